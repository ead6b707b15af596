"""When a save is allowed, asked for and written."""

from __future__ import annotations

import contextlib
import numbers
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import attrs

from hookbus.checkpoint import Checkpoint, RunLock, write_checkpoint
from hookbus.errors import CallError, HookbusError, SaveError, raise_all
from hookbus.logs import logger
from hookbus.registration import Registered, name_type
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

    def bind(self, bus: Any) -> None:
        """Learn which bus it is on."""


@attrs.define(eq=False)
class Asked:
    """The save that the script asked for and that is not written yet, if any."""

    run: Path
    metrics: dict[str, float] | None = None


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
    _saved_position: Mapping[str, Any] | None = attrs.field(default=None, init=False)
    _process: int = attrs.field(factory=os.getpid, init=False)
    _thread: int = attrs.field(factory=threading.get_ident, init=False)
    _handled: BaseException | None = attrs.field(factory=sys.exception, init=False)

    def __attrs_post_init__(self) -> None:
        self.asked = Asked(self.run)

    def note_position(self) -> None:
        """Remember that nothing has been counted since the save or resume that ends here."""
        self._saved_position = dict(self.pace.position) if self.pace else None

    def check_moment(self) -> None:
        """Refuse a save at a moment at which the state may not be whole.

        Raises:
            SaveError: in a forked child, another thread, while an exception is handled, or when a
                newer bus has taken the run over.
        """
        if os.getpid() != self._process:
            raise SaveError(
                f"this process was forked from {self._process}, which saves; save there only"
            )
        if threading.get_ident() != self._thread:
            raise SaveError("save() was called from another thread than resume(); call it there")
        if (handled := self._find_exception()) is not None:
            raise SaveError(
                f"save() was called while {type(handled).__name__} is being handled, so the batch"
                " in hand may be half done; the last checkpoint is whole"
            )
        self._check_lock()

    def save(self, step: int | None, metrics: Mapping[str, Any] | None) -> Checkpoint | None:
        self.check_moment()
        cleaned = _clean_metrics(metrics)
        if self.pace is not None and step is not None:
            raise CallError("step= is for scripts without a loop; the loop counts its own")
        self.fire("check_attached", components=self.components)
        if self.pace is None:
            return self.write(self._check_step(step), cleaned, "asked")
        self._check_order(self.pace.step)
        if self.pace.running:
            self.asked.metrics = {**(self.asked.metrics or {}), **cleaned}
            return None
        cleaned = {**(self.asked.metrics or {}), **cleaned}
        nothing_new = self._saved_position == self.pace.position and not cleaned
        if nothing_new and not self.pace.metrics and self.last is not None:
            return self.last
        return self.write(self.pace.step, cleaned, "asked")

    def write_asked(self) -> None:
        """Write the save that was asked for, if any: the state is whole now.

        What this process was forked from writes it, and not its child.
        """
        metrics = self.asked.metrics
        if metrics is not None and self.pace is not None and os.getpid() == self._process:
            self._check_lock()
            self.write(self.pace.step, metrics, "asked")

    def write_last(self) -> None:
        """Write the save that was asked for, if any, when the bus closes."""
        handled = self._find_exception()
        if handled is None or isinstance(handled, SystemExit):
            self.write_asked()
        elif self.asked.metrics is not None:
            self.asked.metrics = None
            logger.warning(
                "the save that was asked for is not written, since %s is being handled and the"
                " batch in hand may be half done",
                type(handled).__name__,
            )

    def write(self, step: int, metrics: Mapping[str, float], why: str) -> Checkpoint:
        """Collect every plugin's state and commit a checkpoint.

        Streams are noted before the first plugin is asked and put back at the end, so that a
        plugin which draws while it saves changes neither the checkpoint nor the run.
        """
        self.asked.metrics = None  # this is the one, also where the loop was left meanwhile
        if self.pace is not None:
            metrics = {**_clean_metrics(self.pace.metrics), **metrics}
        self.fire("note_streams", slot="now")
        try:
            self.last = self._commit(Save(step, metrics, self.components), why)
            self.fire("save_end", checkpoint=self.last)
        finally:
            self.fire("put_streams", slot="now")
        return self.last

    def _commit(self, save: Save, why: str) -> Checkpoint:
        pace = self.pace
        self.fire("save_start", save=save)
        self.fire("save_state", save=save)
        sections = save.collect_sections(self.entries())
        left = pace is not None and pace.left
        if left:
            logger.warning(
                "step %d is saved as things stand: %s; what stands after it in the body is not run"
                " again after a resume",
                save.step,
                LEFT_NOTE,
            )
        total = sum(part.flat.bytes for each in sections for part in each.parts.values())
        with self.watch("writing", self.run, save.step, total) as on_bytes:
            checkpoint = write_checkpoint(
                self.run,
                run_id=self.run_id,
                step=save.step,
                sections=sections,
                progress=pace.position if pace else {},
                metrics=save.metrics,
                settings=read_settings(),
                versions=read_versions(),
                why=why,
                notes=[LEFT_NOTE] if left else [],
                on_bytes=on_bytes,
            )
        if pace is not None:
            pace.metrics.clear()
        self.note_position()
        logger.info("step %d is committed: %s", save.step, checkpoint.path)
        return checkpoint

    def _find_exception(self) -> BaseException | None:
        """Return what is being handled now and was not when the run began."""
        handled = sys.exception()
        return None if handled is self._handled else handled

    def _check_lock(self) -> None:
        if self.lock.lost:
            raise SaveError(
                f"a newer bus of this process took {self.run} over; save through that one"
            )
        self.lock.renew()

    def _check_step(self, step: int | None) -> int:
        if step is None:
            raise CallError("there is no loop on the bus that counts; pass save(step=…)")
        if isinstance(step, bool) or not isinstance(step, numbers.Integral) or step < 0:
            raise CallError(f"step={step!r}: pass a whole number of steps")
        if self.last is not None and step < self.last.step:
            raise CallError(f"step={step} is below the newest checkpoint's, {self.last.step}")
        return int(step)

    def _check_order(self, step: int) -> None:
        if self.last is not None and step < self.last.step:
            raise SaveError(
                f"the loop stands at step {step}, below the newest checkpoint of {self.run}, step"
                f" {self.last.step}, so a resume would never take this one; save into a run of its"
                " own"
            )


def warn_at_exit(bus: object, asked: Asked) -> None:
    """Warn, when ``bus`` goes or the process ends, of a save that was never written."""
    weakref.finalize(bus, _warn_of_unwritten, asked, os.getpid())


def _warn_of_unwritten(asked: Asked, process: int) -> None:
    if asked.metrics is not None and os.getpid() == process:
        logger.warning(
            "a save was asked for and never written into %s; call bus.close() at the end, or use"
            " with hookbus.HookBus() as bus:",
            asked.run,
        )


def _clean_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics as plain numbers; a tensor or array of one element is taken by value."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise CallError(f"metrics={metrics!r}: pass a dict of names and numbers")
    cleaned: dict[str, float] = {}
    problems: list[HookbusError] = []
    for name, value in metrics.items():
        number = value
        with contextlib.suppress(
            AttributeError, RuntimeError, TypeError, ValueError
        ):  # of more than one element
            number = value.item()
        if not isinstance(name, str):
            problems.append(CallError(f"metrics: {name!r} is no name; pass a str"))
        elif not isinstance(number, (int, float)):
            problems.append(CallError(f"metrics[{name!r}]: {name_type(value)} is no number"))
        else:
            cleaned[name] = number if type(number) in (int, float) else float(number)
    raise_all("metrics cannot be saved", problems)
    return cleaned
