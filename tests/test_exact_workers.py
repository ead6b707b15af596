"""Data from worker processes goes on bit for bit, or is refused; so does torchdata's loader."""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from exact import CUT, Parts, Save, Where, check_exact, cut_and_go_on, run_bus, run_plain
from scenes import (
    BATCH,
    SAMPLES,
    EagerGlobal,
    Points,
    Stream,
    data_scene,
    make_body,
    make_loader,
    make_model,
)
from torch.utils import data
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import hookbus
from hookbus.errors import SamplerError


# torchdata 0.11 with torch 2.13
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def make_scene(
    make: Callable[[], Any], *, kept: bool = True, attach: bool = True, left: int = 9, **options: Any
) -> Callable[[], Parts]:
    """Three epochs over a loader that is kept or made in each; the first is left early."""

    def build() -> Parts:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        body = make_body(model, optimizer)
        loader = make() if kept else None

        def script(loop: Any, save: Save) -> None:
            for epoch in loop.epochs(3):
                for x in loop.batches(loader if kept else make(), **options):
                    body(loop.batch, x)
                    save(("body", epoch, loop.batch))
                    if epoch == 0 and loop.batch == left:
                        break
                torch.rand(1)
                save(("tail", epoch, 0))

        attached = {"model": model, "optimizer": optimizer}
        return Parts({**attached, "data": loader} if attach and kept else attached, script=script)

    return build


class Late(Points):
    """Draws only for some samples."""

    def __init__(self, *late: int) -> None:
        super().__init__()
        self.late = late

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + (torch.rand(1) if index in self.late else 0)


class Resumable(Stream):
    """A stream that can tell where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0

    def __iter__(self):
        worker = data.get_worker_info()
        n, i = (worker.num_workers, worker.id) if worker else (1, 0)
        while self.done < SAMPLES // n:
            self.done += 1
            yield torch.full((4,), float(self.done * n + i))
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


def stateful(workers: int, dataset: Callable[[], Any] = Points, **options: Any):
    return lambda: StatefulDataLoader(dataset(), BATCH, num_workers=workers, **options)


LOADERS = {
    "made in each epoch, persistent": make_scene(
        lambda: make_loader(num_workers=1, persistent_workers=True), kept=False
    ),
    "kept, persistent, left early": make_scene(
        lambda: make_loader(num_workers=1, persistent_workers=True), left=2
    ),
    "kept, persistent, not attached, left early": make_scene(
        lambda: make_loader(num_workers=1, persistent_workers=True), left=2, attach=False
    ),
    "a stream in persistent workers": make_scene(
        lambda: make_loader("stream", num_workers=1, persistent_workers=True)
    ),
    "a stream in persistent workers, not attached": make_scene(
        lambda: make_loader("stream", num_workers=1, persistent_workers=True), attach=False
    ),
    "torchdata's distributed sampler": make_scene(
        lambda: data.DataLoader(
            Points(), BATCH, sampler=StatefulDistributedSampler(Points(), 1, 0), num_workers=1
        )
    ),
    "torchdata": make_scene(stateful(0)),
    "torchdata, shuffle": make_scene(stateful(0, shuffle=True)),
    "torchdata, shuffle, not attached": make_scene(stateful(0, shuffle=True), attach=False),
    "torchdata, shuffle, made in each epoch": make_scene(stateful(0, shuffle=True), kept=False),
    "torchdata, shuffle, own generator": make_scene(
        lambda: stateful(0, shuffle=True, generator=torch.Generator().manual_seed(1))()
    ),
    "torchdata, noise": make_scene(stateful(0, lambda: Points("torch", "python"), shuffle=True)),
    "torchdata, a stream": make_scene(stateful(0, Stream)),
    "torchdata, a stream with a state": make_scene(stateful(0, Resumable)),
    "torchdata, two workers": make_scene(stateful(2, shuffle=True)),
    "torchdata, two workers, not attached": make_scene(stateful(2, shuffle=True), attach=False),
    "torchdata, two workers, a stream with a state": make_scene(stateful(2, Resumable)),
    "torchdata, two workers that draw, replayed": make_scene(
        stateful(2, lambda: Points("torch")), replay=True
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_goes_on_bit_for_bit(name: str, tmp_path) -> None:
    """Source: meta-pytorch/data#1437; huggingface/accelerate#4204, #3110."""
    check_exact(LOADERS[name], tmp_path, every=1 if "workers" not in name else 2)
