"""Writes the checkpoints of one run, at once or behind training, and its history."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from hookbus.asked import Wanted
from hookbus.background import Background
from hookbus.checkpoint import (
    Checkpoint,
    Staging,
    append_record,
    open_checkpoint,
    read_folder_name,
    remove_checkpoint,
    write_checkpoint,
    write_checkpoint_together,
)
from hookbus.errors import CheckpointNotFoundError, HookbusError, SaveError, raise_all
from hookbus.logs import logger
from hookbus.ranks import ALONE, Ranks
from hookbus.registration import Registered
from hookbus.replicas import settle
from hookbus.resume import Resume
from hookbus.save import Save
from hookbus.settings import read_settings, read_versions


@attrs.define(eq=False)
class RunWriter:
    """Writes into one run directory; who may, and when, is for others to decide.

    ``check_right`` raises where this process may not write there any more.

    ``last`` is the newest committed checkpoint of the run.
    """

    run: Path
    run_id: str
    last: Checkpoint | None
    entries: Callable[[], Sequence[Registered]]
    components: Mapping[str, object]
    fire: Callable[..., Any]
    watch: Callable[..., Any]
    check_right: Callable[[], None]
    ranks: Ranks = ALONE
    ranks_behind: Ranks = ALONE  # the same, for the thread that writes
    _writing: bool = attrs.field(default=False, init=False)
    _plans: dict[str, Any] = attrs.field(factory=dict, init=False)
    _staging: Staging = attrs.field(factory=Staging, init=False)
    _background: Background[Checkpoint] | None = attrs.field(default=None, init=False)
    _step_behind: int = attrs.field(default=-1, init=False)
    _deleting: Background[None] | None = attrs.field(default=None, init=False)
    _verified: Checkpoint | None = attrs.field(default=None, init=False)
    _process: int = attrs.field(factory=os.getpid, init=False)

    @property
    def newest_step(self) -> int:
        """The step of the newest save, committed or on its way; -1 if there is none."""
        if self._background is not None:
            return self._step_behind
        return self.last.step if self.last is not None else -1

    @property
    def is_forked(self) -> bool:
        """Whether this is a child of the process that writes."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Refuse to write in a forked child.

        Raises:
            SaveError: this is one.
        """
        if self.is_forked:
            raise SaveError(
                f"this process was forked from {self._process}, which saves; save there only"
            )

    @property
    def saving(self) -> bool:
        return self._background is not None and not self._background.done

    @property
    def has_saved(self) -> bool:
        """Whether there is a checkpoint, committed or on its way."""
        return self._background is not None or self.last is not None

    def write(
        self,
        step: int,
        wanted: Wanted,
        *,
        metrics: Mapping[str, float],
        progress: Mapping[str, Any],
        notes: Sequence[str],
        when_copied: Callable[[], None],
    ) -> Checkpoint | None:
        """Collect every plugin's state and commit a checkpoint; ``None`` if behind training.

        Streams are noted before the first plugin is asked and put back at the end, so that a
        plugin which draws while it saves changes neither the checkpoint nor the run.
        ``when_copied`` is called as soon as the run may go on.
        """
        started = time.perf_counter()
        self._wait_for_turn(step)
        with self._alone(), self.streams_kept("now"):
            with self.ranks.together(f"saving step {step}"):
                save = Save(step, metrics, self.components, self.ranks.world_size)
                self.fire("save_start", save=save)
                self.fire("save_state", save=save)
                sections = save.collect_sections(self.entries())
            if self.ranks.world_size > 1:
                sections = settle(self.ranks, sections)
            if not wanted.wait:
                with self.ranks.together("copying the state"):
                    sections = self._staging.copy(sections)
            # Everything in it is as of now.
            write = functools.partial(
                self._choose_writer(wanted.wait),
                self.run,
                run_id=self.run_id,
                step=save.step,
                sections=sections,
                progress=progress,
                metrics=save.metrics,
                settings=read_settings(),
                versions=read_versions(),
                why=", ".join(wanted.why),
                tag=wanted.tag,
                notes=notes,
                previous=self.last,
                before_commit=self.check_right,
            )
            if not wanted.wait:
                blocked = time.perf_counter() - started
                when_copied()
                self._step_behind = step
                self._background = Background(
                    self.run,
                    f"the save of step {step}",
                    lambda: self._record(write(), started, blocked),
                )
                self._background.start()
                logger.info("step %d is copied and is being written behind training", step)
                return None
            total = sum(part.flat.bytes for each in sections for part in each.parts.values())
            with self.watch("writing", self.run, step, total) as on_bytes:
                checkpoint = self._record(write(on_bytes=on_bytes), started)
            when_copied()
            self._end_save(checkpoint)
            self._wait_for_deletions()  # whoever waits for a save waits for what it entails
            return checkpoint

    def _choose_writer(self, wait: bool) -> Callable[..., Checkpoint]:
        if self.ranks.world_size == 1:
            return write_checkpoint
        peers = self.ranks if wait else self.ranks_behind
        return functools.partial(write_checkpoint_together, peers=peers, plans=self._plans)

    # -- behind training -----------------------------------------------------------------------

    def collect_done(self) -> None:
        """Take in the save behind training if it is done, and fire `save_end` for it.

        Raises:
            SaveError: it failed.
        """
        background = self._background
        if background is None or self.is_forked:
            return
        if self.ranks.any("is the save behind training done?", not background.done):
            return
        self._take_in(background)

    def _take_in(self, background: Background[Checkpoint]) -> None:
        """Take in a save that is over on all ranks."""
        self._background = None
        checkpoint = background.collect()
        with self._alone(), self.streams_kept("end"):
            self._end_save(checkpoint)

    def finish(self) -> None:
        """Wait for what is done behind training, and take in the save, if any."""
        if self._background is not None and not self.is_forked:
            self._background.wait()
            self._take_in(self._background)
        self.wait_out()  # its end may have begun a deletion

    def wait_out(self) -> None:
        """Wait for what is done behind training; the bus goes, and nothing is fired."""
        for each in self._list_behind():
            each.wait()

    def when_done(self, then: Callable[[], None]) -> None:
        """Call ``then`` once nothing is done behind training any more; at once, if so."""
        for each in self._list_behind():
            then = functools.partial(each.when_done, then)
        then()

    def _list_behind(self) -> list[Background[Any]]:
        threads: list[Background[Any] | None] = [self._background, self._deleting]
        return [each for each in threads if each is not None and not self.is_forked]

    def _wait_for_turn(self, step: int) -> None:
        if self._background is None:
            return
        before, seconds = self._step_behind, self._background.wait()
        if seconds > 0.1:
            logger.warning(
                "step %d waited %.2f s, since step %d was still being written: save less often, or"
                " onto a faster disk",
                step,
                seconds,
                before,
            )
        self._take_in(self._background)

    # -- the run directory ---------------------------------------------------------------------

    def delete(self, checkpoints: Sequence[Checkpoint], why: str) -> None:
        """Delete checkpoints of this run; the newest must be a later one, and good.

        Raises:
            HookbusError: some could not be deleted; what each says is raised together.
        """
        self._wait_for_deletions()
        problems = self._delete(checkpoints, why, self.last)
        raise_all("not all were deleted", list(problems.values()))

    def delete_behind(self, checkpoints: Sequence[Checkpoint], why: str) -> None:
        """Do the same behind training; what could not be deleted is a WARNING."""
        before, newest = self._deleting, self.last
        waits = before.wait if before is not None and not before.done else lambda: 0.0

        def work() -> None:
            waits()
            for path, problem in self._delete(checkpoints, why, newest).items():
                if not isinstance(problem, CheckpointNotFoundError) or path.exists():
                    logger.warning("%s is not deleted: %s", path, problem)

        self._deleting = Background(self.run, f"deleting {len(checkpoints)} checkpoints", work)
        self._deleting.start()

    def _wait_for_deletions(self) -> None:
        if self._deleting is not None and not self.is_forked:
            self._deleting.wait()

    def _delete(
        self, checkpoints: Sequence[Checkpoint], why: str, newest: Checkpoint | None
    ) -> dict[Path, HookbusError]:
        """Delete each that may be, and return what is in the way of the others."""
        problems: dict[Path, HookbusError] = {}
        for each in checkpoints:
            try:
                self._delete_one(each.path.absolute(), why, newest)
            except HookbusError as error:
                problems[each.path] = error
        return problems

    def _delete_one(self, path: Path, why: str, newest: Checkpoint | None) -> None:
        if path.parent != self.run or read_folder_name(path.name) is None:
            raise SaveError(f"{path} is no checkpoint in {self.run}, so it is not deleted")
        found = open_checkpoint(path)
        if found.run_id != self.run_id:
            raise SaveError(f"{path} is of another run ({found.run_id}), so it is not deleted")
        if newest is None or (newest.step, newest.serial) <= (found.step, found.serial):
            raise SaveError(f"{path} is the newest checkpoint of its run, so it is not deleted")
        # Every byte once, and each time that it is there as it was.
        newest.verify(hashes=self._verified is not newest)
        self._verified = newest
        self.check_right()
        remove_checkpoint(path)
        logger.info("%s is deleted: %s", path, why)
        append_record(self.run, "delete", checkpoint=path.name, step=found.step, why=why)

    def note_start(self, resume: Resume) -> None:
        """Write into the history how the run starts this time."""
        if not self.ranks.is_first:
            return
        how = "resumed" if not resume.fresh else "warm" if resume.checkpoint else "fresh"
        append_record(
            self.run,
            "start",
            how=how,
            step=resume.step,
            checkpoint=str(resume.checkpoint.path) if resume.checkpoint else None,
            run_id=self.run_id,
            changes=[attrs.asdict(change) for change in resume.report.changes],
            versions=dict(read_versions()),
        )

    # -- inside --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if self._writing:
            raise SaveError(
                "save() was called in an event of a save; ask for another one after it, at the next"
                " safe point"
            )
        self._writing = True
        try:
            yield
        finally:
            self._writing = False

    @contextlib.contextmanager
    def streams_kept(self, slot: str) -> Iterator[None]:
        """Put the random streams back at the end, so that plugins which draw change no run."""
        self.fire("note_streams", slot=slot)
        try:
            yield
        finally:
            self.fire("put_streams", slot=slot)

    def _record(
        self, checkpoint: Checkpoint, started: float, blocked: float | None = None
    ) -> Checkpoint:
        """Note what a committed checkpoint took, in the history too."""
        seconds = time.perf_counter() - started
        checkpoint.seconds = seconds
        checkpoint.blocked = seconds if blocked is None else blocked
        if not self.ranks.is_first:
            return checkpoint
        append_record(
            self.run,
            "save",
            checkpoint=checkpoint.path.name,
            step=checkpoint.step,
            blocked=round(checkpoint.blocked, 4),
            seconds=round(seconds, 4),
            bytes=checkpoint.bytes,
            written=checkpoint.written,
            why=checkpoint.why,
            metrics={name: _show_number(n) for name, n in checkpoint.metrics.items()},
        )
        return checkpoint

    def _end_save(self, checkpoint: Checkpoint) -> None:
        self.last = checkpoint
        logger.info(
            "step %d is committed after %.2f s: %s",
            checkpoint.step,
            checkpoint.seconds,
            checkpoint.path,
        )
        self.fire("save_end", checkpoint=checkpoint)


def _show_number(value: float) -> float | str:
    """Return a metric as every reader of JSON can hold it."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"a number of {value.bit_length()} bits"
    return value if -float("inf") < value < float("inf") else str(value)
