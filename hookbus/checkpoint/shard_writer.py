"""Writes the sharded tensors of a part: each rank its chunks, once each, in a file of its own.

torch's distributed checkpoint plans who writes what; the files are ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy
import torch
import xxhash
from numpy.typing import NDArray

from hookbus.checkpoint import files
from hookbus.checkpoint.dtensors import Cut
from hookbus.checkpoint.peers import Peers
from hookbus.checkpoint.rank_lists import RankFile, Receipt, rank_name
from hookbus.checkpoint.shards import (
    Chunk,
    Layout,
    Shards,
    StoredChunk,
    find_gap,
    write_list,
)
from hookbus.checkpoint.tensor_info import TensorInfo
from hookbus.checkpoint.tensor_writer import write_tensors
from hookbus.checkpoint.tensors import describe, dtype_name
from hookbus.checkpoint.tree import Flat
from hookbus.errors import CorruptCheckpointError, StateError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

SPREAD = 8
"""Over how many ranks at most the copies of tensors of one sort are spread."""


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


@attrs.frozen(eq=False)
class Plan:
    """What this rank writes of a part, and on rank 0 the layout of each tensor.

    It holds as long as no rank has other tensors or other cuts: then ``fingerprint`` is the same.
    """

    fingerprint: str
    names: list[str]
    layouts: dict[str, Layout]


Plans = dict[str, Plan]  # by folder


def write_shards(
    folder: Path,
    flat: Flat,
    peers: Peers,
    uncompared: Collection[str] = (),
    *,
    plans: Plans | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Shards | None:
    """Write this rank's part of a state into ``folder``; return on rank 0 what the manifest says.

    All ranks call it with the same state, each with what it holds of the sharded tensors; what is
    not sharded is the same on all of them, but for ``uncompared`` tensors, of which rank 0's are
    written. Rank 0 makes the folder. All of it is on the disk when it returns. ``plans`` keeps
    what was planned for the next call.

    Raises:
        WriteError: the disk refused.
        CorruptCheckpointError: what a rank wrote is not here.
    """
    plan = _find_plan(folder, flat, peers, uncompared, {} if plans is None else plans)

    def collect(sent: list[Receipt | None]) -> Sequence[Shards | None]:
        for rank, receipt in enumerate(sent):
            if receipt is not None:
                receipt.check(folder / rank_name(rank, "json"), rank)
        ranks = {rank: each.list for rank, each in enumerate(sent) if each is not None}
        shards = Shards.make(plan.layouts, ranks)
        if gaps := list(shards.find_gaps(describe_tensors(flat))):
            raise CorruptCheckpointError(f"{folder}: {'; '.join(gaps)}")
        files.sync_folder(folder)
        return [shards] + [None] * (len(sent) - 1)

    return peers.exchange(lambda: _write(folder, peers.rank, flat, plan.names, on_bytes), collect)


def _find_plan(
    folder: Path, flat: Flat, peers: Peers, uncompared: Collection[str], plans: Plans
) -> Plan:
    """Take the plan of the last save if it still holds on all ranks, else plan together."""
    known, fingerprint = plans.get(folder.name), _take_fingerprint(flat, uncompared)

    def compare(sent: list[bool]) -> Sequence[bool]:
        files.create_folder(folder)
        return [all(sent)] * len(sent)

    is_known = peers.exchange(
        lambda: known is not None and known.fingerprint == fingerprint, compare
    )
    if is_known:
        assert known is not None
        return known
    left = {*uncompared} if peers.rank else set()
    mine = {name: tensor for name, tensor in flat.tensors.items() if name not in left}
    names = list(flat.tensors)
    ids = number_patterns(names, mine, flat.cuts)
    leaders = peers.exchange(lambda: ids, lambda sent: [find_leaders(sent)] * len(sent))
    led = {name: names[leader] for name, leader in zip(names, leaders, strict=True)}
    leading = {name: mine[name] for name in dict.fromkeys(led.values()) if name in mine}
    layouts: dict[str, Layout] = dict.fromkeys(led.values(), ())

    def decide(sent: list[SavePlan]) -> Sequence[list[str]]:
        planned = plan_all(sent)
        for rank, items in enumerate(planned):
            for item in items:
                layouts[item.index.fqn] += (take_chunk(rank, item),)
        return [[item.index.fqn for item in items] for items in planned]

    chosen = {*peers.exchange(lambda: plan_local(leading, flat.cuts), decide)}
    plan = plans[folder.name] = Plan(
        fingerprint,
        [name for name in names if led[name] in chosen],
        {name: layouts[leader] for name, leader in led.items()},
    )
    return plan


def number_patterns(
    names: Sequence[str], tensors: Mapping[str, torch.Tensor], cuts: Mapping[str, Cut]
) -> NDArray[numpy.int32]:
    """Return a number for each tensor, int32 [tensors]: the same for those that are cut alike."""
    numbers: dict[object, int] = {}
    found = []
    for name in names:
        tensor = tensors.get(name)
        like = tensor is not None and (tensor.dtype, tensor.shape, cuts.get(name))
        found.append(numbers.setdefault(like, len(numbers)))
    return numpy.array(found, numpy.int32)


def find_leaders(numbers: Sequence[NDArray[numpy.int32]]) -> list[int]:
    """Return for each tensor the position of one that every rank cuts alike, and that leads it.

    What holds for its leader holds for a tensor too, so only leaders need planning. There are
    several for tensors of one sort, so that copies on several ranks are not all written by one.
    """
    _, sorts = numpy.unique(numpy.stack(numbers), axis=1, return_inverse=True)
    leaders: dict[int, list[int]] = {}
    counts: Counter[int] = Counter()
    found = []
    for position, sort in enumerate(sorts.reshape(-1).tolist()):
        leading = leaders.setdefault(sort, [])
        if len(leading) < SPREAD:
            leading.append(position)
        found.append(leading[counts[sort] % SPREAD])
        counts[sort] += 1
    return found


def _take_fingerprint(flat: Flat, uncompared: Collection[str]) -> str:
    digest = xxhash.xxh3_128(repr(sorted(uncompared)).encode())
    for name, tensor in flat.tensors.items():
        cut = flat.cuts.get(name)
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape), cut)).encode())
    return digest.hexdigest()


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


def plan_all(plans: list[SavePlan]) -> list[list[WriteItem]]:
    """Let each chunk be written by one rank; return what each rank writes.

    Raises:
        StateError: the chunks of a tensor do not make it up.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        return [plan.items for plan in planner.create_global_plan(plans)[0]]
    except ValueError as error:
        raise StateError(
            f"the pieces on the ranks do not make up the whole: {_find_gaps(plans) or error}"
        ) from error


