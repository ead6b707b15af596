"""What the bus costs a step: the plain loop beside the same loop on a bus. Prints microseconds."""

from __future__ import annotations

import tempfile
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import hookbus
from builtin_plugins import Loop

EPOCHS, BATCHES = 5, 400


def build(parameters: int):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4) for _ in range(parameters // 2)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(BATCHES * 4, 4)), batch_size=4, shuffle=True)
    return model, optimizer, loader


def train(model, optimizer, x) -> None:
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def time_plain(parameters: int) -> float:
    model, optimizer, loader = build(parameters)
    start = time.perf_counter()
    for _ in range(EPOCHS):
        for (x,) in loader:
            train(model, optimizer, x)
    return (time.perf_counter() - start) / EPOCHS / BATCHES


def time_bus(parameters: int) -> float:
    model, optimizer, loader = build(parameters)
    with tempfile.TemporaryDirectory() as run, hookbus.HookBus() as bus:
        loop = Loop()
        bus.attach(model=model, optimizer=optimizer, data=loader, loop=loop)
        bus.resume(run)
        start = time.perf_counter()
        for _ in loop.epochs(EPOCHS):
            for (x,) in loop.batches(loader):
                train(model, optimizer, x)
        return (time.perf_counter() - start) / EPOCHS / BATCHES


if __name__ == "__main__":
    torch.set_num_threads(1)
    for parameters in (4, 200):
        pairs = [(time_plain(parameters), time_bus(parameters)) for _ in range(3)]
        plain, bus = min(p for p, _ in pairs), min(b for _, b in pairs)
        print(
            f"{parameters} parameters: plain {plain * 1e6:.0f} µs a step, on a bus"
            f" {bus * 1e6:.0f} µs, {(bus - plain) * 1e6:.0f} µs more"
        )
