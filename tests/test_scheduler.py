"""Learning rates go on as if nothing had happened, for every scheduler of torch."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

import hookbus
from builtin_plugins import Loop, Optimizer
from builtin_plugins.scheduler import Schedulers
from hookbus.errors import MismatchError, UnattachedError

# torch itself steps the schedulers inside a SequentialLR before the optimizer
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


class Warmup:
    """A callable with a state."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return min(1.0, (epoch + 1) / self.length) * 0.99**self.calls

    def method(self, epoch: int) -> float:
        return 0.9**epoch


def build_linear(o: Any) -> Any:
    return schedulers.LinearLR(o, 0.1, total_iters=4)


def build_cosine(o: Any) -> Any:
    return schedulers.CosineAnnealingLR(o, 12)


def build_sequence(o: Any) -> Any:
    first = schedulers.SequentialLR(o, [build_linear(o), schedulers.ConstantLR(o, 1.0, 1)], [3])
    return schedulers.SequentialLR(o, [first, build_cosine(o)], [7])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR lambda": lambda o: schedulers.LambdaLR(o, lambda e: 0.9**e),
    "LambdaLR object": lambda o: schedulers.LambdaLR(o, Warmup(5)),
    "LambdaLR partial": lambda o: schedulers.LambdaLR(o, functools.partial(pow, 0.9)),
    "LambdaLR bound method": lambda o: schedulers.LambdaLR(o, Warmup(1).method),
    "MultiplicativeLR lambda": lambda o: schedulers.MultiplicativeLR(o, lambda e: 0.9),
    "MultiplicativeLR object": lambda o: schedulers.MultiplicativeLR(o, Warmup(5)),
    "StepLR": lambda o: schedulers.StepLR(o, 3),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5, 5, 9]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.3, 4),
    "LinearLR": build_linear,
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 10, 2.0),
    "CosineAnnealingLR": build_cosine,
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR triangular": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3),
    "CyclicLR exp_range": lambda o: schedulers.CyclicLR(
        o, 0.01, 0.1, 3, mode="exp_range", gamma=0.9
    ),
    "CyclicLR lambda": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3, scale_fn=lambda x: 0.9**x),
    "CyclicLR object": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3, scale_fn=Warmup(5)),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.3, 30),
    "OneCycleLR three phases": lambda o: schedulers.OneCycleLR(
        o, 0.3, 30, three_phase=True, anneal_strategy="linear"
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "ReduceLROnPlateau cooldown": lambda o: schedulers.ReduceLROnPlateau(
        o, patience=1, cooldown=2, min_lr=[1e-4, 1e-3]
    ),
    "SequentialLR": lambda o: schedulers.SequentialLR(o, [build_linear(o), build_cosine(o)], [4]),
    "SequentialLR of three": lambda o: schedulers.SequentialLR(
        o,
        [
            schedulers.ConstantLR(o, 0.1, 3),
            schedulers.ExponentialLR(o, 0.9),
            schedulers.StepLR(o, 2),
        ],
        [3, 8],
    ),
    "SequentialLR of SequentialLR": build_sequence,
    "SequentialLR with a lambda": lambda o: schedulers.SequentialLR(
        o, [schedulers.LambdaLR(o, lambda e: (e + 1) / 5), build_cosine(o)], [4]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [build_linear(o), schedulers.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "SWALR cos": lambda o: SWALR(o, 0.05, 5),
    "SWALR linear": lambda o: SWALR(o, 0.05, 5, anneal_strategy="linear"),
}


def build_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.ParameterList([torch.randn(2), torch.randn(2)])


def build_optimizer(model: nn.Module, *, tensor: bool = False, lr: float = 0.1) -> Any:
    lrs = [torch.tensor(lr), torch.tensor(lr * 2)] if tensor else [lr, lr * 2]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), lrs, strict=True)]
    return optim.SGD(groups, momentum=0.9)


