"""Save the run and end it when a signal says that the machine is about to be taken away."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import hookbus
from hookbus.errors import CallError, SaveError

logger = logging.getLogger("hookbus")

Former: TypeAlias = Callable[[int, types.FrameType | None], Any] | int | None

_NEVER = (signal.SIGKILL, signal.SIGSTOP)  # nobody can heed these


class Preemption:
    """On a signal, save at the next safe point and end with status 128 + its number.

    So 143 for SIGTERM and 138 for SIGUSR1; ``on_interrupt`` does the same for Ctrl-C, with 130. A
    second signal ends the process at once. Signals are heeded from the end of the resume until the
    bus closes, in this process only; then the former handlers are back. One that comes after the
    last safe point is handed to them. ``caught`` is the one that came, if any, for code that takes
    long and has no safe point of its own.

    Of several processes a signal to one is enough: all save at the same safe point, and end so.

    Have SIGTERM sent to the training process alone, and not to its group: a loader's workers end on
    it, and training breaks without them.

    ``grace`` is how many seconds are left after the signal: a WARNING says when that is less than
    the longest way to a safe point and the save may take, and before that the rest of one that is
    being written behind training.
    """

    kind = "preemption"

    def __init__(
        self,
        *,
        signals: Collection[int] = (signal.SIGTERM, signal.SIGUSR1),
        grace: float | None = None,
        on_interrupt: bool = False,
    ) -> None:
        able = signal.valid_signals() - set(_NEVER)
        if not isinstance(signals, Collection) or not all(each in able for each in signals):
            raise CallError(f"signals={signals!r}: pass a tuple such as (signal.SIGTERM,)")
        is_number = isinstance(grace, int | float) and not isinstance(grace, bool)
        if grace is not None and not (is_number and 0 < grace < math.inf):
            raise CallError(f"grace={grace!r}: pass seconds, or None")
        self._signals = tuple(
            dict.fromkeys([*map(int, signals), *([signal.SIGINT] if on_interrupt else [])])
        )
        self._grace = grace
        self._bus: hookbus.HookBus | None = None
        self._process = 0
        self._active = False
        self._former: dict[int, Former] = {}
        self.caught: int | None = None
        self._passed_at = 0.0
        self._longest_way = 0.0
        self._warned = False

    @hookbus.hookimpl
    def bus_open(self, bus: hookbus.HookBus) -> None:
        if any(isinstance(e.plugin, Preemption) for e in bus.plugins if e.plugin is not self):
            raise CallError("there is a Preemption on this bus already; give it all the signals=")
        self._bus = bus
        if bus.resumed:
            self._begin()

    @hookbus.hookimpl
    def resume_start(self, resume: hookbus.Resume) -> None:
        if resume.stage == "fit" and threading.current_thread() is not threading.main_thread():
            raise CallError(
                "signals can only be heeded in the main thread; resume there, or leave Preemption"
                " out"
            )

    @hookbus.hookimpl
    def resume_end(self, resume: hookbus.Resume) -> None:
        if resume.stage == "fit":
            self._begin()
        else:
            self._leave()

    @hookbus.hookimpl(trylast=True)
    def safe_point(self, loop: Any) -> None:
        now = time.monotonic()
        self._longest_way = max(self._longest_way, now - self._passed_at)
        self._passed_at = now
        if self._bus is None:
            return
        number = self._bus.ranks.largest("has a signal come?", self.caught or 0)
        if not number:
            return
        name = _name(number)
        # Written here and now, with whatever else was asked for in this body. That one behind
        # training has failed was told, and keeps nobody from saving.
        with contextlib.suppress(SaveError):
            self._bus.wait()
            self._bus.collect_done()
        self._bus.save(why=name)
        self._bus.write_asked()
        logger.warning("%s: step %d is saved, and the run ends here", name, loop.step)
        self.caught = None
        sys.exit(128 + number)

    @hookbus.hookimpl
    def save_end(self, checkpoint: hookbus.Checkpoint) -> None:
        seconds = checkpoint.seconds or 0.0
        saves = 2  # one may have begun when the signal comes, and its own waits for it
        if checkpoint.blocked == checkpoint.seconds:
            self._passed_at += seconds  # a save that is waited for is no part of the way
            saves = 1
        if self._grace is not None and self._longest_way + saves * seconds > self._grace:
            self._warn_of_grace(seconds, saves)

    @hookbus.hookimpl
    def bus_close(self) -> None:
        self._bus = None
        self._leave()

    # -- inside --------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Heed no more signals, and hand on the one that came too late for a safe point."""
        caught, self.caught, self._active = self.caught, None, False
        if threading.current_thread() is threading.main_thread():
            for number, former in self._former.items():
                if signal.getsignal(number) == self._heed:
                    signal.signal(number, signal.SIG_DFL if former is None else former)
        if caught is None or os.getpid() != self._process:
            return
        if sys.exception() is None:
            os.kill(os.getpid(), caught)  # as if it came now
        else:  # the error is to be seen, and mostly ends the process by itself
            logger.warning("%s came and was not heeded, since the run broke", _name(caught))

    def _begin(self) -> None:
        if self._bus is None or self._active:
            return
        if self._bus.loop is None:
            logger.warning(
                "Preemption: there is no loop on the bus, so no safe point comes and signals are"
                " not heeded"
            )
            return
        self._process, self._passed_at, self._active = os.getpid(), time.monotonic(), True
        for number in self._signals:
            self._former[number] = signal.signal(number, self._heed)

    def _heed(self, number: int, frame: types.FrameType | None) -> None:
        forked = os.getpid() != self._process
        if forked and number not in (signal.SIGTERM, signal.SIGINT):
            return  # sent to all processes of the job, as some schedulers do
        if forked or not self._active or self.caught is not None:
            # A forked child's own affair; or it comes too late; or it is the second one.
            self._hand_on(number, frame)
            return
        self.caught = number
        with contextlib.suppress(OSError):  # not through buffers, which may be in use right now
            os.write(2, f"hookbus: {_name(number)}: saving at the next safe point\n".encode())

    def _hand_on(self, number: int, frame: types.FrameType | None) -> None:
        """Do what the former handler would; somebody else's may stand before this one by now."""
        former = self._former.get(number)
        if callable(former) and former != self._heed:
            former(number, frame)
        elif self._active or former is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _warn_of_grace(self, seconds: float, saves: int) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "grace=%g is too short: the longest way to a safe point took %.1f s, and a save"
                " %.1f s%s; ask for more time, or save less",
                self._grace,
                self._longest_way,
                seconds,
                ", behind one that may be under way" if saves == 2 else "",
            )


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
