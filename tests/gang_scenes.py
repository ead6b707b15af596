"""What several processes go through while one of them dies, breaks, differs or comes too many.

Each scene is given a `Gang` and returns what happened as plain values.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ddp_run
import torch
import torch.distributed as dist
from exact import run_plain, seed, to_bits
from gang import LIMIT, End, Gang
from torch import nn
from torch.utils import data

import builtin_plugins
import hookbus
from builtin_plugins import EverySeconds, EverySteps, Loop, Preemption, SavePolicy
from hookbus.checkpoint import files
from hookbus.sequence import RESUME_EVENTS

# -- what they do --------------------------------------------------------------------------------


def train(run: Path, *plugins: object, wait: bool = True, number: int = 0, **options: Any) -> str:
    """Go on with the run to its end; a policy saves at steps 4, 8, 12."""
    seed(number if any(run.glob("step-*")) else 0)  # what goes on owes nothing to a seed
    parts, loop = ddp_run.build(), Loop()
    with hookbus.HookBus() as bus:
        bus.register(SavePolicy(when=EverySteps(4), wait=wait))
        for i, plugin in enumerate(plugins):
            bus.register(plugin, f"plugin{i}")
        bus.attach(**parts.attached, loop=loop)
        bus.resume(run, **options)
        parts.run(loop, lambda where: None)
        digest = parts.digest()
    return ddp_run.shorten(digest)


def run_plainly(gang: Gang) -> list[str]:
    return [end.told for end in gang.start(lambda rank: ddp_run.shorten(run_plain(ddp_run.build)))]


def begin(gang: Gang, run: Path, saves: int = 1) -> None:
    """Leave a run with some checkpoints, of steps 4, 8, 12."""
    ends = gang.start(lambda rank: train(run, Stop(saves)))
    assert [end.told["error"] for end in ends] == ["StoppedError"] * gang.world_size, ends


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class At:
    """Does something in one event of a resume."""

    kind = "at"

    def __init__(self, event: str, act: Callable[[], object]) -> None:
        def call(resume: hookbus.Resume) -> None:
            act()

        setattr(self, event, hookbus.hookimpl(call))


class AtStep:
    """Does something at each safe point, before the policies are asked."""

    kind = "at"

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act

    @hookbus.hookimpl(tryfirst=True)
    def safe_point(self, loop: Any) -> None:
        self._act(loop.step)


class StoppedError(Exception):
    """The script broke on all ranks."""


class Stop:
    """Ends the script on all ranks, right after some saves."""

    kind = "at"

    def __init__(self, saves: int = 1) -> None:
        self._left = saves

    @hookbus.hookimpl(trylast=True)
    def save_end(self, checkpoint: object) -> None:
        self._left -= 1
        if not self._left:
            raise StoppedError


class DiskCount:
    """Counts what is done to the disk in the second save, and may act before one of it."""

    kind = "at"

    def __init__(self, fatal: int = -1, act: Callable[[], object] = die) -> None:
        self.done, self.saves, self.fatal, self.act = 0, 0, fatal, act
        files.watcher = self.watch

    @hookbus.hookimpl
    def save_start(self, save: hookbus.Save) -> None:
        self.saves += 1

    def watch(self, *_: object) -> None:
        if self.saves == 2:
            self.done += 1
            if self.done == self.fatal + 1:
                self.act()


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


def list_starts(run: Path) -> list[int]:
    return [each["step"] for each in hookbus.history(run) if each["event"] == "start"]


# -- one dies ------------------------------------------------------------------------------------


def kill_in_saves(gang: Gang, every: int, wait: bool) -> dict[str, Any]:
    """Kill each rank before changes of the disk in the second save."""
    expected = run_plainly(gang)
    told: dict[str, Any] = {"kills": 0, "slowest": 0.0, "from": {}}

    def count(rank: int) -> int:
        counting = DiskCount()
        train(gang.folder / "whole", counting, wait=wait)
        return counting.done

    counts = [end.told for end in gang.start(count)]
    assert all(counts), counts
    for victim in range(gang.world_size):
        for fatal in sorted({*range(0, counts[victim], every), counts[victim] - 1}):
            run = gang.folder / f"kill-{victim}-{fatal}"

            def act(rank: int, run: Path, victim: int, fatal: int) -> str:
                return train(run, DiskCount(fatal if rank == victim else -1), wait=wait)

            killed = functools.partial(act, run=run, victim=victim, fatal=fatal)
            told["slowest"] = max(told["slowest"], check_others(gang.start(killed), victim))
            newest = max(path.name for path in run.glob("step-*"))
            told["from"][newest] = told["from"].get(newest, 0) + 1
            again = gang.start(lambda rank, run=run: train(run, DiskCount(), number=9))
            assert [end.told for end in again] == expected, (run, again)
            assert list_starts(run) == [0, int(newest[5:])], run
            assert not list(run.glob(".*tmp")), run
            told["kills"] += 1
    return told


def kill_in_events(gang: Gang, victims: list[int], events: list[str]) -> dict[str, Any]:
    """Kill a rank in some events of a resume."""
    told: dict[str, Any] = {"kills": 0, "slowest": 0.0}
    expected = run_plainly(gang)
    run = gang.folder / "run"
    begin(gang, run)
    for event in events:
        for victim in victims:

            def act(rank: int, event: str = event, victim: int = victim) -> str:
                return train(run, At(event, die if rank == victim else int))

            told["slowest"] = max(told["slowest"], check_others(gang.start(act), victim))
            told["kills"] += 1
    again = gang.start(lambda rank: train(run, number=9))
    assert [end.told for end in again] == expected, again
    return told


# -- one breaks ----------------------------------------------------------------------------------


def complain() -> None:
    raise KeyError("shadow")


def break_in_events(gang: Gang) -> dict[str, Any]:
    """Break on one rank in each event; all hear of it."""
    told: dict[str, Any] = {}
    run = gang.folder / "run"
    begin(gang, run)
    for event in RESUME_EVENTS:
        victim = len(told) % gang.world_size

        def act(rank: int, event: str = event, victim: int = victim) -> str:
            return train(run, At(event, complain if rank == victim else int))

        ends = gang.start(act)
        told[event] = [victim, [{**end.told, "seconds": end.seconds} for end in ends]]
    return told


def break_beside_a_collective(gang: Gang) -> list[Any]:
    """Break on rank 1 while rank 0 waits for it in the default group."""

    def act(rank: int) -> str:
        acts = At("configure_sharded", complain if rank == 1 else dist.barrier)
        return train(gang.folder / "run", acts)

    return [{**end.told, "seconds": end.seconds} for end in gang.start(act)]


def break_in_saves(gang: Gang, cases: list[tuple[bool, int]]) -> dict[str, Any]:
    """Break on one rank in a save; no checkpoint is made, all raise, and the next one is made."""
    told: dict[str, Any] = {}

    def fill_up() -> None:
        raise OSError(28, "No space left on device")

    for wait, victim in cases:
        run = gang.folder / f"{wait}-{victim}"

        def act(rank: int, run: Path = run, victim: int = victim, wait: bool = wait) -> str:
            count = DiskCount(5 if rank == victim else -1, fill_up)
            return train(run, count, wait=wait)

        ends = gang.start(act)
        again = gang.start(lambda rank, run=run: train(run, DiskCount(), number=9))
        told[f"{wait} {victim}"] = {
            "ends": [{**end.told, "seconds": end.seconds} for end in ends],
            "starts": list_starts(run),
            "again": [end.status for end in again],
            "left": [path.name for path in run.glob(".*tmp")],
        }
    return told


class Large:
    """Writes a small tensor, or one for whose copy there is no memory on rank 1."""

    kind = "large"

    def __init__(self, rank: int) -> None:
        self.rank, self.breaks = rank, False

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        size = 2**27 if self.breaks else 1
        save.write({"large": torch.zeros(size, dtype=torch.uint8)}, per_rank=True)
        if self.breaks and self.rank == 1:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            room = pages * resource.getpagesize() + 2**26
            resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))


def fill_up_in_the_copy(gang: Gang) -> dict[str, Any]:
    """Run out of memory on rank 1 in the first copy of the state; then save."""
    run = gang.folder / "run"

    def act(rank: int) -> list[str]:
        large = Large(rank)
        with hookbus.HookBus() as bus:
            bus.register(large, "large")
            bus.resume(run)
            large.breaks = True
            try:
                bus.save(step=1, wait=False)
            except Exception as error:
                told = [type(error).__name__, str(error)]
            large.breaks = False
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
            bus.save(step=2, wait=False)
        return told

    ends = gang.start(act)
    return {
        "told": [end.told for end in ends],
        "checkpoints": [each.step for each in hookbus.checkpoints(run)],
    }


def count_groups(gang: Gang) -> list[Any]:
    """Count the groups of processes that come and go with a bus."""

    def count() -> int:
        return len(dist.distributed_c10d._world.pg_map)

    def act(rank: int) -> list[int]:
        told = [count()]
        with hookbus.HookBus() as bus:
            bus.attach(model=nn.Linear(2, 2))
            for step in (1, 2, 3):
                bus.resume(gang.folder / "run")
                told.append(count())
                bus.save(step=step, wait=False)
            told.append(count())
        return [each - told[0] for each in (*told, count())]

    return [end.told for end in gang.start(act)]


def lose_a_file(gang: Gang) -> dict[str, Any]:
    """Let a list that rank 1 wrote be gone by the commit, as on a disk that is not everybody's."""
    run = gang.folder / "run"

    def lose() -> None:
        for path in run.glob(".*tmp/rng/rank00001.json"):
            path.unlink()

    def act(rank: int) -> str:
        # The list of the streams is not the last thing that it writes.
        return train(run, DiskCount(25 if rank == 1 else -1, lose))

    ends = gang.start(act)
    return {
        "ends": [end.told for end in ends],
        "checkpoints": [path.name for path in run.glob("step-*")],
        "left": [path.name for path in run.glob(".*tmp")],
    }


