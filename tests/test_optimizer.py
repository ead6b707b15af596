"""Optimizers go on bit for bit, by the names of their parameters, or say why they cannot."""

from __future__ import annotations

import copy
import gc
import itertools
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.optimizer import _global_optimizer_post_hooks

import hookbus
from builtin_plugins import Loop, Model, Optimizer
from builtin_plugins.optimizer import Optimizers
from hookbus.errors import AttachError, ManyErrors, MismatchError, StateError, UnattachedError

Build = Callable[[int], tuple[nn.Module, Any]]


def put_on_bus(bus: hookbus.HookBus, components: Mapping[str, object]) -> None:
    for name, component in components.items():
        if isinstance(component, Model | Optimizer):
            bus.register(component, name)
        else:
            bus.attach(**{name: component})


def save(run: Path, **components: object) -> None:
    with hookbus.HookBus() as bus:
        put_on_bus(bus, components)
        bus.resume(run)
        bus.save(step=1)


def resume(run: Path, options: Mapping[str, Any] | None = None, **components: object) -> str:
    """Resume, and return the changes and notes of the report."""
    with hookbus.HookBus() as bus:
        put_on_bus(bus, components)
        report = bus.resume(run, **(options or {})).report
    return "\n".join([*map(str, report.changes), *report.notes])


def spell(value: Any) -> Any:
    """Spell a state out so that two are equal only for the same bits, dtypes and strides."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().coalesce().values() if value.is_sparse else value.detach()
        raw = dense.contiguous().reshape(-1).view(torch.uint8).tolist()
        strides = None if value.is_sparse else value.stride()
        return str(value.dtype), tuple(value.shape), strides, raw
    if isinstance(value, Mapping):
        return {key: spell(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [spell(member) for member in value]
    return type(value), repr(value)


def read_bits(model: nn.Module, *optimizers: Any) -> list[Any]:
    return [
        {
            name: (spell(p), [spell(o.state.get(p, {})) for o in optimizers])
            for name, p in model.named_parameters()
        },
        [
            {key: spell(value) for key, value in group.items() if key not in NOT_OPTIONS}
            for o in optimizers
            for group in o.param_groups
        ],
    ]


NOT_OPTIONS = ("params", "param_names")


def step(model: nn.Module, optimizer: Any, i: int, **zero: bool) -> None:
    x = make_input(model, i)

    def closure() -> torch.Tensor:
        optimizer.zero_grad(**zero)
        loss = (model(x).float() ** 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def make_input(model: nn.Module, i: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 + i)
    if isinstance(model, nn.Embedding):
        return torch.randint(0, 10, (6,), generator=draw)
    shape = (2, 3, 6, 6) if isinstance(model, nn.Conv2d) else (8, 4)
    return torch.randn(shape, generator=draw).to(next(model.parameters()).dtype)


def build_net(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a net with two layers of one shape, so that mixing them up would go unseen."""
    torch.manual_seed(seed)
    layers = nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False)
    return nn.Sequential(*layers).to(dtype)


# -- every optimizer of torch -------------------------------------------------------------------


def list_optimizers() -> Iterator[Any]:
    for name in optim.__all__:
        cls = getattr(optim, name)
        if not isinstance(cls, type) or name in ("Optimizer", "SparseAdam"):
            continue
        options: dict[str, Any] = {"lr": 1e-2} | ({"momentum": 0.9} if name == "SGD" else {})
        for dtype in (torch.float32, torch.bfloat16):
            yield pytest.param(cls, options, dtype, id=f"{name} {dtype}")
    adam = (optim.Adam, optim.AdamW)
    for cls in (*adam, optim.SGD, optim.Adagrad):
        for dtype in (torch.float32, torch.bfloat16):
            options = {"lr": 1e-2, "fused": True}
            yield pytest.param(cls, options, dtype, id=f"{cls.__name__} fused {dtype}")
    for cls in adam:
        for dtype in (torch.float32, torch.float64):
            options = {"lr": torch.tensor(1e-2, dtype=dtype)}
            yield pytest.param(cls, options, torch.float32, id=f"{cls.__name__} lr tensor {dtype}")
        options = {"lr": 1e-2, "amsgrad": True, "foreach": True}
        yield pytest.param(cls, options, torch.float32, id=f"{cls.__name__} amsgrad foreach")


def check_exactness(tmp_path: Path, build: Build) -> None:
    """Compare three steps, a cut and three steps with six."""
    model, optimizer = build(0)
    for i in range(3):
        step(model, optimizer, i)
    save(tmp_path, model=model, optimizer=optimizer)
    at_cut = read_bits(model, optimizer)
    for i in range(3, 6):
        step(model, optimizer, i)
    again, optimizer_again = build(1)
    assert resume(tmp_path, model=again, optimizer=optimizer_again) == ""
    assert read_bits(again, optimizer_again) == at_cut
    for i in range(3, 6):
        step(again, optimizer_again, i)
    assert read_bits(again, optimizer_again) == read_bits(model, optimizer)


