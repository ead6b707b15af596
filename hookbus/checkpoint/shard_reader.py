"""Reads tensors that are stored in chunks into tensors that are there, sharded or plain, in place.

torch's distributed checkpoint plans what of which chunk goes where, for any two ways to cut a
tensor; each rank plans for itself, so that reading needs no other rank.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
import xxhash

from hookbus.checkpoint.shard_files import RankShards, open_rank
from hookbus.checkpoint.shards import Chunk, Layout, Shards, StoredChunk
from hookbus.checkpoint.tensor_file import TensorFile
from hookbus.checkpoint.tensor_info import PIECE, TensorInfo, split_bytes
from hookbus.checkpoint.tensors import view_bytes
from hookbus.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import ReadItem


def fill_from_ranks(
    folder: Path,
    shards: Shards,
    targets: Mapping[str, torch.Tensor],
    infos: Mapping[str, TensorInfo],
    trusted: bool,
) -> None:
    """Read sharded tensors into live ones; see `read_chunks`."""
    layouts = {name: shards.get_layout(name) for name in targets}
    read_chunks(
        targets, infos, layouts, lambda rank: open_rank(folder, shards, rank), trusted=trusted
    )


def fill_from_file(file: TensorFile, info: TensorInfo, live: torch.Tensor, trusted: bool) -> None:
    """Read a tensor that is stored in one piece into a sharded one; see `read_chunks`."""
    origin = (0,) * len(info.sizes)
    opened = RankShards(file, {info.name: StoredChunk(info, origin)})
    layouts = {info.name: (Chunk(0, origin, info.sizes),)}
    read_chunks(
        {info.name: live},
        {info.name: info},
        layouts,
        lambda _: nullcontext(opened),
        trusted=trusted,
    )


Open = Callable[[int], AbstractContextManager[RankShards]]


def read_chunks(
    targets: Mapping[str, torch.Tensor],
    infos: Mapping[str, TensorInfo],
    layouts: Mapping[str, Layout],
    open_rank: Open,
    *,
    trusted: bool = False,
) -> None:
    """Fill each of ``targets``, which have the shape and dtype of the stored tensor, in place.

    A chunk is read whole and hashed, except that with ``trusted``, which says that every byte has
    been read and found right before, of a chunk that is needed in part only that part is read.
    Beside the targets there is a few MiB, or one row of a chunk if that is more.

    Raises:
        CorruptCheckpointError: the bytes are not those that were saved.
    """
    needed: dict[int, list[tuple[str, ReadItem]]] = defaultdict(list)
    live = {name: target.detach() for name, target in targets.items()}
    planner, items = plan_reading(live, infos, layouts)
    for item in items:
        name = item.storage_index.fqn
        needed[layouts[name][item.storage_index.index or 0].rank].append((name, item))
    for rank, wanted in sorted(needed.items()):
        with open_rank(rank) as opened:
            for name, item in wanted:
                chunk = opened.chunks.get(name)
                place = layouts[name][item.storage_index.index or 0]
                if chunk is None or (chunk.offsets, chunk.info.sizes) != (
                    place.offsets,
                    place.sizes,
                ):
                    raise CorruptCheckpointError(
                        f"{opened.file.path}: has no chunk of {name!r} at {list(place.offsets)}"
                    )
                with torch.no_grad():
                    _copy_box(
                        opened.file,
                        chunk.info,
                        tuple(item.storage_offsets),
                        planner.resolve_tensor(item).detach(),
                        trusted,
                    )
    for target in targets.values():
        torch.autograd.graph.increment_version(target)  # as copy_ would


def plan_reading(
    live: dict[str, torch.Tensor],
    infos: Mapping[str, TensorInfo],
    layouts: Mapping[str, Layout],
) -> tuple[Any, list[ReadItem]]:
    """Return what to read, and the planner, which knows where it goes.

    Tensors that are cut alike, in the files and here, are planned once.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    alike: dict[object, list[str]] = {}
    for name, each in live.items():
        sort = id(layouts[name]), infos[name].sizes, _list_boxes(each)
        alike.setdefault(sort, []).append(name)
    leaders = {names[0]: names for names in alike.values()}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = _describe(leaders, infos, layouts)
    planner.set_up_planner({name: live[name] for name in leaders}, metadata)
    items = planner.finish_plan(planner.create_local_plan()).items
    planner.set_up_planner(live)
    return planner, [
        _rename(item, name)
        for item in items
        if 0 not in item.lengths
        for name in leaders[item.storage_index.fqn]
    ]


def _list_boxes(live: torch.Tensor) -> object:
    """Return which boxes of the whole tensor are here; ``None`` for a plain one."""
    if not hasattr(live, "__create_chunk_list__"):
        return None
    return tuple((*each.offsets, *each.sizes) for each in live.__create_chunk_list__())


def _rename(item: ReadItem, name: str) -> ReadItem:
    if item.storage_index.fqn == name:
        return item
    from torch.distributed.checkpoint.metadata import MetadataIndex

    there, here = item.storage_index, item.dest_index
    return dataclasses.replace(
        item,
        storage_index=MetadataIndex(name, there.offset, there.index),
        dest_index=MetadataIndex(name, here.offset, here.index),
    )


def _describe(
    names: Iterable[str], infos: Mapping[str, TensorInfo], layouts: Mapping[str, Layout]
) -> Metadata:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(infos[name].dtype),
                torch.Size(infos[name].sizes),
                [
                    ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes))
                    for each in layouts[name]
                ],
            )
            for name in names
        }
    )


def _copy_box(
    file: TensorFile, info: TensorInfo, start: tuple[int, ...], target: torch.Tensor, trusted: bool
) -> None:
    """Copy the box of a chunk that begins at ``start`` and is as large as ``target`` into it."""
    whole = tuple(target.shape) == info.sizes
    if whole and target.device.type == "cpu" and target.is_contiguous():
        file.read(info, split_bytes(view_bytes(target)))
        return
    if not info.sizes:  # of no dimension, and not on the CPU
        info, start = attrs.evolve(info, sizes=(1,)), (0,)
        target = target.reshape(1)
    first, count = start[0], target.shape[0]
    rows = (first, first + count) if trusted and not whole else (0, info.sizes[0])
    block = max(1, PIECE // max(1, info.bytes // info.sizes[0]))
    digest = xxhash.xxh3_128()
    for row in range(rows[0], rows[1], block):
        end = min(row + block, rows[1])
        buffer = torch.empty((end - row, *info.sizes[1:]), dtype=info.dtype, device="cpu")
        data = view_bytes(buffer)
        file.read_rows(info, row, data)
        digest.update(data)
        low, high = max(row, first), min(end, first + count)
        if low < high:
            box = buffer[low - row : high - row]
            for axis in range(1, len(start)):
                box = box.narrow(axis, start[axis], target.shape[axis])
            _copy(target[low - first : high - first], box)
    if rows == (0, info.sizes[0]):
        file.compare(info, digest.hexdigest())


def _copy(target: torch.Tensor, box: torch.Tensor) -> None:
    if target.itemsize == 1:  # some of these dtypes cannot be copied by every release
        target, box = target.view(torch.uint8), box.view(torch.uint8)
    target.copy_(box)
