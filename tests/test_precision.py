"""The gradient scaler goes on with the same scale and growth tracker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.amp.grad_scaler import GradScaler

import hookbus
from hookbus.errors import MismatchError, MissingSectionError, SaveError

torch.set_num_threads(1)


def make_scaler(**options: Any) -> GradScaler:
    return GradScaler("cpu", **{"init_scale": 8.0, "growth_interval": 2, **options})


def step(scaler: GradScaler, *, overflow: bool, update: bool = True) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    loss = (parameter * (float("inf") if overflow else 1.0)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    if update:
        scaler.update()


def read_scaler(scaler: GradScaler) -> tuple[float, int]:
    return scaler.get_scale(), scaler._get_growth_tracker()


def save(run: Path, scaler: GradScaler) -> None:
    with hookbus.HookBus() as bus:
        bus.attach(scaler=scaler)
        bus.resume(run)
        bus.save(step=1)


def resume(run: Path, scaler: GradScaler, **options: Any) -> hookbus.Report:
    with hookbus.HookBus() as bus:
        bus.attach(scaler=scaler)
        return bus.resume(run, **options).report


@settings(max_examples=30, deadline=None)
@given(overflows=st.lists(st.booleans(), max_size=8), cut=st.integers(0, 8))
def test_scale_and_growth_tracker_are_the_same_at_each_later_step(
    overflows: list[bool], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Source: mosaicml/composer#1376, ultralytics/ultralytics#22189"""
    run = tmp_path_factory.mktemp("run")
    scaler = make_scaler()
    for overflow in overflows[:cut]:
        step(scaler, overflow=overflow)
    save(run, scaler)

    resumed = make_scaler(init_scale=2.0**10)
    resume(run, resumed)
    assert read_scaler(resumed) == read_scaler(scaler)
    for overflow in overflows[cut:]:
        step(scaler, overflow=overflow)
        step(resumed, overflow=overflow)
        assert read_scaler(resumed) == read_scaler(scaler)


def make_components(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "scaler": make_scaler()}


def train(model: Any, optimizer: Any, scaler: Any, batches: range) -> list[torch.Tensor]:
    for batch in batches:
        optimizer.zero_grad()
        factor = float("inf") if batch == 2 else 1.0 + batch
        scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    return list(model.parameters())


@pytest.mark.parametrize("cut", range(7))
def test_training_with_a_scaler_ends_with_the_same_bits(cut: int, tmp_path: Path) -> None:
    expected = train(**make_components(0), batches=range(6))
    components = make_components(0)
    with hookbus.HookBus() as bus:
        bus.attach(**components)
        bus.resume(tmp_path)
        train(**components, batches=range(cut))
        bus.save(step=cut)
    resumed = make_components(1)
    with hookbus.HookBus() as bus:
        bus.attach(**resumed)
        bus.resume(tmp_path)
    for one, other in zip(train(**resumed, batches=range(cut, 6)), expected, strict=True):
        assert torch.equal(one, other)


def test_the_scaler_comes_back_before_the_optimizer() -> None:
    """Source: mosaicml/composer#1376"""
    with hookbus.HookBus() as bus:
        bus.attach(**make_components(0))
        order = [place.name for place in bus.order("restore_training_state")]
    assert order.index("scaler") < order.index("optimizer")


def test_a_scaler_that_is_not_restored_goes_another_way() -> None:
    """The negative control of the law above."""
    scaler, fresh = make_scaler(), make_scaler()
    step(scaler, overflow=False)
    for each in (scaler, fresh):
        step(each, overflow=False)
    assert read_scaler(scaler) != read_scaler(fresh)


def test_a_scaler_in_use_is_rolled_back_on_its_device_tensors(tmp_path: Path) -> None:
    scaler = make_scaler()
    step(scaler, overflow=False)
    save(tmp_path, scaler)
    before, tensor = read_scaler(scaler), scaler._scale
    step(scaler, overflow=True)
    resume(tmp_path, scaler)
    assert read_scaler(scaler) == before
    assert scaler._scale is tensor


def test_the_old_class_of_scaler_is_looked_after_too(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="deprecated"):
        scaler = torch.cpu.amp.GradScaler(init_scale=4.0)
    save(tmp_path, scaler)
    resumed = make_scaler()
    resume(tmp_path, resumed)
    assert read_scaler(resumed) == (4.0, 0)


def test_mixed_precision_switched_off_drops_the_state_with_one_note(tmp_path: Path) -> None:
    """Source: facebookresearch/fairseq#4520"""
    save(tmp_path, make_scaler())
    notes = resume(tmp_path, make_scaler(enabled=False)).notes
    assert notes == [
        "scaler: the gradient scaler is disabled in this run; "
        "its saved state (scale 8.0) is dropped"
    ]


def test_mixed_precision_switched_on_keeps_the_scale_of_the_script(tmp_path: Path) -> None:
    """Source: facebookresearch/fairseq#4520"""
    save(tmp_path, make_scaler(enabled=False))
    scaler = make_scaler()
    notes = resume(tmp_path, scaler).notes
    assert notes == [
        "scaler: the gradient scaler was disabled when it was saved; "
        "this run's starts with its own scale 8.0"
    ]
    step(scaler, overflow=False)
    assert read_scaler(scaler) == (8.0, 1)


def test_disabled_on_both_sides_is_not_worth_a_note(tmp_path: Path) -> None:
    save(tmp_path, make_scaler(enabled=False))
    assert resume(tmp_path, make_scaler(enabled=False)).notes == []


def test_factors_come_from_the_checkpoint_and_a_difference_is_noted(tmp_path: Path) -> None:
    save(tmp_path, make_scaler(growth_interval=2, growth_factor=4.0))
    scaler = make_scaler(growth_interval=3, growth_factor=4.0)
    assert resume(tmp_path, scaler).notes == [
        "scaler: growth_interval is 2 as in the checkpoint, not 3 as in the script"
    ]
    assert scaler.get_growth_interval() == 2


def test_a_checkpoint_from_before_the_scaler_names_the_argument(tmp_path: Path) -> None:
    """Source: ultralytics/ultralytics#22189"""
    with hookbus.HookBus() as bus:
        bus.resume(tmp_path)
        bus.save(step=1)
    with pytest.raises(MissingSectionError, match=r"missing_ok=\('scaler',\)"):
        resume(tmp_path, make_scaler())
    scaler = make_scaler()
    report = resume(tmp_path, scaler, missing_ok=("scaler",))
    assert report.sections["scaler"].status == "missing"
    assert read_scaler(scaler) == (8.0, 0)


def test_a_save_between_step_and_update_is_refused(tmp_path: Path) -> None:
    scaler = make_scaler()
    step(scaler, overflow=True, update=False)
    with pytest.raises(SaveError, match=r"call scaler\.update\(\) in the same batch"):
        save(tmp_path, scaler)
    scaler.update()
    save(tmp_path, scaler)


class ClippingScaler(GradScaler):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "clip": 1.0}


def test_a_scaler_with_another_state_is_a_problem_before_anything_changes(tmp_path: Path) -> None:
    save(tmp_path, ClippingScaler("cpu"))
    scaler = make_scaler()
    with pytest.raises(MismatchError, match=r"scaler: .* 'clip', .*, GradScaler has \["):
        resume(tmp_path, scaler)
    assert read_scaler(scaler) == (8.0, 0)
