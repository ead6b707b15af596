"""The files of a sharded part, opened and checked: nothing here needs torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import attrs

from hookbus.checkpoint.manifest import NAME, PartInfo, describe_file
from hookbus.checkpoint.rank_lists import rank_name
from hookbus.checkpoint.shards import Shards, StoredChunk, read_list
from hookbus.checkpoint.tensor_file import TensorFile, open_tensors
from hookbus.errors import CorruptCheckpointError


@attrs.frozen(eq=False)
class RankShards:
    """What one rank wrote, open for reading."""

    file: TensorFile
    chunks: Mapping[str, StoredChunk]


@contextmanager
def open_rank(folder: Path, shards: Shards, rank: int) -> Iterator[RankShards]:
    """Open what one rank wrote; its list, and size and header of its file, are checked.

    Raises:
        CorruptCheckpointError: it is missing, or not what was written.
    """
    if rank not in shards.ranks:
        raise CorruptCheckpointError(f"{folder}: rank {rank} holds chunks and has no file")
    chunks = read_list(folder, rank, shards.ranks[rank])
    infos = {name: chunk.info for name, chunk in chunks.items()}
    path = folder / rank_name(rank, "safetensors")
    with open_tensors(path, describe_file(path.name, infos.values()), infos) as file:
        yield RankShards(file, chunks)


def find_shard_damage(
    folder: Path,
    part: PartInfo,
    ranks: Collection[int | None],
    hashes: bool,
    on_bytes: Callable[[int], None] | None,
) -> Iterator[tuple[str, str | None, str]]:
    """Yield file, tensor and what is wrong, for all that some ranks wrote and is not as it was.

    A hole or an overlap among the chunks, a lost file, a list that says other chunks than the
    manifest, a changed byte; with ``hashes`` those of the tensors too.
    """
    assert part.shards is not None
    yield from ((NAME, None, f"{folder}: {gap}") for gap in part.shards.find_gaps(part.tensors))
    expected: dict[int, dict[str, tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for name in part.tensors:
        for chunk in part.shards.get_layout(name):
            if chunk.rank in ranks:
                expected.setdefault(chunk.rank, {})[name] = chunk.offsets, chunk.sizes
    for rank in (each for each in ranks if each is not None):
        file = f"{folder.name}/{rank_name(rank, 'safetensors')}"
        try:
            with open_rank(folder, part.shards, rank) as opened:
                found = {n: (c.offsets, c.info.sizes) for n, c in opened.chunks.items()}
                if found != expected.get(rank, {}):
                    yield (
                        file,
                        None,
                        f"{opened.file.path}: holds other chunks than the manifest says",
                    )
                for stored in opened.chunks.values() if hashes else ():
                    try:
                        opened.file.check(stored.info, on_bytes)
                    except CorruptCheckpointError as error:
                        yield file, stored.info.name, str(error)
        except CorruptCheckpointError as error:
            yield file, None, str(error)
