"""When a save is allowed, and how it is written."""

from __future__ import annotations

import contextlib
import functools
import numbers
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import attrs

from hookbus.asked import Asked, Wanted, clean_metrics
from hookbus.background import Background
from hookbus.checkpoint import (
    Checkpoint,
    RunLock,
    Section,
    Staging,
    append_record,
    open_checkpoint,
    read_folder_name,
    remove_checkpoint,
    write_checkpoint,
)
from hookbus.errors import CallError, SaveError, WriteError
from hookbus.logs import logger
from hookbus.registration import Registered
from hookbus.resume import Resume
from hookbus.save import Save
from hookbus.settings import read_settings, read_versions

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
    """Writes the checkpoints of one run."""

    run: Path
    lock: RunLock
    run_id: str
    last: Checkpoint | None
    entries: Callable[[], Sequence[Registered]]
    components: Mapping[str, object]
    fire: Callable[..., Any]
    watch: Callable[..., Any]
    pace: Pace | None = None
    asked: Asked = attrs.field(init=False)
    _staging: Staging = attrs.field(factory=Staging, init=False)
    _background: Background | None = attrs.field(default=None, init=False)
    _saved_position: Mapping[str, Any] | None = attrs.field(default=None, init=False)
    _verified: Path | None = attrs.field(default=None, init=False)
    _process: int = attrs.field(factory=os.getpid, init=False)
    _thread: int = attrs.field(factory=threading.get_ident, init=False)
    _handled: BaseException | None = attrs.field(factory=sys.exception, init=False)

    def __attrs_post_init__(self) -> None:
        self.asked = Asked(self.run)

    def note_position(self) -> None:
        """Remember that nothing has been counted since the save or resume that ends here."""
        self._saved_position = dict(self.pace.position) if self.pace else None

    def note_start(self, resume: Resume) -> None:
        """Write into the history how the run starts this time."""
        how = "resumed" if not resume.fresh else "warm" if resume.checkpoint else "fresh"
        self._append(
            "start",
            how=how,
            step=resume.step,
            checkpoint=str(resume.checkpoint.path) if resume.checkpoint else None,
            run_id=self.run_id,
            changes=[str(change) for change in resume.report.changes],
            versions=dict(read_versions()),
        )

    def check_moment(self) -> None:
        """Refuse a save at a moment at which the state may not be whole.

        Raises:
            SaveError: in a forked child, another thread, while an exception is handled, or when a
                newer bus has taken the run over.
        """
        self._check_process()
        if threading.get_ident() != self._thread:
            raise SaveError("save() was called from another thread than resume(); call it there")
        if (handled := self._find_exception()) is not None:
            raise SaveError(
                f"save() was called while {type(handled).__name__} is being handled, so the batch"
                " in hand may be half done; the last checkpoint is whole"
            )
        self._check_lock()

    def save(self, step: int | None, wanted: Wanted) -> Checkpoint | None:
        self.check_moment()
        if self.pace is not None and step is not None:
            raise CallError("step= is for scripts without a loop; the loop counts its own")
        self.collect_done()
        with self._streams_kept("ask"):
            self.fire("check_attached", components=self.components)
        if self.pace is None:
            return self.write(self._check_step(step), wanted)
        self._check_order(self.pace.step)
        if self.pace.running:
            self.asked.add(wanted)
            return None
        if self.asked.wanted is not None:
            wanted = self.asked.wanted.join(wanted)
        is_saved = self._saved_position == self.pace.position and (self._background or self.last)
        if is_saved and not (wanted.metrics or self.pace.metrics or wanted.tag):
            if not wanted.wait:
                return None
            self.finish()
            return self.last
        return self.write(self.pace.step, wanted)

    def write_asked(self) -> None:
        """Write the save that was asked for, if any: the state is whole now.

        What this process was forked from writes it, and not its child.
        """
        wanted = self.asked.wanted
        if wanted is not None and self.pace is not None and os.getpid() == self._process:
            self._check_lock()
            self.write(self.pace.step, wanted)

    def write_last(self) -> None:
        """Write the save that was asked for, if any, and wait: the bus closes."""
        handled = self._find_exception()
        if handled is None or isinstance(handled, SystemExit):
            self.write_asked()
        elif self.asked.wanted is not None:
            self.asked.wanted = None
            logger.warning(
                "the save that was asked for is not written, since %s is being handled and the"
                " batch in hand may be half done",
                type(handled).__name__,
            )
        self.finish()

    def write(self, step: int, wanted: Wanted) -> Checkpoint | None:
        """Collect every plugin's state and commit a checkpoint, now or behind training.

        Streams are noted before the first plugin is asked and put back at the end, so that a
        plugin which draws while it saves changes neither the checkpoint nor the run.
        """
        started = time.perf_counter()
        self._wait_for_turn(step)
        self.asked.wanted = None  # this is the one, also where the loop was left meanwhile
        metrics = wanted.metrics
        if self.pace is not None:
            metrics = {**clean_metrics(self.pace.metrics), **metrics}
        with self._streams_kept("now"):
            save = Save(step, metrics, self.components)
            self.fire("save_start", save=save)
            self.fire("save_state", save=save)
            sections = save.collect_sections(self.entries())
            if wanted.wait:
                checkpoint = self._make_job(save, sections, wanted, started)()
                self._note_copied()
                self._finish_save(checkpoint)
                return checkpoint
            sections = self._staging.copy(sections)
            job = self._make_job(save, sections, wanted, started)
            self._note_copied()
            self._background = Background(step, job)
            logger.info("step %d is copied and is being written behind training", step)
            return None

    def delete(self, checkpoint: Checkpoint, why: str) -> None:
        """Delete a checkpoint of this run; the newest must be a later one, and good."""
        self._check_process()
        self._check_lock()
        path = checkpoint.path
        if path.parent != self.run or read_folder_name(path.name) is None:
            raise SaveError(f"{path} is no checkpoint in {self.run}, so it is not deleted")
        found = open_checkpoint(path)
        if found.run_id != self.run_id:
            raise SaveError(f"{path} is of another run ({found.run_id}), so it is not deleted")
        newest = self.last
        if newest is None or (newest.step, newest.serial) <= (found.step, found.serial):
            raise SaveError(f"{path} is the newest checkpoint of its run, so it is not deleted")
        if self._verified != newest.path:
            newest.verify()
            self._verified = newest.path
        remove_checkpoint(path)
        logger.info("%s is deleted: %s", path, why)
        self._append("delete", checkpoint=path.name, step=found.step, why=why)

    # -- behind training -----------------------------------------------------------------------

    def collect_done(self) -> None:
        """Take in the save behind training if it is done, and fire `save_end` for it.

        Raises:
            SaveError: it failed.
        """
        background = self._background
        if background is None or not background.done or os.getpid() != self._process:
            return
        self._background = None
        try:
            checkpoint = background.collect()
        except SaveError:
            self._saved_position = None  # so that the next save is one
            raise
        with self._streams_kept("end"):
            self._finish_save(checkpoint)

    def finish(self) -> None:
        """Wait for the save behind training, if any, and take it in."""
        if self._background is not None and os.getpid() == self._process:
            self._background.wait()
            self.collect_done()

    def abandon(self) -> None:
        """Wait for the save behind training, if any; the bus goes, and nothing is fired."""
        if self._background is not None and os.getpid() == self._process:
            self._background.wait()
        self._background = None

    def _wait_for_turn(self, step: int) -> None:
        background = self._background
        if background is None:
            return
        seconds = background.wait()
        if seconds > 0.1:
            logger.warning(
                "step %d waited %.2f s, since step %d was still being written: save less often, or"
                " onto a faster disk",
                step,
                seconds,
                background.step,
            )
        self.collect_done()

    # -- inside --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _streams_kept(self, slot: str) -> Iterator[None]:
        """Put the random streams back at the end, so that plugins which draw change no run."""
        self.fire("note_streams", slot=slot)
        try:
            yield
        finally:
            self.fire("put_streams", slot=slot)

    def _make_job(
        self, save: Save, sections: Sequence[Section], wanted: Wanted, started: float
    ) -> Callable[[], Checkpoint]:
        """Return what writes the files; everything in it is as of now."""
        pace = self.pace
        left = pace is not None and pace.left
        if left:
            logger.warning(
                "step %d is saved as things stand: %s; what stands after it in the body is not run"
                " again after a resume",
                save.step,
                LEFT_NOTE,
            )
        blocked = None if wanted.wait else time.perf_counter() - started
        write = functools.partial(
            write_checkpoint,
            self.run,
            run_id=self.run_id,
            step=save.step,
            sections=sections,
            progress=dict(pace.position) if pace else {},
            metrics=save.metrics,
            settings=read_settings(),
            versions=read_versions(),
            why=wanted.why,
            tag=wanted.tag,
            notes=[LEFT_NOTE] if left else [],
            previous=self.last,
        )
        if not wanted.wait:
            return lambda: self._record(write(), blocked, started)
        total = sum(part.flat.bytes for each in sections for part in each.parts.values())

        def write_watched() -> Checkpoint:
            with self.watch("writing", self.run, save.step, total) as on_bytes:
                return self._record(write(on_bytes=on_bytes), None, started)

        return write_watched

    def _record(self, checkpoint: Checkpoint, blocked: float | None, started: float) -> Checkpoint:
        """Note what a committed checkpoint took, in the history too."""
        seconds = time.perf_counter() - started
        checkpoint.seconds = seconds
        checkpoint.blocked = seconds if blocked is None else blocked
        self._append(
            "save",
            checkpoint=checkpoint.path.name,
            step=checkpoint.step,
            blocked=round(checkpoint.blocked, 4),
            seconds=round(seconds, 4),
            bytes=sum(section.bytes for section in checkpoint.sections.values()),
            written=checkpoint.written,
            why=checkpoint.why,
            metrics={name: _show_number(n) for name, n in checkpoint.metrics.items()},
        )
        return checkpoint

    def _append(self, event: str, **values: Any) -> None:
        try:
            append_record(self.run, event, **values)
        except WriteError as error:  # what it tells of has happened all the same
            logger.warning("the history of %s is not written: %s", self.run, error)

    def _note_copied(self) -> None:
        if self.pace is not None:
            self.pace.metrics.clear()
        self.note_position()

    def _finish_save(self, checkpoint: Checkpoint) -> None:
        self.last = checkpoint
        logger.info(
            "step %d is committed after %.2f s: %s",
            checkpoint.step,
            checkpoint.seconds,
            checkpoint.path,
        )
        self.fire("save_end", checkpoint=checkpoint)

    def _find_exception(self) -> BaseException | None:
        """Return what is being handled now and was not when the run began."""
        handled = sys.exception()
        return None if handled is self._handled else handled

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise SaveError(
                f"this process was forked from {self._process}, which saves; save there only"
            )

    def _check_lock(self) -> None:
        if self.lock.lost:
            raise SaveError(
                f"a newer bus of this process took {self.run} over; save through that one"
            )
        self.lock.renew()

    @property
    def _newest_step(self) -> int:
        """The step of the newest save, committed or not; -1 if there is none."""
        if self._background is not None:
            return self._background.step
        return self.last.step if self.last is not None else -1

    def _check_step(self, step: int | None) -> int:
        if step is None:
            raise CallError("there is no loop on the bus that counts; pass save(step=…)")
        if isinstance(step, bool) or not isinstance(step, numbers.Integral) or step < 0:
            raise CallError(f"step={step!r}: pass a whole number of steps")
        if step < self._newest_step:
            raise CallError(f"step={step} is below the newest checkpoint's, {self._newest_step}")
        return int(step)

    def _check_order(self, step: int) -> None:
        if step < self._newest_step:
            raise SaveError(
                f"the loop stands at step {step}, below the newest checkpoint of {self.run}, step"
                f" {self._newest_step}, so a resume would never take this one; save into a run of"
                " its own"
            )


def _show_number(value: float) -> float | str:
    """Return a metric as JSON can hold it."""
    return value if -float("inf") < value < float("inf") else str(value)
