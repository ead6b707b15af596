"""Two runs, one of them cut: what they recorded and what they saved, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from hookbus.checkpoint import Checkpoint, checkpoints, history
from hookbus.errors import CallError, ExactnessError
from hookbus.testing.pictures import list_differences, read_section
from hookbus.testing.recorder import Record
from hookbus.testing.runs import THE_END, Cut, Lived, count_saves

Cuts: TypeAlias = Iterable[int | Sequence[int]]


@attrs.frozen
class CutRun:
    """A run that was cut: where, and after which step each of its processes went on."""

    cuts: tuple[Cut, ...]
    resumed_after: tuple[int, ...]

    def __str__(self) -> str:
        steps = ", ".join(map(str, self.resumed_after))
        return f"cut at {join(self.cuts)}; went on after step {steps}"


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


@attrs.frozen
class Expected:
    """The run that was never cut."""

    run: Path
    records: tuple[Record, ...]
    commits: int

    @classmethod
    def read(cls, run: Path, lived: Lived) -> Expected:
        """Look at what it left.

        Raises:
            CallError: nothing.
        """
        if not run.exists():
            raise CallError(f"the run made no {run.name!r}; resume the path that it is given")
        if not checkpoints(run):
            raise CallError("the run saves nothing, so there is nothing to resume from")
        return cls(run, lived.records, count_saves(run))

    def list_scenes(self, cuts: Cuts | None) -> list[tuple[Cut, ...]]:
        """Return the runs to make, each with the places at which it is cut."""
        at_commit = not self.records
        if cuts is None:
            during = [each for each in self.records if each.place != THE_END]
            most = len(during) or self.commits
            third = max(1, most // 3)
            chosen: list[Any] = [*dict.fromkeys((1, third, 2 * third, most))]
            if most >= 3:
                chosen.append((third,) * 3 if not at_commit else (1, 1))
        else:
            chosen = list(cuts) if isinstance(cuts, Iterable) else [None]
        scenes = [each if isinstance(each, list | tuple) else (each,) for each in chosen]
        wrong = [n for each in scenes for n in each or (None,) if type(n) is not int or n < 1]
        if wrong or not scenes:
            raise CallError(
                f"cuts={cuts!r}: pass whole numbers from 1 up, or tuples of these for runs that"
                " are cut more than once"
            )
        return [tuple(Cut(n, at_commit) for n in each) for each in scenes]

    def compare(self, run: Path, scene: tuple[Cut, ...], lived: Sequence[Lived]) -> CutRun:
        """Compare a run that was cut with this one, all of it.

        Raises:
            ExactnessError: they part; it says where.
        """
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
        if not theirs or theirs[-1].step != ours[-1].step:
            steps = [each[-1].step if each else None for each in (ours, theirs)]
            return [f"the last checkpoint is of step {steps[0]}, and here of {steps[1]}"]
        # By their place too: one that a signal brought about is there only once.
        by_place = {_get_place(each): each for each in theirs}
        for each in ours:
            other = by_place.get(_get_place(each))
            if other is not None and (found := _compare_sections(each, other)):
                return [found]
        found = _compare_sections(ours[-1], theirs[-1])
        return [found] if found else []

    def report(self, runs: Sequence[CutRun]) -> ExactReport:
        """Say what was compared with these."""
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


def join(cuts: Iterable[Cut]) -> str:
    """Say where a run is cut."""
    return ", then ".join(map(str, cuts))


def _show(index: int, record: Record) -> str:
    return f"record {index + 1}" + (f" ({record.place})" if record.place else "")


def _get_place(checkpoint: Checkpoint) -> tuple[int, str]:
    return checkpoint.step, repr(sorted(checkpoint.progress.items()))


def _compare_sections(first: Checkpoint, second: Checkpoint) -> str | None:
    """Name the first section that is not the same, and where."""
    for name in {**first.sections, **second.sections}:
        if name not in first.sections or name not in second.sections:
            return f"step {first.step}: only one has a section {name!r}"
        if found := list_differences(read_section(first, name), read_section(second, name)):
            more = "\n    ".join(found)
            return f"step {first.step}, section {name!r}: {more}"
    return None
