"""Where plugins are tried: a folder that goes, a quiet log, streams that are put back."""

from __future__ import annotations

import contextlib
import itertools
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

from hookbus.bus import HookBus
from hookbus.logs import logger
from hookbus.testing.source import Fault, Source, faults
from hookbus.testing.trial import Trial, copy_run


@attrs.define(eq=False)
class Bench:
    """Where trials are made: a folder that goes, a quiet log, streams that are put back."""

    source: Source
    change: Callable[[Any], object] | None
    other: Source | None
    folder: Path
    _watch: HookBus = attrs.field(factory=HookBus)
    _open: list[Trial] = attrs.field(factory=list)
    _numbers: Iterator[int] = attrs.field(factory=itertools.count)

    @property
    def is_single(self) -> bool:
        """Whether there is only one of what is checked."""
        if isinstance(self.source.given, str):
            plugins = [Source(self.source.given).put_on(bus)[1] for bus in (HookBus(), HookBus())]
            return plugins[0] is plugins[1]
        return not self.source.is_function

    def make(self, source: Source | None = None, *, run: Path | None = None) -> Trial:
        """Make one, on a bus of its own; ``run`` is copied for it."""
        if self.is_single:
            self.close()
        folder = self.folder / f"run-{next(self._numbers)}"
        if run is not None:
            copy_run(run, folder)
        bus = HookBus()
        try:
            name, made = (source or self.source).put_on(bus)
        except BaseException:
            bus._let_go()
            raise
        self._open.append(Trial(bus, name, made, folder))
        return self._open[-1]

    def make_changed(self) -> Trial:
        """Make one in another state, in a run of its own."""
        trial = self.make(self.other)
        trial.bus.resume(trial.run)
        self.bring_on(trial)
        return trial

    def bring_on(self, trial: Trial) -> None:
        """Bring one into another state, as the caller does it."""
        if self.change is not None:
            with faults():
                self.change(trial.made)

    def read_streams(self) -> dict[str, str]:
        """Return a digest of each random stream of the process."""
        noted = self._watch.hook.note_streams(slot="law")
        return {name: digest for streams in noted for name, digest in streams.items()}

    def close(self) -> None:
        """Close every bus that is open."""
        while self._open:
            self._open.pop().bus._let_go()


@contextlib.contextmanager
def bench(
    source: Source, change: Callable[[Any], object] | None, other: Source | None
) -> Iterator[Bench]:
    """Put a bench up, and take it away."""
    with tempfile.TemporaryDirectory(prefix="hookbus-check-") as folder, quiet():
        made = Bench(source, change, other, Path(folder))
        try:
            with streams_kept():
                yield made
        except Fault as fault:
            raise (fault.__cause__ or fault) from None
        finally:
            made.close()
            made._watch.close()


@contextlib.contextmanager
def streams_kept() -> Iterator[None]:
    """Put the streams of the process back at the end."""
    with HookBus() as watch:
        watch.hook.note_streams(slot="kept")
        try:
            yield
        finally:
            watch.hook.put_streams(slot="kept")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Say nothing of the runs that are made here."""
    stop = _Stop()
    logger.addFilter(stop)
    level = logger.level
    logger.setLevel(logging.INFO)
    silent = logging.NullHandler()
    logger.addHandler(silent)
    try:
        yield
    finally:
        logger.removeHandler(silent)
        logger.setLevel(level)
        logger.removeFilter(stop)


class _Stop(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return False
