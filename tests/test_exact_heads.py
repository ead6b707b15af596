"""What stands between `epochs()` and `batches()` runs again after a resume, and draws the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import seed
from scenes import make_loader, make_model
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import hookbus
from builtin_plugins import Loop

POINTS = torch.arange(48.0).view(24, 2) / 48
Head = Callable[[], tuple[Iterable[Any], float]]


def draw_order() -> tuple[Iterable[Any], float]:
    """Shuffle by hand, with a tuple of index tensors in place of a loader."""
    return torch.randperm(24).split(6), 0.0


def draw_subset() -> tuple[Iterable[Any], float]:
    """Choose a part of the data anew for each epoch."""
    subset = Subset(TensorDataset(torch.arange(24)), torch.randperm(24)[:12].tolist())
    return (x for (x,) in DataLoader(subset, batch_size=4, shuffle=True)), 0.0


def draw_noise() -> tuple[Iterable[Any], float]:
    """Draw a number for the whole epoch from python's stream."""
    noise = random.random()
    return DataLoader(torch.arange(24), batch_size=6, shuffle=True), noise


def train(head: Head, run: Path | None, cut: int = 0, number: int = 0) -> list[Any]:
    """Train three epochs, on a bus if there is a run; stop for good after save ``cut``."""
    seed(number)
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(indices: torch.Tensor, noise: float) -> None:
        optimizer.zero_grad()
        (model(POINTS[indices]) + noise).square().mean().backward()
        optimizer.step()

    if run is None:
        for _ in range(3):
            data, noise = head()
            for indices in data:
                step(indices, noise)
    else:
        with hookbus.HookBus() as bus:
            loop = Loop()
            bus.attach(model=model, optimizer=optimizer, loop=loop)
            bus.resume(run)
            for _ in loop.epochs(3):
                data, noise = head()
                for indices in loop.batches(data):
                    step(indices, noise)
                    bus.save()
                    if loop.step == cut:
                        break
                if loop.step == cut:
                    break
    return [p.tolist() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("head", [draw_order, draw_subset, draw_noise])
def test_a_head_that_draws_draws_the_same_after_a_resume(head: Head, tmp_path) -> None:
    expected = train(head, None)
    assert train(head, tmp_path / "uncut") == expected
    for cut in (1, 5, 6, 8, 11):
        run = tmp_path / str(cut)
        train(head, run, cut)
        assert train(head, run, number=9) == expected, cut


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda: make_loader("stream torch"), "draw from the same streams (torch)"),
        (lambda: make_loader(noise=("torch",), num_workers=1), "replay=True"),
        (lambda: make_loader(num_workers=1, in_order=False), "in_order=False"),
    ],
)
def test_a_save_warns_of_what_its_resume_would_refuse(data, said, tmp_path, caplog) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hookbus.HookBus() as bus:
        loop = Loop()
        bus.attach(model=model, optimizer=optimizer, loop=loop)
        bus.resume(tmp_path)
        for x in loop.steps(4, data()):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            bus.save()
    warnings = [record.message for record in caplog.records if "cannot go on" in record.message]
    assert len(warnings) == 1
    assert said in warnings[0]


def test_steps_takes_inexact_ok(tmp_path, caplog) -> None:
    for number in range(2):
        seed(number)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hookbus.HookBus() as bus:
            loop = Loop()
            bus.attach(model=model, optimizer=optimizer, loop=loop)
            bus.resume(tmp_path)
            for x in loop.steps(3 + number, make_loader("stream torch"), inexact_ok=True):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            bus.save()
    assert "going on, as inexact_ok=True says" in caplog.text