def leave_one_behind(gang: Gang) -> list[Any]:
    """Break on rank 1 in the script, while rank 0 goes on to its next safe point."""

    def act(rank: int) -> str:
        def call(step: int) -> None:
            if step == 2 and rank == 1:
                complain()

        return train(gang.folder / "run", AtStep(call))

    return [{**end.told, "seconds": end.seconds} for end in gang.start(act)]


# -- they differ ---------------------------------------------------------------------------------


class Older:
    """A plugin of another order on some ranks."""

    kind = "older"
    before: tuple[str, ...] = ()

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write({})


def disagree(gang: Gang) -> dict[str, list[Any]]:
    """Let rank 1 pass another run directory, another argument, and have another order."""
    run, elsewhere = gang.folder / "run", gang.folder / "elsewhere"
    begin(gang, run, saves=2)
    shutil.copytree(run, elsewhere)

    def order(rank: int) -> str:
        plugin = Older()
        plugin.before = ("rng",) if rank else ()
        return train(run, plugin, missing_ok=("plugin0",))

    def come_with_less(rank: int) -> str:
        return train(run, *([] if rank else [Older()]), missing_ok=("plugin0",))

    cases = {
        "directory": lambda rank: train(elsewhere if rank else run),
        "argument": lambda rank: train(run, step=8 if rank else None),
        "order": order,
        "plugins": come_with_less,
    }
    told = {name: [end.told for end in gang.start(act)] for name, act in cases.items()}
    told["starts"] = list_starts(run)
    return told


