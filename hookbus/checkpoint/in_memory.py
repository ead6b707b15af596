"""A state in memory that is read like one in a file: the same values, the same comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import xxhash

from hookbus.checkpoint.loading import load, load_into
from hookbus.checkpoint.manifest import PartInfo
from hookbus.checkpoint.reader import Metadata, describe_part
from hookbus.checkpoint.tensor_info import TensorInfo, split_bytes
from hookbus.checkpoint.tensors import describe, take_bytes
from hookbus.checkpoint.tree import Flat, flatten


class InMemory:
    """A state, taken apart as if it were saved, in some version of its layout.

    Raises:
        StateError: it holds what cannot be stored.
    """

    def __init__(self, state: object, version: int) -> None:
        self._flat: Flat = flatten(state)
        infos = [describe(name, tensor) for name, tensor in self._flat.tensors.items()]
        self._part = PartInfo(version, self._flat.tree, None, {info.name: info for info in infos})

    def read(self) -> Any:
        """Return the state, once: each tensor is let go of when it has been copied."""
        return load(_Tensors(self._flat, keep=False), self._part)

    def read_into(self, tree: Any, *, who: str, partial: bool) -> Any:
        """Copy the state into ``tree``, as `Checkpoint.read_into` does.

        Raises:
            MismatchError: they do not fit; nothing was changed.
        """
        tensors = _Tensors(self._flat, keep=True)
        return load_into(tensors, self._part, tree, who=who, partial=partial)

    def describe(self) -> Metadata:
        """Return what the state looks like, with the hashes that it would be saved with."""
        tensors = self._flat.tensors
        hashed = {
            name: attrs.evolve(info, hash=xxhash.xxh3_128_hexdigest(take_bytes(tensors[name])))
            for name, info in self._part.tensors.items()
        }
        return describe_part(attrs.evolve(self._part, tensors=hashed))


@attrs.frozen(eq=False)
class _Tensors:
    """Tensors that give their bytes like a file of tensors."""

    flat: Flat
    keep: bool

    def read(self, info: TensorInfo, pieces: Iterator[memoryview]) -> None:
        tensors = self.flat.tensors
        tensor = tensors[info.name] if self.keep else tensors.pop(info.name)
        for piece, data in zip(pieces, split_bytes(take_bytes(tensor)), strict=True):
            piece[:] = data
