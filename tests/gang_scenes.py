"""What several processes go through while one of them dies, breaks, differs or comes too many.

Each scene is given a `Gang` and returns what happened as plain values.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ddp_run
import torch
import torch.distributed as dist
from exact import run_plain, seed, to_bits
from gang import LIMIT, End, Gang

import hookbus
from builtin_plugins import EverySteps, Loop, Preemption, SavePolicy
from hookbus.checkpoint import files
from hookbus.sequence import RESUME_EVENTS

# -- what they do --------------------------------------------------------------------------------


def train(run: Path, *plugins: object, wait: bool = True, number: int = 0) -> str:
    """Go on with the run to its end; a policy saves at steps 4, 8, 12."""
    seed(number if any(run.glob("step-*")) else 0)  # what goes on owes nothing to a seed
    parts, loop = ddp_run.build(), Loop()
    with hookbus.HookBus() as bus:
        bus.register(SavePolicy(when=EverySteps(4), wait=wait))
        for i, plugin in enumerate(plugins):
            bus.register(plugin, f"plugin{i}")
        bus.attach(**parts.attached, loop=loop)
        bus.resume(run)
        parts.run(loop, lambda where: None)
        digest = parts.digest()
    return ddp_run.shorten(digest)


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class At:
    """Does something in one event of a resume."""

    kind = "at"

    def __init__(self, event: str, act: Callable[[], object]) -> None:
        def call(resume: hookbus.Resume) -> None:
            act()

        setattr(self, event, hookbus.hookimpl(call))


class DiskCount:
    """Counts what is done to the disk, from the second save on, and dies before one of it."""

    def __init__(self, fatal: int = -1) -> None:
        self.done, self.saves, self.fatal = 0, 0, fatal
        files.watcher = self.watch

    @hookbus.hookimpl
    def save_start(self, save: hookbus.Save) -> None:
        self.saves += 1

    def watch(self, *_: object) -> None:
        if self.saves == 2:
            if self.done == self.fatal:
                die()
            self.done += 1


class Quiet:
    """The same plugin on ranks that nothing happens to: all ranks have the same ones."""

    kind = "at"


def check_others(ends: list[End], victim: int) -> float:
    """See that each of the others ended with an error, and soon; return how soon."""
    for rank, end in enumerate(ends):
        if rank == victim:
            assert end.status == -signal.SIGKILL, ends
            continue
        assert end.status == 1, ends
        assert end.told is not None, ends
        assert end.seconds < LIMIT, ends
    return max(end.seconds for end in ends)


# -- scenarios -----------------------------------------------------------------------------------


def kill_in_saves(gang: Gang, every: int) -> dict[str, Any]:
    """Kill each rank before changes of the disk in the second save, at once and behind training."""
    told: dict[str, Any] = {"kills": 0, "slowest": 0.0, "from": {}}
    expected = [
        end.told for end in gang.start(lambda rank: ddp_run.shorten(run_plain(ddp_run.build)))
    ]
    for wait in (True, False):

        def count(rank: int, wait: bool = wait) -> int:
            counting = DiskCount()
            train(gang.folder / f"whole-{wait}", counting, wait=wait)
            return counting.done

        counts = [end.told for end in gang.start(count)]
        assert all(counts), counts
        told[f"changes, wait={wait}"] = counts
        for victim in range(gang.world_size):
            for fatal in {*range(0, counts[victim], every), counts[victim] - 1}:
                run = gang.folder / f"kill-{wait}-{victim}-{fatal}"

                def act(
                    rank: int,
                    victim: int = victim,
                    fatal: int = fatal,
                    run: Path = run,
                    wait: bool = wait,
                ) -> str:
                    return train(run, DiskCount(fatal if rank == victim else -1), wait=wait)

                told["slowest"] = max(told["slowest"], check_others(gang.start(act), victim))
                newest = max(path.name for path in run.glob("step-*"))
                told["from"][newest] = told["from"].get(newest, 0) + 1
                again = gang.start(lambda rank, run=run: train(run, DiskCount(), number=9))
                assert [end.told for end in again] == expected, (run, again)
                starts = [e["step"] for e in hookbus.history(run) if e["event"] == "start"]
                assert starts == [0, int(newest[5:])], (run, starts)
                assert not list(run.glob(".*tmp")), run
                told["kills"] += 1
    return told


def kill_in_events(gang: Gang) -> dict[str, Any]:
    """Kill each rank in each event of a resume."""
    told: dict[str, Any] = {"kills": 0, "slowest": 0.0}
    expected = [
        end.told for end in gang.start(lambda rank: ddp_run.shorten(run_plain(ddp_run.build)))
    ]
    run = gang.folder / "run"

    def stop(rank: int) -> str:
        return train(run, At("resume_start", lambda: None), Stop())

    assert [end.told["error"] for end in gang.start(stop)] == ["StoppedError"] * gang.world_size
    for event in RESUME_EVENTS:
        for victim in range(gang.world_size):

            def act(rank: int, event: str = event, victim: int = victim) -> str:
                return train(run, At(event, die if rank == victim else int), Stop())

            told["slowest"] = max(told["slowest"], check_others(gang.start(act), victim))
            told["kills"] += 1
    again = gang.start(lambda rank: train(run, number=9))
    assert [end.told for end in again] == expected, again
    return told


class StoppedError(Exception):
    """The script broke on all ranks."""


class Stop:
    """Ends the script on all ranks, right after the first save."""

    kind = "at"

    @hookbus.hookimpl(trylast=True)
    def save_end(self, checkpoint: object) -> None:
        raise StoppedError


def break_in_events(gang: Gang) -> dict[str, Any]:
    """Break on one rank in each event; all hear of it."""
    told: dict[str, Any] = {}
    run = gang.folder / "run"
    gang.start(lambda rank: train(run, At("resume_start", int), Stop()))

    def complain() -> None:
        raise KeyError("shadow")

    for event in RESUME_EVENTS:
        victim = len(told) % gang.world_size

        def act(rank: int, event: str = event, victim: int = victim) -> str:
            return train(run, At(event, complain if rank == victim else int), Stop())

        ends = gang.start(act)
        told[event] = [victim, *({**end.told, "seconds": end.seconds} for end in ends)]
    return told


def signal_one(gang: Gang) -> dict[str, Any]:
    """Send SIGTERM to one rank in the middle of training."""
    expected = [
        end.told for end in gang.start(lambda rank: ddp_run.shorten(run_plain(ddp_run.build)))
    ]
    run = gang.folder / "run"

    def act(rank: int) -> str:
        def send(step: int) -> None:
            if step == 5 and rank == gang.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)

        return train(run, Preemption(), AtStep(send), wait=False)

    ends = gang.start(act)
    newest = hookbus.checkpoints(run)[-1]
    again = gang.start(lambda rank: train(run, number=9))
    return {
        "status": [end.status for end in ends],
        "seconds": max(end.seconds for end in ends),
        "step": newest.step,
        "why": newest.why,
        "exact": [end.told for end in again] == expected,
    }


def change_number(gang: Gang, numbers: list[int]) -> dict[str, Any]:
    """Save in the middle of an epoch on some processes, and go on with others, twice."""
    told: dict[str, Any] = {}
    for first in numbers:
        gang.world_size = first
        run = gang.folder / f"from-{first}"
        begun = [end.told for end in gang.start(lambda rank, run=run: collect(run, stop=2))]
        for second in numbers:
            ends = []
            for again in (0, 1):  # twice, since new processes must draw the same numbers
                copy = gang.folder / f"{first}-to-{second}-{again}"
                shutil.copytree(run, copy)
                gang.world_size = second
                ends.append(gang.start(lambda rank, run=copy: collect(run, stop=3)))
            gang.world_size = first
            last = gang.start(lambda rank, run=copy: collect(run))
            rest = [[end.told for end in each] for each in (*ends, last)]
            told[f"{first} to {second}"] = [begun, *rest]
    return told


def collect(run: Path, stop: int = 0) -> dict[str, Any]:
    """Train up to a step and save there, or to the end of the epoch; tell the samples seen."""
    seed(dist.get_rank())
    parts, loop, seen = ddp_run.build(), Loop(), []
    with contextlib.suppress(StoppedError), hookbus.HookBus() as bus:
        bus.register(Stop(), "stop")
        bus.attach(**parts.attached, loop=loop)
        resume = bus.resume(run)
        before = ddp_run.shorten([to_bits(each) for each in bus.components["model"].parameters()])
        moments = ddp_run.shorten(to_bits(bus.components["optimizer"].state_dict()["state"]))
        draws = torch.rand(3).tolist()
        for epoch in loop.epochs(1):
            parts.head(epoch)
            for x in loop.batches(parts.loader):
                parts.body(loop.batch, x)
                seen += x[:, 0].int().tolist()
                if stop and loop.batch == stop:
                    bus.save()
    return {
        "seen": seen,
        "draws": draws,
        "weights": before,
        "moments": moments,
        "notes": [*resume.report.notes, *map(str, resume.report.changes)],
    }


class AtStep:
    """Does something at each safe point, before the policies are asked."""

    kind = "at"

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act

    @hookbus.hookimpl(tryfirst=True)
    def safe_point(self, loop: Any) -> None:
        self._act(loop.step)
