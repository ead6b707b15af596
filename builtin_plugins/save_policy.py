"""Save the run when a rule wants it, and delete the checkpoints that no rule wants to keep."""

from __future__ import annotations

import logging
import math
import time
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
        self.when, self.keep, self.wait = when, keep, wait
        self._bus: hookbus.HookBus | None = None
        self._checkpoints: list[hookbus.Checkpoint] = []
        self._step_before = 0
        self._saved_at = time.monotonic()
        self._blocked: float | None = None
        self._writing: float | None = None

    @hookbus.hookimpl
    def bus_open(self, bus: hookbus.HookBus) -> None:
        others = [each.plugin for each in bus.plugins if isinstance(each.plugin, SavePolicy)]
        if self.keep and any(each.keep for each in others if each is not self):
            raise CallError(
                "two policies keep checkpoints on this bus, and each would delete the other's; give"
                " one of them keep=A | B"
            )
        self._bus = bus

    @hookbus.hookimpl
    def bus_close(self) -> None:
        self._bus = None

    @hookbus.hookimpl
    def resume_end(self, resume: hookbus.Resume) -> None:
        if resume.stage != "fit":
            return
        self._checkpoints = hookbus.checkpoints(resume.run) if self.keep else []
        self._step_before, self._saved_at = 0, time.monotonic()
        self._blocked = self._writing = None
        if self.when is None:
            return
        loop = self._bus.loop if self._bus is not None else None
        if loop is None:
            logger.warning("SavePolicy(when=%s): there is no loop on the bus to save by", self.when)
        else:
            self._step_before = loop.step
        try:
            self._read_history(hookbus.history(resume.run))
        except HookbusError as error:  # figures only
            logger.warning("%s", error)

    @hookbus.hookimpl
    def safe_point(self, loop: Any) -> None:
        if self.when is None or self._bus is None:
            return
        moment = Moment(
            step=loop.step,
            step_before=self._step_before,
            epoch=loop.epoch,
            epoch_ended=loop.epoch_ended,
            seconds=time.monotonic() - self._saved_at,
            saving=self._bus.saving,
            blocked=self._blocked,
            writing=self._writing,
        )
        self._step_before = loop.step
        if reasons := self.when.list_due(moment):
            self._bus.save(wait=self.wait, why=", ".join(reasons))

    @hookbus.hookimpl
    def save_start(self, save: hookbus.Save) -> None:
        self._saved_at = time.monotonic()

    @hookbus.hookimpl
    def save_end(self, checkpoint: hookbus.Checkpoint) -> None:
        started = time.monotonic()
        self._delete_others(checkpoint)
        self._note_cost(checkpoint.blocked, checkpoint.seconds, time.monotonic() - started)

    def _delete_others(self, checkpoint: hookbus.Checkpoint) -> None:
        if self.keep is None or self._bus is None:
            return
        ours = [each for each in self._checkpoints if each.run_id == checkpoint.run_id]
        # What is not deleted yet is asked for again.
        self._checkpoints = [*(each for each in ours if each.path.exists()), checkpoint]
        kept = {each.path for each in (*self.keep.choose(self._checkpoints), checkpoint)}
        others = [each for each in self._checkpoints if each.path not in kept]
        try:
            self._bus.delete(*others, why="no rule keeps it", wait=self.wait)
        except HookbusError as error:
            logger.warning("not everything is deleted: %s", error)

    def _read_history(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            if record["event"] == "save":
                self._note_cost(record.get("blocked"), record.get("seconds"))

    def _note_cost(self, blocked: object, seconds: object, more: float = 0.0) -> None:
        """Note what a save cost, if it was of the sort that this policy asks for."""
        if not isinstance(blocked, float) or not isinstance(seconds, float):
            return
        if math.isfinite(blocked + seconds) and self.wait == (blocked >= seconds):
            self._blocked, self._writing = blocked + more, seconds
