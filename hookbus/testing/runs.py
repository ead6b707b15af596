"""How a run is made for `assert_exact_resume`: in this process or another, to its end or cut."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy
import torch

from hookbus.bus import made as buses
from hookbus.checkpoint import checkpoints, history, read_folder_name
from hookbus.errors import CallError
from hookbus.testing.faults import Death, DiskChange
from hookbus.testing.recorder import VARIABLE, Record, Recorder, open_by, read_records

Function = Callable[[Path, Recorder], object]

THE_END = "the end"
"""The place of what a function returns."""

_SEEDS = f"""\
import importlib.util, json, os, random, sys

seed = json.loads(os.environ["{VARIABLE}"])["seed"]
random.seed(seed)

class Seeding:
    def find_spec(self, name, path=None, target=None):
        if name not in ("numpy", "torch"):
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None:
            load = spec.loader.exec_module
            def load_and_seed(module):
                load(module)
                (module.random.seed if name == "numpy" else module.manual_seed)(seed)
            spec.loader.exec_module = load_and_seed
        return spec

sys.meta_path.insert(0, Seeding())

# What stands behind this one has its turn too.
sys.path.remove(os.path.dirname(__file__))
here = sys.modules.pop("sitecustomize")
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = here
"""
"""What Python runs before a script. What it does not seed begins anywhere, and is compared too."""

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

        _seed(next(self._seeds) + 1 if _has_saved(run) else 0)
        with death.awaited():
            try:
                _call(self._function, run, Recorder(run, take))
            finally:
                _let_go(run)
        if death.happened:
            gc.collect()  # a bus that was not closed is full of cycles
        return Lived(tuple(records), death.happened)


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
            "seed": number if _has_saved(run) else 0,
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
        (site / "sitecustomize.py").write_text(_SEEDS)
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
    _seed(order["seed"])
    with _KillAfterCommit(order["commits"], order["signal"]).in_front():
        _call(function, Path(order["run"]), open_by(order))


def _call(function: Function, run: Path, recorder: Recorder) -> None:
    result = function(run, recorder)
    if result is not None:
        recorder(at=THE_END, result=result)


@attrs.define
class _Commits:
    """Counts commits down."""

    left: int

    def are_behind(self, change: DiskChange) -> bool:
        """Whether all of them lie behind this change."""
        if not self.left:
            return True
        self.left -= _is_commit(change)
        return False


class _DeathAfterCommit(Death):
    def __init__(self, number: int) -> None:
        super().__init__()
        self._commits = _Commits(number)

    def is_due(self, change: DiskChange) -> bool:
        return self._commits.are_behind(change)


class _KillAfterCommit(Death):
    """Sends the signal to its own process, once."""

    def __init__(self, number: int, signal_number: int) -> None:
        super().__init__()
        self._commits, self._signal, self._sent = _Commits(number), signal_number, number == 0

    def is_due(self, change: DiskChange) -> bool:
        if not self._sent and self._commits.are_behind(change):
            self._sent = True
            os.kill(os.getpid(), self._signal)
        return False


def _is_commit(change: DiskChange) -> bool:
    final = change.target.name if change.kind == "rename" and change.target else ""
    return change.path.name.startswith(".") and read_folder_name(final) is not None


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


def _has_saved(run: Path) -> bool:
    return run.exists() and bool(checkpoints(run))


def _seed(number: int) -> None:
    """Begin with other streams where a run goes on, as a new process would.

    A start from nothing begins as the first one did: what it does not seed is nobody's fault here.
    """
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)