@pytest.mark.parametrize(("cls", "options", "dtype"), [*list_optimizers()])
def test_every_optimizer_goes_on_bit_for_bit(
    tmp_path: Path, cls: Callable[..., Any], options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Source: Lightning-AI/pytorch-lightning#2613, KempnerInstitute/KempnerForge#114"""

    def build(seed: int) -> tuple[nn.Module, Any]:
        model = build_net(seed, dtype)
        return model, cls(model.parameters(), **copy.deepcopy(options))

    check_exactness(tmp_path, build)


def test_sparse_adam_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.Embedding(10, 4, sparse=True)
        return model, optim.SparseAdam(model.parameters(), lr=1e-2)

    check_exactness(tmp_path, build)


def test_channels_last_moments_keep_their_strides(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, optim.Adam(model.parameters())

    check_exactness(tmp_path, build)


# -- names --------------------------------------------------------------------------------------


@given(
    order=st.permutations(range(4)),
    groups=st.sampled_from([(0, 4), (0, 1, 4), (0, 2, 4)]),
    cut=st.integers(0, 3),
)
@settings(max_examples=15, deadline=None)
def test_moments_find_their_parameters_in_any_order(
    order: Sequence[int], groups: Sequence[int], cut: int
) -> None:
    """Source: pytorch/pytorch#1489, pytorch/pytorch#113673"""

    def build(seed: int, *, permuted: bool) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
        sets = [sorted(order[a:b]) for a, b in itertools.pairwise(groups)]
        if permuted:
            sets = [list(order[a:b]) for a, b in itertools.pairwise(groups)]
        parameters = list(model.parameters())
        given = [
            {"params": [parameters[i] for i in each], "weight_decay": 0.1 * n}
            for n, each in enumerate(sets)
        ]
        return model, optim.AdamW(given, lr=0.1)

    model, optimizer = build(0, permuted=False)
    again, optimizer_again = build(1, permuted=True)
    for i in range(cut):
        step(model, optimizer, i)
    with tempfile.TemporaryDirectory() as run:
        save(Path(run), model=model, optimizer=optimizer)
        resume(Path(run), model=again, optimizer=optimizer_again)
    for i in range(cut, cut + 3):
        step(model, optimizer, i)
        step(again, optimizer_again, i)
    assert read_bits(again, optimizer_again) == read_bits(model, optimizer)


def test_layers_swapped_in_the_class_keep_their_moments(tmp_path: Path) -> None:
    """Source: pytorch/pytorch#1489"""

    def build(seed: int, names: str) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.ModuleDict({name: nn.Linear(3, 3) for name in names})
        return model, optim.Adam(model.parameters(), lr=0.1)

    model, optimizer = build(0, "ab")
    sum((n + 1) * p.square().sum() for n, p in enumerate(model.parameters())).backward()
    optimizer.step()
    again, optimizer_again = build(1, "ba")
    save(tmp_path, model=model, optimizer=optimizer)
    resume(tmp_path, model=again, optimizer=optimizer_again)
    for name, parameter in model.named_parameters():
        there = optimizer_again.state[again.get_parameter(name)]
        assert spell(there) == spell(optimizer.state[parameter])


def test_two_models_may_share_names(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[nn.Module, nn.Module, Any]:
        generator, critic = build_net(seed), build_net(seed + 10)
        both = [*generator.parameters(), *critic.parameters()]
        return generator, critic, optim.Adam(both, lr=0.1)

    generator, critic, optimizer = build(0)
    (generator(torch.ones(1, 4)).sum() + 2 * critic(torch.ones(1, 4)).sum()).backward()
    optimizer.step()
    save(tmp_path, generator=generator, critic=critic, optimizer=optimizer)
    generator2, critic2, optimizer2 = build(1)
    resume(tmp_path, generator=generator2, critic=critic2, optimizer=optimizer2)
    assert read_bits(generator2, optimizer2) == read_bits(generator, optimizer)
    assert read_bits(critic2, optimizer2) == read_bits(critic, optimizer)


def test_names_are_those_without_wrappers(tmp_path: Path) -> None:
    """Source: pytorch/pytorch#124546"""
    model, again = build_net(0), build_net(1)
    wrapped = torch.compile(nn.Sequential(*map(checkpoint_wrapper, model)), backend="eager")
    optimizer = optim.Adam(wrapped.parameters())  # type: ignore[union-attr]
    optimizer_again = optim.Adam(again.parameters())
    step(model, optimizer, 0)
    save(tmp_path, model=wrapped, optimizer=optimizer)
    resume(tmp_path, model=again, optimizer=optimizer_again)
    assert read_bits(again, optimizer_again) == read_bits(model, optimizer)


def test_renamed_layers_keep_their_moments(tmp_path: Path) -> None:
    model, again = build_net(0), nn.ModuleDict(dict(zip("abc", build_net(1), strict=True)))
    optimizer, optimizer_again = optim.Adam(model.parameters()), optim.Adam(again.parameters())
    step(model, optimizer, 0)
    save(tmp_path, model=model, optimizer=optimizer)
    names = dict(zip("012", "abc", strict=True))
    resume(
        tmp_path,
        model=Model(again, rename=names),
        optimizer=Optimizer(
            optimizer_again, rename={f"model.{old}": f"model.{new}" for old, new in names.items()}
        ),
    )
    for name, parameter in model.named_parameters():
        there = again.get_parameter(names[name[0]] + name[1:])
        assert spell(optimizer_again.state[there]) == spell(optimizer.state[parameter])
        assert spell(there.grad) == spell(parameter.grad)


def test_lbfgs_is_refused_in_another_order(tmp_path: Path) -> None:
    model, again = build_net(0), build_net(1)
    optimizer = optim.LBFGS(model.parameters())
    step(model, optimizer, 0)
    save(tmp_path, model=model, optimizer=optimizer)
    reverse = optim.LBFGS([*again.parameters()][::-1])
    for plugin in (reverse, Optimizer(reverse, strict=False)):
        with pytest.raises(
            MismatchError,
            match=r"LBFGS keeps one state over all parameters, saved in the order "
            r"model\.0\.weight, model\.2\.weight, run has model\.2\.weight, model\.0\.weight; "
            r"pass skip=\('optimizer',\) to start it fresh",
        ):
            resume(tmp_path, model=again, optimizer=plugin)


# -- state --------------------------------------------------------------------------------------


def test_state_of_any_kind_keeps_its_dtype_and_bits(tmp_path: Path) -> None:
    """Source: pytorch/pytorch#75224, pytorch/torchtitan#4615"""
    model, again = build_net(0), build_net(1)
    optimizer, optimizer_again = optim.Adam(model.parameters()), optim.Adam(again.parameters())
    step(model, optimizer, 0)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
    optimizer.state[model[0].weight] |= {
        "rng_state": torch.arange(4, dtype=torch.uint8),
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "list": [torch.ones(1).double(), None, 3],
        "nested": {"deep": (torch.tensor(1, dtype=torch.int64),)},
        "text": "x",
    }
    optimizer.state["shared"] = {"count": 3, "sum": torch.ones(2)}
    save(tmp_path, model=model, optimizer=optimizer)
    resume(tmp_path, model=again, optimizer=optimizer_again)
    assert read_bits(again, optimizer_again) == read_bits(model, optimizer)
    assert spell(optimizer_again.state["shared"]) == spell(optimizer.state["shared"])


class LowMomentum(optim.SGD):
    """Keeps its momentum in bfloat16, whatever its parameters are."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16()
        return loss


def test_moments_narrower_than_their_parameters_go_on_bit_for_bit(tmp_path: Path) -> None:
    """Source: pytorch/torchtitan#4615"""

    def build(seed: int) -> tuple[nn.Module, Any]:
        model = build_net(seed)
        return model, LowMomentum(model.parameters(), lr=0.1, momentum=0.9, foreach=False)

    model, optimizer = build(0)
    step(model, optimizer, 0)
    assert {s["momentum_buffer"].dtype for s in optimizer.state.values()} == {torch.bfloat16}
    again, optimizer_again = build(1)
    optimizer_again.load_state_dict(optimizer.state_dict())  # the negative control: torch widens
    widened = optimizer_again.state[again[0].weight]["momentum_buffer"]
    assert widened.dtype == torch.float32
    check_exactness(tmp_path, build)


def test_a_never_stepped_optimizer_stays_one(tmp_path: Path) -> None:
    """Source: pytorch/pytorch#164929"""
    model, untouched = build_net(0), build_net(0)
    optimizer = optim.AdamW(model.parameters())
    save(tmp_path, model=model, optimizer=optimizer)
    assert not optimizer.state
    step(model, optimizer, 0)
    plain = optim.AdamW(untouched.parameters())
    step(untouched, plain, 0)
    assert read_bits(model, optimizer) == read_bits(untouched, plain)
    resume(tmp_path, model=model, optimizer=optimizer)  # back to where nothing had been done
    assert not optimizer.state
    step(model, optimizer, 0)
    assert read_bits(model, optimizer) == read_bits(untouched, plain)


def test_restored_state_shares_no_memory(tmp_path: Path) -> None:
    """Source: pytorch/pytorch#196083"""
    model = build_net(0)
    optimizer = optim.Adam(model.parameters())
    step(model, optimizer, 0)
    save(tmp_path, model=model, optimizer=optimizer)
    restored = []
    for seed in (1, 2):
        again = build_net(seed)
        optimizer_again = optim.Adam(again.parameters())
        resume(tmp_path, model=again, optimizer=optimizer_again)
        restored.append(optimizer_again)
        step(again, optimizer_again, 1)
    places = [
        tensor.data_ptr()
        for each in (optimizer, *restored)
        for state in each.state.values()
        for tensor in state.values()
    ]
    assert len(set(places)) == len(places)


def test_groups_and_states_stay_the_same_objects(tmp_path: Path) -> None:
    model = build_net(0)
    optimizer = optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    step(model, optimizer, 0)
    save(tmp_path, model=model, optimizer=optimizer)
    groups, group, states = optimizer.param_groups, optimizer.param_groups[0], optimizer.state
    lr = group["lr"]
    lr.fill_(0.5)
    resume(tmp_path, model=model, optimizer=optimizer)
    assert optimizer.param_groups is groups
    assert groups[0] is group
    assert optimizer.state is states
    assert group["lr"] is lr
    assert lr == torch.tensor(0.1)


# -- options ------------------------------------------------------------------------------------


def test_numbers_come_from_the_checkpoint_and_the_report_tells_both(tmp_path: Path) -> None:
    model, again = build_net(0), build_net(1)
    optimizer = optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9), foreach=False)
    save(tmp_path, model=model, optimizer=optimizer)
    optimizer = optim.AdamW(again.parameters(), lr=0.2, weight_decay=0.5, foreach=True)
    notes = resume(tmp_path, model=again, optimizer=optimizer)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["foreach"]) == (0.1, (0.8, 0.9), True)
    assert group["weight_decay"] == 1e-2
    for line in (
        "optimizer: lr of group 0: saved 0.1, run has 0.2; the saved one is used",
        "optimizer: betas of group 0: saved (0.8, 0.9), run has (0.9, 0.999); the saved",
        "optimizer: weight_decay of group 0: saved 0.01, run has 0.5; the saved one is used",
        "optimizer: foreach of group 0: saved False, run has True; the run's is used, so not",
    ):
        assert line in notes
    assert len(notes.splitlines()) == 4


