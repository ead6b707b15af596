"""Save the run when a rule wants it, and delete the checkpoints that no rule wants to keep."""

from __future__ import annotations

import logging
import time
import weakref
from typing import Any

import hookbus
from builtin_plugins.keep import Keep
from builtin_plugins.when import Moment, When
from hookbus.errors import CallError, HookbusError

logger = logging.getLogger("hookbus")


class SavePolicy:
    """Save at safe points, when ``when`` wants it, and keep what ``keep`` wants.

    Saves are written behind training unless ``wait`` is true. Without ``when`` only the script
    saves, without ``keep`` everything is kept. The newest checkpoint is always kept, and nothing is
    deleted before a newer one is committed and every byte of it was read and found right.
    """

    kind = "policy"

    def __init__(
        self, *, when: When | None = None, keep: Keep | None = None, wait: bool = False
    ) -> None:
        if when is not None and not isinstance(when, When):
            raise CallError(f"when={when!r}: pass a rule such as EverySteps(500)")
        if keep is not None and not isinstance(keep, Keep):
            raise CallError(f"keep={keep!r}: pass a rule such as KeepLast(3)")
        self._when, self._keep, self._wait = when, keep, wait
        self._bus: weakref.ref[hookbus.HookBus] | None = None
        self._checkpoints: list[hookbus.Checkpoint] = []
        self._step_before = 0
        self._saved_at = 0.0
        self._saving = False
        self._blocked: float | None = None
        self._writing: float | None = None

    @hookbus.hookimpl
    def bus_open(self, bus: hookbus.HookBus) -> None:
        self._bus = weakref.ref(bus)

    @hookbus.hookimpl
    def resume_end(self, resume: hookbus.Resume) -> None:
        if resume.stage != "fit":
            return
        self._checkpoints = hookbus.checkpoints(resume.run) if self._keep else []
        self._step_before, self._saved_at = resume.step, time.monotonic()
        saves = [each for each in hookbus.history(resume.run) if each["event"] == "save"]
        last = saves[-1] if saves else {}
        if all(isinstance(last.get(name), float) for name in ("blocked", "seconds")):
            self._blocked, self._writing = last["blocked"], last["seconds"]

    @hookbus.hookimpl
    def safe_point(self, loop: Any) -> None:
        if self._when is None or self._bus is None or (bus := self._bus()) is None:
            return
        moment = Moment(
            step=loop.step,
            step_before=self._step_before,
            epoch=loop.epoch,
            epoch_ended=loop.position["where"] == "tail",
            seconds=time.monotonic() - self._saved_at,
            saving=self._saving,
            blocked=self._blocked,
            writing=self._writing,
        )
        self._step_before = loop.step
        if reasons := self._when.list_due(moment):
            bus.save(wait=self._wait, why=", ".join(reasons))

    @hookbus.hookimpl
    def save_start(self, save: hookbus.Save) -> None:
        self._saved_at, self._saving = time.monotonic(), True

    @hookbus.hookimpl
    def save_end(self, checkpoint: hookbus.Checkpoint) -> None:
        self._saving = False
        self._blocked, self._writing = checkpoint.blocked, checkpoint.seconds
        if self._keep is None or self._bus is None or (bus := self._bus()) is None:
            return
        ours = [each for each in self._checkpoints if each.run_id == checkpoint.run_id]
        self._checkpoints = [*ours, checkpoint]
        kept = [*self._keep.choose(self._checkpoints), checkpoint]
        for each in [each for each in self._checkpoints if each not in kept]:
            try:
                bus.delete(each, why="no rule keeps it")
            except HookbusError as error:
                logger.warning("%s is not deleted: %s", each.path, error)
            self._checkpoints.remove(each)
