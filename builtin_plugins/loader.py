"""Loaders: what they hold (streams, samplers, workers), and how one is taken up in mid-epoch."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch.utils.data import DataLoader, IterableDataset

import hookbus
from builtin_plugins.gate import Draws, Gate, Watch
from builtin_plugins.spy import Spy
from builtin_plugins.streams import digest, find_streams, put_stream, read_stream
from hookbus.errors import SamplerError

logger = logging.getLogger("hookbus")


@attrs.frozen
class Repeat:
    """How the script lets a loader be taken up in the middle of an epoch.

    ``replay`` loads the batches that are done and drops them; ``inexact_ok`` goes on where an
    exact resume is impossible.
    """

    replay: bool = False
    inexact_ok: bool = False


class Loader:
    """Saves what a loader and its samplers hold, and takes the loader up where it stood.

    A `DataLoader` over a map-style dataset skips by drawing indices, without loading a sample. One
    with a state of its own (`state_dict`) is given it back. Anything else is replayed.
    """

    kind = "loader"

    def __init__(self, loader: Iterable[Any]) -> None:
        self.component = loader
        self._slots: dict[str, Any] = {}
        self._kept: Mapping[str, Any] | None = None
        self._gate = Gate(loader) if _draws_indices(loader) else None  # type: ignore[arg-type]
        self._spy: Spy | None = None
        self._draws: Draws | None = None
        self._handed = self._samples = 0
        self._in_epoch = False
        self._had_workers = False
        self._drew_before = False
        self._repeat = Repeat()
        self._watch: Watch | None = None
        self._moved_by_data: set[str] = set()
        self._moved_by_training: set[str] = set()
        self._last_digests: Mapping[str, str] = {}
        self._attributes: Mapping[str, Any] = {}
        self._warned: set[str] = set()

    # -- sections ------------------------------------------------------------------------------

    @hookbus.hookimpl
    def note_streams(self, slot: str) -> Mapping[str, str]:
        self._slots[slot] = self._read_holders()
        return {name: digest(state) for name, state in self._slots[slot]["streams"].items()}

    @hookbus.hookimpl
    def put_streams(self, slot: str) -> None:
        if slot not in self._slots:
            return
        streams = find_streams(self.component)
        for name, state in self._slots[slot]["streams"].items():
            put_stream(streams[name], state)
        for name, state in self._slots[slot]["samplers"].items():
            getattr(self.component, name).load_state_dict(copy.deepcopy(state))

    @hookbus.hookimpl
    def check_state(self, resume: hookbus.Resume) -> None:
        saved = resume.metadata().state["slots"]["now"]
        now = self._read_holders()
        for what in ("streams", "samplers"):
            if list(saved[what]) != list(now[what]):
                resume.problem(
                    f"saved {what} were {', '.join(saved[what]) or 'none'}, the run has"
                    f" {', '.join(now[what]) or 'none'}"
                )

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self.read_state(), per_rank=True)

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        self.put_state(resume.read())

    def read_state(self) -> dict[str, Any]:
        """Return what the section holds; streams are as they were last noted."""
        slots = {slot: self._slots[slot] for slot in ("epoch", "now") if slot in self._slots}
        return {"slots": slots, "workers": self._needs_workers(), "drew": self._has_drawn()}

    def put_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `read_state` returned; persistent workers are brought up."""
        self._slots = dict(state["slots"])
        self._drew_before = state["drew"]
        if state["workers"] and self._gate is not None and not _has_workers(self.component):
            with self._spying():
                self._gate.start_workers(self.component)
        self.put_streams("now")

    # -- for the loop --------------------------------------------------------------------------

    def start(self, watch: Watch, repeat: Repeat) -> None:
        """Begin an epoch: called before the streams are noted and the iterator is made."""
        self._watch, self._repeat = watch, repeat
        self._handed = self._samples = 0
        self._had_workers = _has_workers(self.component)
        if not _is_persistent(self.component):
            self._drew_before = False
        elif self._has_drawn() and self._drew_before:
            self._refuse("its persistent workers drew random numbers, which nothing can restore")
        self._moved_by_data.clear()
        self._moved_by_training.clear()
        self._last_digests = {}
        self._attributes = _read_attributes(self.component)

    def iterate(self) -> Iterator[Any]:
        """Make the iterator of a whole epoch."""
        self._in_epoch = True
        if self._gate is None:
            self._draws = None
            return iter(self.component)
        with self._spying():
            iterator, self._draws = self._gate.iterate(self.component)
        return iterator

    def iterate_from(self, position: Mapping[str, Any]) -> Iterator[Any]:
        """Make the iterator of an epoch of which some batches are done.

        Called with the streams as they were when that epoch's iterator was made.

        Raises:
            SamplerError: the data that was handed out, or the data to come, cannot be repeated.
        """
        self._in_epoch = True
        self._drew_before = bool(position["drew"])
        self._had_workers = position["workers"]
        self._moved_by_data |= set(position["moved by data"])
        self._moved_by_training |= set(position["moved by training"])
        batches = position["batch"]
        if self._gate is None:
            return self._replay(position)
        drew = self._has_drawn() and self._count_workers() > 0
        replay = drew and self._repeat.replay and not _is_persistent(self.component)
        if drew and not replay:
            self._refuse(
                "its persistent workers drew random numbers, which nothing can restore"
                if _is_persistent(self.component)
                else "its workers drew random numbers; pass batches(loader, replay=True) to load"
                f" the {batches} batches again and drop them"
            )
        if self._count_workers() and not getattr(self.component, "in_order", True):
            self._refuse("in_order=False lets workers overtake each other")
        with self._spying():
            skip = 0 if replay else batches
            ahead = batches + position["ahead"] - skip
            iterator, self._draws = self._gate.iterate(self.component, skip, ahead, self._watch)
        if replay:
            self._drop(iterator, batches)
        self._check_order(position)
        self._handed = batches
        return iterator

    def hand(self, batch: Any) -> int:
        """Count a batch as handed out, and return how many samples are in it."""
        self._handed += 1
        if self._draws is None:
            return _count_samples(batch)
        before = self._draws.handed.samples
        self._draws.hand()
        return self._draws.handed.samples - before

    def end(self) -> None:
        """End the epoch; its iterator is exhausted or was left."""
        self._in_epoch = False

    def read_position(self) -> dict[str, Any]:
        """Return where this epoch stands and the proof of its order, as plain values."""
        draws = self._draws
        self._warn_of_memory()
        return {
            "batch": self._handed,
            "digest": draws.handed.digest if draws else None,
            "ahead": draws.ahead if draws else 0,
            "digest ahead": draws.drawn.digest if draws else None,
            "workers": self._had_workers,
            "drew": self._has_drawn(),
            "moved by data": sorted(self._moved_by_data),
            "moved by training": sorted(self._moved_by_training),
            "described": _describe(self.component),
            "state": self._read_own_state(),
        }

    def fetch(self, iterator: Iterator[Any]) -> Any:
        """Return the next batch, and see which streams the data moves in this process."""
        if self._draws is not None or self._watch is None or self._count_workers():
            return next(iterator)
        before: Any = self._watch()
        batch = next(iterator)
        after: Any = self._watch()
        self._moved_by_data |= _list_moved(before, after)
        if self._last_digests:
            self._moved_by_training |= _list_moved(self._last_digests, before)
        self._last_digests = after
        return batch

    # -- inside --------------------------------------------------------------------------------

    def _read_holders(self) -> dict[str, Any]:
        streams = find_streams(self.component)
        samplers = {
            name: copy.deepcopy(sampler.state_dict())
            for name in ("sampler", "batch_sampler")
            if not _has_own_state(self.component)
            and hasattr(sampler := getattr(self.component, name, None), "state_dict")
            and hasattr(sampler, "load_state_dict")
        }
        return {
            "streams": {name: read_stream(stream) for name, stream in streams.items()},
            "samplers": samplers,
        }

    def _read_own_state(self) -> Any:
        # A stateful loader that is asked before it is iterated starts its workers and draws.
        if self._in_epoch and _has_own_state(self.component):
            return copy.deepcopy(self.component.state_dict())  # type: ignore[attr-defined]
        return None

    def _replay(self, position: Mapping[str, Any]) -> Iterator[Any]:
        batches = position["batch"]
        if position["state"] is not None and _has_own_state(self.component):
            self.component.load_state_dict(position["state"])  # type: ignore[attr-defined]
            self._handed = batches
            return iter(self.component)
        both = self._moved_by_data & self._moved_by_training
        if both and not self._count_workers():
            self._refuse(
                f"the data and the training draw from the same streams ({', '.join(sorted(both))})"
                " in this process; give the dataset a generator of its own"
            )
        iterator = iter(self.component)
        logger.warning(
            "%s cannot skip: the %d batches that are done are loaded again and dropped",
            _describe(self.component),
            batches,
        )
        self._drop(iterator, batches)
        self._handed = batches
        return iterator

    def _drop(self, iterator: Iterator[Any], batches: int) -> None:
        for done in range(batches):
            try:
                next(iterator)
            except StopIteration:
                raise SamplerError(
                    f"{batches} batches of this epoch are done, and the loader has only {done} now"
                ) from None
            if self._draws is not None:
                self._draws.hand()

    def _check_order(self, position: Mapping[str, Any]) -> None:
        draws = self._draws
        if draws is None or position["digest"] is None:
            return
        if draws.handed.digest != position["digest"]:
            raise SamplerError(
                f"the indices of the {position['batch']} batches that are done are not those of"
                f" the saved run ({position['described']}; now {_describe(self.component)}): the"
                " sampler has a memory of its own (give it state_dict and load_state_dict), its"
                " set_epoch was not called, or dataset or batch size changed"
            )
        saved = position["batch"] + position["ahead"]
        if draws.drawn.batches == saved and draws.drawn.digest != position["digest ahead"]:
            raise SamplerError(
                f"the {position['ahead']} batches that the saved run had drawn ahead are not"
                " repeated: the sampler draws from a stream that something else moves"
            )
        if draws.moved_a_stream:
            self._refuse(
                f"this run draws {draws.ahead} batches ahead, the saved one {position['ahead']},"
                " and the sampler moves a stream meanwhile; pass the num_workers and"
                " prefetch_factor of the saved run"
            )

    def _refuse(self, why: str) -> None:
        text = f"{_describe(self.component)} cannot go on exactly: {why}"
        if not self._repeat.inexact_ok:
            raise SamplerError(f"{text}; or pass batches(loader, inexact_ok=True)")
        self._warn(f"{text}; going on, as inexact_ok=True says")

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text)

    def _warn_of_memory(self) -> None:
        for path, value in _read_attributes(self.component).items():
            name, _, attribute = path.partition(".")
            sampler = getattr(self.component, name)
            remembers = hasattr(sampler, "state_dict") or hasattr(sampler, "set_epoch")
            if not remembers and self._attributes.get(path, value) != value:
                self._warn(
                    f"{type(sampler).__qualname__}.{attribute} changes while it is iterated and"
                    " is not saved; give the sampler state_dict and load_state_dict"
                )

    @contextlib.contextmanager
    def _spying(self) -> Iterator[None]:
        if not self._count_workers() or _has_workers(self.component):
            yield
            return
        assert isinstance(self.component, DataLoader)
        self._spy = Spy(self.component)
        with self._spy.put_in(self.component):
            yield

    def _has_drawn(self) -> bool:
        return self._drew_before or (self._spy is not None and self._spy.drew)

    def _needs_workers(self) -> bool:
        """Whether persistent workers must be there when the saved position is taken up."""
        return self._had_workers if self._in_epoch else _has_workers(self.component)

    def _count_workers(self) -> int:
        return getattr(self.component, "num_workers", 0)


