"""Models, optimizers and gradients whose tensors are sharded, in a group of one process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import hookbus
from builtin_plugins import FSDP2
from builtin_plugins.gradients import Gradients
from builtin_plugins.sharded import make_targets
from hookbus.errors import AttachError, CallError, MismatchError, StateError

torch.set_num_threads(1)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    gc.collect()  # what is sharded must be gone before the group is
    dist.destroy_process_group()


class Renaming(nn.Linear):
    """Loads by code of its own: its weight once had another name, and is doubled as it comes."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state, prefix, *rest)


def save(run: Path, **components: object) -> None:
    with hookbus.HookBus() as bus:
        bus.attach(**components)
        bus.resume(run)
        bus.save(step=1)


def resume(run: Path, **components: object) -> None:
    with hookbus.HookBus() as bus:
        bus.attach(**components)
        bus.resume(run)


# -- models --------------------------------------------------------------------------------------


def test_a_module_with_loading_code_of_its_own_is_given_shards(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    saved = nn.Sequential(Renaming(3, 2))
    save(tmp_path, model=saved)
    live = fully_shard(nn.Sequential(Renaming(3, 2)), mesh=mesh)
    parameter = live[0].weight
    resume(tmp_path, model=live)
    assert live[0].weight is parameter
    assert isinstance(parameter, DTensor)
    assert torch.equal(parameter.full_tensor(), saved[0].weight * 2)
    assert torch.equal(live[0].bias.full_tensor(), saved[0].bias)


def test_names_are_found_while_fsdp_still_holds_whole_parameters(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    model = fully_shard(nn.Linear(3, 2), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hookbus.HookBus() as bus:
        bus.attach(model=model, optimizer=optimizer)
        bus.resume(tmp_path)
        with torch.no_grad():
            model(torch.ones(1, 3))
        assert not isinstance(model.weight, DTensor), "as FSDP leaves it"
        bus.save(step=1)


def test_a_tensor_still_to_be_summed_up_is_refused_on_both_sides(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    model = nn.Linear(3, 2, bias=False)
    save(tmp_path / "plain", model=model)
    partial = DTensor.from_local(torch.ones(2, 3), mesh, [Partial()], run_check=False)
    model.weight = nn.Parameter(partial)
    with pytest.raises(StateError, match="a DTensor that is partial"):
        save(tmp_path / "partial", model=model)
    checkpoint = hookbus.checkpoints(tmp_path / "plain")[0]
    with pytest.raises(MismatchError, match="that is partial"):
        checkpoint.read_into("model", {"weight": partial})


def test_sharded_and_per_rank_do_not_go_together(mesh: DeviceMesh, tmp_path: Path) -> None:
    class Keeper:
        @hookbus.hookimpl
        def save_state(self, save: hookbus.Save) -> None:
            save.write(distribute_tensor(torch.ones(2), mesh, [Shard(0)]), per_rank=True)

    with hookbus.HookBus() as bus:
        bus.register(Keeper(), "keeper")
        bus.resume(tmp_path)
        with pytest.raises(StateError, match="all ranks write such a tensor together"):
            bus.save(step=1)


# -- optimizers ----------------------------------------------------------------------------------


def test_state_has_the_shards_of_its_parameter_or_is_whole(mesh: DeviceMesh) -> None:
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))

    def info(name: str, *sizes: int, dtype: str = "float32") -> hookbus.TensorInfo:
        return hookbus.TensorInfo(name, dtype, sizes, 0, "")

    saved = {
        "exp_avg": info("a", 4, 3),
        "low": info("b", 4, 3, dtype="bfloat16"),
        "factors": [info("c", 4, 1), (info("d", 3),)],
        "step": info("e"),
        "plain": 3,
    }
    targets = make_targets(saved, parameter)
    assert list(targets) == ["a", "b", "c", "d"]
    assert all(isinstance(each, DTensor) and not each.requires_grad for each in targets.values())
    assert [each.placements for each in targets.values()] == [(Shard(0),)] * 2 + [
        (Replicate(),)
    ] * 2
    assert targets["b"].dtype == torch.bfloat16
    assert make_targets(saved, torch.ones(4, 3)) == {}


def test_a_gradient_that_fsdp_adds_to_is_waiting_again(mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Linear(3, 2), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = Gradients(optimizer)
    model(torch.ones(1, 3)).sum().backward()
    assert gradients.any_waiting()
    gradient = model.weight.grad
    optimizer.step()
    assert not gradients.any_waiting()
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is gradient, "it is added to, and not replaced"
    assert gradients.any_waiting()


# -- the strategy --------------------------------------------------------------------------------


def shard(model: nn.Module, run: Path, strategy: FSDP2) -> None:
    with hookbus.HookBus() as bus:
        bus.attach(model=model)
        bus.register(strategy)
        bus.resume(run)


def test_tied_parameters_are_not_sharded_apart(mesh: DeviceMesh, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with pytest.raises(MismatchError, match=r"0\.weight and 1\.weight are one parameter"):
        shard(model, tmp_path, FSDP2((nn.Linear,), mesh=mesh))


def test_a_model_on_meta_without_weights_says_what_to_pass(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    with pytest.raises(CallError, match=r"model is on the meta device.*pass initial="):
        shard(model, tmp_path, FSDP2(mesh=mesh))
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    with pytest.raises(MismatchError, match=r"initial\(\) built no weight \[2, 3\]"):
        shard(model, tmp_path, FSDP2(mesh=mesh, initial=lambda: nn.Linear(2, 3)))


def test_building_the_first_weights_draws_nothing(mesh: DeviceMesh, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    before = torch.get_rng_state()
    shard(model, tmp_path, FSDP2(mesh=mesh, initial=lambda: nn.Linear(3, 2)))
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(model.weight, DTensor)
    torch.set_rng_state(before)
    assert torch.equal(model.weight.full_tensor(), nn.Linear(3, 2).weight)


def test_only_the_models_that_are_named_are_sharded(mesh: DeviceMesh, tmp_path: Path) -> None:
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    with hookbus.HookBus() as bus:
        bus.attach(one=one, other=other)
        bus.register(FSDP2(mesh=mesh, models=("other",)))
        bus.resume(tmp_path / "run")
    assert not isinstance(one.weight, DTensor)
    assert isinstance(other.weight, DTensor)
    with pytest.raises(AttachError, match="there is no 'another' to shard; attached are model"):
        shard(nn.Linear(3, 2), tmp_path / "other", FSDP2(mesh=mesh, models=("another",)))