def diverge(gang: Gang) -> dict[str, Any]:
    """Change one weight of rank 1, and then save."""
    run = gang.folder / "run"

    def act(rank: int) -> str:
        def change(step: int) -> None:
            if step == 6 and rank == 1:
                for each in hookbus_model[0].parameters():
                    each.data.view(-1)[0] += 1e-3
                    break

        hookbus_model: list[nn.Module] = []
        remember = At("resume_end", int)

        class Find:
            kind = "at"

            @hookbus.hookimpl
            def resume_end(self, resume: hookbus.Resume) -> None:
                model = resume.components["model"]
                assert isinstance(model, nn.Module)
                hookbus_model.append(model)

        return train(run, remember, Find(), AtStep(change))

    ends = gang.start(act)
    return {
        "ends": [end.told for end in ends],
        "checkpoints": [each.step for each in hookbus.checkpoints(run)],
        "left": [path.name for path in run.glob(".*tmp")],
    }


def go_apart(gang: Gang) -> list[Any]:
    """Let rank 0 save without a loop, and rank 1 close."""

    def act(rank: int) -> None:
        with hookbus.HookBus() as bus:
            bus.attach(model=nn.Linear(2, 2))
            bus.resume(gang.folder / "run")
            if rank == 0:
                bus.save(step=1)
            else:
                bus.ranks.gather("something else", 1)

    return [{**end.told, "seconds": end.seconds} for end in gang.start(act)]


