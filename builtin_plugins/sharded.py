"""Room for the state of sharded parameters, so that a rank reads its own shards and no more."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

import hookbus

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a sharded tensor, without importing what makes them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def get_version(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the version counter of a tensor; FSDP adds up gradients in the shard inside."""
    if is_dtensor(tensor):
        return tensor._version, tensor.to_local()._version
    return (tensor._version,)


def reshard(module: torch.nn.Module) -> None:
    """Let FSDP put its own parameters back, which it does not do after an evaluation."""
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
        for each in module.modules():
            if isinstance(each, fsdp.FSDPModule):
                each.reshard()


def make_targets(saved: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return, by the names of a section's file, where the state of a sharded parameter is read to.

    ``saved`` is that state without its data. What has the parameter's shape is sharded as it is;
    any other tensor that has a dimension is whole on each rank of its mesh.
    """
    if not is_dtensor(parameter):
        return {}
    if isinstance(saved, hookbus.TensorInfo):
        if not saved.sizes:
            return {}
        if saved.shape == parameter.shape:
            return {saved.name: torch.empty_like(parameter.detach(), dtype=saved.dtype)}
        whole = torch.empty(saved.shape, dtype=saved.dtype, device=parameter.device)
        return {saved.name: _replicate(whole, parameter)}
    if isinstance(saved, Mapping):
        saved = saved.values()
    elif not isinstance(saved, list | tuple):
        return {}
    found: dict[str, torch.Tensor] = {}
    for each in saved:
        found |= make_targets(each, parameter)
    return found


def _replicate(whole: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
