"""Wherever a run is cut, it ends with the same weights: optimizers, schedulers, precision, EMA.

Each run here is two epochs of a few batches; it is compared bit for bit with the plain loop, saved
at every batch and at the end of every epoch's own code, and taken up from each of these.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from exact import (
    CUT,
    EVERY,
    Parts,
    Save,
    check_exact,
    cut_and_go_on,
    list_places,
    run_bus,
    run_plain,
)
from scenes import (
    Embedding,
    data_scene,
    make_loader,
    make_matrices,
    make_model,
    make_net,
    training_scene,
)
from torch.optim import lr_scheduler as schedulers
from torch.optim import swa_utils

import builtin_plugins
import hookbus

# In a new process torch does not know that the optimizer has stepped before.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")

OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], dict[str, Any]]] = {
    "ASGD": (lambda p: torch.optim.ASGD(p, lr=0.05, t0=3), {}),
    "Adadelta": (lambda p: torch.optim.Adadelta(p, lr=0.5), {}),
    "Adafactor": (lambda p: torch.optim.Adafactor(p, lr=0.05), {}),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01), {}),
    "Adam": (lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.01), {}),
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=0.02), {}),
    "Adamax": (lambda p: torch.optim.Adamax(p, lr=0.02), {}),
    "LBFGS": (lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4), {}),
    "Muon": (lambda p: torch.optim.Muon(p, lr=0.02), {"net": make_matrices}),
    "NAdam": (lambda p: torch.optim.NAdam(p, lr=0.02), {}),
    "RAdam": (lambda p: torch.optim.RAdam(p, lr=0.02), {}),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True), {}),
    "Rprop": (lambda p: torch.optim.Rprop(p, lr=0.01), {}),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True), {}),
    "SparseAdam": (lambda p: torch.optim.SparseAdam(p, lr=0.02), {"net": Embedding}),
}

SCHEDULERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "ChainedScheduler": (
        lambda o: schedulers.ChainedScheduler(
            [schedulers.LinearLR(o, 0.5, total_iters=4), schedulers.ExponentialLR(o, 0.9)]
        ),
        "batch",
    ),
    "ConstantLR": (lambda o: schedulers.ConstantLR(o, 0.5, total_iters=4), "batch"),
    "CosineAnnealingLR": (lambda o: schedulers.CosineAnnealingLR(o, 7), "batch"),
    "CosineAnnealingWarmRestarts": (
        lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, 2),
        "batch",
    ),
    "CyclicLR": (
        lambda o: schedulers.CyclicLR(
            o, 0.01, 0.1, step_size_up=3, cycle_momentum="momentum" in o.defaults
        ),
        "batch",
    ),
    "ExponentialLR": (lambda o: schedulers.ExponentialLR(o, 0.8), "epoch"),
    "LambdaLR": (lambda o: schedulers.LambdaLR(o, Warmup(4)), "batch"),
    "LinearLR": (lambda o: schedulers.LinearLR(o, 0.1, total_iters=6), "batch"),
    "MultiStepLR": (lambda o: schedulers.MultiStepLR(o, [2, 5, 5], 0.5), "batch"),
    "MultiplicativeLR": (lambda o: schedulers.MultiplicativeLR(o, lambda n: 0.9), "batch"),
    "OneCycleLR": (
        lambda o: schedulers.OneCycleLR(
            o, 0.1, total_steps=12, cycle_momentum="momentum" in o.defaults or "betas" in o.defaults
        ),
        "batch",
    ),
    "PolynomialLR": (lambda o: schedulers.PolynomialLR(o, 8, 2.0), "batch"),
    "ReduceLROnPlateau": (lambda o: schedulers.ReduceLROnPlateau(o, patience=0), "epoch"),
    "SequentialLR": (
        lambda o: schedulers.SequentialLR(
            o,
            [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.CosineAnnealingLR(o, 6)],
            milestones=[3],
        ),
        "batch",
    ),
    "StepLR": (lambda o: schedulers.StepLR(o, 3, 0.5), "batch"),
    "SWALR": (lambda o: swa_utils.SWALR(o, 0.01, anneal_epochs=5), "batch"),
}

REPRESENTATIVE = ("StepLR", "OneCycleLR", "SequentialLR", "ReduceLROnPlateau", "LambdaLR")


class Warmup:
    """A schedule with a state of its own, which `LambdaLR` saves."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.asked = 0

    def __call__(self, step: int) -> float:
        self.asked += 1
        return min(1.0, (step + 1) / self.steps) + self.asked * 1e-3


