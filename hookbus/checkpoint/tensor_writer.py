"""Writes a file of tensors, each hashed as it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs
import torch
import xxhash

from hookbus.checkpoint import files
from hookbus.checkpoint.tensor_info import TensorInfo, make_header, split_bytes
from hookbus.checkpoint.tensors import describe, order_names, take_bytes


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], on_bytes: Callable[[int], None] | None
) -> tuple[dict[str, TensorInfo], int]:
    """Write a file and bring it to the disk.

    Returns what is known of each tensor, in the order of the file, and the size of the file.

    Raises:
        WriteError: the disk refused.
    """
    infos = [describe(name, tensors[name]) for name in order_names(tensors.items())]
    hashes = dict[str, str]()

    def list_pieces() -> Iterator[files.Piece]:
        yield make_header(infos)
        for info in infos:
            digest = xxhash.xxh3_128()
            for piece in split_bytes(take_bytes(tensors[info.name])):
                digest.update(piece)
                yield piece
                if on_bytes is not None:
                    on_bytes(len(piece))
            hashes[info.name] = digest.hexdigest()

    size = files.write_file(path, list_pieces())
    return {each.name: attrs.evolve(each, hash=hashes[each.name]) for each in infos}, size