def step(optimizer: Any, scheduler: Any, i: int) -> None:
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.full((2,), 1.0 + i)
    optimizer.step()
    is_plateau = isinstance(scheduler, schedulers.ReduceLROnPlateau)
    scheduler.step(*([[1.0, 0.9, 0.95, 0.95, 0.95, 0.8][i % 6]] if is_plateau else []))


def read_options(optimizer: Any) -> list[tuple[Any, ...]]:
    return [(type(g["lr"]), float(g["lr"]), g["momentum"]) for g in optimizer.param_groups]


def save(run: Path, **components: object) -> None:
    with hookbus.HookBus() as bus:
        bus.attach(**components)
        bus.resume(run)
        bus.save(step=1)


def resume(run: Path, options: Mapping[str, Any] | None = None, **components: object) -> list[str]:
    """Resume, and return the changes and notes of the report."""
    with hookbus.HookBus() as bus:
        bus.attach(**components)
        report = bus.resume(run, **(options or {})).report
    return [*map(str, report.changes), *report.notes]


def build_all(seed: int, *, tensor: bool) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for number, build in enumerate(SCHEDULERS.values()):
        model = build_model(seed + number)
        optimizer = build_optimizer(model, tensor=tensor)
        parts |= {f"model{number}": model, f"optimizer{number}": optimizer}
        parts[f"scheduler{number}"] = build(optimizer)
    return parts


def step_all(parts: Mapping[str, Any], i: int) -> list[list[tuple[Any, ...]]]:
    seen = []
    for number, name in enumerate(SCHEDULERS):
        step(parts[f"optimizer{number}"], parts[f"scheduler{number}"], i)
        weights = [p.tolist() for p in parts[f"model{number}"].parameters()]
        seen.append([name, read_options(parts[f"optimizer{number}"]), weights])
    return seen


# -- every scheduler of torch -------------------------------------------------------------------


def test_every_scheduler_of_torch_is_tried() -> None:
    tried = {name.partition(" ")[0] for name in SCHEDULERS}
    assert {*schedulers.__all__, "SWALR"} - {"LRScheduler"} == tried


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.filterwarnings("ignore:.*scale_fn.*")
def test_every_scheduler_goes_on_bit_for_bit(tmp_path: Path, tensor: bool) -> None:
    """Source: pytorch/pytorch#65342"""
    parts = build_all(0, tensor=tensor)
    for i in range(6):
        step_all(parts, i)
    save(tmp_path, **parts)
    now = [read_options(parts[name]) for name in parts if name.startswith("optimizer")]
    again = build_all(100, tensor=tensor)
    tensors = [group["lr"] for o in list(again.values())[1::3] for group in o.param_groups]
    notes = resume(tmp_path, **again)
    # A plateau keeps no record of the lr that it was given.
    plateaus = {f"optimizer{n}" for n, name in enumerate(SCHEDULERS) if "Plateau" in name}
    assert {note.partition(":")[0] for note in notes} == plateaus
    assert [read_options(again[name]) for name in again if name.startswith("optimizer")] == now
    after = [group["lr"] for o in list(again.values())[1::3] for group in o.param_groups]
    assert not tensor or [*map(id, after)] == [*map(id, tensors)]
    for number in range(len(SCHEDULERS)):
        scheduler, last = again[f"scheduler{number}"], now[number]
        assert [float(lr) for lr in scheduler.get_last_lr()] == [lr for _, lr, _ in last]
    for i in range(6, 18):
        assert step_all(again, i) == step_all(parts, i)


