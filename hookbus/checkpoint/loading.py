"""From the bytes of a part's files to a state: fresh tensors, or those that are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs
import numpy
import torch

from hookbus.checkpoint.dtensors import copy_shard, is_dtensor
from hookbus.checkpoint.manifest import PartInfo
from hookbus.checkpoint.nodes import describe_leaf, list_names, rebuild
from hookbus.checkpoint.placing import Stored, match, place
from hookbus.checkpoint.shard_reader import fill_from_file, fill_from_ranks
from hookbus.checkpoint.tensor_file import TensorFile
from hookbus.checkpoint.tensor_info import TensorInfo, split_bytes
from hookbus.checkpoint.tensors import allocate, lay_out, view_bytes
from hookbus.checkpoint.tree import unflatten
from hookbus.errors import MismatchError


class Bytes(Protocol):
    """What gives the bytes of tensors, such as an open file of them."""

    def read(self, info: TensorInfo, pieces: Iterator[memoryview]) -> None:
        """Fill ``pieces``, which together are as long as the tensor, with its bytes."""


@attrs.frozen(eq=False)
class Source:
    """Where the tensors of a part come from: an open file, or a folder with one of each rank.

    ``trusted`` says that every byte has been read and found right.
    """

    part: PartInfo
    file: Bytes | None
    folder: Path
    trusted: bool

    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Read tensors into live ones of the same shape and dtype, wherever those are."""
        if self.part.shards is not None:
            fill_from_ranks(self.folder, self.part.shards, targets, self.part.tensors, self.trusted)
            return
        assert self.file is not None
        for name, live in targets.items():
            info = self.part.tensors[name]
            if not is_dtensor(live):
                _fill_plain(self.file, info, live)
            elif isinstance(self.file, TensorFile):
                fill_from_file(self.file, info, live, self.trusted)
            else:
                whole = allocate(info)
                _fill_plain(self.file, info, whole)
                copy_shard(whole, live)

    def load(
        self, names: Iterable[str], targets: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return tensors: those of ``targets``, filled, and others fresh, whole, on the CPU.

        Fresh ones have the strides that they were saved with.
        """
        infos = {name: self.part.tensors[name] for name in names}
        given = {name: each for name, each in (targets or {}).items() if name in infos}
        fresh = {name: allocate(info) for name, info in infos.items() if name not in given}
        self.fill({**given, **fresh})
        laid = {name: lay_out(each, infos[name]) for name, each in fresh.items()}
        return {name: given[name] if name in given else laid[name] for name in infos}


def load(source: Source, targets: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Return a state. Its tensors and arrays are fresh, on the CPU, and share nothing.

    Raises:
        MismatchError: one of ``targets`` is not as large as what is stored, or of another dtype.
    """
    part = source.part
    for name, live in (targets or {}).items():
        info = part.tensors.get(name)
        if info is None or (live.shape, live.dtype) != (info.shape, info.dtype):
            raise MismatchError(f"{name}: saved {info}, run has {list(live.shape)} {live.dtype}")
    return unflatten(part.tree, source.load(part.tensors, targets))


def load_into(source: Source, tree: Any, *, who: str, partial: bool = False) -> Any:
    """Copy a state into ``tree``, in place, and return ``tree``, or what takes its place.

    Raises:
        MismatchError: they do not fit; nothing was changed.
    """
    part = source.part

    def leaf(tag: str, payload: Any) -> object:
        stored = Stored(tag, payload, describe_leaf(tag, payload, part.tensors))
        return _load_leaf(source, stored) if tag == "$blob" else stored

    saved = rebuild(part.tree, leaf)
    targets: dict[str, torch.Tensor] = {}
    for each in match(who, saved, tree, partial=partial):
        if each.stored.tag == "$array":
            numpy.copyto(each.live, _load_leaf(source, each.stored))
        elif not isinstance(each.stored.form, str):
            with torch.no_grad():
                each.live.copy_(_load_leaf(source, each.stored))
        elif each.stored.form not in targets:
            targets[each.stored.form] = each.live
        elif each.live is not targets[each.stored.form]:
            source.fill({each.stored.form: each.live})
    source.fill(targets)
    return place(saved, tree)


def _load_leaf(source: Source, stored: Stored) -> Any:
    tensors = source.load(list_names(stored.payload))
    return unflatten({stored.tag: stored.payload}, tensors)


def _fill_plain(file: Bytes, info: TensorInfo, live: torch.Tensor) -> None:
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
