"""Work that is done behind training: a save is written, old checkpoints are deleted."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from hookbus.errors import SaveError
from hookbus.logs import logger

T = TypeVar("T")

_in_flight = set["Background[Any]"]()
os.register_at_fork(after_in_child=_in_flight.clear)


class Background(Generic[T]):
    """Work on a run directory that a thread of its own does.

    The thread ends by itself and is waited for when the process ends. A failure is logged at once,
    and raised by `collect`, in the thread that trains. Whether it is over is told by the thread
    alone: an interrupted ``join`` takes a running one for dead (Python 3.11 and 3.12).
    """

    def __init__(self, run: Path, what: str, work: Callable[[], T]) -> None:
        self.run = run
        self.what = what
        self._work: Callable[[], T] | None = work
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._begun, self._over = threading.Event(), threading.Event()
        self._given_up = False
        self._guard = threading.Lock()
        self._then: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin; keep this object before, since an interrupt may come from here."""
        _in_flight.add(self)
        try:
            threading.Thread(target=self._run, name=f"hookbus: {self.what}").start()
        except BaseException as error:
            with self._guard:
                if not self._begun.wait(5):  # it never will
                    self._given_up, self._error = True, error
                    self._end()
            raise

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> float:
        """Wait until it is done; return the seconds that took."""
        started = time.perf_counter()
        self._over.wait()
        return time.perf_counter() - started

    def when_done(self, then: Callable[[], None]) -> None:
        """Call ``then`` once it is done, or now if it is."""
        with self._guard:
            if not self.done:
                self._then = then
                return
        then()

    def collect(self) -> T:
        """Return what came of it, once it is done.

        Raises:
            SaveError: it failed; its cause is what went wrong first.
        """
        if not self._result:
            error = self._error
            raise SaveError(
                f"{self.what} failed behind training: {type(error).__name__}: {error}; earlier"
                " checkpoints are as they were"
            ) from error
        return self._result[0]

    def _run(self) -> None:
        self._begun.set()
        try:
            if self._work is not None and not self._given_up:
                self._result.append(self._work())
        except BaseException as error:  # torch has errors that are no Exception
            self._error = error
            logger.error("%s failed: %s: %s", self.what, type(error).__name__, error)
        finally:
            self._work = None  # it may hold a state, or what was done before it
            with self._guard:
                self._end()
            if self._then is not None:
                self._then()

    def _end(self) -> None:
        _in_flight.discard(self)
        self._over.set()


def wait_for_writers(run: Path | None = None) -> None:
    """Wait until nothing is done behind training, in this run or at all."""
    for each in list(_in_flight):
        if run in (None, each.run):
            each.wait()