def _find_gaps(plans: list[SavePlan]) -> str:
    chunks: dict[str, dict[tuple[int, ...], Chunk]] = {}
    shapes = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            assert item.tensor_data is not None
            chunk = take_chunk(rank, item)
            chunks.setdefault(item.index.fqn, {}).setdefault(chunk.offsets, chunk)
            shapes[item.index.fqn] = tuple(item.tensor_data.size)
    gaps = {name: find_gap(shapes[name], tuple(each.values())) for name, each in chunks.items()}
    return "; ".join(f"tensor {name!r}: {gap}" for name, gap in gaps.items() if gap)


def take_chunk(rank: int, item: WriteItem) -> Chunk:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Chunk(rank, tuple(chunk.offsets), tuple(chunk.sizes))


# -- the files of this rank ----------------------------------------------------------------------


def _write(
    folder: Path,
    rank: int,
    flat: Flat,
    names: Sequence[str],
    on_bytes: Callable[[int], None] | None,
) -> Receipt | None:
    if not names:
        return None
    tensors = {name: flat.tensors[name] for name in names}
    infos, size = write_tensors(folder / rank_name(rank, "safetensors"), tensors, on_bytes)
    chunks = [
        StoredChunk(info, flat.cuts[name].offsets if name in flat.cuts else (0,) * len(info.sizes))
        for name, info in infos.items()
    ]
    data = write_list(rank, chunks)
    files.write_file(folder / rank_name(rank, "json"), [data])
    return Receipt(RankFile.describe(data, sum(each.bytes for each in infos.values())), size)
