"""The lists of what each rank has of a part of its own: what they are called, and their hashes."""

from __future__ import annotations

import builtins
import os
from pathlib import Path
from typing import Any

import attrs
import xxhash

from hookbus.checkpoint.files import describe_failure, open_file
from hookbus.checkpoint.names import file_name
from hookbus.checkpoint.tensor_info import are_sizes
from hookbus.errors import CorruptCheckpointError, FormatError


@attrs.frozen
class RankFile:
    """The list of one rank: its size in bytes, its xxh3-128 in hex, the size of its tensors."""

    bytes: int
    hash: str
    tensors: int

    @classmethod
    def describe(cls, data: builtins.bytes, tensors: int) -> RankFile:
        return cls(len(data), xxhash.xxh3_128_hexdigest(data), tensors)

    def read(self, path: Path) -> builtins.bytes:
        """Return the bytes of the list.

        Raises:
            CorruptCheckpointError: it is missing, or a byte of it is not what was written.
        """
        try:
            with os.fdopen(open_file(path), "rb") as opened:
                data = opened.read(self.bytes + 1)
        except OSError as error:
            raise describe_failure(path, error) from error
        if RankFile.describe(data, self.tensors) != self:
            raise CorruptCheckpointError(
                f"{path}: its hash does not fit its {len(data)} bytes: changed or cut short"
            )
        return data


@attrs.frozen
class Receipt:
    """What a rank wrote of a part: its list, and the size of its file of tensors."""

    list: RankFile
    file: int

    def check(self, path: Path, rank: int) -> None:
        """Find a rank's list at ``path``, and its tensors beside it, as they were written.

        Raises:
            CorruptCheckpointError: they are not: they may lie in another run directory.
        """
        try:
            self.list.read(path)
            tensors = path.with_suffix(".safetensors")
            size = tensors.stat().st_size if tensors.exists() else 0
            if size != self.file:
                raise CorruptCheckpointError(
                    f"{tensors}: has {size} bytes, written were {self.file}"
                )
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(
                f"what rank {rank} wrote is not here: {error}; all ranks need the same run"
                " directory"
            ) from error


def read_rank_files(written: Any) -> tuple[RankFile, ...]:
    """Take what a manifest says of the ranks' lists.

    Raises:
        FormatError: no version could have written it.
    """
    for each in written:
        match each:
            case [int(), str(), int()] if are_sizes([each[0], each[2]]):
                continue
        raise FormatError(f"{each!r} is no list of a rank")
    return tuple(RankFile(*each) for each in written)


def folder_of_ranks(section: str, part: str | None) -> str:
    """Return the name of the folder in which each rank has a file."""
    return file_name(section, part).removesuffix(".safetensors")


def name_list(section: str, part: str | None, rank: int) -> str:
    """Return the name of a rank's list, within the checkpoint; its tensors lie beside it."""
    return f"{folder_of_ranks(section, part)}/{rank_name(rank, 'json')}"


def rank_name(rank: int, suffix: str) -> str:
    """Return the name of a file of one rank."""
    return f"rank{rank:05d}.{suffix}"