def test_a_chain_with_a_plateau_goes_on(tmp_path: Path) -> None:
    def build() -> dict[str, Any]:
        model = build_model()
        optimizer = build_optimizer(model)
        plateau = schedulers.ReduceLROnPlateau(optimizer, patience=1)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": [build_linear(optimizer), plateau],
        }

    def run(parts: Mapping[str, Any], start: int, stop: int) -> list[Any]:
        for i in range(start, stop):
            for scheduler in parts["scheduler"]:
                step(parts["optimizer"], scheduler, i)
        return read_options(parts["optimizer"])

    parts, again = build(), build()
    run(parts, 0, 5)
    save(tmp_path, **parts)
    resume(tmp_path, **again)
    assert run(again, 5, 12) == run(parts, 5, 12)
    with pytest.raises(MismatchError, match="saved with 2 schedulers, run has 1; pass skip="):
        resume(tmp_path, **{**again, "scheduler": again["scheduler"][:1]})


def test_a_wrapper_is_followed_to_the_scheduler_inside(tmp_path: Path) -> None:
    class Wrapper:
        def __init__(self, scheduler: Any) -> None:
            self.scheduler = scheduler

        def step(self) -> None:
            self.scheduler.step()

        def get_last_lr(self) -> Any:
            return self.scheduler.get_last_lr()

        def state_dict(self) -> Any:
            return self.scheduler.state_dict()

        def load_state_dict(self, state: Any) -> None:
            self.scheduler.load_state_dict(state)

    def build() -> dict[str, Any]:
        model = build_model()
        optimizer = build_optimizer(model)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": Wrapper(schedulers.StepLR(optimizer, 3)),
        }

    parts, again = build(), build()
    for i in range(5):
        step(parts["optimizer"], parts["scheduler"], i)
    save(tmp_path, **parts)
    resume(tmp_path, **again)
    assert read_options(again["optimizer"]) == read_options(parts["optimizer"])
    assert again["scheduler"].scheduler.last_epoch == 5
    again["scheduler"] = again["scheduler"].scheduler
    resume(tmp_path, **again)


# -- what does not fit --------------------------------------------------------------------------


def build_parts(build: Callable[[Any], Any], lr: float = 0.1) -> dict[str, Any]:
    model = build_model()
    optimizer = build_optimizer(model, lr=lr)
    return {"model": model, "optimizer": optimizer, "scheduler": build(optimizer)}


