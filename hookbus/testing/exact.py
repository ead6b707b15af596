"""Trains, cuts, resumes, and compares bit for bit with a run that was never cut.

In the tests of a training script::

    from hookbus.testing import assert_exact_resume

    def train(run, record):
        torch.manual_seed(0)
        ...                                  # build everything anew
        with hookbus.HookBus() as bus:
            bus.attach(model=model, optimizer=optimizer, loop=loop)
            bus.resume(run)
            for epoch in loop.epochs(2):
                for x in loop.batches(loader):
                    loss = ...
                    record(batch=x, loss=loss)
                    if loop.every(2):
                        bus.save()
            bus.save()

    def test_it_resumes_exactly():
        assert_exact_resume(train)
        assert_exact_resume(train, cuts=[3, (2, 4)], kill=signal.SIGKILL)
        assert_exact_resume([sys.executable, "train.py", "--run", "{run}"])
"""

from __future__ import annotations

import inspect
import itertools
import signal
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from hookbus.checkpoint import Checkpoint, checkpoints, history
from hookbus.errors import CallError, ExactnessError
from hookbus.testing.pictures import list_differences, read_section
from hookbus.testing.recorder import Record
from hookbus.testing.runs import THE_END, Children, Cut, InProcess, Lived, count_saves
from hookbus.testing.trial import quiet, streams_kept

MakeRun: TypeAlias = Callable[..., object] | Sequence[str]
Cuts: TypeAlias = Iterable[int | Sequence[int]]


@attrs.frozen
class CutRun:
    """A run that was cut: where, and after which step each of its processes went on."""

    cuts: tuple[Cut, ...]
    resumed_after: tuple[int, ...]

    def __str__(self) -> str:
        where = ", then ".join(map(str, self.cuts))
        return f"cut at {where}; went on after step {', '.join(map(str, self.resumed_after))}"


@attrs.frozen
class ExactReport:
    """What was compared, and found equal; ``str()`` has a line for each run that was cut."""

    records: int
    sections: tuple[str, ...]
    tensors: int
    checkpoints: int
    runs: tuple[CutRun, ...]

    def __str__(self) -> str:
        head = (
            f"equal, bit for bit: {self.records} records, {self.checkpoints} checkpoints, and at"
            f" the end {self.tensors} tensors in {', '.join(self.sections)}"
        )
        return "\n".join([head, *(f"  {each}" for each in self.runs)])


def assert_exact_resume(
    make_run: MakeRun,
    *,
    cuts: Cuts | None = None,
    kill: signal.Signals | int | None = None,
    timeout: float = 300.0,
) -> ExactReport:
    """Hold a run to its word: cut anywhere and resumed, it ends as if it never had been.

    ``make_run(run, record)`` builds everything anew, resumes ``run``, a path, trains, and saves
    now and then. It can tell what it does by ``record(batch=x, loss=loss)``, in the loop's body
    or in the epoch's own code, as often as it likes; what it returns is recorded as well. Or it is
    a script: the words of a command, with ``"{run}"`` in the place of the run directory, that can
    tell what it does by ``record = hookbus.testing.open_record()``.

    Each of ``cuts`` is a run that is cut and then goes on to its end: at the so many-th record of
    its process, counted from 1, or after the so many-th checkpoint where nothing is recorded.
    ``(3, 2)`` is cut at the third record, and once more at the second of the process that goes on.
    Default: some places from the first record to the last, and one that is cut three times.

    A function is called in this process, and a cut ends it by an exception with which nothing
    reaches the disk any more. With ``kill``, such as ``signal.SIGKILL``, each time is a process of
    its own, and so is a script's, whose default is SIGKILL. ``timeout`` is in seconds, for each.

    All that was recorded is compared, all checkpoints of the same step, and the last ones.

    Raises:
        ExactnessError: it does not; it names the first record, section and tensor.
        CallError: an argument is not what is expected, or nothing was resumed.
    """
    with tempfile.TemporaryDirectory(prefix="hookbus-exact-") as folder, quiet(), streams_kept():
        life = _choose_life(make_run, kill, timeout, Path(folder))
        whole = life(Path(folder) / "whole", None)
        expected = _Expected.read(Path(folder) / "whole", whole)
        runs = []
        for number, scene in enumerate(expected.list_scenes(cuts)):
            run = Path(folder) / f"cut-{number}"
            lived = _live_through(life, run, scene)
            runs.append(expected.compare(run, scene, lived))
        if not any(after for each in runs for after in each.resumed_after):
            raise CallError(
                "nothing was resumed: every cut came before the first checkpoint; cut later, or"
                " save earlier"
            )
        return expected.report(runs)


