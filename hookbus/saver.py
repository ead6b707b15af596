"""Whether a run may be saved, and at which moment that is done."""

from __future__ import annotations

import contextlib
import functools
import numbers
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs

from hookbus.asked import Asked, Wanted, clean_metrics
from hookbus.checkpoint import Checkpoint, RunLock
from hookbus.errors import CallError, SaveError
from hookbus.logs import logger
from hookbus.run_writer import RunWriter

LEFT_NOTE = "a body was left before its end"


@runtime_checkable
class Pace(Protocol):
    """What the bus asks of the loop that it keeps pace with."""

    metrics: dict[str, Any]

    @property
    def step(self) -> int: ...

    @property
    def running(self) -> bool:
        """Whether the script is inside ``epochs()`` or ``steps()``."""

    @property
    def position(self) -> Mapping[str, Any]:
        """Epoch, batch, step and whatever else counts, as plain values."""

    @property
    def left(self) -> bool:
        """Whether a body was left before its end."""

    def bus_open(self, bus: Any) -> None:
        """Learn which bus it is on."""


@attrs.define(eq=False)
class Saver:
    """Decides when the checkpoints of one run are written."""

    writer: RunWriter
    lock: RunLock
    pace: Pace | None = None
    asked: Asked = attrs.field(init=False)
    _saved_position: Mapping[str, Any] | None = attrs.field(default=None, init=False)
    _thread: int = attrs.field(factory=threading.get_ident, init=False)
    _handled: BaseException | None = attrs.field(factory=sys.exception, init=False)

    def __attrs_post_init__(self) -> None:
        self.asked = Asked(self.writer.run)
        self._note_position()

    def save(self, step: int | None, wanted: Wanted) -> Checkpoint | None:
        self._check_moment()
        if self.pace is not None and step is not None:
            raise CallError("step= is for scripts without a loop; the loop counts its own")
        if self.writer.ranks.world_size == 1:  # several do it at a safe point, all together
            self.collect_done()
        with self.writer.streams_kept("ask"):
            self.writer.fire("check_attached", components=self.writer.components)
        if self.pace is None:
            return self._write(self._check_step(step), wanted)
        self._check_order(self.pace.step)
        if self.pace.running:
            self.asked.add(wanted)
            return None
        if self.asked.wanted is not None:
            wanted = self.asked.wanted.join(wanted)
        is_saved = self._saved_position == self.pace.position and self.writer.has_saved
        needs = not is_saved or bool(wanted.metrics or self.pace.metrics or wanted.tag)
        if not self.writer.ranks.any("save()", needs):
            if not wanted.wait:
                return None
            self.finish()
            return self.writer.last
        return self._write(self.pace.step, wanted)

    def write_asked(self) -> None:
        """Write the save that was asked for, if any: the state is whole now.

        What this process was forked from writes it, and not its child.
        """
        if self.pace is None or self.writer.is_forked:
            return
        wanted = self.asked.wanted
        if self.writer.ranks.any("is a save asked for?", wanted is not None):
            with self.writer.ranks.together("asking for a save"):
                check_right(self.lock)
            self._write(self.pace.step, wanted)

    def write_last(self) -> None:
        """Write the save that was asked for, if any, and wait: the bus closes."""
        handled = self._find_exception()
        if handled is None or isinstance(handled, SystemExit):
            # Others are only met if there is something to write: they may have more to do.
            if self.asked.wanted is not None:  # a copy would only be waited for
                self.asked.wanted = attrs.evolve(self.asked.wanted, wait=True)
                self.write_asked()
        elif self.asked.wanted is not None:
            self.asked.wanted = None
            logger.warning(
                "the save that was asked for is not written, since %s is being handled and the"
                " batch in hand may be half done",
                type(handled).__name__,
            )
        self.finish()

    def collect_done(self) -> None:
        """Take in the save behind training if it is done.

        Raises:
            SaveError: it failed.
        """
        with self._forgetting_if_it_fails():
            self.writer.collect_done()

    def finish(self) -> None:
        """Wait for what is done behind training, and take in the save, if any."""
        with self._forgetting_if_it_fails():
            self.writer.finish()

    def delete(self, checkpoints: Sequence[Checkpoint], why: str, *, wait: bool) -> None:
        self.writer.check_process()
        check_right(self.lock)
        if not self.writer.ranks.is_first:
            return  # that one does it
        if wait:
            self.writer.delete(checkpoints, why)
        elif checkpoints:
            self.writer.delete_behind(checkpoints, why)

    # -- inside --------------------------------------------------------------------------------

    def _write(self, step: int, asked: Wanted | None) -> Checkpoint | None:
        self.asked.wanted = None  # this is the one, also where the loop was left meanwhile
        pace = self.pace
        wanted = self._agree_on(step, asked)
        left = pace is not None and pace.left
        if left:
            logger.warning(
                "step %d is saved as things stand: %s; what stands after it in the body is not run"
                " again after a resume",
                step,
                LEFT_NOTE,
            )
        with self._forgetting_if_it_fails():
            return self.writer.write(
                step,
                wanted,
                metrics=wanted.metrics
                if self.writer.ranks.world_size > 1
                else {**clean_metrics(pace.metrics if pace else None), **wanted.metrics},
                progress=dict(pace.position) if pace else {},
                notes=[LEFT_NOTE] if left else [],
                when_copied=self._note_copied,
            )

    def _agree_on(self, step: int, wanted: Wanted | None) -> Wanted:
        """Return what all ranks want together, with the metrics of rank 0.

        Raises:
            RankError: they stand at different places.
        """
        ranks = self.writer.ranks
        if wanted is not None and ranks.world_size == 1:
            return wanted
        position = self.pace.position if self.pace else {}
        place = {name: position.get(name) for name in ("where", "epoch", "call", "batch")}
        ranks.agree("a save", {"the place of the run": {**place, "step": step}})
        metrics = {**clean_metrics(self.pace.metrics if self.pace else None)}
        if wanted is not None:
            metrics |= wanted.metrics
        told = ranks.gather("a save, what is wanted", (wanted, metrics))
        first, *others = [each for each, _ in told if each is not None]
        with ranks.together("a save"):
            return attrs.evolve(functools.reduce(Wanted.join, others, first), metrics=told[0][1])

    @contextlib.contextmanager
    def _forgetting_if_it_fails(self) -> Iterator[None]:
        """Forget that this place was saved, so that the next save is one."""
        try:
            yield
        except BaseException:
            self._saved_position = None
            raise

    def _note_copied(self) -> None:
        if self.pace is not None:
            self.pace.metrics.clear()
        self._note_position()

    def _note_position(self) -> None:
        """Remember that nothing has been counted since the save or resume that ends here."""
        self._saved_position = dict(self.pace.position) if self.pace else None

    def _check_moment(self) -> None:
        """Refuse a save at a moment at which the state may not be whole.

        Raises:
            SaveError: in a forked child, another thread, while an exception is handled, or when a
                newer bus has taken the run over.
        """
        self.writer.check_process()
        if threading.get_ident() != self._thread:
            raise SaveError("save() was called from another thread than resume(); call it there")
        if (handled := self._find_exception()) is not None:
            raise SaveError(
                f"save() was called while {type(handled).__name__} is being handled, so the batch"
                " in hand may be half done; the last checkpoint is whole"
            )
        check_right(self.lock)

    def _find_exception(self) -> BaseException | None:
        """Return what is being handled now and was not when the run began."""
        handled = sys.exception()
        return None if handled is self._handled else handled

    def _check_step(self, step: int | None) -> int:
        newest = self.writer.newest_step
        if step is None:
            raise CallError("there is no loop on the bus that counts; pass save(step=…)")
        if isinstance(step, bool) or not isinstance(step, numbers.Integral) or step < 0:
            raise CallError(f"step={step!r}: pass a whole number of steps")
        if step < newest:
            raise CallError(f"step={step} is below the newest checkpoint's, {newest}")
        return int(step)

    def _check_order(self, step: int) -> None:
        newest = self.writer.newest_step
        if step < newest:
            raise SaveError(
                f"the loop stands at step {step}, below the newest checkpoint of"
                f" {self.writer.run}, step {newest}, so a resume would never take this one; save"
                " into a run of its own"
            )


def check_right(lock: RunLock) -> None:
    """Refuse to write where this process, or this bus of it, may not any more.

    Raises:
        SaveError: a newer bus of this process has taken the run over.
        RunLockedError: another process has, or the run directory was removed or replaced.
    """
    if lock.lost:
        raise SaveError(
            f"a newer bus of this process took {lock.path.parent} over; save through that one"
        )
    lock.renew()
