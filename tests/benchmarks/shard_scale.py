"""What sharded saves cost with very many ranks, without starting any of them.

Run it by hand: ``python tests/benchmarks/shard_scale.py [RANKS TENSORS]...``. Tensors have twenty
shapes and are cut into rows, one piece a rank. Each line is one size: what a rank and rank 0 plan
at the first save and what travels between them (later saves send one word a rank), the part of the
manifest, and what a rank plans that resumes on half as many. The peak is that of the simulation,
which holds what all ranks send.
"""

from __future__ import annotations

import json
import pickle
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hookbus.checkpoint.dtensors import Cut
from hookbus.checkpoint.rank_lists import RankFile
from hookbus.checkpoint.shard_reader import plan_reading
from hookbus.checkpoint.shard_writer import (
    find_leaders,
    number_patterns,
    plan_all,
    plan_local,
    take_chunk,
)
from hookbus.checkpoint.shards import Chunk, Shards
from hookbus.checkpoint.tensor_info import TensorInfo

WIDTH = 512


class Piece(torch.Tensor):
    """Stands for a sharded tensor of which this rank wants some rows."""

    @staticmethod
    def make(info: TensorInfo, start: int, rows: int) -> Piece:
        piece = torch.empty(0).as_subclass(Piece)
        piece.whole, piece.box = info.shape, ((start, 0), (rows, WIDTH))
        return piece

    def size(self) -> torch.Size:
        return self.whole

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(*map(torch.Size, self.box))]


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    result = function()
    return result, time.perf_counter() - started


def cut_rows(infos: list[TensorInfo], rank: int, ranks: int) -> Iterator[tuple[str, int, int]]:
    for info in infos:
        rows = -(-info.sizes[0] // ranks)
        start = min(rank * rows, info.sizes[0])
        yield info.name, start, min(rows, info.sizes[0] - start)


def make_state(infos: list[TensorInfo], rank: int, ranks: int) -> tuple[dict[str, Any], Any]:
    whole = {info.name: info.sizes for info in infos}
    pieces = [*cut_rows(infos, rank, ranks)]
    tensors = {name: torch.empty((rows, WIDTH), device="meta") for name, _, rows in pieces}
    return tensors, {name: Cut(whole[name], (start, 0)) for name, start, _ in pieces}


def measure(ranks: int, tensors: int) -> str:
    infos = [
        TensorInfo(f"model.layers.{i}.weight", "float32", (rows, WIDTH), rows * WIDTH * 4, "")
        for i in range(tensors)
        for rows in [4096 + 64 * (i % 20)]
    ]
    names = [info.name for info in infos]
    plan_local(*make_state(infos[:1], 0, ranks))  # torch is imported now
    own, own_seconds = timed(lambda: number_patterns(names, *make_state(infos, 0, ranks)))
    sent = [own] + [number_patterns(names, *make_state(infos, r, ranks)) for r in range(1, ranks)]
    leaders, leading_seconds = timed(lambda: find_leaders(sent))
    leading = [infos[i] for i in dict.fromkeys(leaders)]
    plans = [plan_local(*make_state(leading, rank, ranks)) for rank in range(ranks)]
    planned, seconds = timed(lambda: plan_all(plans))
    found: dict[str, list[Chunk]] = {info.name: [] for info in leading}
    for rank, items in enumerate(planned):
        for item in items:
            found[item.index.fqn].append(take_chunk(rank, item))
    layouts = {names[i]: tuple(found[names[leader]]) for i, leader in enumerate(leaders)}
    payload = [len(pickle.dumps(each)) / 1e6 for each in (own, leaders, plans[0])]
    shards = Shards.make(layouts, {rank: RankFile(10**6, "0" * 32, 10**9) for rank in range(ranks)})
    by_name = {info.name: info for info in infos}
    gaps, checked = timed(lambda: list(shards.find_gaps(by_name)))
    assert not gaps
    text, written = timed(lambda: json.dumps(shards.to_json(), separators=(",", ":")))
    read, parsed = timed(lambda: Shards.from_json(layouts, **json.loads(text)))
    live: Any = {
        name: Piece.make(by_name[name], start, rows)
        for name, start, rows in cut_rows(infos, 1, max(2, ranks // 2))
    }
    at = {name: read.get_layout(name) for name in live}
    (_, items), reading = timed(lambda: plan_reading(live, by_name, at))
    needed = len({at[item.storage_index.fqn][item.storage_index.index].rank for item in items})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        f"{ranks:5d} ranks {tensors:6d} tensors | first save: a rank {own_seconds:.2f} s, sends"
        f" {payload[0]:.2f} + {payload[2]:.2f} MB, gets {payload[1]:.2f} MB; rank 0"
        f" {leading_seconds:.1f} + {seconds:.1f} s, peak {peak:.0f} MiB | manifest"
        f" {len(text) / 1e6:.2f} MB, written {written:.2f} s, read {parsed:.2f} s, checked"
        f" {checked:.2f} s | resume: a rank plans {reading:.2f} s, opens {needed} files"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    numbers = [int(each) for each in sys.argv[1:]] or [
        250,
        10_000,
        500,
        10_000,
        1000,
        10_000,
        1000,
        5_000,
    ]
    for ranks, tensors in zip(numbers[::2], numbers[1::2], strict=True):
        print(measure(ranks, tensors), flush=True)
