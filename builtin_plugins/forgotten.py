"""Find loaders that the script iterates and that nobody looks after."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing import active_children
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from builtin_plugins.data_pass import BlindPass, Pass
from builtin_plugins.loader import describe, has_persistent_workers
from builtin_plugins.search import find_instances
from builtin_plugins.streams import digest, find_streams, is_fresh, read_stream

_HALF_WAY = (
    "an iterator of a loader stands half-way and nobody saves where, so a resume would start it"
    " anew; hand out several loaders as one: loop.batches(zip(…))"
)


class Forgotten:
    """Tells, once each, what a resume could not put back.

    That is a loader whose persistent workers are up or whose streams move, and an iterator of a
    loader that stands half-way. What was so before the run was resumed is not the run's.
    """

    def __init__(self) -> None:
        self._saves = 0
        self._processes: set[int | None] = set()
        self._told: set[str] = set()
        # Loaders whose iterators are always begun anew, wherever the last one was left.
        self.begun_anew: list[DataLoader[Any]] = []
        # What loaders and iterators there were when they were first seen, and how they were.
        self._before: weakref.WeakKeyDictionary[Any, Mapping[str, object]] = (
            weakref.WeakKeyDictionary()
        )

    def look_around(self) -> None:
        """Note what there is before the run goes on."""
        self._before.clear()
        for each in _find():
            self._before[each] = _look_at(each)

    def is_due(self) -> bool:
        """Whether this save is one that searches, which takes some 10 ms.

        It is if processes came or went since the last save, or if it is the first, second, fourth,
        eighth and so on.
        """
        self._saves += 1
        before, self._processes = self._processes, {each.pid for each in active_children()}
        return self._processes != before or self._saves.bit_count() == 1

    def find(self, known: Iterable[object], data_pass: Pass | BlindPass | None) -> Iterator[str]:
        """Yield what was found, in words.

        ``known`` are the loaders and generators that somebody looks after; ``data_pass`` is what
        the loop is going through.
        """
        known = list(known)
        if not any(self._describe_all(known, data_pass)):
            return
        gc.collect()  # it may be garbage that waits to be collected
        for text in self._describe_all(known, data_pass):
            if text not in self._told:
                self._told.add(text)
                yield text

    def _describe_all(
        self, known: list[object], data_pass: Pass | BlindPass | None
    ) -> Iterator[str]:
        theirs = {id(stream) for each in known for stream in find_streams(each).values()}
        theirs |= {id(each) for each in known}
        found = _find()
        theirs |= {id(getattr(each, "_iterator", None)) for each in found}
        for each in found:
            if isinstance(each, DataLoader):
                reasons = [text for owner, text in self._list_moves(each) if owner not in theirs]
                if reasons:
                    yield (
                        f"{describe(each)} is iterated and nobody looks after it:"
                        f" {' and '.join(reasons)}, so a resume would start it anew;"
                        " bus.attach(NAME=loader)"
                    )
            elif id(each) not in theirs and each not in self._before:
                # What is not gated may go through other loaders' iterators.
                gated = data_pass is None or data_pass.draws is not None
                own = data_pass is not None and data_pass.draws is each._sampler_iter
                own |= any(each._index_sampler is one._index_sampler for one in self.begun_anew)
                if gated and not own and _is_half_way(each):
                    yield _HALF_WAY

    def _list_moves(self, loader: DataLoader[Any]) -> Iterator[tuple[int, str]]:
        """Yield whose is what moved since the loader was first seen, and what it is."""
        now, streams = _look_at(loader), find_streams(loader)
        if loader not in self._before:
            moved = {name: None for name, each in streams.items() if is_fresh(each) is False}
            self._before[loader] = {**now, **moved, "workers": False}
        before = self._before[loader]
        for name, stream in streams.items():
            if before.get(name) != now[name]:
                yield id(stream), f"its stream moves ({name})"
        if now["workers"] and not before["workers"]:
            yield id(loader), "its persistent workers are up"


def _find() -> list[Any]:
    return find_instances([DataLoader, _BaseDataLoaderIter])


def _look_at(each: Any) -> dict[str, object]:
    streams = find_streams(each) if isinstance(each, DataLoader) else {}
    return {
        "workers": has_persistent_workers(each),
        **{name: digest(read_stream(stream)) for name, stream in streams.items()},
    }


def _is_half_way(iterator: _BaseDataLoaderIter) -> bool:
    try:
        return 0 < iterator._num_yielded < len(iterator)
    except TypeError:  # over an iterable dataset
        return False
