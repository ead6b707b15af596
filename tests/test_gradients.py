"""Gradients come back wherever a later step needs them, however the script clears them."""

from __future__ import annotations

import copy
import logging
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

import hookbus
from builtin_plugins import Loop


class Halves(nn.Module):
    """The second layer is used by every other batch only, so it has a gradient or none."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, i: int) -> torch.Tensor:
        return self.second(self.first(x)) if i % 2 else self.first(x)


@attrs.define
class Script:
    """A loop body as people write it: when gradients are cleared, and how."""

    clear: str  # "first", "last", "never"
    to_none: bool
    accumulate: int

    def run(self, model: nn.Module, optimizer: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            if self.clear == "first" and i % self.accumulate == 0:
                optimizer.zero_grad(set_to_none=self.to_none)
            model(torch.full((2, 3), 1.0 + i), i).square().sum().backward()
            if i % self.accumulate == self.accumulate - 1:
                optimizer.step()
                if self.clear == "last":
                    optimizer.zero_grad(set_to_none=self.to_none)


SCRIPTS = st.builds(
    Script,
    clear=st.sampled_from(["first", "last", "never"]),
    to_none=st.booleans(),
    accumulate=st.sampled_from([1, 3]),
)


def build(seed: int) -> tuple[nn.Module, Any]:
    model = Halves(seed)
    return model, optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def attach(run: Path, **components: object) -> hookbus.HookBus:
    bus = hookbus.HookBus()
    bus.attach(**components)
    bus.resume(run)
    return bus


def read_bits(model: nn.Module) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in model.parameters()]


def list_gradients(model: nn.Module) -> dict[str, list[Any]]:
    return {n: p.grad.tolist() for n, p in model.named_parameters() if p.grad is not None}


def list_stored(run: Path) -> set[str]:
    """Return the parameters whose gradients have values in the newest checkpoint."""
    path = hookbus.checkpoints(run)[-1].path / "optimizer.safetensors"
    if not path.exists():
        return set()
    names = [name.partition(".gradients.") for name in load_file(path)]
    return {rest.partition(".model.")[2] for _, found, rest in names if found}


@given(script=SCRIPTS, cuts=st.sets(st.integers(0, 7), max_size=2))
@settings(max_examples=20, deadline=None)
def test_a_run_cut_anywhere_goes_on_bit_for_bit(script: Script, cuts: set[int]) -> None:
    """Source: huggingface/transformers#22143"""
    plain, optimizer = build(0)
    script.run(plain, optimizer, 0, 8)
    model, optimizer = build(0)
    start = 0
    with tempfile.TemporaryDirectory() as run:
        bus = attach(Path(run), model=model, optimizer=optimizer)
        for cut in sorted(cuts):
            script.run(model, optimizer, start, cut)
            bus.save(step=cut)
            bus.close()
            start = cut
            model, optimizer = build(1)
            bus = attach(Path(run), model=model, optimizer=optimizer)
        script.run(model, optimizer, start, 8)
        bus.close()
    assert read_bits(model) == read_bits(plain)


def test_without_the_saved_gradients_the_bits_differ(tmp_path: Path) -> None:
    """The negative control of the law above."""
    script = Script(clear="first", to_none=True, accumulate=3)
    plain, optimizer = build(0)
    script.run(plain, optimizer, 0, 8)
    model, optimizer = build(0)
    bus = attach(tmp_path, model=model, optimizer=optimizer)
    script.run(model, optimizer, 0, 4)
    bus.save(step=4)
    bus.close()
    model, optimizer = build(1)
    bus = attach(tmp_path, model=model, optimizer=optimizer)
    optimizer.zero_grad()
    script.run(model, optimizer, 4, 8)
    bus.close()
    assert read_bits(model) != read_bits(plain)


@pytest.mark.parametrize(
    ("script", "steps", "stored"),
    [
        (Script(clear="first", to_none=True, accumulate=1), 4, False),
        (Script(clear="last", to_none=True, accumulate=1), 4, False),
        (Script(clear="first", to_none=False, accumulate=1), 4, True),
        (Script(clear="never", to_none=True, accumulate=1), 4, True),
        (Script(clear="first", to_none=True, accumulate=3), 4, True),
        (Script(clear="first", to_none=True, accumulate=3), 6, False),
        (Script(clear="first", to_none=True, accumulate=1), 1, True),  # nobody can tell yet
    ],
)
def test_only_values_that_go_on_mattering_are_stored(
    tmp_path: Path, script: Script, steps: int, stored: bool
) -> None:
    model, optimizer = build(0)
    bus = attach(tmp_path, model=model, optimizer=optimizer)
    script.run(model, optimizer, 0, steps)
    bus.save(step=steps)
    bus.close()
    assert bool(list_stored(tmp_path)) == stored


