"""Save the run and end it when a signal says that the machine is about to be taken away."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import hookbus
from hookbus.errors import CallError

logger = logging.getLogger("hookbus")

Former: TypeAlias = Callable[[int, types.FrameType | None], Any] | int | None


class Preemption:
    """On a signal, save at the next safe point and end with status 128 + its number.

    So 143 for SIGTERM and 138 for SIGUSR1; ``on_interrupt`` does the same for Ctrl-C, with 130. A
    second signal ends the process at once. Signals are heeded from the end of the resume until the
    bus closes, in this process only; then the former handlers are back. One that comes after the
    last safe point is handed to them. Have SIGTERM sent to the training process alone, and not to
    its group: a loader's workers end on it, and training breaks without them.

    ``grace`` is how many seconds are left after the signal: a WARNING says when that is less than
    the longest way to a safe point and the save have taken.
    """

    kind = "preemption"

    def __init__(
        self,
        *,
        signals: Collection[int] = (signal.SIGTERM, signal.SIGUSR1),
        grace: float | None = None,
        on_interrupt: bool = False,
    ) -> None:
        if isinstance(signals, int) or not all(each in signal.valid_signals() for each in signals):
            raise CallError(f"signals={signals!r}: pass a tuple such as (signal.SIGTERM,)")
        if grace is not None and (isinstance(grace, bool) or not isinstance(grace, int | float)):
            raise CallError(f"grace={grace!r}: pass seconds, or None")
        self._signals = [*signals, *([signal.SIGINT] if on_interrupt else [])]
        self._grace = grace
        self._bus: weakref.ref[hookbus.HookBus] | None = None
        self._process = 0
        self._former: dict[int, Former] = {}
        self._caught: int | None = None
        self._passed_at = 0.0
        self._longest_way = 0.0
        self._warned = False

    @property
    def caught(self) -> signal.Signals | None:
        """The signal that came, if any: leave long code that has no safe point of its own."""
        return None if self._caught is None else signal.Signals(self._caught)

    @hookbus.hookimpl
    def bus_open(self, bus: hookbus.HookBus) -> None:
        self._bus = weakref.ref(bus)

    @hookbus.hookimpl
    def resume_end(self, resume: hookbus.Resume) -> None:
        self._passed_at = time.monotonic()
        if resume.stage != "fit" or self._former:
            return
        if threading.current_thread() is not threading.main_thread():
            raise CallError(
                "signals can only be heeded in the main thread; resume there, or leave Preemption"
                " out"
            )
        self._process = os.getpid()
        for number in self._signals:
            self._former[number] = signal.signal(number, self._heed)

    @hookbus.hookimpl(trylast=True)
    def safe_point(self, loop: Any) -> None:
        now = time.monotonic()
        self._longest_way = max(self._longest_way, now - self._passed_at)
        self._passed_at = now
        if self._caught is None or self._bus is None or (bus := self._bus()) is None:
            return
        name = signal.Signals(self._caught).name
        status, self._caught = 128 + self._caught, None
        # Written here and now, with whatever else was asked for in this body.
        bus.save(why=name)
        bus.write_asked()
        logger.warning("%s: step %d is saved, and the run ends here", name, loop.step)
        sys.exit(status)

    @hookbus.hookimpl
    def save_end(self, checkpoint: hookbus.Checkpoint) -> None:
        self._passed_at = time.monotonic()  # saving is no part of the way
        needed = self._longest_way + (checkpoint.seconds or 0.0)
        if self._grace is not None and needed > self._grace and not self._warned:
            self._warned = True
            logger.warning(
                "grace=%g is too short: the longest way to a safe point took %.1f s, and a save"
                " %.1f s; ask for more time, or save less",
                self._grace,
                self._longest_way,
                checkpoint.seconds or 0.0,
            )

    @hookbus.hookimpl
    def bus_close(self) -> None:
        caught, self._caught = self._caught, None
        self._put_back()
        # An error on its way is to be seen, and ends the process by itself.
        if caught is not None and os.getpid() == self._process and sys.exception() is None:
            os.kill(os.getpid(), caught)  # too late for a safe point: as if it came now

    def _heed(self, number: int, frame: types.FrameType | None) -> None:
        forked = os.getpid() != self._process
        if forked and number not in (signal.SIGTERM, signal.SIGINT):
            return  # sent to all processes of the job, as some schedulers do
        if forked or self._caught is not None:
            # A forked child's own affair; or the second one, which ends it at once.
            self._put_back()
            os.kill(os.getpid(), number)
            return
        self._caught = number
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):  # not through buffers, which may be in use right now
            os.write(2, f"hookbus: {name}: saving at the next safe point\n".encode())

    def _put_back(self) -> None:
        for number, former in self._former.items():
            if signal.getsignal(number) == self._heed:
                signal.signal(number, signal.SIG_DFL if former is None else former)
        self._former.clear()