def test_with_a_scheduler_it_is_the_lr_given_that_is_compared(tmp_path: Path) -> None:
    def build(seed: int, lr: float) -> dict[str, Any]:
        model = build_net(seed)
        optimizer = optim.SGD(model.parameters(), lr=lr)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        }

    parts = build(0, 0.1)
    step(parts["model"], parts["optimizer"], 0)
    parts["scheduler"].step()
    save(tmp_path, **parts)
    assert resume(tmp_path, **build(1, 0.1)) == ""
    assert resume(tmp_path, **build(1, 0.3)).splitlines() == [
        "optimizer: initial_lr of group 0: saved 0.1, run has 0.3; the saved one is used"
    ]


@pytest.mark.parametrize(
    ("saved", "of_run", "expected"),
    [
        (0.1, torch.tensor(0.2), torch.tensor(0.1)),
        (0.1, torch.tensor(0.2).double(), torch.tensor(0.1, dtype=torch.float64)),
        (torch.tensor(0.1), 0.2, torch.tensor(0.1).item()),
        (torch.tensor(0.1), torch.tensor(0.2).double(), torch.tensor(0.1).double()),
    ],
)
def test_an_lr_stays_what_it_is_in_the_run_number_or_tensor(
    tmp_path: Path, saved: Any, of_run: Any, expected: Any
) -> None:
    model = build_net(0)
    save(tmp_path, model=model, optimizer=optim.Adam(model.parameters(), lr=copy.copy(saved)))
    optimizer = optim.Adam(model.parameters(), lr=copy.copy(of_run))
    resume(tmp_path, model=model, optimizer=optimizer)
    assert spell(optimizer.param_groups[0]["lr"]) == spell(expected)