def test_another_class_is_refused_with_both_names_and_can_be_skipped(tmp_path: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#11665"""
    save(tmp_path, **build_parts(build_cosine))
    parts = build_parts(lambda o: schedulers.LambdaLR(o, lambda e: 1.0))
    with pytest.raises(
        MismatchError,
        match=re.escape(
            "scheduler: saved by CosineAnnealingLR, run has LambdaLR; "
            "pass skip=('scheduler',) to start fresh"
        ),
    ):
        resume(tmp_path, **parts)
    resume(tmp_path, {"skip": ("scheduler",)}, **parts)


def test_other_schedulers_inside_are_another_class(tmp_path: Path) -> None:
    save(tmp_path, **build_parts(SCHEDULERS["SequentialLR"]))
    with pytest.raises(
        MismatchError,
        match=re.escape(
            "saved by SequentialLR(LinearLR, CosineAnnealingLR), "
            "run has SequentialLR(ConstantLR, ExponentialLR, StepLR)"
        ),
    ):
        resume(tmp_path, **build_parts(SCHEDULERS["SequentialLR of three"]))


def test_arguments_that_differ_are_told_and_the_saved_ones_used(tmp_path: Path) -> None:
    """Source: huggingface/transformers#18070"""
    cases = {
        "CosineAnnealingLR.T_max: saved 12, run has 15": (
            build_cosine,
            lambda o: schedulers.CosineAnnealingLR(o, 15),
        ),
        "OneCycleLR.total_steps: saved 30, run has 40": (
            SCHEDULERS["OneCycleLR"],
            lambda o: schedulers.OneCycleLR(o, 0.3, 40),
        ),
        "MultiStepLR.milestones: saved Counter({5: 2, 2: 1, 9: 1}), run has Counter({3: 1})": (
            SCHEDULERS["MultiStepLR"],
            lambda o: schedulers.MultiStepLR(o, [3]),
        ),
        "LinearLR.total_iters: saved 4, run has 5": (
            SCHEDULERS["SequentialLR"],
            lambda o: schedulers.SequentialLR(
                o, [schedulers.LinearLR(o, 0.1, total_iters=5), build_cosine(o)], [4]
            ),
        ),
        "SequentialLR._milestones: saved [4], run has [6]": (
            SCHEDULERS["SequentialLR"],
            lambda o: schedulers.SequentialLR(o, [build_linear(o), build_cosine(o)], [6]),
        ),
        "ReduceLROnPlateau.patience: saved 1, run has 3": (
            SCHEDULERS["ReduceLROnPlateau"],
            lambda o: schedulers.ReduceLROnPlateau(o, patience=3),
        ),
    }
    for number, (line, (build, build_other)) in enumerate(cases.items()):
        run, parts = tmp_path / str(number), build_parts(build_other)
        save(run, **build_parts(build))
        assert resume(run, **parts) == [f"scheduler: {line}; the saved one is used"]


def test_another_number_of_groups_is_refused(tmp_path: Path) -> None:
    save(tmp_path, **build_parts(build_cosine))
    model = build_model()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with hookbus.HookBus() as bus:
        bus.attach(model=model, scheduler=build_cosine(optimizer))
        bus.register(Optimizer(optimizer, strict=False), "optimizer")
        with pytest.raises(
            MismatchError,
            match=r"scheduler: saved for 2 parameter groups, run has 1; pass skip=\('scheduler',\)",
        ):
            bus.resume(tmp_path)


def test_a_fresh_optimizer_takes_its_lr_from_the_restored_scheduler(tmp_path: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#20552"""
    for number, build in enumerate((build_cosine, SCHEDULERS["OneCycleLR"])):
        run, parts = tmp_path / str(number), build_parts(build)
        for i in range(5):
            step(parts["optimizer"], parts["scheduler"], i)
        save(run, **parts)
        model = build_model()
        fresh = optim.AdamW([{"params": [p]} for p in model.parameters()], lr=0.5)
        scheduler = build(fresh)
        resume(run, {"skip": ("optimizer",)}, model=model, optimizer=fresh, scheduler=scheduler)
        assert not fresh.state
        for i in range(5, 12):
            lrs = [group["lr"] for group in fresh.param_groups]
            assert lrs == [group["lr"] for group in parts["optimizer"].param_groups]
            assert lrs == scheduler.get_last_lr()
            step(parts["optimizer"], parts["scheduler"], i)
            for group in fresh.param_groups:
                group["params"][0].grad = torch.ones(2)
            fresh.step()
            scheduler.step()


def test_another_optimizer_goes_on_at_the_saved_step_of_the_schedule(tmp_path: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#20552"""

    def train(make: Callable[[Any], Any], stop: int, **options: Any) -> list[tuple[Any, ...]]:
        model, loop, seen = build_model(), Loop(), []
        optimizer = make(model.parameters())
        scheduler = build_cosine(optimizer)
        with hookbus.HookBus() as bus:
            bus.attach(model=model, optimizer=optimizer, scheduler=scheduler, loop=loop)
            report = bus.resume(tmp_path, **options).report
            for epoch in loop.epochs(3):
                for x in loop.batches([1.0, 2.0, 3.0, 4.0]):
                    seen.append((epoch, loop.batch, loop.step, optimizer.param_groups[0]["lr"]))
                    optimizer.zero_grad()
                    (model[0] * x).square().sum().backward()
                    optimizer.step()
                    scheduler.step()
                    bus.save()
                    if loop.step == stop:
                        return seen
        assert report.sections["optimizer"].status == "skipped"
        assert report.sections["loop"].status == report.sections["scheduler"].status == "restored"
        return seen

    train(lambda p: optim.Adam(p, lr=0.1), 6)
    model = build_model()
    reference = build_cosine(optim.Adam(model.parameters(), lr=0.1))
    lrs = []
    for _ in range(12):
        lrs += reference.get_last_lr()
        reference.optimizer.step()
        reference.step()
    with pytest.raises(MismatchError, match=r"pass skip=\('optimizer',\) to start it fresh"):
        train(lambda p: optim.SGD(p, lr=0.1), 99)
    seen = train(lambda p: optim.SGD(p, lr=0.5), 99, skip=("optimizer",))
    assert seen == [(n // 4, n % 4 + 1, n, lrs[n]) for n in range(6, 12)]


# -- none is forgotten --------------------------------------------------------------------------


def test_a_scheduler_that_is_attached_to_nothing_is_refused_at_the_save(tmp_path: Path) -> None:
    parts = build_parts(SCHEDULERS["SequentialLR"])
    forgotten = parts.pop("scheduler")
    with pytest.raises(
        UnattachedError,
        match=re.escape(
            "SequentialLR(LinearLR, CosineAnnealingLR) changes the lr of an attached optimizer and "
            "is attached to nothing, so it would start anew after a resume; "
            "bus.attach(scheduler=scheduler)"
        ),
    ):
        save(tmp_path, **parts)
    save(tmp_path, **parts, scheduler=forgotten)


def test_schedulers_inside_an_attached_one_are_not_forgotten(tmp_path: Path) -> None:
    for name in ("SequentialLR of SequentialLR", "ChainedScheduler"):
        save(tmp_path / name, **build_parts(SCHEDULERS[name]))


def test_a_scheduler_that_is_garbage_is_not_held_against_anybody(tmp_path: Path) -> None:
    parts = build_parts(build_cosine)
    dropped = build_linear(parts["optimizer"])
    dropped.itself = dropped  # only the garbage collector can free it
    gc.disable()
    try:
        del dropped
        save(tmp_path, **parts)
    finally:
        gc.enable()


def test_schedulers_of_optimizers_that_are_not_attached_are_left_alone(tmp_path: Path) -> None:
    parts = build_parts(build_cosine)
    other = build_cosine(build_optimizer(build_model()))
    save(tmp_path, **parts)
    assert other.last_epoch == 0


def test_a_plateau_leaves_no_mark_and_is_found_at_the_first_save(tmp_path: Path) -> None:
    parts = build_parts(SCHEDULERS["ReduceLROnPlateau"])
    forgotten = parts.pop("scheduler")
    with pytest.raises(UnattachedError, match="ReduceLROnPlateau changes the lr") as kept:
        save(tmp_path, **parts)
    assert forgotten.last_epoch == 0
    del forgotten
    save(tmp_path, **parts)
    assert kept  # as a notebook keeps the last traceback


@pytest.mark.parametrize(("before", "found_at"), [(0, 1), (1, 2), (2, 4), (5, 8)])
def test_a_scheduler_made_later_is_found_before_saves_have_doubled(
    before: int, found_at: int, tmp_path: Path
) -> None:
    parts = build_parts(SCHEDULERS["ReduceLROnPlateau"])
    with hookbus.HookBus() as bus:
        bus.attach(**parts)
        bus.resume(tmp_path)
        for number in range(before):
            bus.save(step=number)
        forgotten = build_linear(parts["optimizer"])
        for number in range(before, found_at - 1):
            bus.save(step=number)
        with pytest.raises(UnattachedError, match="LinearLR changes the lr"):
            bus.save(step=found_at)
    assert forgotten.last_epoch == 0
    del forgotten
    with hookbus.HookBus() as bus:  # each run counts from its own resume
        bus.attach(**parts)
        bus.resume(tmp_path / "another")
        also_forgotten = build_linear(parts["optimizer"])
        with pytest.raises(UnattachedError, match="LinearLR changes the lr"):
            bus.save(step=1)
    assert also_forgotten.last_epoch == 0


@pytest.mark.parametrize("component", [schedulers.StepLR, [], [1], {}, object(), build_model()])
def test_other_things_are_not_claimed(component: object) -> None:
    assert Schedulers().plugin_for(name="x", component=component) is None
