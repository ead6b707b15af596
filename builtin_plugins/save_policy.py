"""Save the run when a rule wants it, and delete the checkpoints that no rule wants to keep."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
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
        if not isinstance(wait, bool):
            raise CallError(f"wait={wait!r}: pass True or False")
        self.when, self.keep, self.wait = when, keep, wait
        self._bus: hookbus.HookBus | None = None
        self._checkpoints: list[hookbus.Checkpoint] = []
        self._is_tidy = False
        self._step_before = 0
        self._saved_at = time.monotonic()
        self._seconds_before = 0.0
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
        if bus.run is not None:
            self._begin(bus.run)

    @hookbus.hookimpl
    def bus_close(self) -> None:
        self._bus = None

    @hookbus.hookimpl
    def resume_end(self, resume: hookbus.Resume) -> None:
        if resume.stage == "fit":
            self._begin(resume.run)

    @hookbus.hookimpl
    def safe_point(self, loop: Any) -> None:
        if self._bus is None or not self._bus.ranks.is_first:
            return  # of several processes the first decides: each has a clock of its own
        if not self._is_tidy and self._bus.last is not None:  # a start may have died before that
            self._delete_others(self._bus.last)
        if self.when is None:
            return
        running = time.monotonic() - self._saved_at
        moment = Moment(
            step=loop.step,
            step_before=self._step_before,
            epoch=loop.epoch if loop.position["where"] != "start" else None,
            epoch_ended=loop.epoch_ended,
            seconds=self._seconds_before + running,
            running=running,
            saving=self._bus.saving,
            blocked=self._blocked,
            writing=self._writing,
        )
        self._step_before = loop.step
        if reasons := self.when.list_due(moment):
            self._bus.save(wait=self.wait, why=", ".join(reasons))

    @hookbus.hookimpl
    def save_start(self, save: hookbus.Save) -> None:
        self._saved_at, self._seconds_before = time.monotonic(), 0.0

    @hookbus.hookimpl
    def save_end(self, checkpoint: hookbus.Checkpoint) -> None:
        started = time.monotonic()
        self._delete_others(checkpoint)
        self._note_cost(checkpoint.blocked, checkpoint.seconds, time.monotonic() - started)

    # -- inside --------------------------------------------------------------------------------

    def _begin(self, run: Path) -> None:
        """Learn what is on the disk, and what the last saves were like."""
        self._checkpoints = hookbus.checkpoints(run) if self.keep else []
        self._is_tidy = not self.keep
        self._step_before, self._saved_at, self._seconds_before = 0, time.monotonic(), 0.0
        self._blocked = self._writing = None
        if self.when is None:
            return
        loop = self._bus.loop if self._bus is not None else None
        if loop is None:
            logger.warning("SavePolicy(when=%s): there is no loop on the bus to save by", self.when)
        else:
            self._step_before = loop.step
        try:
            self._read_history(hookbus.history(run))
        except HookbusError as error:  # figures only
            logger.warning("%s", error)

    def _delete_others(self, newest: hookbus.Checkpoint) -> None:
        """Delete what no rule keeps beside the newest checkpoint."""
        self._is_tidy = True
        if self.keep is None or self._bus is None or not self._bus.ranks.is_first:
            return
        # What is not deleted yet is asked for again.
        others = [
            each
            for each in self._checkpoints
            if each.run_id == newest.run_id and each.path != newest.path and each.path.exists()
        ]
        self._checkpoints = [*others, newest]
        kept = {each.path for each in (*self._choose(self.keep), newest)}
        try:
            self._bus.delete(
                *(each for each in others if each.path not in kept),
                why="no rule keeps it",
                wait=self.wait,
            )
        except HookbusError as error:
            logger.warning("not everything is deleted: %s", error)

    def _choose(self, keep: Keep) -> Sequence[hookbus.Checkpoint]:
        chosen = keep.choose(self._checkpoints)
        if not isinstance(chosen, Sequence):
            raise CallError(
                f"{type(keep).__qualname__}.choose returned a {type(chosen).__qualname__}; return"
                " those to keep of the checkpoints that it is given"
            )
        return chosen

    def _read_history(self, records: list[dict[str, Any]]) -> None:
        since = None
        for record in records:
            if record["event"] == "save":
                self._note_cost(record.get("blocked"), record.get("seconds"))
            if record["event"] == "save" or (record["event"] == "start" and since is None):
                since = record.get("time")
        with contextlib.suppress(TypeError, ValueError):  # a line may be anything
            passed = datetime.now(UTC) - datetime.fromisoformat(since)  # type: ignore[arg-type]
            self._seconds_before = max(passed.total_seconds(), 0.0)  # clocks may be set back

    def _note_cost(self, blocked: object, seconds: object, more: float = 0.0) -> None:
        """Note what a save cost, if it was of the sort that this policy asks for."""
        if not isinstance(blocked, float) or not isinstance(seconds, float):
            return
        if math.isfinite(blocked + seconds) and self.wait == (blocked >= seconds):
            self._blocked, self._writing = blocked + more, seconds
