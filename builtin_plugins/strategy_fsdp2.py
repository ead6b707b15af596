"""Shard models over the ranks with torch's ``fully_shard`` (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

import hookbus
from builtin_plugins.module_state import list_tensors
from builtin_plugins.sharded import is_dtensor
from hookbus.errors import AttachError, CallError, MismatchError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@attrs.define(eq=False)
class FSDP2:
    """Shard each attached model, and before it each module in it that is one of ``blocks``.

    ``models`` are the names of those to shard; all, if it is ``None``. ``mesh`` and ``options``
    go to ``fully_shard``. Build the optimizer afterwards: sharding gives a model new parameters.

    Weights come back behind the sharding, each rank reading its own shards in place. With
    ``weights_first`` they come before it, into the whole model that each rank holds then. A model
    that is built on the ``meta`` device is sharded first in any case, and no rank holds it whole:
    where there are no weights to come back, rank 0 builds another one with ``initial()`` and hands
    it out tensor by tensor. That leaves torch's random streams as they are.
    """

    blocks: tuple[type[nn.Module], ...] = ()
    mesh: DeviceMesh | None = attrs.field(default=None, kw_only=True)
    models: tuple[str, ...] | None = attrs.field(default=None, kw_only=True)
    weights_first: bool = attrs.field(default=False, kw_only=True)
    initial: Callable[[], nn.Module] | None = attrs.field(default=None, kw_only=True)
    options: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True)
    kind = "strategy"

    @hookbus.hookimpl
    def restore_before_configure_sharded(self) -> bool | None:
        return None if self.weights_first else False

    @hookbus.hookimpl
    def configure_sharded(self, resume: hookbus.Resume) -> None:
        for name, model in self._find_models(resume.components).items():
            is_made = not any(tensor.is_meta for tensor in list_tensors(model))
            ties = _find_ties(model)
            self._shard(model)
            if parted := [each for each in ties if each not in _find_ties(model)]:
                raise MismatchError(
                    f"{name}: {' and '.join(parted[0])} are one parameter and were sharded apart;"
                    " name a module in blocks= that holds them all, or none that holds one"
                )
            if is_made:
                continue
            _make_empty(model, ties)
            if resume.fates.judge(name) != "restored":
                with resume.ranks.together("building the first weights"):
                    built = self._build(name, model) if resume.ranks.is_first else {}
                _hand_out(model, built)

    def _find_models(self, components: Mapping[str, object]) -> dict[str, nn.Module]:
        models = {
            name: each
            for name, each in components.items()
            if isinstance(each, nn.Module) and (self.models is None or name in self.models)
        }
        if not models or len(models) < len(self.models or ()):
            wanted = "model" if self.models is None else ", ".join(map(repr, self.models))
            there = ", ".join(
                name for name, each in components.items() if isinstance(each, nn.Module)
            )
            raise AttachError(f"there is no {wanted} to shard; attached are {there or 'no models'}")
        return models

    def _shard(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        options = {**self.options, **({} if self.mesh is None else {"mesh": self.mesh})}
        for module in reversed(list(model.modules())):  # from the inside out
            is_due = module is model or isinstance(module, self.blocks)
            if is_due and not isinstance(module, FSDPModule):  # by a resume before, or the script
                fully_shard(module, **options)

    def _build(self, name: str, model: nn.Module) -> dict[str, torch.Tensor]:
        if self.initial is None:
            raise CallError(
                f"{name} is on the meta device and no weights come back; pass initial=, a function"
                " that builds it with weights"
            )
        # Of the current device alone: torch would take all, and wake them up for it.
        device = torch.accelerator.current_accelerator(check_available=True)
        devices = [torch.accelerator.current_device_index()] if device else []
        forked = torch.random.fork_rng(devices, device_type=device.type if device else "cuda")
        with forked, torch.device("cpu"):
            made = self.initial()
        built = dict(_list_tensors(made))
        for path, live in _list_tensors(model):
            if path not in built or built[path].shape != live.shape:
                raise MismatchError(f"{name}: initial() built no {path} {list(live.shape)}")
        return built


def _list_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def _find_ties(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    paths: dict[int, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(path)
    return [each for each in paths.values() if len(each) > 1]


def _make_empty(model: nn.Module, ties: Sequence[Sequence[str]]) -> None:
    """Give a sharded model memory; what was one parameter stays one."""
    meshes = (each.device_mesh for each in model.parameters() if is_dtensor(each))
    model.to_empty(device=next((mesh.device_type for mesh in meshes), "cpu"))
    for first, *others in ties:
        for path in others:
            owner, _, key = path.rpartition(".")
            setattr(model.get_submodule(owner), key, model.get_parameter(first))


@torch.no_grad()
def _hand_out(model: nn.Module, built: Mapping[str, torch.Tensor]) -> None:
    """Copy what rank 0 built into the shards of all, one tensor after the other."""
    for path, live in _list_tensors(model):
        whole = torch.empty(live.shape, dtype=live.dtype, device=live.device)
        if built:
            whole.copy_(built[path])
        torch.distributed.broadcast(whole, 0)
        if not is_dtensor(live):
            live.copy_(whole)
        elif (local := live.to_local()).numel():
            (box,) = live.__create_chunk_list__()  # as DCP asks it
            places = zip(box.offsets, box.sizes, strict=True)
            local.copy_(whole[tuple(slice(start, start + size) for start, size in places)])
