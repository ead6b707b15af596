"""Lets one of several processes die or break, again and again, and sees what the others do.

``python gang.py SCENARIO FOLDER WORLD_SIZE EVERY``: one warm process, which itself never trains,
keeps the store as torchrun's agent does and forks the processes of each start, so that nobody waits
for imports. Prints what happened as JSON, and ends with 1 if anything was wrong.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import ddp_run
import torch
import torch.distributed as dist
from exact import run_plain, seed

import hookbus
from builtin_plugins import EverySteps, Loop, Preemption, SavePolicy
from hookbus.checkpoint import files
from hookbus.sequence import RESUME_EVENTS

LIMIT = 30.0  # seconds within which every process ends when one is gone


@attrs.frozen
class End:
    """How a process ended: its status, what it told, and how long after the first one."""

    status: int
    told: Any
    seconds: float


class Gang:
    """Starts the processes of a run, one start after the other."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self.folder, self.world_size = folder, world_size
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._starts = 0

    def start(self, act: Callable[[int], Any]) -> list[End]:
        """Run ``act(rank)`` in each process; return how each ended, by rank."""
        self._starts += 1
        files_ = [self.folder / f"told-{self._starts}-{rank}" for rank in range(self.world_size)]
        pids = [self._fork(act, rank, file) for rank, file in enumerate(files_)]
        ended: dict[int, tuple[int, float]] = {}
        deadline = time.monotonic() + 2 * LIMIT
        while len(ended) < len(pids):
            for pid in set(pids) - set(ended):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[pid] = os.waitstatus_to_exitcode(status), time.monotonic()
            if time.monotonic() > deadline:
                for pid in set(pids) - set(ended):
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(
                    f"rank {[r for r, p in enumerate(pids) if p not in ended]} hangs"
                )
            time.sleep(0.005)
        first = min(at for _, at in ended.values())
        return [
            End(
                ended[pid][0],
                json.loads(file.read_text()) if file.exists() else None,
                ended[pid][1] - first,
            )
            for pid, file in zip(pids, files_, strict=True)
        ]

    def _fork(self, act: Callable[[int], Any], rank: int, file: Path) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            store = dist.TCPStore("127.0.0.1", self._store.port, timeout=timedelta(seconds=60))
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"{self._starts}", store),
                rank=rank,
                world_size=self.world_size,
            )
            try:
                told = act(rank)
                status = 0
            except Exception as error:
                notes = "\n".join(getattr(error, "__notes__", ()))
                told = {"error": type(error).__name__, "text": str(error), "notes": notes}
                kinds = [each.__name__ for each in type(error).__mro__]
                told["kinds"] = kinds
            except SystemExit as end:
                told, status = {"exit": end.code}, int(end.code or 0)
            written = file.with_suffix(".tmp")
            written.write_text(json.dumps(told))
            written.rename(file)
        except BaseException:
            logging.exception("rank %d broke", rank)
        finally:
            os._exit(status)


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


def kill_in_events(gang: Gang, every: int) -> dict[str, Any]:
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


def break_in_events(gang: Gang, every: int) -> dict[str, Any]:
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


def signal_one(gang: Gang, every: int) -> dict[str, Any]:
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


class AtStep:
    """Does something at each safe point, before the policies are asked."""

    kind = "at"

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act

    @hookbus.hookimpl(tryfirst=True)
    def safe_point(self, loop: Any) -> None:
        self._act(loop.step)


def main(scenario: str, folder: Path, world_size: int, every: int) -> None:
    importlib.import_module("torch._dynamo")  # by the first step of an optimizer
    torch.set_num_threads(1)
    with hookbus.HookBus():
        gc.freeze()  # what is here already is not searched by each child again
    started = time.monotonic()
    told = globals()[scenario](Gang(folder, world_size), every)
    print(json.dumps({**told, "took": round(time.monotonic() - started, 1)}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
