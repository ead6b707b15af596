"""How a run lives for `assert_exact_resume`: what cuts it, and in processes of its own."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from hookbus.checkpoint import checkpoints, history, read_folder_name
from hookbus.errors import CallError
from hookbus.testing.faults import Death, DiskChange
from hookbus.testing.recorder import VARIABLE, Record, Recorder, open_by, read_records
from hookbus.testing.seeds import SITE, seed

Function = Callable[[Path, Recorder], object]

THE_END = "the end"
"""The place of what a function returns."""

_SECONDS_BETWEEN_LOOKS = 0.005
_TAIL = 2000  # characters of what a process that broke has said


@attrs.frozen
class Cut:
    """Where a process ends: at its ``number``-th record, or after its so many-th commit."""

    number: int
    at_commit: bool

    def __str__(self) -> str:
        return f"{'checkpoint' if self.at_commit else 'record'} {self.number}"


@attrs.frozen
class Lived:
    """One process of a run: what it recorded, and whether it came to its cut."""

    records: tuple[Record, ...]
    was_cut: bool


@attrs.define
class Children:
    """Starts a function or a script in a process of its own, again and again, and kills it.

    ``start`` starts it for a run directory, with what `open_by` needs, and a file for what it says.
    """

    what: Function | Sequence[str]
    folder: Path
    signal: signal.Signals
    timeout: float
    _numbers: Iterator[int] = attrs.field(factory=itertools.count)

    def live(self, run: Path, cut: Cut | None) -> Lived:
        """Start it once, and wait until it is over."""
        number = next(self._numbers)
        file, log = self.folder / f"{number}.jsonl", self.folder / f"{number}.log"
        order = {
            "file": str(file),
            "log": str(log),
            "run": str(run),
            "cut": cut.number if cut is not None and not cut.at_commit else 0,
            "commits": cut.number if cut is not None and cut.at_commit else 0,
            "signal": int(self.signal),
            "seed": number if has_saved(run) else 0,
        }
        status = self._finish(self._start(run, order), order)
        records = tuple(read_records(file))
        was_cut = status != 0
        if cut is None or not was_cut or status not in self._ends:
            self._check_status(status, was_cut and cut is not None, log)
        return Lived(records, was_cut)

    @property
    def _ends(self) -> tuple[int, int]:
        """How a process ends by the signal: at once, or after it has heeded it."""
        return -self.signal, 128 + self.signal

    def _check_status(self, status: int, expected: bool, log: Path) -> None:
        if status == 0:
            return
        said = log.read_text(encoding="utf-8", errors="replace")[-_TAIL:] if log.exists() else ""
        raise CallError(
            f"the run ended with status {status}"
            + (f" instead of {' or '.join(map(str, self._ends))}" if expected else "")
            + (f"; it said:\n{said}" if said.strip() else "")
        )

    def _start(self, run: Path, order: Mapping[str, Any]) -> Any:
        if callable(self.what):
            # A new process, since torch does not outlive a fork.
            context = multiprocessing.get_context("spawn")
            process = context.Process(target=_live, args=(self.what, order))
            try:
                process.start()
            except Exception as error:
                raise CallError(
                    f"kill= needs a function that a new process can import, and"
                    f" {getattr(self.what, '__qualname__', self.what)} is none ({error}); define it"
                    " at the top of a module"
                ) from error
            return process
        command = [each.replace("{run}", str(run)) for each in self.what]
        site = self.folder / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(SITE)
        paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
        with open(order["log"], "wb") as log:
            try:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={
                        **os.environ,
                        VARIABLE: json.dumps(order),
                        "PYTHONPATH": os.pathsep.join(paths),
                    },
                )
            except OSError as error:
                raise CallError(f"the command cannot be started: {error}") from error

    def _finish(self, process: Any, order: Mapping[str, Any]) -> int:
        """Wait for the end; kill a script that records nothing once it has committed enough."""
        run, begun = Path(order["run"]), time.monotonic()
        ends_itself = callable(self.what) or not order["commits"]
        before = count_saves(run)
        told = False
        try:
            while (status := _read_status(process)) is None:
                if not ends_itself and not told and count_saves(run) - before >= order["commits"]:
                    os.kill(process.pid, self.signal)
                    told = True
                if time.monotonic() - begun > self.timeout:
                    raise CallError(f"the run did not end within timeout={self.timeout} seconds")
                time.sleep(_SECONDS_BETWEEN_LOOKS)
            return status
        finally:
            if _read_status(process) is None:
                process.kill()
            process.join() if hasattr(process, "join") else process.wait()


def count_saves(run: Path) -> int:
    """Return how many checkpoints a run has committed, also those that are deleted by now."""
    return sum(each["event"] == "save" for each in history(run)) if run.exists() else 0


def _read_status(process: Any) -> int | None:
    status: int | None = (
        process.poll() if isinstance(process, subprocess.Popen) else process.exitcode
    )
    return status


def _live(function: Function, order: Mapping[str, Any]) -> None:
    """Be the process of a function."""
    said = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(said, stream.fileno())
    seed(order["seed"])
    with _KillAfterCommit(order["commits"], order["signal"]).in_front():
        call(function, Path(order["run"]), open_by(order))


def call(function: Function, run: Path, recorder: Recorder) -> None:
    result = function(run, recorder)
    if result is not None:
        recorder(at=THE_END, result=result)


@attrs.define
class Commits:
    """Counts commits down."""

    left: int

    def are_behind(self, change: DiskChange) -> bool:
        """Whether all of them lie behind this change."""
        if not self.left:
            return True
        self.left -= _is_commit(change)
        return False


class _KillAfterCommit(Death):
    """Sends the signal to its own process, once."""

    def __init__(self, number: int, signal_number: int) -> None:
        super().__init__()
        self._commits, self._signal, self._sent = Commits(number), signal_number, number == 0

    def is_due(self, change: DiskChange) -> bool:
        if not self._sent and self._commits.are_behind(change):
            self._sent = True
            os.kill(os.getpid(), self._signal)
        return False


def _is_commit(change: DiskChange) -> bool:
    final = change.target.name if change.kind == "rename" and change.target else ""
    return change.path.name.startswith(".") and read_folder_name(final) is not None


def has_saved(run: Path) -> bool:
    return run.exists() and bool(checkpoints(run))
