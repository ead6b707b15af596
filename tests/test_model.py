"""A model comes back bit for bit: in place, by names without wrappers, or not at all."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import hookbus
from builtin_plugins import Model
from builtin_plugins.names import drop_wrappers, parameter_names
from hookbus.errors import (
    AttachError,
    HookbusError,
    MismatchError,
    StateError,
    UnattachedError,
)


def put_on_bus(bus: hookbus.HookBus, components: Mapping[str, object]) -> None:
    for name, component in components.items():
        if isinstance(component, Model):
            bus.register(component, name)
        else:
            bus.attach(**{name: component})


def save(run: Path, **components: object) -> Path:
    """Save a run of one step, and return its checkpoint's folder."""
    with hookbus.HookBus() as bus:
        put_on_bus(bus, components)
        bus.resume(run)
        checkpoint = bus.save(step=1)
    assert checkpoint is not None
    return checkpoint.path


def resume(run: Path, options: Mapping[str, Any] | None = None, **components: object) -> str:
    """Resume, and return the notes of the report."""
    with hookbus.HookBus() as bus:
        put_on_bus(bus, components)
        return "\n".join(bus.resume(run, **(options or {})).report.notes)


def read_bits(module: nn.Module) -> list[tuple[Any, ...]]:
    """Return name, dtype, shape and bytes of every parameter and buffer."""
    return [
        (
            drop_wrappers(module, name),
            tensor.dtype,
            tensor.shape,
            tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist(),
        )
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    ]


def build(seed: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).to(dtype)


class Holder(nn.Module):
    """A child that is called like what a wrapper wraps."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.module = child
        self.module_scale = nn.Parameter(torch.randn(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class Tied(nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


class Cached(nn.Module):
    """A buffer outside the state_dict that grows, and one that the first forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(2))
        self.register_buffer("mean", torch.zeros(2), persistent=False)
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("late", None, persistent=False)


def compile_module(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


WRAPPERS: list[Callable[[nn.Module], nn.Module]] = [
    compile_module,
    nn.DataParallel,
    checkpoint_wrapper,
    lambda module: AveragedModel(module, use_buffers=True),
    Holder,
]


# -- laws ---------------------------------------------------------------------------------------


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), seed=st.integers(0, 9)
)
@settings(max_examples=6, deadline=None)
def test_every_bit_comes_back_into_the_same_tensors(dtype: torch.dtype, seed: int) -> None:
    saved, live = build(seed, dtype), build(seed + 1, dtype)
    saved(torch.randn(5, 4, dtype=dtype))  # moves the running statistics
    tensors = [*live.parameters(), *live.buffers()]
    places = [tensor.data_ptr() for tensor in tensors]
    with tempfile.TemporaryDirectory() as run:
        save(Path(run), model=saved)
        resume(Path(run), model=live)
    assert read_bits(live) == read_bits(saved)
    assert [id(tensor) for tensor in (*live.parameters(), *live.buffers())] == [*map(id, tensors)]
    assert [tensor.data_ptr() for tensor in tensors] == places


@given(
    saved_in=st.lists(st.sampled_from(WRAPPERS[:3]), unique=True),
    live_in=st.lists(st.sampled_from(WRAPPERS[:3]), unique=True),
    holders=st.integers(0, 2),
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_wrappers_change_no_name_in_whatever_order_they_are(
    saved_in: list[Callable[[nn.Module], nn.Module]],
    live_in: list[Callable[[nn.Module], nn.Module]],
    holders: int,
) -> None:
    """Source: karpathy/nanoGPT#325, pytorch/pytorch#124546"""
    models = []
    for seed, wrappers in ((0, saved_in), (1, live_in)):
        model: nn.Module = build(seed)
        for _ in range(holders):
            model = Holder(model)
        names = list(model.state_dict())
        for wrap in wrappers:
            model = wrap(model)
        models.append(model)
    with tempfile.TemporaryDirectory() as run:
        path = save(Path(run), model=models[0])
        assert sorted(load_file(path / "model.safetensors")) == sorted(names)
        resume(Path(run), model=models[1])
    assert read_bits(models[1]) == read_bits(models[0])


@given(wrappers=st.lists(st.sampled_from(WRAPPERS), unique=True))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_parameter_names_are_those_of_the_plain_module(
    wrappers: list[Callable[[nn.Module], nn.Module]],
) -> None:
    """Source: pytorch/pytorch#124546"""
    plain: nn.Module = build(0)
    wrapped: nn.Module = copy.deepcopy(plain)
    for wrap in wrappers:
        wrapped = wrap(wrapped)
        if wrap is Holder:
            plain = Holder(plain)
    expected = {f"model.{name}" for name, _ in plain.named_parameters()}
    assert set(parameter_names({"model": wrapped}).values()) == expected


def test_inner_wrappers_are_left_out_too_and_a_name_that_looks_like_one_is_not(
    tmp_path: Path,
) -> None:
    inner = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), Holder(nn.Linear(2, 2)))
    path = save(tmp_path, model=nn.DataParallel(inner))
    names = ["0.bias", "0.weight", "1.module.bias", "1.module.weight", "1.module_scale"]
    assert sorted(load_file(path / "model.safetensors")) == names


