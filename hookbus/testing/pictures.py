"""A state as it was at one moment, kept to be compared bit for bit with that of another."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
import xxhash

from hookbus.checkpoint import Checkpoint, Part, Section, Staging, flatten
from hookbus.checkpoint.tensors import describe, take_bytes

_MOST = 5
"""Differences that are told of one state; the others are counted."""


@attrs.frozen(eq=False)
class Picture:
    """A state, taken apart and copied: it shares no memory with what it was taken of."""

    tree: Any
    tensors: Mapping[str, torch.Tensor]
    version: int = 1

    @classmethod
    def take(cls, state: object) -> Picture:
        """Copy a state as it is now.

        Raises:
            StateError: it holds what cannot be stored.
        """
        return take_section(Section("", "", "", None, None, {None: Part(flatten(state), 1)}))[None]

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing: ``None``, ``{}``, ``[]`` and the like."""
        return not self.tensors and self.tree in (None, {}, [], {"$dict": []}, {"$tuple": []})

    @property
    def digest(self) -> str:
        """A hash of all its bits."""
        infos = {name: describe(name, each) for name, each in self.tensors.items()}
        made = xxhash.xxh3_128(json.dumps([self.version, self.tree]).encode())
        for name, info in infos.items():
            made.update(repr(info).encode())
            made.update(take_bytes(self.tensors[name]))
        return made.hexdigest()

    def list_differences(self, other: Picture, path: str = "") -> list[str]:
        """Say where the other one is not the same, bit for bit; nothing if it is."""
        found = list(self._find(other))
        more = [f"and {len(found) - _MOST} more"] if len(found) > _MOST else []
        return [f"{path}{text}" for text in found[:_MOST]] + more

    def __str__(self) -> str:
        if len(self.tensors) == 1 and _is_leaf(self.tree):
            return _show_tensor(next(iter(self.tensors.values())))
        return reprlib.repr(self.tree)

    def _find(self, other: Picture) -> Iterator[str]:
        if self.version != other.version:
            yield f"version {self.version} and {other.version}"
        for name in {**self.tensors, **other.tensors}:
            first, second = self.tensors.get(name), other.tensors.get(name)
            if first is None or second is None:
                which = "second" if first is None else "first"
                yield f"only the {which} has a tensor {name!r}"
            elif text := _compare_tensors(first, second):
                yield text if _is_leaf(self.tree) else f"tensor {name!r}: {text}"
        yield from _compare_trees(self.tree, other.tree, "")


Pictures = Mapping[str | None, Picture]
"""A section: a picture of each part."""


def take_section(section: Section) -> Pictures:
    """Copy the live state that a plugin handed over."""
    (copied,) = Staging().copy([section])
    return {
        name: Picture(part.flat.tree, part.flat.tensors, part.version)
        for name, part in copied.parts.items()
    }


def read_section(checkpoint: Checkpoint, name: str) -> Pictures:
    """Read a section of a checkpoint."""
    return {
        part: attrs.evolve(
            Picture.take(checkpoint.read(name, part)),
            version=checkpoint.metadata(name, part).version,
        )
        for part in checkpoint.sections[name].parts
    }


def list_differences(first: Pictures, second: Pictures) -> list[str]:
    """Say where two sections are not the same, bit for bit."""
    found = []
    for part in {**first, **second}:
        where = "" if part is None else f"part {part!r}: "
        if part not in first or part not in second:
            which = "second" if part in second else "first"
            found.append(f"only the {which} has {where.rstrip(': ') or 'a state without a part'}")
        else:
            found += first[part].list_differences(second[part], where)
    return found


def _compare_tensors(first: torch.Tensor, second: torch.Tensor) -> str | None:
    was, now = (attrs.evolve(describe("", each), hash="") for each in (first, second))
    if was != now:
        strides = (
            "" if str(was) != str(now) else f", strides {first.stride()} and {second.stride()}"
        )
        return f"{was} and {now}{strides}"
    one, two = (_view_bytes(each) for each in (first, second))
    if torch.equal(one, two):
        return None
    size = first.itemsize
    differs = (one != two).reshape(-1, size).any(1)
    index = int(differs.nonzero()[0])
    place = [int(n) for n in torch.unravel_index(torch.tensor(index), first.shape)]
    values = (_show_element(each, index) for each in (first, second))
    return (
        f"{was}: {int(differs.sum())} of {differs.numel()} elements differ, first {place}:"
        f" {' and '.join(values)}"
    )


def _compare_trees(first: Any, second: Any, path: str) -> Iterator[str]:
    if type(first) is dict and type(second) is dict and not _is_leaf(first):
        for key in {**first, **second}:
            place = path if key[:1] == "$" else f"{path}[{key!r}]"
            if key in first and key in second:
                yield from _compare_trees(first[key], second[key], place)
            else:
                which = "second" if key in second else "first"
                yield f"only the {which} has {place or key}"
    elif type(first) is list and type(second) is list and len(first) == len(second):
        for number, (one, two) in enumerate(zip(first, second, strict=True)):
            yield from _compare_trees(one, two, f"{path}[{number}]")
    elif json.dumps(first) != json.dumps(second):
        yield f"{path or 'the state'}: {_show_node(first)} and {_show_node(second)}"


def _is_leaf(node: Any) -> bool:
    return type(node) is dict and next(iter(node), "") in ("$tensor", "$parameter", "$array")


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _show_element(tensor: torch.Tensor, index: int) -> str:
    if tensor.itemsize == 1 and tensor.dtype not in (torch.bool, torch.int8, torch.uint8):
        return hex(int(_view_bytes(tensor)[index]))  # some have no numbers yet
    return repr(tensor.detach().cpu().reshape(-1)[index].item())


def _show_tensor(tensor: torch.Tensor) -> str:
    values = [_show_element(tensor, n) for n in range(min(3, tensor.numel()))]
    more = ", …" if tensor.numel() > 3 else ""
    return f"{describe('', tensor)} ({', '.join(values)}{more})"


def _show_node(node: Any) -> str:
    if type(node) is dict and len(node) == 1:
        tag, value = next(iter(node.items()))
        return f"{tag.removeprefix('$')} {reprlib.repr(value)}"
    return reprlib.repr(node)