def test_present_gradients_come_back_as_zeros_and_missing_ones_as_none(tmp_path: Path) -> None:
    script = Script(clear="first", to_none=True, accumulate=1)
    model, optimizer = build(0)
    bus = attach(tmp_path, model=model, optimizer=optimizer)
    script.run(model, optimizer, 0, 3)
    bus.save(step=3)
    bus.close()
    again, optimizer_again = build(1)
    again(torch.ones(1, 3), 1).sum().backward()
    optimizer_again.zero_grad()
    again.second.weight.grad = torch.ones(3, 3)
    bus = attach(tmp_path, model=again, optimizer=optimizer_again)
    assert list_gradients(again) == {"first.weight": [[0.0] * 3] * 3, "first.bias": [0.0] * 3}
    assert bus.hook.gradients_waiting() == [False]
    bus.save(step=4)  # the same again, without a step in between
    bus.close()
    assert list_stored(tmp_path) == set()


def test_a_save_right_after_a_resume_stores_the_same_gradients(tmp_path: Path) -> None:
    for script in (Script("never", True, 1), Script("first", True, 3)):
        run = tmp_path / script.clear
        model, optimizer = build(0)
        bus = attach(run, model=model, optimizer=optimizer)
        script.run(model, optimizer, 0, 4)
        bus.save(step=4)
        bus.close()
        stored, gradients = list_stored(run), list_gradients(model)
        model, optimizer = build(1)
        bus = attach(run, model=model, optimizer=optimizer)
        assert list_gradients(model) == gradients
        bus.save(step=5)
        bus.close()
        assert list_stored(run) == stored != set()


def test_gradients_wait_from_backward_to_step(tmp_path: Path) -> None:
    model, optimizer = build(0)
    bus = attach(tmp_path, model=model, optimizer=optimizer)
    seen = []
    for _ in range(2):
        seen.append(bus.hook.gradients_waiting())
        model(torch.ones(1, 3), 1).sum().backward()
        seen.append(bus.hook.gradients_waiting())
        optimizer.step()
        seen.append(bus.hook.gradients_waiting())
        optimizer.zero_grad()
    assert seen == [[False], [True], [False]] * 2
    model(torch.ones(1, 3), 1).sum().backward()  # new tensors, perhaps where the old ones were
    assert bus.hook.gradients_waiting() == [True]