# -- what does not fit --------------------------------------------------------------------------


def test_another_class_is_refused_with_both_names(tmp_path: Path) -> None:
    """Source: huggingface/transformers#18070"""
    model = build_net(0)
    save(tmp_path, model=model, optimizer=optim.Adam(model.parameters()))
    with pytest.raises(
        MismatchError,
        match=re.escape(
            "optimizer: saved by torch.optim.adam.Adam, run has torch.optim.sgd.SGD; "
            "pass skip=('optimizer',) to start it fresh"
        ),
    ):
        resume(tmp_path, model=model, optimizer=optim.SGD(model.parameters()))


def test_every_difference_is_told_at_once_and_nothing_is_changed(tmp_path: Path) -> None:
    """Source: pytorch/pytorch#148252"""

    def build(names: str, width: int) -> tuple[nn.Module, Any]:
        layers = {name: nn.Linear(2, 2, bias=False) for name in names}
        model = nn.ModuleDict({**layers, "head": nn.Linear(2, width, bias=False)})
        halves = [*model.parameters()][:2], [*model.parameters()][2:]
        return model, optim.Adam([{"params": half} for half in halves])

    model, optimizer = build("abc", 3)
    again, optimizer_again = build("bad", 4)
    save(tmp_path, model=model, optimizer=optimizer)
    before = read_bits(again, optimizer_again)
    with pytest.raises(MismatchError) as caught:
        resume(tmp_path, model=Model(again, strict=False), optimizer=optimizer_again)
    assert str(caught.value) == (
        "optimizer: checkpoint and run differ in 3 places: "
        "model.c.weight is only in the checkpoint; "
        "model.head.weight saved [3, 2], run has [4, 2]; model.d.weight is only in the run; "
        "to restore what fits, bus.register(builtin_plugins.Optimizer(optimizer, strict=False), "
        "'optimizer'), or with rename={…}"
    )
    assert read_bits(again, optimizer_again) == before


def test_a_parameter_in_another_group_is_a_difference(tmp_path: Path) -> None:
    def build(split: int) -> tuple[nn.Module, Any]:
        model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3)))
        parameters = list(model.parameters())
        return model, optim.SGD([{"params": parameters[:split]}, {"params": parameters[split:]}])

    model, optimizer = build(1)
    save(tmp_path, model=model, optimizer=optimizer)
    model, optimizer = build(2)
    with pytest.raises(MismatchError, match=r"model\.1\.weight saved in group 1, run has it in 0"):
        resume(tmp_path, model=model, optimizer=optimizer)


def test_without_strict_matched_states_load_and_the_rest_is_fresh(tmp_path: Path) -> None:
    """Source: pytorch/pytorch#3852"""

    def build(seed: int, layers: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(layers)))
        return model, optim.Adam(model.parameters(), lr=0.1 * layers)

    model, optimizer = build(0, 3)
    step(model, optimizer, 0)
    save(tmp_path, model=model, optimizer=optimizer)
    again, optimizer_again = build(1, 4)
    notes = resume(
        tmp_path,
        model=Model(again, strict=False),
        optimizer=Optimizer(optimizer_again, strict=False),
    )
    for old, new in zip(model.parameters(), again.parameters(), strict=False):
        assert spell(optimizer_again.state[new]) == spell(optimizer.state[old])
    assert again[3].weight not in optimizer_again.state
    assert optimizer_again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert (
        "optimizer: checkpoint and run differ in 1 place: model.3.weight is only in the run; "
        "3 parameters take their state back, others are fresh"
    ) in notes
    step(again, optimizer_again, 1)


