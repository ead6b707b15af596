"""Loaders: save what they hold (streams, samplers, workers), and put it back."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

import hookbus
from builtin_plugins.gate import Gate
from builtin_plugins.held import Held, has_own_state
from builtin_plugins.spy import Spy
from builtin_plugins.streams import SLOTS
from hookbus.errors import MismatchError, SamplerError

logger = logging.getLogger("hookbus")

# Settings whose change changes the order or the batches; that of the others may change the bits.
OF_THE_ORDER = ("class", "batch_size", "drop_last", "sampler", "samples", "persistent_workers")


class Loader:
    """Saves what a loader and its samplers hold, and whether its persistent workers are there.

    How far it is belongs to the loop, which takes it up with a `Pass`.
    """

    kind = "loader"

    def __init__(self, loader: Iterable[Any], warned: set[str] | None = None) -> None:
        self.component = loader
        self.gate = Gate(loader) if _is_plain(loader) else None  # type: ignore[arg-type]
        # The workers that were there when the pass in hand began.
        self.workers_of_pass: bool | None = None
        # Why this process must not see its workers draw, and its sampler not as it goes.
        self.no_draws: str | None = None
        self.no_late_draws: str | None = None
        # Attributes of samplers that change while they are iterated and are in no state, ...
        self.memories: set[str] = set()
        # ... and what they must be when the next pass begins.
        self.remembered: dict[str, Any] = {}
        # Whether a sampler was given its state back and has not been gone through since.
        self.is_reloaded = False
        self._slots: dict[str, Held] = {}
        self._spy: Spy | None = None
        self._drew_before = False
        self._warned: set[str] = set() if warned is None else warned

    # -- sections ------------------------------------------------------------------------------

    @hookbus.hookimpl
    def note_streams(self, slot: str) -> Mapping[str, str]:
        self._slots[slot] = held = Held.read(self.component)
        return held.digest()

    @hookbus.hookimpl
    def put_streams(self, slot: str) -> None:
        if slot not in self._slots:
            return
        self._put(self._slots[slot])
        if slot != "epoch":
            # As of before the epoch's own code, and after the proof of its order, so that a
            # `set_epoch` that is forgotten is still found.
            self._slots[slot].put_epochs(self.component, but=self.memories)

    @hookbus.hookimpl
    def check_state(self, resume: hookbus.Resume) -> None:
        saved = Held(**resume.metadata().state["slots"]["now"])
        difference = saved.find_difference(self.component)
        if difference is not None:
            hint = f"pass skip=({resume.name!r},) to start it fresh"
            resume.problem(MismatchError(f"{resume.name}: {difference}; {hint}"))
        self._refuse_batch_size(resume)

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self.read_state(), per_rank=True)

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        state = resume.read()
        for name, saved, now in self.compare_settings(state["settings"]):
            exact = name not in OF_THE_ORDER
            why = "the order does not depend on it" if exact else "other batches are drawn"
            resume.change(name, saved, now, then="adapt", exact=exact, why=why)
        self.put_state(state)

    def _refuse_batch_size(self, resume: hookbus.Resume) -> None:
        """Refuse another batch size where this loader was saved in the middle of an epoch."""
        assert resume.checkpoint is not None
        state, live = resume.metadata().state, read_settings(self.component)
        was, now = (each.get("batch_size") for each in (state["settings"], live))
        progress = resume.checkpoint.progress
        if was != now and state["in_hand"] and progress.get("where") == "body":
            resume.change(
                "batch_size",
                was,
                now,
                then="refuse",
                why=f"{progress['batch']} batches of epoch {progress['epoch']} are done, so what is"
                f" left of it cannot be told; pass batch_size={was} until this epoch is over, or"
                " start it again from a checkpoint of an epoch's end: bus.resume(NEW, init_from="
                "CHECKPOINT, init_only=('*',))",
            )

    def read_state(self) -> dict[str, Any]:
        """Return what the section holds; streams are as they were last noted."""
        slots = {slot: self._slots[slot].to_dict() for slot in SLOTS if slot in self._slots}
        workers = self.workers_of_pass
        if workers is None:
            workers = has_persistent_workers(self.component)
        return {
            "slots": slots,
            "workers": workers,
            "in_hand": self.workers_of_pass is not None,
            "drew": self.has_drawn,
            "memories": sorted(self.memories),
            "settings": read_settings(self.component),
        }

    def put_state(self, state: Mapping[str, Any], *, keep: Set[str] = frozenset()) -> None:
        """Take back what `read_state` returned.

        Streams and samplers named in ``keep`` stay as they are. Persistent workers are brought up,
        which draws; so do not count on the process's streams.
        """
        self._slots = {slot: Held(**held) for slot, held in state["slots"].items()}
        self.memories = set(state["memories"])
        self.remembered = {way: self._slots["now"].attributes[way] for way in self.memories}
        self._drew_before, self.workers_of_pass = state["drew"], None
        if is_persistent(self.component):
            self.component._iterator = None  # type: ignore[attr-defined]
            if state["workers"]:
                self._start_workers()
                self.no_draws = "nothing can restore the streams of persistent workers"
        self._put(self._slots["now"], keep)

    def compare_settings(self, saved: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """Return the settings that are not as they were saved, with both values of each."""
        live = read_settings(self.component)
        changes = [
            (name, saved.get(name), live.get(name))
            for name in {**saved, **live}
            if saved.get(name) != live.get(name)
        ]
        texts = {name: f"{name} {was} → {now}" for name, was, now in changes}
        if "num_workers" in texts:
            self.no_draws = f"what workers draw depends on their number, {texts['num_workers']}"
        ahead = [texts[name] for name in ("num_workers", "prefetch_factor") if name in texts]
        self.no_late_draws = ", ".join(ahead) or None
        return changes

    # -- workers -------------------------------------------------------------------------------

    @property
    def has_drawn(self) -> bool:
        """Whether a worker of this loader has ever drawn random numbers."""
        return self._drew_before or (self._spy is not None and self._spy.drew)

    @contextlib.contextmanager
    def spying(self) -> Iterator[None]:
        """See from now on whether the workers that are started in here draw."""
        if not count_workers(self.component) or has_persistent_workers(self.component):
            yield
            return
        self._drew_before = self.has_drawn
        self._spy = Spy(self.component)  # type: ignore[arg-type]
        with self._spy.put_in(self.component):  # type: ignore[arg-type]
            yield

    def warn(self, text: str) -> None:
        """Log a warning, once."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text)

    # -- inside --------------------------------------------------------------------------------

    def _start_workers(self) -> None:
        with self.spying():
            if self.gate is not None:
                self.gate.start_workers(self.component)  # type: ignore[arg-type]
            else:
                iter(self.component)

    def _put(self, held: Held, keep: Set[str] = frozenset()) -> None:
        difference = held.find_difference(self.component)
        if difference is not None:
            raise SamplerError(f"{describe(self.component)}: {difference}")
        self.is_reloaded |= held.put(self.component, keep)