def test_a_new_gradient_at_the_old_address_is_waiting() -> None:
    """Ids are used again at once, so they would not do."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([parameter])
    bus = hookbus.HookBus()
    bus.attach(parameter=parameter, optimizer=optimizer)
    waiting = []
    for _ in range(20):
        parameter.grad = None
        parameter.grad = torch.ones(2)
        waiting += bus.hook.gradients_waiting()
        optimizer.step()
        waiting += bus.hook.gradients_waiting()
    assert waiting == [True, False] * 20


def test_noting_a_step_keeps_no_gradient_alive() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([parameter])
    bus = hookbus.HookBus()
    bus.attach(parameter=parameter, optimizer=optimizer)
    parameter.grad = torch.ones(2)
    alive = weakref.ref(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    assert alive() is None


def test_in_a_gan_the_critics_gradients_of_the_generators_backward_come_back(
    tmp_path: Path,
) -> None:
    def build_gan(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
        return {
            "generator": generator,
            "critic": critic,
            "generator_optimizer": optim.Adam(generator.parameters(), lr=0.1),
            "critic_optimizer": optim.Adam(critic.parameters(), lr=0.1),
        }

    def run(parts: Mapping[str, Any], start: int, stop: int) -> None:
        for i in range(start, stop):
            x = torch.full((2, 2), 0.1 * i)
            parts["critic"](parts["generator"](x).detach()).square().sum().backward()
            parts["critic_optimizer"].step()  # with what the generator's backward left, too
            parts["critic_optimizer"].zero_grad()
            (-parts["critic"](parts["generator"](x)).sum()).backward()
            parts["generator_optimizer"].step()
            parts["generator_optimizer"].zero_grad()

    plain = build_gan(0)
    run(plain, 0, 6)
    parts = build_gan(0)
    bus = attach(tmp_path, **parts)
    run(parts, 0, 3)
    assert sorted(bus.hook.gradients_waiting()) == [False, True]
    bus.save(step=3)
    bus.close()
    parts = build_gan(1)
    bus = attach(tmp_path, **parts)
    assert sorted(bus.hook.gradients_waiting()) == [False, True]
    run(parts, 3, 6)
    bus.close()
    for name in ("generator", "critic"):
        assert read_bits(parts[name]) == read_bits(plain[name])


@pytest.mark.parametrize("order", [["one", "two"], ["two", "one"]])
def test_for_a_parameter_of_two_optimizers_a_value_beats_zeros(
    tmp_path: Path, order: list[str]
) -> None:
    def build_both() -> dict[str, Any]:
        model = nn.Linear(2, 1, bias=False)
        both = {name: optim.SGD(model.parameters()) for name in ("one", "two")}
        return {"model": model} | {name: both[name] for name in order}

    parts = build_both()
    bus = attach(tmp_path, **parts)
    for _ in range(2):
        parts["model"].weight.grad = torch.full((1, 2), 3.0)
        parts["one"].step()
    bus.save(step=1)  # "one" has used it up, for "two" it waits
    bus.close()
    parts = build_both()
    attach(tmp_path, **parts).close()
    assert parts["model"].weight.grad.tolist() == [[3.0, 3.0]]


def test_sparse_gradients_come_back_sparse(tmp_path: Path) -> None:
    def build_sparse(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.Embedding(10, 2, sparse=True)
        return model, optim.SparseAdam(model.parameters())

    model, optimizer = build_sparse(0)
    bus = attach(tmp_path, model=model, optimizer=optimizer)
    for i in range(3):
        optimizer.zero_grad()
        model(torch.tensor([i, 2])).sum().backward()
        optimizer.step()
    bus.save(step=3)
    bus.close()
    again, optimizer_again = build_sparse(1)
    attach(tmp_path, model=again, optimizer=optimizer_again).close()
    assert again.weight.grad.is_sparse
    assert torch.equal(again.weight.grad.to_dense(), model.weight.grad.to_dense())


def test_a_script_that_adds_to_a_gradient_that_was_not_saved_is_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = build(0)
    bus = attach(tmp_path, model=model, optimizer=optimizer)
    Script(clear="first", to_none=True, accumulate=1).run(model, optimizer, 0, 4)
    bus.save(step=4)
    bus.close()
    again, optimizer_again = build(1)
    bus = attach(tmp_path, model=again, optimizer=optimizer_again)
    with caplog.at_level(logging.WARNING, "hookbus"):
        Script(clear="never", to_none=True, accumulate=1).run(again, optimizer_again, 4, 6)
    bus.close()
    assert [record.getMessage() for record in caplog.records] == [
        "not bit for bit: the gradients of 4 parameters were not set to None after the resume, "
        "and their values of before were not saved; call optimizer.zero_grad() before each "
        "backward() that is not to add up"
    ]


# -- steps --------------------------------------------------------------------------------------


def test_steps_are_answered_for_the_whole_chain_and_nobody_else() -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        @property
        def param_groups(self) -> Any:
            return self.optimizer.param_groups

    model, optimizer = build(0)
    wrapper, other = Wrapper(optimizer), copy.deepcopy(optimizer)
    bus = hookbus.HookBus()
    bus.attach(model=model, optimizer=wrapper)
    assert bus.hook.optimizer_stepped(optimizer=optimizer) is True
    assert bus.hook.optimizer_stepped(optimizer=wrapper) is True
    assert bus.hook.optimizer_stepped(optimizer=other) is None


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_a_scaler_made_void_does_not_count(tmp_path: Path, fused: bool) -> None:
    model = Halves(0)
    optimizer = optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    bus = attach(tmp_path, model=model, optimizer=optimizer)
    answers = []

    def ask(stepped: Any, *_: object) -> None:
        answers.append(bus.hook.optimizer_stepped(optimizer=stepped))

    handle = register_optimizer_step_post_hook(ask)
    try:
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((1, 3), factor), 1).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            answers.append(bus.hook.gradients_waiting())
    finally:
        handle.remove()
    bus.close()
    assert answers == [True, [False], *([False] if fused else []), [True], True, [False]]
    assert all(p.isfinite().all() for p in model.parameters())


def test_the_loop_counts_no_void_step(tmp_path: Path) -> None:
    model = Halves(0)
    optimizer = optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler, loop = torch.amp.GradScaler("cpu", init_scale=4.0), Loop()
    bus = attach(tmp_path, model=model, optimizer=optimizer, scaler=scaler, loop=loop)
    for _ in loop.epochs(1):
        for factor in loop.batches([1.0, float("inf"), 1.0]):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((1, 3), factor), 1).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    bus.close()
    assert loop.step == 2


def test_gradients_that_are_views_of_one_buffer_stay_views(tmp_path: Path) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        flat = torch.zeros(6)
        model.weight.grad, model.bias.grad = flat[:4].view(2, 2), flat[4:]
        return model, torch.optim.SGD(model.parameters(), lr=0.1), flat

    def train(run: Path | None, bodies: int, number: int = 0) -> torch.Tensor:
        model, optimizer, flat = build()
        torch.manual_seed(number)
        with hookbus.HookBus(block=("rng",)) as bus:
            bus.attach(model=model, optimizer=optimizer)
            bus.resume(run)
            for body in range(number, bodies):
                flat.zero_()
                model(torch.full((1, 2), 1.0 + body)).square().sum().backward()
                flat.mul_(0.5)
                optimizer.step()
            bus.save(step=bodies)
        return model.weight.detach()

    expected = train(tmp_path / "uncut", 4)
    train(tmp_path / "cut", 2)
    assert torch.equal(train(tmp_path / "cut", 4, number=2), expected)