def test_without_strict_a_new_group_keeps_its_own_options(tmp_path: Path) -> None:
    model = build_net(0)
    save(tmp_path, model=model, optimizer=optim.SGD(model.parameters(), lr=0.1))
    again = nn.Sequential(*build_net(1), nn.Linear(1, 1))
    groups = [{"params": again[3].parameters(), "lr": 0.7}, {"params": again[:3].parameters()}]
    optimizer = optim.SGD(groups, lr=0.5)
    resume(
        tmp_path,
        model=Model(again, strict=False),
        optimizer=Optimizer(optimizer, strict=False),
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.7, 0.1]


def test_a_group_added_by_a_callback_is_there_before_it_is_compared(tmp_path: Path) -> None:
    @attrs.define
    class Unfreeze:
        """Adds the second layer's parameters to the optimizer, and again when restored."""

        model: nn.Module
        optimizer: Any
        state_key = "unfreeze"

        def unfreeze(self) -> None:
            self.optimizer.add_param_group({"params": self.model[2].parameters(), "lr": 0.01})

        def state_dict(self) -> dict[str, Any]:
            return {"unfrozen": len(self.optimizer.param_groups) == 2}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if state["unfrozen"]:
                self.unfreeze()

    def build(seed: int) -> dict[str, Any]:
        model = build_net(seed)
        optimizer = optim.Adam(model[0].parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer, "calls": Unfreeze(model, optimizer)}

    parts, again = build(0), build(1)
    parts["calls"].unfreeze()
    step(parts["model"], parts["optimizer"], 0)
    save(tmp_path, **parts)
    resume(tmp_path, **again)
    assert read_bits(again["model"], again["optimizer"]) == read_bits(
        parts["model"], parts["optimizer"]
    )
    with pytest.raises(MismatchError, match=r"model\.2\.weight is only in the checkpoint"):
        resume(tmp_path, {"skip": ("calls",)}, **build(1))


# -- what is attached ---------------------------------------------------------------------------


def test_a_parameter_of_nothing_attached_is_refused_at_the_save(tmp_path: Path) -> None:
    model, head = build_net(0), nn.Linear(3, 2)
    optimizer = optim.Adam([*model.parameters(), *head.parameters()])
    with pytest.raises(
        UnattachedError,
        match=re.escape(
            "optimizer: 2 of 4 parameters would be trained and never saved: parameters of shape "
            "[2, 3], [2] belong to nothing attached; attach the module that holds them, "
            "bus.attach(NAME=module)"
        ),
    ):
        save(tmp_path, model=model, optimizer=optimizer)
    save(tmp_path, model=model, head=head, optimizer=optimizer)
    with pytest.raises(UnattachedError, match="2 of 4 parameters would be trained and never saved"):
        resume(tmp_path, {"skip": ("head",)}, model=model, optimizer=optimizer)


def test_many_lost_parameters_make_a_short_message(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))
    with pytest.raises(UnattachedError, match=r"\[1, 1\], \[1\], .* and 3 more belong to nothing"):
        save(tmp_path, optimizer=optim.Adam(model.parameters()))


