"""One save that is written behind training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hookbus.checkpoint import Checkpoint
from hookbus.errors import SaveError
from hookbus.logs import logger


class Background:
    """A save whose state is copied and whose files are being written by a thread of its own.

    The thread ends by itself and is waited for when the process ends. A failure is logged at once,
    and raised by `collect`, in the thread that trains.
    """

    def __init__(self, step: int, write: Callable[[], Checkpoint]) -> None:
        self.step = step
        self._write = write
        self._checkpoint: Checkpoint | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"hookbus save of step {step}")
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> float:
        """Wait until it is done; return the seconds that took."""
        started = time.perf_counter()
        self._thread.join()
        return time.perf_counter() - started

    def collect(self) -> Checkpoint:
        """Return what was committed, once it is done.

        Raises:
            SaveError: nothing was; its cause is what went wrong first.
        """
        if self._error is not None:
            raise SaveError(
                f"the save of step {self.step} failed behind training:"
                f" {type(self._error).__name__}: {self._error}; earlier checkpoints are as they"
                " were"
            ) from self._error
        assert self._checkpoint is not None
        return self._checkpoint

    def _run(self) -> None:
        try:
            self._checkpoint = self._write()
        except BaseException as error:  # torch has errors that are no Exception
            self._error = error
            logger.error(
                "the save of step %d failed: %s: %s", self.step, type(error).__name__, error
            )