class Loaders:
    """Looks after loaders that are attached, and says which ones should be."""

    def __init__(self) -> None:
        self._looked_at = -1

    @hookbus.hookimpl
    def plugin_for(self, name: str, component: object) -> object | None:
        if isinstance(component, DataLoader) or (
            _has_own_state(component)
            and hasattr(component, "__iter__")
            and not isinstance(component, (torch.nn.Module, Mapping))
        ):
            return Loader(component)  # type: ignore[arg-type]
        return None


def find_loose_workers(components: Iterable[object]) -> list[DataLoader[Any]]:
    """Return loaders whose persistent workers run and which are none of ``components``."""
    known = {id(component) for component in components}
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), DataLoader) and id(each) not in known and _has_workers(each)
    ]


def _draws_indices(loader: object) -> bool:
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
    )


def _has_own_state(loader: object) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _is_persistent(loader: object) -> bool:
    return bool(getattr(loader, "persistent_workers", False))


def _has_workers(loader: object) -> bool:
    return _is_persistent(loader) and getattr(loader, "_iterator", None) is not None


def _read_attributes(loader: object) -> dict[str, Any]:
    """Return the plain attributes of a loader's samplers, in which a memory would show."""
    return {
        f"{name}.{attribute}": value
        for name in ("sampler", "batch_sampler")
        for attribute, value in getattr(getattr(loader, name, None), "__dict__", {}).items()
        if type(value) in (int, float, str, bool)
    }


def _list_moved(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    return {name for name, value in after.items() if before.get(name, value) != value}


def _count_samples(batch: Any) -> int:
    match batch:
        case torch.Tensor():
            return len(batch) if batch.dim() else 1
        case Mapping():
            return next((n for value in batch.values() if (n := _count_samples(value))), 0)
        case list() | tuple():
            return next((n for value in batch if (n := _count_samples(value))), 0)
        case _:
            return 0


def _describe(loader: Any) -> str:
    name = type(loader).__qualname__
    if not isinstance(loader, DataLoader):
        return name
    sampler = type(loader.sampler).__qualname__
    size = f", {len(loader.dataset)} samples" if hasattr(loader.dataset, "__len__") else ""
    return f"{name} (batch_size={loader.batch_size}, {sampler}{size})"