def test_a_layer_replaced_after_the_optimizer_was_built_is_found(tmp_path: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#7535"""
    expected = re.escape(
        "optimizer: 1 of 2 parameters would be trained and never saved: no longer part of the "
        "model are model.2.weight; build the optimizer after layers are replaced or sharded"
    )

    class Replace:
        def __init__(self, model: nn.Sequential) -> None:
            self.model = model

        @hookbus.hookimpl
        def pre_configure_sharded(self) -> None:
            self.model[2] = nn.Linear(4, 4, bias=False)

    model = build_net(0)
    optimizer = optim.Adam(model.parameters())
    save(tmp_path, model=model, optimizer=optimizer)
    with hookbus.HookBus() as bus:
        bus.attach(model=model, optimizer=optimizer)
        bus.register(Replace(model))
        with pytest.raises(UnattachedError, match=expected):
            bus.resume(tmp_path)
    model = build_net(0)
    optimizer = optim.Adam(model.parameters())
    with hookbus.HookBus() as bus:
        bus.attach(model=model, optimizer=optimizer)
        bus.resume(tmp_path / "fresh")
        model[2] = nn.Linear(4, 4, bias=False)
        with pytest.raises(UnattachedError, match=expected):
            bus.save(step=1)


def test_parameters_of_lazy_layers_get_their_shapes_and_then_their_moments(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Any]:
        model = nn.Sequential(nn.LazyLinear(2))
        return model, optim.Adam(model.parameters())

    model, optimizer = build()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    again, optimizer_again = build()
    save(tmp_path, model=model, optimizer=optimizer)
    resume(tmp_path, model=again, optimizer=optimizer_again)
    assert read_bits(again, optimizer_again) == read_bits(model, optimizer)


def test_parameters_without_a_shape_are_refused_with_what_to_do(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Any]:
        model = nn.Sequential(nn.LazyLinear(2))
        return model, optim.Adam(model.parameters())

    model, optimizer = build()
    with pytest.raises(UnattachedError, match="of shape not known yet, not known yet belong to"):
        save(tmp_path, optimizer=optimizer)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save(tmp_path, model=model, optimizer=optimizer)
    model, optimizer = build()
    with pytest.raises(
        MismatchError,
        match=re.escape(
            "optimizer: model.0.weight, model.0.bias have no shape yet; run one batch through the "
            "model before bus.resume(), or give it its shapes in setup="
        ),
    ):
        resume(tmp_path, {"skip": ("model",)}, model=model, optimizer=optimizer)
    model(torch.ones(1, 3))
    resume(tmp_path, {"skip": ("model",)}, model=model, optimizer=optimizer)


def test_an_attached_parameter_is_enough(tmp_path: Path) -> None:
    scale = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([scale], lr=0.1, momentum=0.9)
    scale.grad = torch.ones(2)
    optimizer.step()
    save(tmp_path, scale=scale, optimizer=optimizer)
    momentum = spell(optimizer.state[scale])
    optimizer.step()
    resume(tmp_path, scale=scale, optimizer=optimizer)
    assert spell(optimizer.state[scale]) == momentum


# -- none is forgotten --------------------------------------------------------------------------


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[hookbus.HookBus]:
    """A bus with a model, resumed without a loop."""
    with hookbus.HookBus() as bus:
        bus.attach(model=build_net(0))
        bus.resume(tmp_path)
        yield bus


FORGOTTEN = re.escape(
    "an optimizer steps and is not on the bus, so its state would be lost: Adam of "
    "model.0.weight, model.2.weight; add bus.attach(optimizer=…), and attach the module that holds "
    "its parameters too; if it was for the moment only, let go of it before the save: del optimizer"
)


def test_without_a_loop_too_an_optimizer_that_nobody_attached_refuses_the_save(
    bus: hookbus.HookBus, tmp_path: Path
) -> None:
    model: Any = bus.components["model"]
    optimizer = optim.Adam(model.parameters())
    bus.save(step=0)  # it has not stepped yet
    step(model, optimizer, 0)
    with pytest.raises(UnattachedError, match=FORGOTTEN) as kept:
        bus.save(step=1)
    assert len(hookbus.checkpoints(tmp_path)) == 1
    del optimizer
    bus.save(step=1)
    assert kept  # as a notebook keeps the last traceback


def test_with_nothing_attached_it_is_refused_too(tmp_path: Path) -> None:
    with hookbus.HookBus() as bus:
        bus.resume(tmp_path)
        model = build_net(0)
        optimizer = optim.SGD(model.parameters())
        step(model, optimizer, 0)
        with pytest.raises(UnattachedError, match="SGD of parameters that belong to nothing attac"):
            bus.save(step=1)


def test_an_optimizer_that_stepped_before_the_resume_alone_is_left_alone(
    bus: hookbus.HookBus, tmp_path: Path
) -> None:
    model: Any = bus.components["model"]
    optimizer = optim.Adam(model.parameters())
    step(model, optimizer, 0)
    bus.resume(tmp_path)
    bus.save(step=1)
    step(model, optimizer, 1)
    with pytest.raises(UnattachedError, match=FORGOTTEN):
        bus.save(step=2)


def test_an_optimizer_that_is_gone_at_the_save_is_left_alone(bus: hookbus.HookBus) -> None:
    model: Any = bus.components["model"]
    gc.disable()
    try:
        for itself in (False, True):
            optimizer = optim.Adam(model.parameters())
            step(model, optimizer, 0)
            if itself:
                optimizer.itself = optimizer  # only the garbage collector can free it
            del optimizer
            bus.save(step=1)
    finally:
        gc.enable()


@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: [o], lambda o: Forwarding(o)])
def test_an_optimizer_is_on_the_bus_that_is_open(
    bus: hookbus.HookBus, tmp_path: Path, wrap: Callable[[Any], Any]
) -> None:
    """Two runs in one process do not mind each other, as long as both are open."""
    model = build_net(1)
    optimizer = optim.Adam(model.parameters())
    with hookbus.HookBus(block=("rng",)) as other:
        other.attach(model=model, optimizer=wrap(optimizer))
        step(model, optimizer, 0)
        with pytest.raises(UnattachedError, match="Adam of parameters that belong to nothing"):
            bus.save(step=1)  # it is on the other bus, which is in no run yet
        other.resume(tmp_path / "other")
        bus.save(step=1)
        other.save(step=1)
    step(model, optimizer, 0)
    with pytest.raises(UnattachedError, match="Adam of parameters that belong to nothing"):
        bus.save(step=2)


def test_a_plugin_that_was_never_registered_looks_after_nothing(bus: hookbus.HookBus) -> None:
    model: Any = bus.components["model"]
    plugin = Optimizer(optim.Adam(model.parameters()), strict=False)
    step(model, plugin.component, 0)
    with pytest.raises(UnattachedError, match=FORGOTTEN):
        bus.save(step=1)


def test_another_stage_looks_at_no_steps(tmp_path: Path) -> None:
    model = build_net(0)
    save(tmp_path, model=model)
    before = len(_global_optimizer_post_hooks)
    with hookbus.HookBus() as bus:
        bus.attach(model=model)
        bus.resume(tmp_path, stage="test")
        assert len(_global_optimizer_post_hooks) == before