def make_scene(optimizer: str, scheduler: str | None = None, **options: Any):
    make_optimizer, more = OPTIMIZERS[optimizer]
    make_scheduler, scheduled = SCHEDULERS[scheduler] if scheduler else (None, "batch")
    return training_scene(
        make_optimizer, make_scheduler, scheduled=scheduled, **{**more, **options}
    )


def pair(first, second) -> list[tuple[str, str]]:
    return list(zip(first, itertools.cycle(second), strict=False))


def test_every_optimizer_and_scheduler_of_torch_is_here() -> None:
    optimizers = {
        n for n, each in vars(torch.optim).items() if is_kind(each, torch.optim.Optimizer)
    }
    assert optimizers - {"Optimizer"} == set(OPTIMIZERS)
    every = {n for n, each in vars(schedulers).items() if is_kind(each, schedulers.LRScheduler)}
    assert every - {"LRScheduler", "_LRScheduler"} == set(SCHEDULERS) - {"SWALR"}


def is_kind(each: object, kind: type) -> bool:
    return inspect.isclass(each) and issubclass(each, kind)


@pytest.mark.parametrize(("optimizer", "scheduler"), pair(OPTIMIZERS, REPRESENTATIVE))
@EVERY
def test_every_optimizer_goes_on_bit_for_bit(
    every: int, optimizer: str, scheduler: str, tmp_path
) -> None:
    """Source: pytorch/pytorch#75224; Lightning-AI/pytorch-lightning#2613."""
    check_exact(make_scene(optimizer, scheduler), tmp_path, every=every)


@pytest.mark.parametrize(("scheduler", "optimizer"), pair(SCHEDULERS, ["SGD", "AdamW"]))
@EVERY
def test_every_scheduler_goes_on_bit_for_bit(
    every: int, scheduler: str, optimizer: str, tmp_path
) -> None:
    """Source: pytorch/pytorch#65342, open-mmlab/mmengine#1542, KempnerInstitute/KempnerForge#114"""
    check_exact(make_scene(optimizer, scheduler), tmp_path, every=every)


VARIANTS = {
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.02, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.02, fused=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
    "Adam, lr tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.02)),
    "Adam maximize": lambda p: torch.optim.Adam(p, lr=0.02, maximize=True),
    "AdamW fused, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True, amsgrad=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.02, fused=True),
    "NAdam decoupled": lambda p: torch.optim.NAdam(p, decoupled_weight_decay=True),
    "RMSprop foreach": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "SGD without momentum": lambda p: torch.optim.SGD(p, lr=0.05),
    "LBFGS line search": lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
    "two groups": lambda p: torch.optim.AdamW(
        [{"params": group, "lr": lr} for group, lr in zip(split(p), (0.02, 0.05), strict=True)]
    ),
}


def split(parameters):
    parameters = list(parameters)
    return parameters[::2], parameters[1::2]


@pytest.mark.parametrize("name", VARIANTS)
@EVERY
def test_every_variant_of_an_optimizer_goes_on_bit_for_bit(every: int, name: str, tmp_path) -> None:
    check_exact(training_scene(VARIANTS[name], SCHEDULERS["StepLR"][0]), tmp_path, every=every)


BODIES = {
    "zero_grad() first": {"clear": "first"},
    "zero_grad() first, to zeros": {"clear": "first, zeros"},
    "no zero_grad()": {"clear": "never"},
    "accumulation": {"accumulate": 4, "samples_a_batch": 2},
    "accumulation, zero_grad() first": {
        "accumulate": 4,
        "samples_a_batch": 2,
        "clear": "first",
    },
    "accumulation across the epoch's end": {"accumulate": 3, "clear": "never"},
    "gradient scaler": {"overflow": ()},
    "gradient scaler, overflows": {"overflow": (1, 3)},
    "gradient scaler, nothing but overflows": {"overflow": (1, 2, 3, 4)},
    "gradient scaler, accumulation": {"overflow": (2,), "accumulate": 2},
    "gradient scaler, zero_grad() first": {"overflow": (1, 4), "clear": "first"},
    "averaged model": {"ema": True},
    "averaged model, accumulation": {"ema": True, "accumulate": 2},
}


