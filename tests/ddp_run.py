"""Trains a small network in several processes, plainly and on a bus, and tells every bit of it.

Started by torchrun, with what to do and a folder as arguments.
"""

from __future__ import annotations

import gc
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from crew import tell
from exact import CUT, Parts, list_places, run_bus, run_plain
from scenes import make_body
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import data

import hookbus
from builtin_plugins import Loop

SAMPLES, BATCH = 48, 4


class Points(data.Dataset):
    """float32 [4] a sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def build(norm: Callable[[], nn.Module] = lambda: nn.BatchNorm1d(8)) -> Parts:
    """Dropout and batch norm, whose numbers differ on each rank, and AdamW with a schedule."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(4, 8), norm(), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
    # Else torch lays gradients out anew after the first backward, and sums them in another order.
    parallel = DistributedDataParallel(model, find_unused_parameters=dist.get_world_size() > 2)
    torch.manual_seed(torch.initial_seed() + 1000 * rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    points = Points()
    sampler = data.DistributedSampler(points, seed=3)
    loader = data.DataLoader(points, batch_size=BATCH, sampler=sampler)
    seen = {"loss": 0.0}
    step = make_body(parallel, optimizer)

    def body(batch: int, x: torch.Tensor) -> None:
        step(batch, x)
        scheduler.step()
        seen["loss"] += float(x.sum())  # of this rank's own samples

    attached = {
        "model": parallel,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": loader,
        "seen": seen,
    }
    return Parts(attached, loader, body, head=sampler.set_epoch, epochs=2)


def shorten(digest: object) -> str:
    return "cut" if digest is CUT else hashlib.sha256(repr(digest).encode()).hexdigest()


def check_exact(folder: Path, every: str = "5") -> dict[str, Any]:
    """Run plainly, saving everywhere, and go on from some places with another seed."""
    told: dict[str, Any] = {"plain": shorten(run_plain(build))}
    places = list_places(build)
    told["saving"] = shorten(run_bus(build, folder / "saving", saves=places))
    told["behind"] = shorten(run_bus(build, folder / "behind", saves=places[::3], wait=False))
    for number in range(1, len(places), int(every)):
        run = folder / f"cut-{number}"
        assert run_bus(build, run, cut=places[number]) is CUT
        told[f"cut {places[number]}"] = shorten(run_bus(build, run, seed_number=99))
    return told


def break_on_one(folder: Path) -> None:
    """Break on rank 1 after the second step; tell on rank 0 what it hears of it, and when."""
    parts, loop = build(), Loop()
    started = 0.0
    try:
        with hookbus.HookBus() as bus:
            bus.attach(**parts.attached, loop=loop)
            bus.resume(folder)
            for x in (x for _ in loop.epochs(1) for x in loop.batches(parts.loader)):
                parts.body(loop.batch, x)
                if loop.batch == 2:
                    started = time.monotonic()
                    if dist.get_rank() == 1:
                        raise KeyError("shadow")
                    dist.barrier()
    except RuntimeError as error:  # of torch, which knows no more than that the other is gone
        notes = getattr(error, "__notes__", [])
        tell({"notes": notes, "seconds": time.monotonic() - started})
        raise


if __name__ == "__main__":
    dist.init_process_group("gloo")
    tell(globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:]))
    gc.collect()
    dist.destroy_process_group()