def close_early(gang: Gang) -> list[int]:
    """Close on rank 1 while rank 0 waits for it in a collective of the script's own."""

    def act(rank: int) -> None:
        with hookbus.HookBus() as bus:
            bus.attach(model=nn.Linear(2, 2), loop=Loop())
            bus.resume(gang.folder / "run")
            bus.save()
            if rank == 0:
                dist.barrier()
        if rank == 1:
            dist.barrier()

    return [end.status for end in gang.start(act)]


# -- what one asks for, all do -------------------------------------------------------------------


def signal_one(gang: Gang) -> dict[str, Any]:
    """Send SIGTERM to one rank in the middle of training."""
    expected = run_plainly(gang)
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


def ask_on_one(gang: Gang) -> list[Any]:
    """Save where one rank alone asks for it, with metrics that differ, and by rank 0's clock."""
    run = gang.folder / "run"

    def act(rank: int) -> list[Any]:
        seed(0)
        parts, loop = ddp_run.build(), Loop()
        with hookbus.HookBus() as bus:
            # A clock that is always due on rank 1, and never on rank 0, which decides.
            bus.register(SavePolicy(when=EverySeconds(1e-9 if rank else 1e9)))
            bus.attach(**parts.attached, loop=loop)
            bus.resume(run)
            for epoch in loop.epochs(1):
                parts.head(epoch)
                for x in loop.batches(parts.loader):
                    parts.body(loop.batch, x)
                    if loop.batch == 2 and rank == 1:
                        bus.save(wait=False, why="rank 1 alone")
                    if loop.batch == 4:
                        bus.save(metrics={"loss": float(rank)}, why="all")
        return [[c.step, c.why, c.metrics] for c in hookbus.checkpoints(run)]

    return [end.told for end in gang.start(act)]


def wait_on_one(gang: Gang) -> list[Any]:
    """Wait on rank 1 alone for a save behind training; tell when each has taken it in."""

    class Taken:
        kind = "at"

        def __init__(self) -> None:
            self.steps: list[int] = []

        @hookbus.hookimpl
        def save_end(self, checkpoint: hookbus.Checkpoint) -> None:
            self.steps.append(checkpoint.step)

    def act(rank: int) -> list[list[int]]:
        seed(0)
        parts, loop, taken = ddp_run.build(), Loop(), Taken()
        with hookbus.HookBus() as bus:
            bus.register(taken, "taken")
            bus.attach(**parts.attached, loop=loop)
            bus.resume(gang.folder / "run")
            for epoch in loop.epochs(1):
                parts.head(epoch)
                for x in loop.batches(parts.loader):
                    parts.body(loop.batch, x)
                    if loop.batch == 2:
                        bus.save(wait=False)
                    if loop.batch == 3 and rank == 1:
                        bus.wait()
                        there = [each.step for each in hookbus.checkpoints(gang.folder / "run")]
                        waited = [*taken.steps, *there]
                    if loop.batch == 4:
                        during = [*taken.steps]
        return [waited if rank == 1 else [2], during, taken.steps]

    return [end.told for end in gang.start(act)]


def save_at_odd_moments(gang: Gang, saves: int) -> dict[str, Any]:
    """Save again and again while each rank comes late by a time of its own."""
    run = gang.folder / "run"

    def act(rank: int) -> list[int]:
        chance = random.Random(rank)
        model = nn.Linear(2, 2)
        with hookbus.HookBus() as bus:
            bus.attach(model=model, own={"rank": rank})
            bus.resume(run)
            for step in range(saves):
                time.sleep(chance.random() / 50)
                bus.save(step=step, wait=step % 2 == 0)
        return [each.step for each in hookbus.checkpoints(run)]

    ends = gang.start(act)
    for each in hookbus.checkpoints(run):
        each.verify()
    last = hookbus.checkpoints(run)[-1]
    return {
        "steps": [end.told for end in ends],
        "own": [last.read("own", rank=rank) for rank in range(gang.world_size)],
    }


# -- what is damaged or left over ----------------------------------------------------------------