def test_a_distributed_model_has_the_names_of_the_plain_one(tmp_path: Path) -> None:
    saved, live = build(0), build(1)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        path = save(tmp_path, model=nn.parallel.DistributedDataParallel(saved))
    finally:
        torch.distributed.destroy_process_group()
    assert sorted(load_file(path / "model.safetensors")) == sorted(saved.state_dict())
    resume(tmp_path, model=live)
    assert read_bits(live) == read_bits(saved)


def test_an_averaged_model_keeps_its_count(tmp_path: Path) -> None:
    saved, live = AveragedModel(build(0)), AveragedModel(build(1))
    saved.update_parameters(build(2))
    saved.update_parameters(build(3))
    path = save(tmp_path, ema=saved)
    assert "n_averaged" in load_file(path / "ema.safetensors")
    resume(tmp_path, ema=live)
    assert read_bits(live) == read_bits(saved)
    assert live.n_averaged == 2


def test_parameters_carry_their_components_name_and_a_lone_parameter_is_its_own() -> None:
    generator, critic, scale = nn.Linear(1, 1), nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    names = parameter_names({"generator": generator, "critic": critic, "scale": scale, "n": {}})
    assert names[id(generator.weight)] == "generator.weight"
    assert names[id(critic.weight)] == "critic.weight"
    assert names[id(scale)] == "scale"


def test_two_parameters_of_one_name_are_refused() -> None:
    components = {"a": nn.ModuleDict({"b": nn.Linear(1, 1)}), "a.b": nn.Linear(1, 1)}
    with pytest.raises(
        StateError,
        match=r"two parameters are named 'a\.b\.weight'; attach one of them under another name",
    ):
        parameter_names(components)


def test_two_entries_that_become_one_without_wrappers_are_refused(tmp_path: Path) -> None:
    inner = nn.Linear(2, 2)
    inner.register_buffer("n_averaged", torch.tensor(0))
    with pytest.raises(
        StateError,
        match=re.escape(
            "AveragedModel has two entries named 'n_averaged' once its wrappers are left out, "
            "one of them 'module.n_averaged'; rename it in the model"
        ),
    ):
        save(tmp_path, model=AveragedModel(inner))


# -- what does not fit --------------------------------------------------------------------------


