"""Schedule-free optimizers go on exactly, in the mode in which they were saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import EVERY, Parts, check_exact, to_bits
from scenes import make_loader, make_net

import hookbus

schedulefree = pytest.importorskip(
    "schedulefree", reason="schedulefree is not installed: pip install hookbus[schedulefree]"
)


def wrap(parameters: Any, name: str) -> Any:
    inside = torch.optim.SGD(parameters, lr=1e-2, momentum=0.5)
    return getattr(schedulefree, name)(inside, momentum=0.9, weight_decay_at_y=0.1)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: schedulefree.AdamWScheduleFree(p, lr=1e-2, warmup_steps=3),
    "AdamW one by one": lambda p: schedulefree.AdamWScheduleFree(p, lr=1e-2, foreach=False),
    "RAdam": lambda p: schedulefree.RAdamScheduleFree(p, lr=1e-2),
    "SGD": lambda p: schedulefree.SGDScheduleFree(p, lr=1e-2),
    "AdamW, reference": lambda p: schedulefree.AdamWScheduleFreeReference(p, lr=1e-2),
    "wrapper": lambda p: wrap(p, "ScheduleFreeWrapper"),
    "wrapper, reference": lambda p: wrap(p, "ScheduleFreeWrapperReference"),
}


@EVERY
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_goes_on_exactly_from_either_mode(kind: str, every: int, tmp_path: Path) -> None:
    """At an epoch's end it is left in the mode for evaluation, in which it is saved."""

    def build() -> Parts:
        model = make_net()
        optimizer = OPTIMIZERS[kind](model.parameters())
        loader, seen = make_loader(batch_size=6), []

        def body(batch: int, x: torch.Tensor) -> None:
            optimizer.train()
            optimizer.zero_grad()
            ((model(x / 18) - 1) ** 2).mean().backward()
            optimizer.step()

        def tail(epoch: int) -> None:
            optimizer.eval()
            with torch.no_grad():
                seen.append(model(torch.ones(2, 4)).sum().item())

        attached = {"model": model, "optimizer": optimizer, "seen": seen, "data": loader}
        return Parts(attached, loader, body, tail=tail, epochs=2)

    check_exact(build, tmp_path, every=every)


def make(kind: str) -> tuple[torch.nn.Linear, Any]:
    model = torch.nn.Linear(2, 1)
    return model, OPTIMIZERS[kind](model.parameters())


def read_mode(optimizer: Any) -> bool:
    return getattr(optimizer, "train_mode", optimizer.param_groups[0].get("train_mode"))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", ["AdamW", "wrapper"])
def test_the_mode_comes_back_and_the_weights_are_those_of_the_mode(
    kind: str, training: bool, tmp_path: Path
) -> None:
    model, optimizer = make(kind)
    with hookbus.HookBus() as bus:
        bus.attach(model=model, optimizer=optimizer)
        bus.resume(tmp_path)
        optimizer.train()
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        if not training:
            optimizer.eval()
        bus.save(step=1)
    twin, twins = make(kind)
    with hookbus.HookBus() as bus:
        bus.attach(model=twin, optimizer=twins)
        report = bus.resume(tmp_path).report
    assert read_mode(twins) is training
    assert to_bits(dict(twin.state_dict())) == to_bits(dict(model.state_dict()))
    assert report.changes == []  # what it counts in its options is no change of the script's
    optimizer.eval()
    twins.eval()
    assert to_bits(dict(twin.state_dict())) == to_bits(dict(model.state_dict()))


def test_without_the_plugin_the_mode_of_a_wrapper_is_lost(tmp_path: Path) -> None:
    """Negative control: the plugin for all optimizers follows the wrapper and does not see it."""
    for trained in (True, False):
        model, optimizer = make("wrapper")
        with hookbus.HookBus(block=("schedule_free",)) as bus:
            bus.attach(model=model, optimizer=optimizer)
            bus.resume(tmp_path)
            if trained:
                optimizer.train()
                bus.save(step=1)
    assert not optimizer.train_mode