def damage(gang: Gang) -> dict[str, Any]:
    """Take away what rank 1 alone had of the newest checkpoint; leave a dead save's folder too."""
    expected = run_plainly(gang)
    run = gang.folder / "run"
    begin(gang, run, saves=2)
    (run / "step-00000008" / "rng" / "rank00001.safetensors").unlink()
    left = run / ".step-00000012.1-0123456789abcdef.tmp"
    (left / "model.safetensors").mkdir(parents=True)
    strict = gang.start(lambda rank: train(run, fallback=False))
    again = gang.start(lambda rank: train(run, number=9))
    return {
        "strict": [end.told for end in strict],
        "exact": [end.told for end in again] == expected,
        "starts": list_starts(run),
        "moved": [path.name for path in run.glob("damaged-*")],
        "left": [path.name for path in run.glob(".*tmp")],
    }


def save_own(gang: Gang) -> None:
    """Leave a checkpoint in which each process has its own of a section."""

    def act(rank: int) -> None:
        with hookbus.HookBus() as bus:
            own = {"rank": rank, "tensor": torch.full((5,), float(rank))}
            bus.attach(model=nn.Linear(2, 2), own=own)
            bus.resume(gang.folder / "run")
            bus.save(step=1)

    assert [end.status for end in gang.start(act)] == [0] * gang.world_size


# -- another number of processes -----------------------------------------------------------------


def change_number(gang: Gang, numbers: list[int]) -> dict[str, Any]:
    """Save in the middle of an epoch on some processes, and go on with others, twice."""
    told: dict[str, Any] = {}
    for first in numbers:
        gang.world_size = first
        run = gang.folder / f"from-{first}"
        begun = [end.told for end in gang.start(lambda rank, run=run: collect(run, stop=2))]
        for second in numbers:
            rest = []
            for again in (0, 1):  # twice, since new processes must draw the same numbers
                copy = gang.folder / f"{first}-to-{second}-{again}"
                shutil.copytree(run, copy)
                gang.world_size = second
                ends = gang.start(lambda rank, run=copy: collect(run, stop=3))
                rest.append([end.told for end in ends])
            gang.world_size = first
            last = gang.start(lambda rank, run=copy: collect(run))
            told[f"{first} to {second}"] = [begun, *rest, [end.told for end in last]]
    return told


