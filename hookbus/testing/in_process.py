"""How a run lives for `assert_exact_resume` in this process, as if each time in a new one."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from pathlib import Path

from hookbus.bus import made as buses
from hookbus.testing.faults import Death, DiskChange
from hookbus.testing.recorder import Record, Recorder
from hookbus.testing.runs import Commits, Cut, Function, Lived, call, has_saved
from hookbus.testing.seeds import seed


class InProcess:
    """Calls a function again and again in this process, as if each time in a new one."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._seeds = itertools.count()

    def live(self, run: Path, cut: Cut | None) -> Lived:
        """Call it once; at the cut everything ends as with its process."""
        records: list[Record] = []
        death = _DeathAfterCommit(cut.number) if cut is not None and cut.at_commit else Death()

        def take(record: Record) -> None:
            records.append(record)
            if cut is not None and not cut.at_commit and len(records) == cut.number:
                death.die(f"at {cut}")

        seed(next(self._seeds) + 1 if has_saved(run) else 0)
        with death.awaited():
            try:
                call(self._function, run, Recorder(run, take))
            finally:
                _let_go(run)
        if death.happened:
            gc.collect()  # a bus that was not closed is full of cycles
        return Lived(tuple(records), death.happened)


class _DeathAfterCommit(Death):
    def __init__(self, number: int) -> None:
        super().__init__()
        self._commits = Commits(number)

    def is_due(self, change: DiskChange) -> bool:
        return self._commits.are_behind(change)


def _let_go(run: Path) -> None:
    """Close what is still open of a run, so that nothing of it goes on in this process."""
    for bus in list(buses):
        if bus._saver is not None and bus._saver.writer.run == run:
            with contextlib.suppress(Exception):
                bus._let_go()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let searches through all objects of the process find those alone that come from now on.

    What others have left is neither taken for the run's, nor does it cost time.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
