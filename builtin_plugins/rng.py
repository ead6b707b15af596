"""Random streams: those of the process, and generators that are attached."""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Mapping
from typing import Any

import hookbus
from builtin_plugins.new_rank import choose_seed, has_no_streams
from builtin_plugins.streams import (
    GENERATORS,
    SLOTS,
    Generator,
    digest,
    name_kind,
    put_process_streams,
    put_stream,
    read_process_streams,
    read_stream,
    seed_process_streams,
    seed_stream,
)

logger = logging.getLogger("hookbus")

_owner: weakref.ref[Rng] | None = None


class _Slots:
    """Saves streams as they were noted, and puts them back; what is kept are copies."""

    kind = "rng"

    def __init__(self) -> None:
        self._slots: dict[str, Any] = {}
        self._restored = False

    def _read(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def _put(self, streams: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _seed(self, seed: int) -> None:
        raise NotImplementedError

    @hookbus.hookimpl
    def note_streams(self, slot: str) -> Mapping[str, str]:
        self._slots[slot] = self._read()
        return {name: digest(state) for name, state in self._slots[slot].items()}

    @hookbus.hookimpl
    def put_streams(self, slot: str) -> None:
        if slot in self._slots:
            self._put(self._slots[slot])

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        slots = {slot: self._slots[slot] for slot in SLOTS if slot in self._slots}
        save.write(slots, per_rank=None)

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        self._slots = resume.read()
        self._restored = True
        if has_no_streams(resume):
            before = self._read()
            self._seed(choose_seed(resume))
            self._slots = dict.fromkeys(self._slots, self._read())
            self._put(before)
            resume.note(f"rank {resume.rank} is new, and its streams are seeded", warn=True)

    @hookbus.hookimpl
    def resume_end(self, resume: hookbus.Resume) -> None:
        if self._restored:
            self._restored = False
            self._put(self._slots["now"])


class Rng(_Slots):
    """Saves the streams of this process: python, numpy, torch, and each accelerator in use.

    Where all processes had the same streams, a new one takes those; else it is seeded, so that
    every resume of that checkpoint gives it the same numbers (`new_rank.choose_seed`).
    """

    _read = staticmethod(read_process_streams)
    _put = staticmethod(put_process_streams)
    _seed = staticmethod(seed_process_streams)

    @hookbus.hookimpl
    def resume_start(self, resume: hookbus.Resume) -> None:
        global _owner
        if resume.stage != "fit":
            return
        other = _owner() if _owner is not None else None
        if other is not None and other is not self:
            logger.warning(
                "another open bus of this process owns its random streams, and both would put them"
                ' back; close it, or pass HookBus(block=("rng",)) to one of them'
            )
        _owner = weakref.ref(self)

    @hookbus.hookimpl
    def bus_close(self) -> None:
        global _owner
        if _owner is not None and _owner() is self:
            _owner = None


class AttachedGenerator(_Slots):
    """Saves one attached generator: torch's, numpy's `Generator` or `RandomState`, or python's."""

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self.component = generator

    def _read(self) -> Mapping[str, Any]:
        return {name_kind(self.component): read_stream(self.component)}

    def _put(self, streams: Mapping[str, Any]) -> None:
        put_stream(self.component, streams[name_kind(self.component)])

    def _seed(self, seed: int) -> None:
        seed_stream(self.component, seed)

    @hookbus.hookimpl
    def check_state(self, resume: hookbus.Resume) -> None:
        (saved,) = resume.metadata().state["now"]
        if saved != name_kind(self.component):
            resume.problem(f"saved was a {saved}, the run has a {name_kind(self.component)}")


class Generators:
    """Looks after generators that are attached."""

    @hookbus.hookimpl
    def plugin_for(self, name: str, component: object) -> object | None:
        if isinstance(component, GENERATORS) and not isinstance(component, random.SystemRandom):
            return AttachedGenerator(component)
        return None
