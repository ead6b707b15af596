"""An ``AveragedModel`` goes on exactly, and one that nobody attached is missed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import EVERY, Parts, check_exact
from scenes import make_loader, make_net
from torch.optim.swa_utils import (
    SWALR,
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_multi_avg_fn,
    update_bn,
)

import hookbus
from builtin_plugins import Loop
from hookbus.errors import UnattachedError

torch.set_num_threads(1)


def approach(average: torch.Tensor, value: torch.Tensor, count: Any) -> torch.Tensor:
    """Average by a rate that falls with the count."""
    return average + (value - average) / (count + 2) ** 0.5


AVERAGES: dict[str, Callable[[torch.nn.Module], AveragedModel]] = {
    "equal weights": lambda model: AveragedModel(model),
    "with buffers": lambda model: AveragedModel(model, use_buffers=True),
    "ema": lambda model: AveragedModel(model, avg_fn=get_ema_avg_fn(0.9)),
    "ema at once": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "swa at once": lambda model: AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn()),
    "of its own": lambda model: AveragedModel(model, avg_fn=approach, use_buffers=True),
}


@EVERY
@pytest.mark.parametrize("kind", AVERAGES)
def test_an_average_goes_on_exactly(kind: str, every: int, tmp_path: Path) -> None:
    """Its count too, and the batch norm that is measured anew at each epoch's end."""

    def build() -> Parts:
        model = make_net()
        average = AVERAGES[kind](model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
        loader = make_loader(batch_size=6)

        def body(batch: int, x: torch.Tensor) -> None:
            optimizer.zero_grad()
            ((model(x / 18) - 1) ** 2).mean().backward()
            optimizer.step()
            if batch != 2:
                average.update_parameters(model)

        def tail(epoch: int) -> None:
            scheduler.step()
            update_bn([x / 18 for x in loader], average)

        attached = {"model": model, "ema": average, "optimizer": optimizer, "scheduler": scheduler}
        return Parts({**attached, "data": loader}, loader, body, tail=tail, epochs=2)

    check_exact(build, tmp_path, every=every)


def train(run: Path, *, update: bool = True, **attached: Any) -> hookbus.HookBus:
    """Take one step, and return the bus before it saves."""
    bus, loop, model = hookbus.HookBus(), Loop(), attached["model"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bus.attach(**attached, optimizer=optimizer, loop=loop)
    bus.resume(run)
    for _ in loop.steps(1):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return bus


def test_one_that_nobody_attached_is_missed_at_the_save(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    average = AveragedModel(model)
    with train(tmp_path, model=model) as bus:
        average.update_parameters(model)
        with pytest.raises(UnattachedError) as raised:
            bus.save()
        assert str(raised.value) == (
            "an AveragedModel of an attached model is attached to nothing, so it would start anew"
            " after a resume: 1 updates of Linear; bus.attach(ema=ema); if it was for the moment"
            " only, let go of it before the save: del ema"
        )
        assert hookbus.checkpoints(tmp_path) == []
        del average
        bus.save(tag="without")


def test_one_of_a_part_of_an_attached_model_is_missed_too(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    average = AveragedModel(model[0])
    with train(tmp_path, model=model) as bus:
        average.update_parameters(model[0])
        with pytest.raises(UnattachedError, match="1 updates of Linear"):
            bus.save()


class Holder:
    """An object with a state that holds an average, as callbacks do."""

    def __init__(self, average: AveragedModel) -> None:
        self.average = average

    def state_dict(self) -> dict[str, Any]:
        return dict(self.average.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.load_state_dict(state)


@pytest.mark.parametrize(
    "wrap",
    [lambda each: each, Holder, lambda each: [Holder(each)], torch.nn.Sequential],
    ids=["itself", "an object", "a list", "a module"],
)
def test_one_that_is_attached_or_held_by_something_attached_is_not(
    wrap: Callable[[Any], Any], tmp_path: Path
) -> None:
    model = torch.nn.Linear(2, 1)
    average = AveragedModel(model)
    with train(tmp_path, model=model, ema=wrap(average)) as bus:
        average.update_parameters(model)
        bus.save()


def test_one_that_is_not_the_runs_is_not(tmp_path: Path) -> None:
    """Updated before the run, never updated, of another model, or another bus's."""
    model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 2)
    before, never, stranger = AveragedModel(model), AveragedModel(model), AveragedModel(other)
    before.update_parameters(model)
    with train(tmp_path / "a", model=model) as bus:
        stranger.update_parameters(other)
        bus.save()
        twin = copy.deepcopy(model)
        theirs = AveragedModel(twin)
        with hookbus.HookBus(block=("rng",)) as second:
            second.attach(model=twin, ema=theirs)
            second.resume(tmp_path / "b")
            theirs.update_parameters(twin)
            bus.save(tag="again")
    assert int(never.n_averaged) == 0