def test_no_bus_leaves_a_hook_behind_and_none_adds_to_another(tmp_path: Path) -> None:
    model = build_net(0)
    optimizer = optim.SGD(model.parameters())
    everywhere, own = _global_optimizer_post_hooks, optimizer._optimizer_step_post_hooks
    before = len(everywhere)
    for number in range(3):
        bus = hookbus.HookBus()
        bus.attach(model=model, optimizer=optimizer)
        for _ in range(2):
            bus.resume(tmp_path)
            assert (len(everywhere), len(own)) == (before + 1, 1)
        step(model, optimizer, number)
        bus.save(step=number)
        bus.close()
        assert (len(everywhere), len(own)) == (before, 0)
    bus = hookbus.HookBus()
    bus.attach(model=model, optimizer=optimizer)
    bus.resume(tmp_path)
    del bus  # as a notebook does
    gc.collect()
    assert (len(everywhere), len(own)) == (before, 0)


def test_a_plugin_that_goes_on_to_another_bus_notes_steps_there(tmp_path: Path) -> None:
    model = build_net(0)
    plugin = Optimizer(optim.SGD(model.parameters()))
    for run in ("first", "second"):
        with hookbus.HookBus() as bus:
            put_on_bus(bus, {"model": model, "optimizer": plugin})
            bus.resume(tmp_path / run)
            step(model, plugin.component, 0)
            assert bus.hook.gradients_waiting() == [False]


# -- schedulers ask whether it stepped ----------------------------------------------------------


def schedule(run: Path | None, stop: int, *, early: int | None) -> list[float]:
    """Train in batches, with a scheduler that steps at the end of an epoch of two batches.

    With ``early`` it steps there in the body, in front of the optimizer.
    """
    model = build_net(0)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    lrs = []
    with hookbus.HookBus() as bus:
        loop = Loop()
        bus.attach(model=model, optimizer=optimizer, scheduler=scheduler, loop=loop)
        bus.resume(run)
        for _ in loop.epochs(2):
            for x in loop.batches([0, 1]):
                if loop.batch == early:
                    scheduler.step()
                step(model, optimizer, x)
                lrs.append(optimizer.param_groups[0]["lr"])
                if loop.step == stop:
                    bus.save()
                    return lrs
            if early is None:
                scheduler.step()
    return lrs


@pytest.mark.parametrize(("early", "cut"), [(None, 2), (2, 1)])
def test_a_scheduler_that_steps_first_after_a_resume_does_not_warn(
    tmp_path: Path, early: int | None, cut: int
) -> None:
    """Source: Lightning-AI/pytorch-lightning#5558"""
    whole = schedule(tmp_path / "whole", 99, early=early)
    begun = schedule(tmp_path / "cut", cut, early=early)
    assert begun + schedule(tmp_path / "cut", 99, early=early) == whole


def test_a_wrapper_that_shows_everything_inside_is_not_written_to(tmp_path: Path) -> None:
    class Shown:
        def __init__(self, optimizer: optim.Optimizer) -> None:
            self.__dict__["optimizer"] = optimizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["optimizer"], name)

        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    def build() -> dict[str, Any]:
        model = build_net(0)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"model": model, "optimizer": Shown(optimizer), "scheduler": scheduler}

    parts = build()
    step(parts["model"], parts["optimizer"], 0)
    save(tmp_path, **parts)
    parts = build()
    resume(tmp_path, **parts)
    parts["scheduler"].step()


def test_it_warns_where_the_uninterrupted_run_does(tmp_path: Path) -> None:
    def build() -> dict[str, Any]:
        model = build_net(0)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    save(tmp_path, **build())
    parts = build()
    step(parts["model"], parts["optimizer"], 0)  # rolled back
    resume(tmp_path, **parts)
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        parts["scheduler"].step()


# -- lists and wrappers -------------------------------------------------------------------------


def test_a_list_of_optimizers_is_one_section(tmp_path: Path) -> None:
    def build(seed: int) -> dict[str, Any]:
        model = build_net(seed)
        shared = [model[0].weight]
        return {
            "model": model,
            "optimizers": [optim.SGD(model.parameters(), 0.1, momentum=0.9), optim.Adam(shared)],
        }

    parts, again = build(0), build(1)
    for optimizer in parts["optimizers"]:
        step(parts["model"], optimizer, 0)
    save(tmp_path, **parts)
    resume(tmp_path, **again)
    assert read_bits(again["model"], *again["optimizers"]) == read_bits(
        parts["model"], *parts["optimizers"]
    )
    sgd, adam = again["optimizers"]
    again["optimizers"] = [sgd]
    with pytest.raises(
        MismatchError,
        match=re.escape(
            "optimizers: saved with 2 optimizers, run has 1; pass skip=('optimizers',) to start "
            "fresh"
        ),
    ):
        resume(tmp_path, **again)
    again["optimizers"] = [adam, sgd]
    with pytest.raises(ManyErrors) as caught:
        resume(tmp_path, **again)
    assert "optimizer 0: saved by torch.optim.sgd.SGD, run has torch.optim.adam.Adam" in str(
        caught.value
    )