def test_every_difference_is_told_at_once_and_nothing_is_changed(tmp_path: Path) -> None:
    """Source: pytorch/pytorch#148252"""

    class Other(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.body = nn.Linear(2, 2)
            self.head = nn.Linear(*shape, dtype=torch.float64 if shape[1] == 5 else None)

    saved, live = Other(2, 4), Other(2, 5)
    saved.old, live.new = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    before = read_bits(live)
    save(tmp_path, model=saved)
    with pytest.raises(MismatchError) as caught:
        resume(tmp_path, model=live)
    assert str(caught.value) == (
        "model: checkpoint and run differ in 4 places: "
        "head.weight saved [4, 2] float32, run has [5, 2] float64; "
        "head.bias saved [4] float32, run has [5] float64; "
        "old.weight is only in the checkpoint; new.weight is only in the run; "
        "to load what fits, bus.register(builtin_plugins.Model(model, strict=False), 'model'), "
        "or with rename={'old.weight': 'new.weight'} if it is the same"
    )
    assert read_bits(live) == before


def test_without_strict_what_fits_is_loaded_and_the_rest_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved, live = build(0), build(1)
    live[2] = nn.Linear(3, 5)
    head = read_bits(live[2])
    save(tmp_path, model=saved)
    notes = resume(tmp_path, model=Model(live, strict=False))
    assert read_bits(live[0]) == read_bits(saved[0])
    assert read_bits(live[2]) == head
    assert (
        "model: checkpoint and run differ in 2 places: "
        "2.weight saved [2, 3] float32, run has [5, 3] float32; "
        "2.bias saved [2] float32, run has [5] float32; what fits is restored, so not bit for bit"
    ) in notes
    assert [text for text in caplog.messages if "so not bit for bit" in text] == notes.splitlines()


def test_rename_takes_names_and_their_beginnings(tmp_path: Path) -> None:
    saved, live = build(0), nn.ModuleDict(dict(zip("abc", build(1), strict=True)))
    live.c.register_parameter("w", live.c.weight)
    del live.c.weight
    save(tmp_path, model=saved)
    rename = {"0": "a", "1": "b", "2": "c", "2.weight": "c.w"}
    resume(tmp_path, model=Model(live, rename=rename))
    assert [bits[1:] for bits in read_bits(live)[:4]] == [bits[1:] for bits in read_bits(saved)[:4]]
    assert torch.equal(live.c.w, saved[2].weight)


def test_a_rename_that_makes_two_names_one_is_refused(tmp_path: Path) -> None:
    save(tmp_path, model=build(0))
    with pytest.raises(
        MismatchError, match=r"rename=\{'0': '2'\} gives two saved names the same name"
    ):
        resume(tmp_path, model=Model(build(1), rename={"0": "2"}))


def test_a_module_with_nothing_to_save_is_refused_and_told_why() -> None:
    with pytest.raises(
        AttachError,
        match=re.escape(
            "loss: MSELoss has neither parameters nor buffers and its state_dict() is empty, so "
            "nothing of it would be saved; leave it out of attach(), or register a plugin that "
            "knows what to save"
        ),
    ):
        hookbus.HookBus().attach(loss=nn.MSELoss())


# -- ties ---------------------------------------------------------------------------------------


def test_tied_weights_are_one_tensor_again(tmp_path: Path) -> None:
    """Source: huggingface/transformers#38870"""
    saved, live = Tied(), Tied()
    save(tmp_path, model=saved)
    resume(tmp_path, model=live)
    assert live.head.weight is live.embedding.weight
    assert live.head.weight.data_ptr() == live.embedding.weight.data_ptr()
    assert read_bits(live) == read_bits(saved)
    live.head(live.embedding(torch.tensor([1, 2]))).square().sum().backward()
    torch.optim.SGD(live.parameters(), 0.1).step()
    assert read_bits(live) != read_bits(saved)
    assert torch.equal(live.head.weight, live.embedding.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_tied_on_one_side_only_are_a_difference(tmp_path: Path, tied: bool) -> None:
    words = ("one tensor", "two") if tied else ("two tensors", "one")
    save(tmp_path, model=Tied(tied=tied))
    with pytest.raises(
        MismatchError,
        match=f"embedding.weight and head.weight were {words[0]} when saved and are {words[1]} in",
    ):
        resume(tmp_path, model=Tied(tied=not tied))


# -- what a state_dict leaves out ---------------------------------------------------------------


def test_buffers_outside_the_state_dict_come_back_also_when_they_have_grown(
    tmp_path: Path,
) -> None:
    saved, live = Cached(), Cached()
    saved.mean += 3
    saved.cache = torch.arange(5.0)
    saved.late = torch.ones(2, 2, dtype=torch.int64)
    mean = live.mean
    save(tmp_path, model=saved)
    resume(tmp_path, model=live)
    assert read_bits(live) == read_bits(saved)
    assert live.mean is mean
    assert list(live.state_dict()) == ["scale"]


def test_a_buffer_that_two_modules_share_is_shared_again(tmp_path: Path) -> None:
    saved, live = (nn.ModuleList([Cached(), Cached()]) for _ in range(2))
    saved[0].late = saved[1].late = torch.arange(3.0)
    save(tmp_path, model=saved)
    resume(tmp_path, model=live)
    assert live[0].late is live[1].late
    assert torch.equal(live[0].late, saved[0].late)


def test_a_buffer_that_was_not_there_yet_is_not_there_again(tmp_path: Path) -> None:
    live = Cached()
    save(tmp_path, model=Cached())
    live.late = torch.ones(1)
    resume(tmp_path, model=live)
    assert live.late is None


def test_a_buffer_outside_the_state_dict_that_the_run_lacks_is_a_difference(tmp_path: Path) -> None:
    saved, live = Cached(), Cached()
    del live.cache
    save(tmp_path, model=saved)
    with pytest.raises(MismatchError, match="cache is only in the checkpoint"):
        resume(tmp_path, model=live)


def test_modes_of_modules_are_put_back_and_noted(tmp_path: Path) -> None:
    saved, live = build(0), build(1)
    saved[1].eval()
    save(tmp_path, model=saved)
    assert "model: modes put back: 1 eval" in resume(tmp_path, model=live)
    assert [module.training for module in live] == [True, False, True]


def test_many_modes_make_a_short_note(tmp_path: Path) -> None:
    models = [nn.Sequential(*(nn.Linear(1, 1) for _ in range(6))) for _ in range(2)]
    save(tmp_path, model=models[0].eval())
    assert "the model itself eval, 0 eval, 1 eval, 2 eval, 3 eval and 2 more" in resume(
        tmp_path, model=models[1]
    )


def test_for_another_stage_and_in_a_warm_start_the_script_decides_on_modes(tmp_path: Path) -> None:
    path = save(tmp_path / "one", model=build(0).eval())
    tested, tuned = build(1), build(1)
    tuned.requires_grad_(False)
    resume(tmp_path / "one", {"stage": "test"}, model=tested)
    resume(tmp_path / "two", {"init_from": path}, model=tuned)
    assert tested.training
    assert tuned.training
    assert read_bits(tested) == read_bits(tuned) == read_bits(build(0))


def test_a_warm_start_with_everything_puts_modes_back(tmp_path: Path) -> None:
    path = save(tmp_path / "one", model=build(0).eval())
    live = build(1)
    resume(tmp_path / "two", {"init_from": path, "init_only": ("*",)}, model=live)
    assert not live.training


def test_other_frozen_parameters_are_a_difference(tmp_path: Path) -> None:
    saved, live = build(0), build(1)
    saved[0].requires_grad_(False)
    live[2].bias.requires_grad_(False)
    save(tmp_path, model=saved)
    with pytest.raises(MismatchError) as caught:
        resume(tmp_path, model=live)
    for part in (
        "differ in 3 places: ",
        "0.weight was frozen when saved and is trained in the run, "
        "call requires_grad_(False) on it before the resume",
        "2.bias was trained when saved and is frozen in the run, "
        "call requires_grad_(True) on it before the resume",
    ):
        assert part in str(caught.value)


def test_trainable_only_leaves_out_what_is_frozen(tmp_path: Path) -> None:
    models = build(0), build(1)
    for model in models:
        model[0].requires_grad_(False)
    saved, live = models
    frozen = read_bits(live[0])
    path = save(tmp_path, model=Model(saved, trainable_only=True))
    assert not any(name.startswith("0.") for name in load_file(path / "model.safetensors"))
    resume(tmp_path, model=Model(live, trainable_only=True))
    assert read_bits(live)[2:] == read_bits(saved)[2:]
    assert read_bits(live[0]) == frozen
    with pytest.raises(MismatchError, match=r"0\.weight is only in the run"):
        resume(tmp_path, model=build(1))


# -- modules with code of their own -------------------------------------------------------------


class Versioned(nn.Module):
    """Version 2 calls its weight by another name, and can read version 1."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self._version = version
        self.register_parameter("w" if version == 2 else "weight", nn.Parameter(torch.randn(3)))

    def _load_from_state_dict(  # type: ignore[override]
        self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        if metadata.get("version", 1) < self._version:
            state_dict[f"{prefix}w"] = state_dict.pop(f"{prefix}weight")
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


class WithExtra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: list[Any] = []

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "sum": torch.tensor(float(len(self.seen)))}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen, self.sum = state["seen"], state["sum"]


def test_a_module_that_reads_its_older_version_is_let_to_do_so(tmp_path: Path) -> None:
    saved, live = nn.Sequential(Versioned(1), nn.Linear(1, 1)), Versioned(2)
    live = nn.Sequential(live, nn.Linear(1, 1))
    save(tmp_path, model=saved)
    resume(tmp_path, model=compile_module(live))
    assert torch.equal(live[0].w, saved[0].weight)
    assert read_bits(live[1]) == read_bits(saved[1])


def test_a_newer_version_is_refused_by_the_module_itself(tmp_path: Path) -> None:
    save(tmp_path, model=Versioned(2))
    with pytest.raises(MismatchError, match=r'(?s)model: .*Missing key\(s\).*"weight"'):
        resume(tmp_path, model=Versioned(1))


def test_names_outside_such_a_module_are_still_checked_first(tmp_path: Path) -> None:
    saved, live = nn.ModuleDict({"v": Versioned(1)}), nn.ModuleDict({"v": Versioned(2)})
    saved["head"] = nn.Linear(2, 2, bias=False)
    live["head"] = nn.Linear(2, 3, bias=False)
    before = read_bits(live)
    save(tmp_path, model=saved)
    with pytest.raises(MismatchError, match=r"checkpoint and run differ in 1 place: head\.weight"):
        resume(tmp_path, model=live)
    assert read_bits(live) == before


def test_extra_state_comes_back(tmp_path: Path) -> None:
    saved, live = nn.Sequential(WithExtra()), nn.Sequential(WithExtra())
    saved[0].seen = [1, "two", None]
    save(tmp_path, model=saved)
    resume(tmp_path, model=live)
    assert live[0].seen == saved[0].seen
    assert live[0].sum == 3
    assert read_bits(live) == read_bits(saved)


def test_without_strict_a_module_with_code_of_its_own_takes_what_fits(tmp_path: Path) -> None:
    saved = nn.ModuleDict({"extra": WithExtra(), "head": nn.Linear(2, 2)})
    live = nn.ModuleDict({"extra": WithExtra(), "head": nn.Linear(2, 3)})
    saved["extra"].seen = [1]
    save(tmp_path, model=saved)
    assert "head.weight saved [2, 2]" in resume(tmp_path, model=Model(live, strict=False))
    assert live["extra"].seen == [1]
    assert read_bits(live["extra"]) == read_bits(saved["extra"])


def test_a_hook_that_rewrites_the_state_dict_is_called_on_both_sides(tmp_path: Path) -> None:
    def double(factor: float) -> nn.Module:
        module = nn.Linear(2, 2)

        def write(_: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * factor

        def read(_: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] / factor

        module._register_state_dict_hook(write)
        module.register_load_state_dict_pre_hook(read)
        return module

    saved, live = double(2), double(2)
    path = save(tmp_path, model=saved)
    stored = load_file(path / "model.safetensors")
    assert torch.equal(stored["weight"], saved.weight * 2)
    resume(tmp_path, model=live)
    assert read_bits(live) == read_bits(saved)


def test_lazy_layers_take_their_shapes_from_the_checkpoint(tmp_path: Path) -> None:
    saved, live = nn.Sequential(nn.LazyLinear(2)), nn.Sequential(nn.LazyLinear(2))
    saved(torch.ones(1, 3))
    save(tmp_path, model=saved)
    resume(tmp_path, model=live)
    assert read_bits(live) == read_bits(saved)


class Unmade(nn.Module):
    """A tensor without a shape, in a module that does not know how to give it one."""

    def __init__(self, kind: str, *, made: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        if kind == "parameter":
            self.weight = nn.UninitializedParameter()
        else:
            self.register_buffer("weight", nn.UninitializedBuffer(), persistent=kind == "buffer")
        if made:
            self.make()

    def make(self) -> None:
        self.weight.materialize((2,))
        self.weight.data.fill_(3.0)


@pytest.mark.parametrize("kind", ["parameter", "buffer", "extra buffer"])
def test_tensors_without_a_shape_are_refused_with_what_to_do(tmp_path: Path, kind: str) -> None:
    model = Unmade(kind, made=False)
    text = "^model: weight has no shape yet; run one batch through the model before bus.{}, or give"
    with pytest.raises(StateError, match=text.format(r"save\(\)")):
        save(tmp_path, model=model)
    assert hookbus.checkpoints(tmp_path) == []
    model.make()
    save(tmp_path, model=model)
    live = Unmade(kind, made=False)
    before = read_bits(live.layer)
    with pytest.raises(MismatchError, match=text.format(r"resume\(\)")):
        resume(tmp_path, model=live)
    assert read_bits(live.layer) == before
    resume(tmp_path, {"setup": lambda resume: live.make()}, model=live)
    assert read_bits(live) == read_bits(model)


def test_a_lazy_layer_that_saw_no_batch_is_refused_at_the_save(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    with pytest.raises(
        StateError, match=r"model: 0\.weight, 0\.bias, .* and 1 more have no shape ye"
    ):
        save(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters()))
    model(torch.ones(2, 3))
    save(tmp_path, model=model)


# -- events -------------------------------------------------------------------------------------


class LateHead(nn.Module):
    """Layers that exist only after ``setup``, as in Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def setup(self, stage: str) -> None:
        self.calls.append(stage)
        self.head = nn.Linear(2, 3)

    def configure_model(self) -> None:
        self.calls.append("configure_model")
        self.tail = nn.Linear(3, 1)


def test_layers_built_in_setup_are_there_before_weights_come_back(tmp_path: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#5410"""
    saved, live = LateHead(), LateHead()
    save(tmp_path, model=saved)
    resume(tmp_path, model=nn.DataParallel(live))
    assert live.calls == ["fit", "configure_model"]
    assert read_bits(live) == read_bits(saved)


def test_a_setup_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    class Tokenized(nn.Linear):
        def setup(self, tokenizer: object) -> None:
            raise AssertionError

    save(tmp_path, model=Tokenized(1, 1))


class WithExtras(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.labels: list[str] = []
        self.order: list[str] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["labels"] = self.labels
        checkpoint["state_dict"]["bias_twice"] = checkpoint["state_dict"].pop("bias") * 2

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.labels = checkpoint["labels"]
        self.weight_before = self.weight.detach().clone()
        checkpoint["state_dict"]["bias"] = checkpoint["state_dict"].pop("bias_twice") / 2


def test_what_lightning_hooks_put_aside_comes_back_before_the_weights(tmp_path: Path) -> None:
    saved, live = WithExtras(), WithExtras()
    saved.labels = ["cat", "dog"]
    before = live.weight.detach().clone()
    save(tmp_path, model=saved)
    resume(tmp_path, model=Model(live, strict=False))
    assert live.labels == ["cat", "dog"]
    assert torch.equal(live.weight_before, before)
    assert read_bits(live) == read_bits(saved)


class Rebuilds(nn.Module):
    """Makes its head anew while it is loaded, as wide as it was when saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(2, width)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["width"] = self.head.out_features

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.head = nn.Linear(2, checkpoint["width"])


def test_a_head_rebuilt_while_loading_is_loaded_and_its_old_optimizer_is_refused(
    tmp_path: Path,
) -> None:
    """Source: Lightning-AI/pytorch-lightning#7535"""

    def build() -> dict[str, Any]:
        model = Rebuilds(3)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    saved, live = build(), build()
    save(tmp_path, **saved)
    with pytest.raises(
        UnattachedError,
        match=r"no longer part of the model are model\.head\.weight, model\.head\.bias; build the",
    ):
        resume(tmp_path, **live)
    with hookbus.HookBus() as bus, bus.resuming(tmp_path) as resumed:
        model = Rebuilds(3)
        bus.attach(model=model)
        resumed.restore_model()
        bus.attach(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert read_bits(model) == read_bits(saved["model"])
    model.head(torch.ones(1, 2)).sum().backward()
    bus.components["optimizer"].step()
    assert read_bits(model) != read_bits(saved["model"])


def test_a_model_on_meta_is_restored_behind_configure_sharded(tmp_path: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#18358"""
    saved = build(0)
    save(tmp_path, model=saved)
    with torch.device("meta"):
        live = build(1)
    with hookbus.HookBus() as bus:
        bus.attach(model=live)
        report = bus.resume(
            tmp_path, configure_sharded=lambda resume: live.to_empty(device="cpu")
        ).report
    assert report.sharded_first == ["model"]
    assert read_bits(live) == read_bits(saved)


def test_a_model_that_stays_on_meta_is_told_how_to_leave_it(tmp_path: Path) -> None:
    save(tmp_path, model=build(0))
    with torch.device("meta"):
        live = build(1)
    with pytest.raises(
        HookbusError,
        match=re.escape(
            "model: 9 tensors are on the meta device, so there is nothing to load into; call "
            "model.to_empty(device=…) in configure_sharded"
        ),
    ):
        resume(tmp_path, model=live)


def test_a_wrapper_made_in_configure_sharded_takes_the_models_place(tmp_path: Path) -> None:
    saved, live = build(0), build(1)
    save(tmp_path / "one", model=saved)
    with hookbus.HookBus() as bus:
        bus.attach(model=live)
        bus.resume(tmp_path / "one", configure_sharded=lambda resume: nn.DataParallel(live))
        checkpoint = bus.save(step=2)
    assert checkpoint is not None
    assert sorted(load_file(checkpoint.path / "model.safetensors")) == sorted(saved.state_dict())
    assert read_bits(live) == read_bits(saved)