def collect(
    run: Path,
    stop: int = 0,
    make_loader: Callable[[], data.DataLoader[torch.Tensor]] | None = None,
    epoch: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train up to a batch and save there, or to the end of the epoch; tell the samples seen."""
    seed(dist.get_rank())
    # A rest may be one sample, which no batch norm takes.
    parts, loop, seen = ddp_run.build(norm=nn.Identity), Loop(), list[int]()
    loader = parts.loader if make_loader is None else make_loader()
    attached: Mapping[str, object] = {**parts.attached, "data": loader}
    with contextlib.suppress(StoppedError), hookbus.HookBus() as bus:
        bus.register(Stop(), "stop")
        bus.attach(**attached, loop=loop)
        resume = bus.resume(run)
        model, optimizer = bus.components["model"], bus.components["optimizer"]
        assert isinstance(model, nn.Module)
        assert isinstance(optimizer, torch.optim.Optimizer)
        weights = ddp_run.shorten([to_bits(each) for each in model.parameters()])
        moments = ddp_run.shorten(to_bits(optimizer.state_dict()["state"]))
        draws = torch.rand(3).tolist()
        for number in loop.epochs(1):
            parts.head(number if epoch is None else epoch)
            for x in loop.batches(loader, **options):
                parts.body(loop.batch, x)
                seen += x[:, 0].int().tolist()
                if stop and loop.batch == stop:
                    bus.save()
    return {
        "seen": seen,
        "draws": draws,
        "weights": weights,
        "moments": moments,
        "notes": [*resume.report.notes, *map(str, resume.report.changes)],
    }


class Numbers(data.IterableDataset[torch.Tensor]):
    """The points as a stream."""

    def __iter__(self) -> Any:
        return iter(torch.full((4,), float(i)) for i in range(ddp_run.SAMPLES))


def change_loaders(gang: Gang) -> dict[str, Any]:
    """Go on with one process more where a loader deals out no one order."""
    points = ddp_run.Points()
    makers: dict[str, Callable[[], data.DataLoader[torch.Tensor]]] = {
        "plain": lambda: data.DataLoader(points, batch_size=4),
        "shuffled": lambda: data.DataLoader(points, batch_size=4, shuffle=True),
        "stream": lambda: data.DataLoader(Numbers(), batch_size=4),
    }
    told: dict[str, Any] = {}
    few = gang.world_size
    for name, make in makers.items():
        told[name] = []
        for number in (few, few + 1):
            gang.world_size = number
            stop = 2 if number == few else 0

            def act(rank: int, make: Any = make, stop: int = stop, name: str = name) -> Any:
                return collect(gang.folder / name, stop, make)

            told[name].append([end.told for end in gang.start(act)])
    gang.world_size = few
    gang.start(lambda rank: collect(gang.folder / "forgotten", 2, epoch=5))
    gang.world_size = few + 1
    ends = gang.start(lambda rank: collect(gang.folder / "forgotten", 0, epoch=6))
    told["forgotten"] = [end.told for end in ends]
    return told


def deal_to_others(gang: Gang) -> dict[str, Any]:
    """Go on on two processes where some sampler deals out to others than these two."""

    def make(replicas: int, number: int) -> Callable[[], data.DataLoader[torch.Tensor]]:
        points = ddp_run.Points()
        sampler = data.DistributedSampler(points, num_replicas=replicas, rank=number, seed=3)
        return lambda: data.DataLoader(points, batch_size=4, sampler=sampler)

    def act(rank: int, name: str, deals: list[tuple[int, int]], **options: Any) -> Any:
        return collect(gang.folder / name, make_loader=make(*deals[rank]), **options)

    right, copies, one_of_them = [(2, 0), (2, 1)], [(1, 0), (1, 0)], [(2, 0), (2, 0)]
    gang.start(lambda rank: act(rank, "copies", copies, stop=2))
    gang.world_size = 1
    gang.start(lambda rank: act(rank, "one", [(1, 0)], stop=2))
    gang.world_size = 2
    shutil.copytree(gang.folder / "one", gang.folder / "dealt")
    gang.start(lambda rank: act(rank, "dealt", right, stop=3))
    cases: dict[str, Callable[[int], Any]] = {
        "same number": lambda rank: act(rank, "copies", copies),
        "all": lambda rank: act(rank, "one", copies),
        "one of them": lambda rank: act(rank, "one", one_of_them),
        "inexact": lambda rank: act(rank, "one", copies, inexact_ok=True),
        "dealt before": lambda rank: act(rank, "dealt", copies),
        "right": lambda rank: act(rank, "dealt", right),
    }
    return {name: [end.told for end in gang.start(case)] for name, case in cases.items()}


# -- strategies ----------------------------------------------------------------------------------


def train_ddp(gang: Gang) -> dict[str, Any]:
    """Let the strategy wrap the model, on several processes, and go on in one without a group."""
    run = gang.folder / "run"

    def act(rank: int, stop: int, number: int, epochs: int = 1) -> dict[str, Any]:
        seed(number + rank)
        torch.manual_seed(number)
        model, average = nn.Linear(4, 1), nn.Linear(4, 1)
        optimizer, loop = torch.optim.AdamW(model.parameters(), lr=1e-2), Loop()
        points = ddp_run.Points()
        sampler = data.DistributedSampler(points) if dist.is_initialized() else None
        loader = data.DataLoader(points, batch_size=4, sampler=sampler)
        with contextlib.suppress(StoppedError), hookbus.HookBus() as bus:
            bus.register(Stop(), "stop")
            bus.register(builtin_plugins.DDP(), "strategy")
            bus.attach(model=model, average=average, optimizer=optimizer, data=loader, loop=loop)
            resume = bus.resume(run)
            weights = ddp_run.shorten([to_bits(each) for each in model.parameters()])
            wrapped = resume.components["model"]
            assert isinstance(wrapped, nn.Module)
            for epoch in loop.epochs(epochs):
                if sampler is not None:
                    sampler.set_epoch(epoch)
                for x in loop.batches(loader):
                    optimizer.zero_grad()
                    wrapped(x).pow(2).mean().backward()
                    optimizer.step()
                    if loop.batch == stop:
                        bus.save()
        return {
            "wrapped": [type(resume.components[each]).__name__ for each in ("model", "average")],
            "events": list(resume.sequence.fired),
            "first": weights,
            "last": ddp_run.shorten([to_bits(each) for each in model.parameters()]),
        }

    def act_alone(rank: int) -> dict[str, Any]:
        dist.destroy_process_group()
        return act(rank, 0, 7, epochs=0)

    told: dict[str, Any] = {}
    told["whole"] = [end.told for end in gang.start(lambda rank: act(rank, 99, 0))]
    shutil.rmtree(run)
    told["begun"] = [end.told for end in gang.start(lambda rank: act(rank, 2, 0))]
    saved = hookbus.checkpoints(run)[-1]
    told["names"] = list(saved.tensors("model"))
    shutil.copytree(run, gang.folder / "kept")
    told["again"] = [end.told for end in gang.start(lambda rank: act(rank, 99, 5))]
    gang.world_size = 1
    shutil.rmtree(run)
    shutil.copytree(gang.folder / "kept", run)
    told["alone"] = [end.told for end in gang.start(act_alone)]
    return told


def keep_buffers(gang: Gang) -> dict[str, Any]:
    """Train with running statistics of each rank's own, which no forward hands out."""
    run = gang.folder / "run"
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    way = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"

    def act(rank: int, stop: int = 0, **options: bool) -> list[str]:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4)
        norm.register_buffer("extra", torch.zeros(()), persistent=False)
        optimizer, loop = torch.optim.SGD(norm.parameters(), lr=0.1), Loop()
        points = ddp_run.Points()
        loader = data.DataLoader(points, batch_size=4, sampler=data.DistributedSampler(points))

        def digest() -> str:
            return ddp_run.shorten([to_bits(each) for each in norm.state_dict().values()])

        with contextlib.suppress(StoppedError), hookbus.HookBus() as bus:
            bus.register(Stop(), "stop")
            bus.register(builtin_plugins.DDP(options=options), "strategy")
            bus.attach(norm=norm, optimizer=optimizer, data=loader, loop=loop)
            bus.resume(run)
            wrapped = bus.components["norm"]
            assert isinstance(wrapped, nn.Module)
            told = [digest(), str(norm.extra)]
            for _ in loop.epochs(1):
                for x in loop.batches(loader):
                    optimizer.zero_grad()
                    wrapped(x).pow(2).sum().backward()
                    optimizer.step()
                    norm.extra += rank + 1
                    if loop.batch == stop:
                        bus.save()
        return [*told, digest(), str(norm.extra)]

    told: dict[str, Any] = {}
    for name, options in {"each": {way: False}, "first": {}}.items():
        for start, stop in {"whole": 0, "begun": 2, "again": 0}.items():
            if start == "begun":
                shutil.rmtree(run, ignore_errors=True)
            ends = gang.start(functools.partial(act, stop=stop, **options))
            told[f"{name} {start}"] = [end.told for end in ends]
        shutil.rmtree(run)
    return told