class Forwarding(optim.Optimizer):
    """Passes everything on to the optimizer inside, and lacks torch's own hooks."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Lookahead:
    """Keeps slow weights of its own, by position, and is no torch optimizer."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.fast = optimizer
        self.count = 0
        self.slow = [p.detach().clone() for p in self.list_parameters()]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.fast.param_groups

    def list_parameters(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def zero_grad(self) -> None:
        self.fast.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any) -> None:
        with torch.enable_grad():
            self.fast.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for slow, fast in zip(self.slow, self.list_parameters(), strict=True):
                fast.copy_(slow.lerp_(fast, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"fast": self.fast.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fast.load_state_dict(state["fast"])
        self.slow, self.count = state["slow"], state["count"]


@pytest.mark.parametrize("wrap", [Forwarding, Lookahead, lambda o: Lookahead(Forwarding(o))])
def test_a_wrapper_goes_on_bit_for_bit_with_the_optimizer_inside(
    tmp_path: Path, wrap: Callable[[optim.Optimizer], Any]
) -> None:
    models, optimizers, wrappers = [], [], []
    for seed in (0, 1):
        model = build_net(seed, torch.bfloat16)
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        models.append(model)
        optimizers.append(optimizer)
        wrappers.append(wrap(optimizer))
    for i in range(3):
        step(models[0], wrappers[0], i)
    for state in optimizers[0].state.values():
        state["odd"] = torch.ones(2).double()  # what torch's own loading would cast
    save(tmp_path, model=models[0], optimizer=wrappers[0])
    resume(tmp_path, model=models[1], optimizer=wrappers[1])
    assert read_bits(models[1], optimizers[1]) == read_bits(models[0], optimizers[0])
    for i in range(3, 6):
        for model, wrapper in zip(models, wrappers, strict=True):
            step(model, wrapper, i)
    assert read_bits(models[1], optimizers[1]) == read_bits(models[0], optimizers[0])


def test_a_wrapper_with_state_by_position_is_refused_in_another_order(tmp_path: Path) -> None:
    model = build_net(0)
    save(tmp_path, model=model, optimizer=Lookahead(optim.Adam(model.parameters())))
    reverse = Lookahead(optim.Adam([*model.parameters()][::-1]))
    with pytest.raises(MismatchError, match="Lookahead keeps one state over all parameters"):
        resume(tmp_path, model=model, optimizer=reverse)


def test_a_wrapper_taken_away_is_another_class(tmp_path: Path) -> None:
    model = build_net(0)
    optimizer = optim.Adam(model.parameters())
    save(tmp_path, model=model, optimizer=Forwarding(optimizer))
    with pytest.raises(
        MismatchError,
        match=r"saved by .*Forwarding around torch.optim.adam.Adam, run has torch.optim.adam.Adam;",
    ):
        resume(tmp_path, model=model, optimizer=optimizer)


def test_an_optimizer_that_nobody_can_watch_is_refused() -> None:
    class Both(optim.Optimizer):
        def __init__(self, *optimizers: optim.Optimizer) -> None:
            self.optimizers = optimizers
            self.param_groups = [group for each in optimizers for group in each.param_groups]

    model = build_net(0)
    both = Both(optim.Adam(model[0].parameters()), optim.SGD(model[2].parameters()))
    with pytest.raises(
        AttachError,
        match=re.escape(
            "Both did not call torch's Optimizer.__init__ and holds no optimizer of the same "
            "parameters, so nobody can tell when it steps; attach the optimizers in it as a list"
        ),
    ):
        hookbus.HookBus().attach(optimizer=both)


def test_an_optimizer_with_a_state_of_another_form_is_refused_at_the_save(tmp_path: Path) -> None:
    class Odd(optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"everything": 1}

    model = build_net(0)
    with pytest.raises(
        StateError,
        match=re.escape(
            "Odd.state_dict() has everything and not 'state' and 'param_groups'; register a "
            "plugin that knows it"
        ),
    ):
        save(tmp_path, model=model, optimizer=Odd(model.parameters()))


def test_an_overridden_state_dict_keeps_what_it_adds(tmp_path: Path) -> None:
    class Counting(optim.SGD):
        count = 0

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]
            super().load_state_dict(state)

    model = build_net(0)
    optimizer = Counting(model.parameters())
    optimizer.count = 7
    save(tmp_path, model=model, optimizer=optimizer)
    again = Counting(model.parameters())
    resume(tmp_path, model=model, optimizer=again)
    assert again.count == 7


@pytest.mark.parametrize("component", [optim.Adam, [], [1], {}, object()])
def test_other_things_are_not_claimed(component: object) -> None:
    assert Optimizers().plugin_for(name="x", component=component) is None


def test_an_option_that_the_optimizer_or_a_scheduler_changes_is_no_change_of_the_script(
    tmp_path: Path,
) -> None:
    """`ReduceLROnPlateau` leaves no ``initial_lr`` by which a schedule could be told."""
    for lr, changes in ((0.5, []), (0.5, []), (0.25, ["lr of group 0"])):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        with hookbus.HookBus() as bus:
            bus.attach(model=model, optimizer=optimizer, scheduler=scheduler)
            report = bus.resume(tmp_path).report
            assert [each.setting for each in report.changes] == changes
            if report.fresh:
                scheduler.step(1.0)
                scheduler.step(2.0)
                bus.save(step=1)
        assert optimizer.param_groups[0]["lr"] == 0.05
