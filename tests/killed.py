"""Trains a run that saves behind training after every step, and kills it, again and again.

``python killed.py FOLDER KILLS SEED``: one warm process, which itself never trains, forks a child
for each start of the run, as the operating system starts a new process, only without the time for
imports; and sends it SIGKILL at a random moment. A run that has ended is compared with the plain
loop, and the next one begins. Prints what happened as JSON, and ends with 1 if anything was wrong.
"""

from __future__ import annotations

import collections
import functools
import gc
import hashlib
import importlib
import json
import logging
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from exact import Parts, run_plain, seed
from scenes import training_scene

import hookbus
from builtin_plugins import EverySteps, KeepLast, Loop, SavePolicy
from hookbus.testing import faulty_storage

EPOCHS, KILLS_A_RUN = 4, 5
DELAY = 0.0005  # seconds more for each change of the disk, so that a save takes most of a step
Tell = Callable[[], object]


@attrs.frozen
class Limit:
    """How many seconds a child may run, from when it trains, or from its fork."""

    seconds: float
    training: bool


def build() -> Parts:
    """AdamW with dropout, a scheduler and an average of the weights, over shuffled batches."""
    make = training_scene(
        torch.optim.AdamW,
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60),
        net=make_net,
        ema=True,
    )
    parts = make()
    parts.epochs = EPOCHS
    return parts


def make_net() -> torch.nn.Module:
    layers = (
        torch.nn.Linear(4, 32),
        torch.nn.Dropout(0.2),
        torch.nn.ReLU(),
        torch.nn.Linear(32, 1),
    )
    return torch.nn.Sequential(*layers)


def train(run: Path, out: Path, number: int, tell: Tell) -> None:
    """Go on with the run to its end, and write down every bit that is left."""
    seed(number if any(run.glob("step-*")) else 0)  # what goes on owes nothing to a seed
    parts, loop = build(), Loop()
    policy = SavePolicy(when=EverySteps(1), keep=KeepLast(2))
    with faulty_storage(error=None, delay=DELAY), hookbus.HookBus() as bus:
        bus.register(policy)
        bus.attach(**parts.attached, loop=loop)
        bus.resume(run)
        tell()
        parts.run(loop, lambda where: None)
        digest = parts.digest()
    write_digest(out, digest)


def write_digest(out: Path, digest: list[Any]) -> None:
    out.write_text(hashlib.sha256(repr(digest).encode()).hexdigest())


def run_child(act: Callable[[Tell], None], limit: Limit | None = None) -> int:
    """Fork a child and let it run, up to a limit; return its exit status, or minus its signal."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(told)
            act(lambda: os.write(tell, b"."))
        except BaseException:
            logging.exception("the child broke")
            os._exit(1)
        os._exit(0)
    os.close(tell)
    if limit is None:
        while os.read(told, 1):
            pass  # until its end
    else:
        if limit.training:
            os.read(told, 1)
        select.select([told], [], [], limit.seconds)
    os.kill(pid, signal.SIGKILL)  # one that has ended is not waited for yet, and takes it
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(told)
    return status


def list_committed(run: Path) -> dict[int, Path]:
    """Return the checkpoints by step, every byte of which is right."""
    found = {}
    for path in sorted(run.glob("step-*")):
        checkpoint = hookbus.open(path)
        checkpoint.verify()
        found[checkpoint.step] = path
    return found


def list_starts(run: Path) -> list[int]:
    """Return the steps from which the run started, each time, as its history tells."""
    return [each["step"] for each in hookbus.history(run) if each["event"] == "start"]


def kill_run(
    run: Path, out: Path, chance: random.Random, seconds: float, kills: int
) -> Mapping[str, int]:
    """Train a run to its end, under some kills; return what they hit."""
    seen = collections.Counter(dict.fromkeys(("kills", "saving", "deleting", "starting"), 0))
    before = number = status = 0
    committed: dict[int, Path] = {}
    while number == 0 or status != 0:
        number += 1
        starts = list_starts(run)
        limit = None
        if seen["kills"] < kills:
            training = chance.random() < 0.8
            limit = Limit(chance.uniform(0, seconds if training else 0.2), training)
        status = run_child(functools.partial(train, run, out, number), limit)
        assert status in (0, -signal.SIGKILL), f"{run}: the child ended with {status}"
        for step in list_starts(run)[len(starts) :]:
            assert step >= before, f"{run}: went on from step {step}, and {before} was committed"
        committed = list_committed(run)
        newest = max(committed, default=0)
        assert newest >= before, f"{run}: step {before} was committed and is gone"
        before = newest
        if status != 0:
            hidden = [int(path.name[6:14]) for path in run.glob(".step-*")]
            seen["kills"] += 1
            seen["saving"] += any(step > newest for step in hidden)
            seen["deleting"] += any(step <= newest for step in hidden)
            seen["starting"] += len(list_starts(run)) == len(starts)
    names = {"run.lock", "run.jsonl", *(path.name for path in committed.values())}
    assert set(os.listdir(run)) == names, f"{run}: {os.listdir(run)}"
    # What a kill kept from being deleted goes after the next save, and the end may be reached.
    last = [each["event"] for each in hookbus.history(run)]
    saved = "save" in last[len(last) - last[::-1].index("start") :]
    assert len(committed) in ((2,) if saved else (2, 3)), f"{run}: {committed}"
    return seen


def warm_up() -> None:
    """Import what a child would import, and train nothing: autograd and forks do not mix."""
    with hookbus.HookBus() as bus:
        bus.register(SavePolicy())
        bus.attach(**build().attached, loop=Loop())
    importlib.import_module("torch._dynamo")  # by the first step of an optimizer
    gc.freeze()  # what is here already is not searched by each child again


def main(folder: Path, kills: int, number: int) -> None:
    warm_up()
    plain, whole, chance = folder / "plain", folder / "whole.txt", random.Random(number)
    assert run_child(lambda tell: write_digest(plain, run_plain(build))) == 0
    started = time.monotonic()
    assert run_child(lambda tell: train(folder / "whole", whole, 0, tell)) == 0
    seconds = time.monotonic() - started
    assert whole.read_text() == plain.read_text(), "a run that is not killed has other bits"
    seen: collections.Counter[str] = collections.Counter()
    while seen["kills"] < kills:
        run, out = folder / f"run-{seen['runs']}", folder / f"out-{seen['runs']}"
        some = min(KILLS_A_RUN, kills - seen["kills"])
        seen.update(kill_run(run, out, chance, seconds / 5, some))
        assert out.read_text() == plain.read_text(), f"{run}: other bits"
        seen["runs"] += 1
    print(json.dumps({**seen, "seconds": round(time.monotonic() - started, 1)}))


def breach(what: str) -> None:
    """Break the product, to see that it is caught."""
    match what:
        case "weights":
            resume = hookbus.HookBus.resume

            def resume_nearly(bus: hookbus.HookBus, run: Path) -> hookbus.Resume:
                resumed = resume(bus, run)
                bus.components["model"][0].bias.data[0] += 0 if resumed.fresh else 1e-6
                return resumed

            hookbus.HookBus.resume = resume_nearly
        case "sweep":
            hookbus.bus.sweep = lambda run: None
        case "rename":
            naming = hookbus.checkpoint.run_directory
            naming._name_temporary = lambda name: name
            hookbus.checkpoint.files.rename_folder = lambda path, target: None


if __name__ == "__main__":
    breach(sys.argv[4])
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