Life: TypeAlias = Callable[[Path, Cut | None], Lived]


def _choose_life(make_run: Any, kill: Any, timeout: float, folder: Path) -> Life:
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or timeout <= 0:
        raise CallError(f"timeout={timeout!r}: pass seconds")
    number = _take_signal(kill)
    if callable(make_run):
        try:
            inspect.signature(make_run).bind(folder, None)
        except TypeError as error:
            raise CallError(f"make_run is called as make_run(run, record): {error}") from error
        if number is None:
            return InProcess(make_run).live
        return Children(make_run, folder, number, timeout).live
    if isinstance(make_run, str) or not all(isinstance(each, str) for each in make_run):
        raise CallError(
            f"make_run={make_run!r}: pass a function, or a list of the words of a command, such as"
            ' [sys.executable, "train.py", "--run", "{run}"]'
        )
    if not any("{run}" in each for each in make_run):
        raise CallError('the command has no "{run}", which stands for the run directory')
    return Children(list(make_run), folder, number or signal.SIGKILL, timeout).live


def _take_signal(kill: Any) -> signal.Signals | None:
    if kill is None:
        return None
    if isinstance(kill, int) and not isinstance(kill, bool) and kill in iter(signal.Signals):
        return signal.Signals(kill)
    raise CallError(f"kill={kill!r}: pass a signal, such as signal.SIGKILL")


def _live_through(life: Life, run: Path, scene: Sequence[Cut]) -> list[Lived]:
    """Make a run that is cut at each place in turn, and let it end."""
    lived = []
    for cut in scene:
        lived.append(life(run, cut))
        if not lived[-1].was_cut:
            raise CallError(
                f"the run was over before {cut} of its process number {len(lived)}: it recorded"
                f" {len(lived[-1].records)} times; cut earlier"
            )
    return [*lived, life(run, None)]


