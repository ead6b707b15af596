"""How long a save holds training: at once, and behind training. Prints milliseconds and bytes."""

from __future__ import annotations

import statistics
import tempfile
import time

import torch

import builtin_plugins
import hookbus
from builtin_plugins import KeepLast, Loop, SavePolicy

PARAMETERS = 25_000_000
SAVES = 8


def build(frozen: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model of which a part is frozen, and AdamW over the rest."""
    sizes = [int(PARAMETERS * frozen / 10)] * 10 + [int(PARAMETERS * (1 - frozen) / 10)] * 10
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.rand(max(size, 1))) for size in sizes)
    for parameter in list(model)[:10]:
        parameter.requires_grad_(False)
    return model, torch.optim.AdamW([p for p in model if p.requires_grad])


def measure(wait: bool, frozen: float = 0.0) -> None:
    model, optimizer = build(frozen)
    loop = Loop()
    blocked, trained = [], []
    with tempfile.TemporaryDirectory() as run, hookbus.HookBus() as bus:
        bus.register(builtin_plugins.Model(model, frozen_apart=frozen > 0), "model")
        bus.register(SavePolicy(keep=KeepLast(2)))
        bus.attach(optimizer=optimizer, loop=loop)
        bus.resume(run)
        for _ in loop.steps(SAVES * 12):
            start = time.perf_counter()
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
            trained.append(time.perf_counter() - start)
            if loop.every(12):
                bus.save(wait=wait)
        bus.close()
        saves = [record for record in hookbus.history(run) if record["event"] == "save"][1:]
    blocked = [record["blocked"] for record in saves]
    seconds = [record["seconds"] for record in saves]
    print(
        f"{'at once' if wait else 'behind training'}, {frozen:.0%} frozen:"
        f" {saves[-1]['bytes'] / 2**20:.0f} MiB, written {saves[-1]['written'] / 2**20:.0f} MiB,"
        f" training held {statistics.median(blocked) * 1e3:.0f} ms,"
        f" done after {statistics.median(seconds) * 1e3:.0f} ms,"
        f" a step {statistics.median(trained) * 1e3:.1f} ms"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    for wait in (True, False):
        measure(wait)
    measure(False, frozen=0.9)