@pytest.mark.parametrize(
    ("name", "fused"),
    # A fused step is called on an overflow too.
    [(name, False) for name in BODIES] + [(name, True) for name in BODIES if "scaler" in name],
)
@EVERY
def test_every_kind_of_body_goes_on_bit_for_bit(
    every: int, name: str, fused: bool, tmp_path
) -> None:
    """Source: huggingface/transformers#22143; mosaicml/composer#1376;
    ultralytics/ultralytics#22189.
    """
    scene = training_scene(lambda p: torch.optim.AdamW(p, lr=0.02, fused=fused), **BODIES[name])
    check_exact(scene, tmp_path, every=every)


def gan_scene() -> Parts:
    """The generator steps in every other batch; the discriminator's gradients pile up there."""
    generator, discriminator = make_model(), make_net()
    first = torch.optim.Adam(discriminator.parameters(), lr=0.02)
    second = torch.optim.RMSprop(generator.parameters(), lr=0.01)
    scheduler = schedulers.StepLR(second, 2, 0.5)
    loader = make_loader()

    def body(batch: int, x: torch.Tensor) -> None:
        first.zero_grad()
        fake = generator(torch.randn(len(x), 4)).expand(-1, 4)
        (discriminator(x / 18).mean() - discriminator(fake.detach()).mean()).backward()
        first.step()
        if batch % 2 == 0:
            second.zero_grad()
            discriminator(generator(torch.randn(len(x), 4)).expand(-1, 4)).mean().backward()
            second.step()
            scheduler.step()

    attached = {
        "generator": generator,
        "discriminator": discriminator,
        "first": first,
        "second": second,
        "scheduler": scheduler,
        "data": loader,
    }
    return Parts(attached, loader, body, epochs=2)


def finishing_scene(place: str) -> Parts:
    """Ends early, in the body or in the epoch's own code."""
    parts = data_scene("shuffle", tail=lambda: torch.rand(1))()

    def script(loop: Any, save: Save) -> None:
        for epoch in loop.epochs(3):
            for x in loop.batches(parts.loader):
                parts.body(loop.batch, x)
                if place == "body" and (epoch, loop.batch) == (1, 2):
                    loop.finish()
                save(("body", epoch, loop.batch))
            parts.tail(epoch)
            if place == "own code" and epoch == 1:
                loop.finish()
            save(("tail", epoch, 0))
        torch.rand(1)

    return attrs.evolve(parts, script=script)


def breaking_scene(again: bool) -> Parts:
    """Leaves the batches of each epoch early; ``again``: and goes through others then."""
    parts = data_scene("shuffle", tail=lambda: torch.rand(1))()
    other = make_loader("replacement", generator=True)

    def script(loop: Any, save: Save) -> None:
        for epoch in loop.epochs(3):
            for x in loop.batches(parts.loader):
                parts.body(loop.batch, x)
                save(("body", epoch, loop.batch))
                if loop.batch == 2 + epoch:
                    break
            for x in loop.batches(other) if again else ():
                parts.body(loop.batch, x)
                save(("body", epoch, 10 + loop.batch))
            parts.tail(epoch)
            save(("tail", epoch, 0))

    return attrs.evolve(parts, script=script, attached={**parts.attached, "other": other})


def steps_scene(loader: bool) -> Parts:
    """Counts steps over a loader, or draws its data itself."""
    parts = data_scene("shuffle")()

    def script(loop: Any, save: Save) -> None:
        for x in loop.steps(12, parts.loader if loader else None):
            parts.body(1, x if loader else torch.rand(4, 4))
            save(("body", 0, loop.step))
        torch.rand(1)

    return attrs.evolve(parts, script=script)


def phases_scene() -> Parts:
    """Epochs, then steps over another loader, then epochs again, and draws in between."""
    parts = data_scene("shuffle")()
    other = make_loader("weighted", generator=True)

    def script(loop: Any, save: Save) -> None:
        for epoch in loop.epochs(1):
            for x in loop.batches(parts.loader):
                parts.body(loop.batch, x)
                save(("body", epoch, loop.batch))
            save(("tail", epoch, 0))
        torch.rand(1)
        for x in loop.steps(12, other):
            parts.body(1, x)
            save(("steps", loop.epoch, loop.batch))
        torch.rand(2)
        for epoch in loop.epochs(5):
            for x in loop.batches(parts.loader):
                parts.body(loop.batch, x)
                save(("body", epoch, loop.batch))
            save(("tail", epoch, 0))
        torch.rand(3)

    return attrs.evolve(parts, script=script, attached={**parts.attached, "other": other})


