"""A script that never heard of this package: `python script.py DIR [--figure MODULE:CLASS]`."""

from __future__ import annotations

import argparse
import pkgutil

import torch

import hookbus
from builtin_plugins import Loop


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--figure", help="what smooths the loss, as a configuration would name it")
    parser.add_argument("--skip", action="append", default=[], help="a section to go on without")
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    points = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 256).view(64, 4))
    loader = torch.utils.data.DataLoader(points, 8, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with hookbus.HookBus() as bus:
        loop = Loop()
        bus.attach(model=model, optimizer=optimizer, loader=loader, loop=loop)
        figure = pkgutil.resolve_name(options.figure)() if options.figure else None
        if figure is not None:
            bus.attach(figure=figure)
        bus.resume(options.run, skip=tuple(options.skip))
        for (inputs,) in loop.steps(options.steps, loader):
            loss = (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if figure is not None:
                figure.update(loss.item())
            if loop.every(8):
                bus.save()
        bus.save()


if __name__ == "__main__":
    main()