class Loaders:
    """Looks after loaders that are attached."""

    @hookbus.hookimpl
    def plugin_for(self, name: str, component: object) -> object | None:
        if isinstance(component, DataLoader) or (
            has_own_state(component)
            and hasattr(component, "__iter__")
            and not isinstance(component, (torch.nn.Module, Mapping))
        ):
            return Loader(component)
        return None


def read_settings(loader: object) -> dict[str, Any]:
    """Return what a loader was built with, as plain values."""
    settings: dict[str, Any] = {"class": type(loader).__qualname__}
    if isinstance(loader, DataLoader):
        batches = loader.batch_sampler
        sampler = loader.sampler if batches is None else getattr(batches, "sampler", batches)
        if isinstance(loader.dataset, IterableDataset):
            sampler = loader.dataset
        settings |= {
            "batch_size": loader.batch_size,
            "sampler": type(sampler).__qualname__,
            "samples": _count_samples(loader.dataset),
            "drop_last": loader.drop_last,
            "num_workers": loader.num_workers,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
        }
    return settings


def describe(loader: object) -> str:
    """Return what a message calls a loader; it may be given by its `read_settings`."""
    settings = loader if isinstance(loader, Mapping) else read_settings(loader)
    if "sampler" not in settings:
        return str(settings["class"])
    size = "" if settings["samples"] is None else f", {settings['samples']} samples"
    return f"{settings['class']} (batch_size={settings['batch_size']}, {settings['sampler']}{size})"


def is_persistent(loader: object) -> bool:
    return bool(getattr(loader, "persistent_workers", False))


def has_persistent_workers(loader: object) -> bool:
    """Whether they are up."""
    return is_persistent(loader) and getattr(loader, "_iterator", None) is not None


def count_workers(loader: object) -> int:
    return loader.num_workers if isinstance(loader, DataLoader) else 0


def _is_plain(loader: object) -> bool:
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def _count_samples(dataset: object) -> int | None:
    if isinstance(dataset, IterableDataset):
        return None
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
