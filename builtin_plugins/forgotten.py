"""Find loaders that the script iterates and that nobody looks after."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from multiprocessing import active_children
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from builtin_plugins.data_pass import BlindPass, Pass
from builtin_plugins.loader import describe, has_persistent_workers
from builtin_plugins.search import find_live
from builtin_plugins.streams import digest, find_streams, is_fresh, read_stream

_HALF_WAY = (
    "an iterator of a loader stands half-way and nobody saves where, so a resume would start it"
    " anew; hand out several loaders as one: loop.batches(zip(…))"
)


class Forgotten:
    """Tells, once each, what a resume could not put back.

    That is a loader whose persistent workers are up or whose streams move, and an iterator of a
    loader that stands half-way.
    """

    def __init__(self) -> None:
        self._saves = 0
        self._processes: set[int | None] = set()
        self._told: set[str] = set()
        self._digests: weakref.WeakKeyDictionary[Any, Mapping[str, str]] = (
            weakref.WeakKeyDictionary()
        )

    def is_due(self) -> bool:
        """Whether this save is one that searches, which takes some 30 ms.

        It is if processes came or went since the last save, or if it is the first, second, fourth,
        eighth and so on.
        """
        self._saves += 1
        before, self._processes = self._processes, {p.pid for p in active_children()}
        return self._processes != before or self._saves.bit_count() == 1

    def find(self, known: Iterable[object], data_pass: Pass | BlindPass | None) -> Iterator[str]:
        """Yield what was found, in words.

        ``known`` are the loaders and generators that somebody looks after; ``data_pass`` is what
        the loop is going through.
        """
        found = find_live(lambda kind: issubclass(kind, (DataLoader, _BaseDataLoaderIter)))
        loaders = [each for each in found if isinstance(each, DataLoader)]
        known = list(known)
        theirs = {id(stream) for each in known for stream in find_streams(each).values()}
        theirs |= {id(each) for each in known}
        texts = [text for each in loaders if (text := self._describe_loader(each, theirs))]
        if data_pass is None or data_pass.draws is not None:  # else it may go through others
            draws = data_pass.draws if data_pass is not None else None
            kept = {id(getattr(each, "_iterator", None)) for each in loaders}
            texts += [
                _HALF_WAY
                for each in found
                if isinstance(each, _BaseDataLoaderIter)
                and each._sampler_iter is not draws
                and id(each) not in kept
                and _is_half(each)
            ]
        for text in texts:
            if text not in self._told:
                self._told.add(text)
                yield text

    def _describe_loader(self, loader: DataLoader[Any], theirs: Set[int]) -> str | None:
        streams = {n: s for n, s in find_streams(loader).items() if id(s) not in theirs}
        now = {name: digest(read_stream(stream)) for name, stream in streams.items()}
        before = self._digests.get(loader, {})
        self._digests[loader] = now
        moved = [
            name
            for name, value in now.items()
            if before.get(name, value) != value or is_fresh(streams[name]) is False
        ]
        reasons = [f"its streams move ({', '.join(moved)})"] if moved else []
        if has_persistent_workers(loader) and id(loader) not in theirs:
            reasons.append("its persistent workers are up")
        if not reasons:
            return None
        return (
            f"{describe(loader)} is iterated and nobody looks after it: {' and '.join(reasons)}, so"
            " a resume would start it anew; bus.attach(NAME=loader)"
        )


def _is_half(iterator: _BaseDataLoaderIter) -> bool:
    try:
        return 0 < iterator._num_yielded < len(iterator)
    except TypeError:  # over an iterable dataset
        return False
