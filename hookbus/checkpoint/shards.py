"""How the tensors of a part lie in the files of several ranks, as the manifest says it.

A part whose tensors are sharded has a folder, with one file of tensors and one list of what is in
it, as JSON, for each rank that wrote something. The manifest knows which chunk of a tensor is in
whose file, and the hash of each list: a rank that resumes opens those that it needs and no others.
Tensors that are cut alike share a layout, so the manifest grows with the ranks and with the
tensors, and not with the product of the two.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from hookbus.checkpoint.rank_lists import RankFile, rank_name, read_rank_files
from hookbus.checkpoint.tensor_info import TensorInfo, are_sizes
from hookbus.errors import FormatError

FORMAT = 1


@attrs.frozen
class Chunk:
    """A box of a tensor: which rank wrote it, where it begins, how large it is."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


Layout = tuple[Chunk, ...]


@attrs.frozen(eq=False)
class Shards:
    """Where the tensors of a part are: a layout for each, and the ranks that wrote any of it."""

    layouts: tuple[Layout, ...]
    of: Mapping[str, int]
    ranks: Mapping[int, RankFile]

    @classmethod
    def make(cls, layouts: Mapping[str, Layout], ranks: Mapping[int, RankFile]) -> Shards:
        """Take the layout of each tensor; equal ones are kept once."""
        numbers: dict[Layout, int] = {}
        of = {name: numbers.setdefault(each, len(numbers)) for name, each in layouts.items()}
        return cls(tuple(numbers), of, ranks)

    def get_layout(self, name: str) -> Layout:
        return self.layouts[self.of[name]]

    def find_gaps(self, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
        """Say which tensors their chunks do not cover exactly, and which ranks have no file."""
        checked: dict[tuple[int, tuple[int, ...]], str | None] = {}
        for name, info in tensors.items():
            key = self.of[name], info.sizes
            if key not in checked:
                checked[key] = find_gap(info.sizes, self.layouts[self.of[name]])
            if problem := checked[key]:
                yield f"tensor {name!r} ({info}): {problem}"
        for rank in sorted({each.rank for layout in self.layouts for each in layout}):
            if rank not in self.ranks:
                yield f"rank {rank} holds chunks and has no file"

    def to_json(self) -> dict[str, object]:
        return {
            "layouts": [[attrs.astuple(each) for each in layout] for layout in self.layouts],
            "of": list(self.of.values()),
            "ranks": [[rank, *attrs.astuple(file)] for rank, file in self.ranks.items()],
        }

    @staticmethod
    def from_json(
        names: Iterable[str], *, layouts: list[Any], of: list[Any], ranks: list[Any]
    ) -> Shards:
        """Take what a manifest says of the tensors ``names``.

        Raises:
            FormatError: no version could have written it.
        """
        read = tuple(tuple(_read_chunk(*each) for each in layout) for layout in layouts)
        kept = dict(zip(names, of, strict=True))
        if wrong := [
            name for name, i in kept.items() if type(i) is not int or not 0 <= i < len(read)
        ]:
            raise FormatError(
                f"the layout of {wrong[0]!r} is {kept[wrong[0]]!r}, and there is none"
            )
        numbers = [each[0] for each in ranks]
        if not are_sizes(numbers) or len({*numbers}) < len(numbers):
            raise FormatError(f"{numbers!r} are no ranks")
        files = dict(zip(numbers, read_rank_files([each[1:] for each in ranks]), strict=True))
        return Shards(read, kept, files)


def _read_chunk(rank: Any, offsets: Any, sizes: Any) -> Chunk:
    if type(rank) is not int or rank < 0 or not are_sizes(offsets) or not are_sizes(sizes):
        raise FormatError(f"{[rank, offsets, sizes]!r} is no chunk")
    return Chunk(rank, tuple(offsets), tuple(sizes))


# -- is all of it there, and once? ---------------------------------------------------------------


def find_gap(shape: Sequence[int], layout: Layout) -> str | None:
    """Say why chunks do not cover a tensor exactly once, or return ``None``."""
    for each in layout:
        ends = [start + size for start, size in zip(each.offsets, each.sizes, strict=False)]
        fits = len(each.offsets) == len(each.sizes) == len(shape)
        if not fits or any(end > size for end, size in zip(ends, shape, strict=True)):
            return f"the chunk of rank {each.rank} at {list(each.offsets)} is not inside of it"
    chunks = [each for each in layout if each.numel]
    if (pair := _find_overlap(shape, chunks)) is not None:
        one, other = pair
        return (
            f"the chunks of ranks {one.rank} and {other.rank} at {list(one.offsets)} and"
            f" {list(other.offsets)} overlap"
        )
    held, wanted = sum(each.numel for each in chunks), math.prod(shape)
    if held != wanted:
        return f"its chunks hold {held} of {wanted} elements"
    return None


def _find_overlap(shape: Sequence[int], chunks: Sequence[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Sweep over the longest axis: only chunks that are open at the same time can meet."""
    if not shape:
        return (chunks[0], chunks[1]) if len(chunks) > 1 else None
    axis = max(range(len(shape)), key=lambda i: shape[i])
    opened: list[tuple[int, int]] = []
    for i in sorted(range(len(chunks)), key=lambda i: chunks[i].offsets[axis]):
        start = chunks[i].offsets[axis]
        del opened[: bisect_right(opened, (start, len(chunks)))]
        for _, j in opened:
            if _meet(chunks[i], chunks[j]):
                return chunks[j], chunks[i]
        insort(opened, (start + chunks[i].sizes[axis], i))
    return None


def _meet(one: Chunk, other: Chunk) -> bool:
    return all(
        a < b + size_b and b < a + size_a
        for a, size_a, b, size_b in zip(
            one.offsets, one.sizes, other.offsets, other.sizes, strict=True
        )
    )


# -- what one rank wrote -------------------------------------------------------------------------


@attrs.frozen
class StoredChunk:
    """A chunk in a rank's file; ``info`` has the tensor's name and the chunk's own shape."""

    info: TensorInfo
    offsets: tuple[int, ...]


def write_list(rank: int, chunks: Iterable[StoredChunk]) -> bytes:
    """Return the list of what a rank wrote, in the order of its file, as JSON."""
    tensors = {c.info.name: {**c.info.to_json(), "offsets": list(c.offsets)} for c in chunks}
    written = {"format": FORMAT, "rank": rank, "tensors": tensors}
    return json.dumps(written, separators=(",", ":")).encode() + b"\n"


def read_list(folder: Path, rank: int, file: RankFile) -> dict[str, StoredChunk]:
    """Return what a rank wrote, by name.

    Raises:
        CorruptCheckpointError: the list is missing, or a byte of it is not what was written.
        FormatError: no version could have written it.
    """
    path = folder / rank_name(rank, "json")
    data = file.read(path)
    try:
        written = json.loads(data)
        if (written["format"], written["rank"]) != (FORMAT, rank):
            raise FormatError(f"it is of format {written['format']} and rank {written['rank']}")
        return {name: _read_stored(name, **each) for name, each in written["tensors"].items()}
    except MemoryError:
        raise
    except Exception as error:  # the hash fits, so somebody else wrote it
        raise FormatError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error


def _read_stored(name: str, *, offsets: Any, **written: Any) -> StoredChunk:
    if not are_sizes(offsets):
        raise FormatError(f"offsets is {offsets!r}, not a list of sizes")
    return StoredChunk(TensorInfo.from_json(name, **written), tuple(offsets))