def roll_back_shards(gang: Gang) -> dict[str, Any]:
    """Resume twice in one process with FSDP2, which shards the model the first time."""

    def act(rank: int, weights_first: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        told = list[str]()
        with hookbus.HookBus() as bus:
            loop = Loop()
            strategy = builtin_plugins.FSDP2((nn.Linear,), weights_first=weights_first)
            bus.register(strategy, "strategy")
            bus.attach(model=model, loop=loop)
            run = gang.folder / f"run-{weights_first}"
            with bus.resuming(run) as resume:
                resume.configure_sharded()
                optimizer = torch.optim.AdamW(model.parameters())
                bus.attach(optimizer=optimizer)

            def digest() -> str:
                shards = [each.to_local() for each in model.parameters()]
                moments = [each["exp_avg"].to_local() for each in optimizer.state.values()]
                return ddp_run.shorten([to_bits(each) for each in (*shards, *moments)])

            def train(limit: int) -> None:
                for _ in loop.steps(limit):
                    generator = torch.Generator().manual_seed(loop.step)
                    model(torch.randn(4, 4, generator=generator)).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                told.append(digest())

            train(2)
            bus.save()
            train(4)
            bus.resume(run)
            told.append(digest())
            train(4)
        return told

    return {
        str(first): [end.told for end in gang.start(lambda rank, first=first: act(rank, first))]
        for first in (False, True)
    }


def tell_of_sums(gang: Gang) -> list[Any]:
    """Resume with a DistributedDataParallel that the script wrapped without its option."""

    def act(rank: int) -> list[str]:
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        with hookbus.HookBus() as bus:
            bus.attach(model=model)
            return bus.resume(gang.folder / "run").report.notes

    return [end.told for end in gang.start(act)]