@attrs.frozen
class _Expected:
    """The run that was never cut."""

    run: Path
    records: tuple[Record, ...]
    commits: int

    @classmethod
    def read(cls, run: Path, lived: Lived) -> _Expected:
        if not run.exists():
            raise CallError(f"the run made no {run.name!r}; resume the path that it is given")
        if not checkpoints(run):
            raise CallError("the run saves nothing, so there is nothing to resume from")
        return cls(run, lived.records, count_saves(run))

    def list_scenes(self, cuts: Cuts | None) -> list[tuple[Cut, ...]]:
        at_commit = not self.records
        if cuts is None:
            during = [each for each in self.records if each.place != THE_END]
            most = len(during) or self.commits
            third = max(1, most // 3)
            chosen: list[Any] = [*dict.fromkeys((1, third, 2 * third, most))]
            if most >= 3:
                chosen.append((third,) * 3 if not at_commit else (1, 1))
        else:
            chosen = list(cuts)
        scenes = [each if isinstance(each, list | tuple) else (each,) for each in chosen]
        wrong = [n for each in scenes for n in each or (None,) if type(n) is not int or n < 1]
        if wrong or not scenes:
            raise CallError(
                f"cuts={chosen!r}: pass whole numbers from 1 up, or tuples of these for runs that"
                " are cut more than once"
            )
        return [tuple(Cut(n, at_commit) for n in each) for each in scenes]

    def compare(self, run: Path, scene: tuple[Cut, ...], lived: Sequence[Lived]) -> CutRun:
        starts = [each["step"] for each in history(run) if each["event"] == "start"]
        cut_run = CutRun(scene, tuple(starts[1:]))
        found = self._compare_records([each.records for each in lived])
        found += self._compare_checkpoints(run)
        if found:
            raise ExactnessError(
                f"a run that was {cut_run} did not go on as one that was never cut:\n  "
                + "\n  ".join(found)
                + "\nwhat is not saved starts anew: is everything attached that the run changes?"
            )
        return cut_run

    def _compare_records(self, lived: Sequence[tuple[Record, ...]]) -> list[str]:
        """Name the first record at which a process is not where, or not as, it should be."""
        reached = 0
        for number, records in enumerate(lived):
            last = number == len(lived) - 1
            start = self._find_start(records, reached, last, first=number == 0)
            for index, record in enumerate(records, start):
                text = self._compare_record(index, record)
                if text and number == 0:
                    return [f"{text}; it was not cut yet, so it is not the same each time: seed it"]
                if text:
                    return [text]
            reached = start + len(records)
        if reached < len(self.records):
            missing = self.records[reached]
            return [f"{_show(reached, missing)} is missing: the run ended before it"]
        return []

    def _find_start(self, records: Sequence[Record], reached: int, last: bool, first: bool) -> int:
        """Return the number of the record with which a process goes on, as well as can be told."""
        if first or not records:
            return 0 if first else reached
        fits = [n for n in range(reached + 1) if self._count_equal(n, records) == len(records)]
        ends = [n for n in fits if n + len(records) == len(self.records)]
        if fits:
            return ends[-1] if last and ends else fits[-1]
        same = [n for n in range(reached + 1) if self._get_place(n) == records[0].place]
        if same and records[0].place:
            return max(same, key=lambda n: self._count_equal(n, records))
        return max(0, min(reached, len(self.records) - len(records)))

    def _count_equal(self, start: int, records: Sequence[Record]) -> int:
        pairs = zip(self.records[start:], records, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _get_place(self, number: int) -> str | None:
        return self.records[number].place if number < len(self.records) else None

    def _compare_record(self, index: int, record: Record) -> str | None:
        if index >= len(self.records):
            return f"{_show(index, record)} is one too many"
        expected = self.records[index]
        if expected.place != record.place:
            return f"record {index + 1} is at {expected.place}, and here at {record.place}"
        for name in {**expected.seen, **record.seen}:
            was, now = expected.seen.get(name), record.seen.get(name)
            if was is None or now is None:
                return f"{_show(index, record)}: {name} is recorded only by one"
            if was != now:
                same = " with other bits" if was.shown == now.shown else ""
                return f"{_show(index, record)}: {name} is {was.shown}, and here {now.shown}{same}"
        return None

    def _compare_checkpoints(self, run: Path) -> list[str]:
        ours, theirs = checkpoints(self.run), checkpoints(run)
        if not theirs or (ours[-1].step, theirs[-1].step) != (ours[-1].step, ours[-1].step):
            steps = [each[-1].step if each else None for each in (ours, theirs)]
            return [f"the last checkpoint is of step {steps[0]}, and here of {steps[1]}"]
        by_step = {(each.step, each.serial): each for each in theirs}
        for each in ours:
            other = by_step.get((each.step, each.serial))
            if other is not None and (found := _compare_sections(each, other)):
                return [found]
        found = _compare_sections(ours[-1], theirs[-1])
        return [found] if found else []

    def report(self, runs: Sequence[CutRun]) -> ExactReport:
        last = checkpoints(self.run)[-1]
        return ExactReport(
            records=len(self.records),
            sections=tuple(last.sections),
            tensors=sum(
                len(last.tensors(name, part))
                for name, section in last.sections.items()
                for part in section.parts
            ),
            checkpoints=len(checkpoints(self.run)),
            runs=tuple(runs),
        )


def _show(index: int, record: Record) -> str:
    return f"record {index + 1}" + (f" ({record.place})" if record.place else "")


def _compare_sections(first: Checkpoint, second: Checkpoint) -> str | None:
    """Name the first section that is not the same, and where."""
    for name in {**first.sections, **second.sections}:
        if name not in first.sections or name not in second.sections:
            return f"step {first.step}: only one has a section {name!r}"
        if found := list_differences(read_section(first, name), read_section(second, name)):
            more = "\n    ".join(found)
            return f"step {first.step}, section {name!r}: {more}"
    return None
