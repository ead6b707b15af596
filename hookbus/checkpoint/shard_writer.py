"""Writes the sharded tensors of a part: each rank its chunks, once each, in a file of its own.

torch's distributed checkpoint plans who writes what; the files are ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import attrs
import torch
import xxhash

from hookbus.checkpoint import files
from hookbus.checkpoint.dtensors import Cut
from hookbus.checkpoint.shards import (
    Chunk,
    Layout,
    RankFile,
    Shards,
    StoredChunk,
    describe_list,
    rank_file_name,
    write_list,
)
from hookbus.checkpoint.tensor_info import TensorInfo, make_header, split_bytes
from hookbus.checkpoint.tensors import describe, dtype_name, order_names, take_bytes
from hookbus.checkpoint.tree import Flat
from hookbus.errors import CorruptCheckpointError, StateError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

_T = TypeVar("_T")
_R = TypeVar("_R")


class Peers(Protocol):
    """The ranks that write one checkpoint together, as one of them sees it."""

    @property
    def rank(self) -> int: ...

    def exchange(self, work: Callable[[], _T], decide: Callable[[list[_T]], Sequence[_R]]) -> _R:
        """Do ``work`` on every rank and ``decide`` on rank 0, which returns something for each.

        What is raised on one rank is raised on all.
        """


def describe_tensors(flat: Flat) -> dict[str, TensorInfo]:
    """Describe the tensors of a part as they are on all ranks together, without a hash."""
    infos = {name: describe(name, tensor) for name, tensor in flat.tensors.items()}
    for name, cut in flat.cuts.items():
        dtype = dtype_name(flat.tensors[name].dtype)
        size = flat.tensors[name].itemsize
        for n in cut.shape:
            size *= n
        infos[name] = TensorInfo(name, dtype, cut.shape, size, "")
    return infos


def write_shards(
    folder: Path, flat: Flat, peers: Peers, on_bytes: Callable[[int], None] | None = None
) -> Shards | None:
    """Write this rank's part of a state into ``folder``; return what rank 0 has to know of all.

    All ranks call it with the same state, each with what it holds of the sharded tensors. Rank 0
    makes the folder. Files are brought to the disk; the folder is not.

    Raises:
        StateError: what is not sharded differs between ranks.
        WriteError: the disk refused.
    """
    # -- one list of chunks a rank --------------------------------------------------------------
    layouts: dict[str, Layout] = {}

    def decide(sent: list[tuple[str, SavePlan]]) -> Sequence[SavePlan | None]:
        if len({digest for digest, _ in sent}) > 1:
            return [None] * len(sent)
        plans = _plan([plan for _, plan in sent])
        layouts.update(dict.fromkeys(flat.tensors, ()))
        for rank, plan in enumerate(plans):
            for item in plan.items:
                layouts[item.index.fqn] += (_take_chunk(rank, item),)
        files.create_folder(folder)
        return plans

    plan = peers.exchange(lambda: (_digest(flat), plan_local(flat.tensors, flat.cuts)), decide)
    if plan is None:
        _tell_difference(flat, peers)
    assert plan is not None
    names = [item.index.fqn for item in plan.items]

    def collect(sent: list[RankFile | None]) -> Sequence[Shards | None]:
        ranks = {rank: file for rank, file in enumerate(sent) if file is not None}
        shards = Shards.make(layouts, ranks)
        if problems := list(shards.find_gaps(describe_tensors(flat))):
            raise CorruptCheckpointError(f"{folder}: {'; '.join(problems)}")
        return [shards] + [None] * (len(sent) - 1)

    return peers.exchange(lambda: _write(folder, peers.rank, flat, names, on_bytes), collect)


# -- who writes what -----------------------------------------------------------------------------


@attrs.frozen(eq=False)
class _Piece:
    """What DCP's planner asks of a sharded tensor, answered from what is known of its cut."""

    local: torch.Tensor
    cut: Cut

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
        )
        from torch.distributed.checkpoint.planner import (
            TensorWriteData,
            WriteItem,
            WriteItemType,
        )

        if not self.local.numel():  # a rank without rows has nothing to write
            return []
        offsets = torch.Size(self.cut.offsets)
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, self.local.shape),
            properties=TensorProperties(dtype=self.local.dtype),
            size=torch.Size(self.cut.shape),
        )
        return [WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)]


def plan_local(tensors: Mapping[str, torch.Tensor], cuts: Mapping[str, Cut]) -> SavePlan:
    """Return what this rank could write."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    state: dict[str, Any] = {
        name: _Piece(tensor, cuts[name]) if name in cuts else tensor
        for name, tensor in tensors.items()
    }
    planner.set_up_planner(state)
    return planner.create_local_plan()


def _plan(plans: list[SavePlan]) -> list[SavePlan]:
    """Let each chunk be written by one rank."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planned, _ = planner.create_global_plan(plans)
    return planned


def _take_chunk(rank: int, item: WriteItem) -> Chunk:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Chunk(rank, tuple(chunk.offsets), tuple(chunk.sizes))


# -- what is not sharded must be the same on every rank ------------------------------------------


def _hash_common(flat: Flat) -> dict[str, str]:
    """Return the hash of what must not differ, by what it is called."""
    hashes = {"": xxhash.xxh3_128_hexdigest(json.dumps(flat.tree).encode())}
    for name, info in describe_tensors(flat).items():
        digest = xxhash.xxh3_128(repr((info.dtype_name, info.sizes)).encode())
        for piece in split_bytes(take_bytes(flat.tensors[name])) if name not in flat.cuts else ():
            digest.update(piece)
        hashes[name] = digest.hexdigest()
    return hashes


def _digest(flat: Flat) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(_hash_common(flat)).encode())


def _tell_difference(flat: Flat, peers: Peers) -> None:
    def find(sent: list[dict[str, str]]) -> Sequence[None]:
        differing = [
            f"{name or 'the plain values'} on rank {rank}"
            for name in dict.fromkeys(key for each in sent for key in each)
            for rank, each in enumerate(sent)
            if each.get(name) != sent[0].get(name)
        ]
        raise StateError(
            f"it holds sharded tensors, and what is not sharded differs from that of rank 0:"
            f" {', '.join(differing[:5])}; make it the same on all ranks, or write it with"
            " per_rank=True in a part of its own"
        )

    peers.exchange(lambda: _hash_common(flat), find)


# -- the files of this rank ----------------------------------------------------------------------


def _write(
    folder: Path,
    rank: int,
    flat: Flat,
    names: Sequence[str],
    on_bytes: Callable[[int], None] | None,
) -> RankFile | None:
    if not names:
        return None
    tensors = {name: flat.tensors[name] for name in names}
    infos = [describe(name, tensors[name]) for name in order_names(tensors.items())]
    header, hashes = make_header(infos), {}

    def list_pieces() -> Iterator[files.Piece]:
        yield header
        for info in infos:
            digest = xxhash.xxh3_128()
            for piece in split_bytes(take_bytes(tensors[info.name])):
                digest.update(piece)
                yield piece
                if on_bytes is not None:
                    on_bytes(len(piece))
            hashes[info.name] = digest.hexdigest()

    files.write_file(folder / rank_file_name(rank, "safetensors"), list_pieces())
    chunks = [
        StoredChunk(
            attrs.evolve(info, hash=hashes[info.name]),
            flat.cuts[info.name].offsets if info.name in flat.cuts else (0,) * len(info.sizes),
        )
        for info in infos
    ]
    data = write_list(rank, chunks)
    files.write_file(folder / rank_file_name(rank, "json"), [data])
    return describe_list(data)