SCRIPTS = {
    "gan": gan_scene,
    "finish() in the body": lambda: finishing_scene("body"),
    "finish() in the epoch's own code": lambda: finishing_scene("own code"),
    "break": lambda: breaking_scene(again=False),
    "two batches() in an epoch": lambda: breaking_scene(again=True),
    "steps over a loader": lambda: steps_scene(loader=True),
    "steps without a loader": lambda: steps_scene(loader=False),
    "phases": phases_scene,
}


@pytest.mark.parametrize("name", SCRIPTS)
@EVERY
def test_every_kind_of_script_goes_on_bit_for_bit(every: int, name: str, tmp_path) -> None:
    check_exact(SCRIPTS[name], tmp_path, every=every)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_cut_again_and_again_goes_on_bit_for_bit(name: str, tmp_path) -> None:
    cuts = list_places(SCRIPTS[name])[1::3]
    assert cut_and_go_on(SCRIPTS[name], tmp_path, cuts) == run_plain(SCRIPTS[name])


CONTROLS = {
    "rng": data_scene("sequential"),
    "loader": data_scene("own random"),
    "optimizer": training_scene(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "scheduler": training_scene(
        lambda p: torch.optim.SGD(p, lr=0.05), lambda o: schedulers.LambdaLR(o, lambda n: 0.5**n)
    ),
    "loop": training_scene(lambda p: torch.optim.SGD(p, lr=0.05)),
    "model": training_scene(lambda p: torch.optim.SGD(p, lr=0.05)),
    "scaler": training_scene(lambda p: torch.optim.SGD(p, lr=0.05), overflow=(1,)),
    "ema": training_scene(lambda p: torch.optim.SGD(p, lr=0.05), ema=True),
    "seen": training_scene(lambda p: torch.optim.SGD(p, lr=0.05)),
}


@pytest.mark.parametrize(
    "name", [name for name in CONTROLS if name not in ("scaler", "ema", "seen")]
)
def test_control_with_one_of_them_blocked_the_weights_differ(name: str, tmp_path) -> None:
    build, expected = CONTROLS[name], run_plain(CONTROLS[name])
    for block in ((), (name,)):
        run = tmp_path / "-".join(("run", *block))
        assert run_bus(build, run, cut=("body", 1, 2), block=block) is CUT
        bits = run_bus(build, run, seed_number=9, block=block)
        assert (bits == expected) == (not block)
        assert bits[0][0] == expected[0][0] == "model"
        assert (bits[0] == expected[0]) == (not block)


class Draws:
    """Draws a number at every safe point, as a careless plugin does."""

    @hookbus.hookimpl
    def safe_point(self) -> None:
        torch.rand(1)


def test_control_with_a_plugin_that_draws_while_training_the_run_is_not_transparent(
    tmp_path,
) -> None:
    build = data_scene("shuffle")

    def build_with_it() -> Parts:
        return attrs.evolve(build(), plugins={"draws": Draws()})

    with pytest.raises(AssertionError, match="transparency"):
        check_exact(build_with_it, tmp_path)


@pytest.mark.parametrize("name", CONTROLS)
def test_control_with_one_of_them_skipped_the_bits_differ(name: str, tmp_path) -> None:
    name_of_section = "data" if name == "loader" else name
    assert is_wrong(CONTROLS[name], tmp_path, {}, {"skip": (name_of_section,)})


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq", "step"])
def test_control_with_a_forgotten_moment_the_bits_differ(moment: str, tmp_path) -> None:
    class Forgetful(builtin_plugins.Optimizer):
        @hookbus.hookimpl
        def restore_training_state(self, resume: hookbus.Resume) -> None:
            super().restore_training_state(resume)
            next(iter(self.component.state.values()))[moment].zero_()

    def build() -> Parts:
        parts = training_scene(lambda p: torch.optim.Adam(p, lr=0.02))()
        return attrs.evolve(parts, plugins={"optimizer": Forgetful(parts.attached["optimizer"])})

    assert is_wrong(build, tmp_path, {}, {})


def is_wrong(build, run, before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether a cut run ends with other bits, or is refused."""
    assert run_bus(build, run, cut=("body", 1, 2), **before) is CUT
    try:
        return run_bus(build, run, seed_number=9, **after) != run_plain(build)
    except hookbus.errors.HookbusError:
        return True


@pytest.mark.sweep
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_with_every_scheduler(optimizer: str, scheduler: str, tmp_path) -> None:
    check_exact(make_scene(optimizer, scheduler), tmp_path, every=2)
