"""A strategy says when weights come back, and wraps the models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import builtin_plugins.strategy
import hookbus
from hookbus.errors import AttachError

torch.set_num_threads(1)


class Wrapper(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


class Spy:
    """A plugin that writes down the order of two events."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @hookbus.hookimpl
    def restore_model(self) -> None:
        self.seen.append("restore_model")

    @hookbus.hookimpl
    def configure_sharded(self) -> None:
        self.seen.append("configure_sharded")


class Sharding:
    """Wrap each model in place, and say on which side of it weights come back."""

    def __init__(self, before: Any = None) -> None:
        if before is not None:
            self.restore_before_configure_sharded = before
        self.wrapped: list[torch.nn.Module] = []

    def configure_sharded(self, model: torch.nn.Module) -> torch.nn.Module | None:
        self.wrapped.append(model)
        return None


class Wrapping(Sharding):
    def configure_sharded(self, model: torch.nn.Module) -> torch.nn.Module | None:
        return Wrapper(model)


def make_model(seed: int) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2)


def save(run: Path, **components: object) -> None:
    with hookbus.HookBus() as bus:
        bus.attach(**components)
        bus.resume(run)
        bus.save(step=1)


def test_weights_are_the_same_on_either_side_of_the_sharding(tmp_path: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#18358"""
    saved = make_model(0)
    save(tmp_path, model=saved)
    for before, order in (
        (True, ["restore_model", "configure_sharded"]),
        (False, ["configure_sharded", "restore_model"]),
    ):
        model, spy = make_model(1), Spy()
        with hookbus.HookBus() as bus:
            bus.attach(model=model, strategy=Sharding(before))
            bus.register(spy, "spy")
            report = bus.resume(tmp_path).report
        assert spy.seen == order
        assert report.sharded_first == ([] if before else ["strategy"])
        assert torch.equal(model.weight, saved.weight)
        assert torch.equal(model.bias, saved.bias)


@pytest.mark.parametrize(
    ("strategy", "is_behind"),
    [
        (SimpleNamespace(restore_before_configure_sharded=False), True),
        (SimpleNamespace(restore_before_configure_sharded=lambda: False), True),
        (SimpleNamespace(restore_before_configure_sharded=lambda: True), False),
        (SimpleNamespace(restore_checkpoint_after_setup=True), True),
        (SimpleNamespace(restore_checkpoint_after_setup=False), False),
        (Sharding(), False),
    ],
    ids=["false", "method, false", "method, true", "after setup", "not after", "says nothing"],
)
def test_each_way_to_say_it_is_understood(
    strategy: object, is_behind: bool, tmp_path: Path
) -> None:
    save(tmp_path, model=make_model(0))
    with hookbus.HookBus() as bus:
        bus.attach(model=make_model(1), strategy=strategy)
        assert bus.resume(tmp_path).report.sharded_first == ["strategy"] * is_behind


def test_a_wrapper_takes_the_place_of_each_model_in_a_fresh_run_too(tmp_path: Path) -> None:
    models = {"generator": make_model(0), "critic": make_model(1)}
    with hookbus.HookBus() as bus:
        bus.attach(**models, strategy=Wrapping())
        bus.resume(tmp_path)
        for name, model in models.items():
            wrapper = bus.components[name]
            assert isinstance(wrapper, Wrapper)
            assert wrapper.module is model


def test_a_model_wrapped_in_place_stays_where_it_is(tmp_path: Path) -> None:
    model, strategy = make_model(0), Sharding()
    with hookbus.HookBus() as bus:
        bus.attach(model=model, strategy=strategy)
        bus.resume(tmp_path)
        assert bus.components["model"] is model
    assert strategy.wrapped == [model]


def test_a_strategy_without_a_model_is_an_error_that_says_what_to_attach(tmp_path: Path) -> None:
    with hookbus.HookBus() as bus:
        bus.attach(strategy=Sharding())
        with pytest.raises(
            AttachError, match=r"Sharding has no model to shard; pass model= to attach\(\)"
        ):
            bus.resume(tmp_path)


class Warming(Sharding):
    """A strategy that counts, and keeps its count."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_a_strategy_that_has_a_state_keeps_it(tmp_path: Path) -> None:
    strategy = Warming()
    strategy.count = 7
    save(tmp_path, model=make_model(0), strategy=strategy)
    resumed = Warming()
    with hookbus.HookBus() as bus:
        bus.attach(model=make_model(0), strategy=resumed)
        report = bus.resume(tmp_path).report
    assert resumed.count == 7
    assert report.sections["strategy"].kind == "strategy"


def test_a_strategy_without_a_state_has_no_section_and_may_come_and_go(tmp_path: Path) -> None:
    save(tmp_path, model=make_model(0), strategy=Sharding())
    assert "strategy" not in hookbus.checkpoints(tmp_path)[0].sections
    with hookbus.HookBus() as bus:
        bus.attach(model=make_model(1))
        bus.resume(tmp_path)


class ShardedModel(torch.nn.Linear):
    """A model with a method of a strategy's name."""

    def configure_sharded(self, model: torch.nn.Module) -> None: ...


@pytest.mark.parametrize(
    "component", [Sharding, ShardedModel(1, 1), make_model(0), SimpleNamespace(), {}, 1]
)
def test_what_is_no_strategy_is_left_to_others(component: object) -> None:
    assert builtin_plugins.strategy.plugin_for("x", component) is None
