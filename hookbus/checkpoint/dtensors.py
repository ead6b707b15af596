"""What a rank holds of a sharded tensor. torch's own code for them is imported by who has one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import attrs
import torch

from hookbus.errors import StateError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@attrs.frozen
class Cut:
    """Where a rank's piece lies in the whole tensor, and the shape of that."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a sharded tensor, without importing what makes them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def take_local(value: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, shared: of a plain one, all."""
    return value.to_local().detach() if is_dtensor(value) else value


def find_cut(value: DTensor) -> Cut:
    """Say which box of the whole tensor this rank holds.

    Raises:
        StateError: its values are still to be summed up over the ranks.
    """
    if any(each.is_partial() for each in value.placements):
        raise StateError("a DTensor that is partial; redistribute it first")
    if value.device_mesh.get_coordinate() is None:  # this rank is not on its mesh
        return Cut(tuple(value.shape), tuple(value.shape))
    chunks: list[Any] = value.__create_chunk_list__()  # as DCP asks it
    return Cut(tuple(value.shape), tuple(chunks[0].offsets))


def copy_shard(whole: torch.Tensor, live: DTensor) -> None:
    """Copy what this rank holds of a whole tensor into a sharded one."""
    local, offsets = take_local(live), find_cut(live).offsets
    if local.numel():
        box = tuple(
            slice(start, start + size) for start, size in zip(offsets, local.shape, strict=True)
        )
        local.copy_(whole[box])
