"""From the bytes of a file of tensors to a state: fresh tensors, or those that are there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy
import torch

from hookbus.checkpoint.manifest import PartInfo
from hookbus.checkpoint.nodes import describe_leaf, list_names, rebuild
from hookbus.checkpoint.placing import Stored, match, place
from hookbus.checkpoint.tensor_info import TensorInfo, split_bytes
from hookbus.checkpoint.tensors import allocate, lay_out, view_bytes
from hookbus.checkpoint.tree import unflatten


class Source(Protocol):
    """What gives the bytes of tensors, such as an open file of them."""

    def read(self, info: TensorInfo, pieces: Iterator[memoryview]) -> None:
        """Fill ``pieces``, which together are as long as the tensor, with its bytes."""


def load(file: Source, part: PartInfo) -> Any:
    """Return a state. Its tensors and arrays are fresh, on the CPU, and share nothing."""
    tensors = {info.name: _load_tensor(file, info) for info in part.tensors.values()}
    return unflatten(part.tree, tensors)


def load_into(file: Source, part: PartInfo, tree: Any, *, who: str, partial: bool = False) -> Any:
    """Copy a state into ``tree``, in place, and return ``tree``, or what takes its place.

    Raises:
        MismatchError: they do not fit; nothing was changed.
    """

    def leaf(tag: str, payload: Any) -> object:
        stored = Stored(tag, payload, describe_leaf(tag, payload, part.tensors))
        return _load_leaf(file, stored, part) if tag == "$blob" else stored

    saved = rebuild(part.tree, leaf)
    for each in match(who, saved, tree, partial=partial):
        if each.stored.tag == "$array":
            numpy.copyto(each.live, _load_leaf(file, each.stored, part))
        elif isinstance(each.stored.form, str):
            _load_tensor_into(file, each.stored.info, each.live)
        else:
            with torch.no_grad():
                each.live.copy_(_load_leaf(file, each.stored, part))
    return place(saved, tree)


def _load_leaf(file: Source, stored: Stored, part: PartInfo) -> Any:
    tensors = {n: _load_tensor(file, part.tensors[n]) for n in list_names(stored.payload)}
    return unflatten({stored.tag: stored.payload}, tensors)


def _load_tensor(file: Source, info: TensorInfo) -> torch.Tensor:
    """Return a fresh tensor on the CPU, with the strides it was saved with."""
    tensor = allocate(info)
    file.read(info, split_bytes(view_bytes(tensor)))
    return lay_out(tensor, info)


def _load_tensor_into(file: Source, info: TensorInfo, live: torch.Tensor) -> None:
    """Read into a dense tensor of the same shape and dtype, wherever it is."""
    direct = live.device.type == "cpu" and live.is_contiguous()
    if direct and not live.is_conj() and not live.is_neg():
        file.read(info, split_bytes(view_bytes(live)))
        torch.autograd.graph.increment_version(live)  # as copy_ would
    else:
        tensor = allocate(info)
        file.read(info, split_bytes(view_bytes(tensor)))
        with torch.no_grad():
            live.copy_(tensor)
