"""State ↔ tree: plain JSON, with tensors kept aside by name.

Values are taken by exact type from a closed list. ``None``, booleans, strings, lists, dicts with
string keys, numbers of ordinary size are themselves in JSON; everything else is a dict with one key
that starts with ``$`` and says what it is. Nothing is ever imported or called by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import attrs
import numpy
import torch

from hookbus.checkpoint.dtensors import Cut
from hookbus.checkpoint.kinds import BY_TYPE, encode_scalar, spell_type
from hookbus.checkpoint.leaves import (
    LONG,
    KeyPath,
    Store,
    decode_leaf,
    encode_array,
    encode_blob,
    encode_tensor,
    show_path,
)
from hookbus.checkpoint.nodes import rebuild
from hookbus.checkpoint.torch_kinds import TORCH_BY_TYPE
from hookbus.errors import StateError

DEEPEST = 100  # levels; each is a few frames here, and Python stops at a thousand

_BY_TYPE = BY_TYPE | TORCH_BY_TYPE
_SURROGATE = re.compile("[\ud800-\udfff]")


@attrs.frozen(eq=False)
class Flat:
    """A state, taken apart: ``tree`` can be written as JSON, ``tensors`` are the run's own.

    Of a sharded tensor it has what this rank holds; ``cuts`` say where that lies in the whole.
    """

    tree: Any
    tensors: dict[str, torch.Tensor]
    cuts: dict[str, Cut] = attrs.field(factory=dict)

    @property
    def bytes(self) -> int:
        """The size of all tensors; of sharded ones, of what is here."""
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors.values())


def flatten(state: object) -> Flat:
    """Take a state apart into a tree and its tensors by name, without copying a dense tensor.

    Names are the keys that lead to a tensor, joined by dots. The state is not changed.

    Raises:
        StateError: something cannot be stored; each place is named, with its type.
    """
    encoder = _Encoder()
    tree = encoder.encode(state, None)
    problems = [*encoder.problems, *encoder.store.list_overlaps()]
    if problems:
        raise StateError(
            f"{len(problems)} {'value' if len(problems) == 1 else 'values'} cannot be stored:"
            f" {'; '.join(problems)}; store plain values, containers and tensors, such as vars(x)"
            " of an object, x.value of an enum member, tuple(x) of a namedtuple"
        )
    return Flat(tree, encoder.store.tensors, encoder.store.cuts)


def unflatten(tree: Any, tensors: Mapping[str, torch.Tensor]) -> object:
    """Put a state together again; its tensors and arrays share the memory of ``tensors``.

    Raises:
        FormatError: the tree holds what this version does not know.
    """
    made = dict[str, object]()

    def leaf(tag: str, payload: Any) -> object:
        key = json.dumps([tag, payload])
        if key not in made:
            made[key] = decode_leaf(tag, payload, tensors)
        return made[key]

    return rebuild(tree, leaf)


@attrs.frozen(eq=False)
class _Encoder:
    """Walks over a state, and goes on behind what it cannot store, to name all of it at once."""

    store: Store = attrs.field(factory=Store)
    problems: list[str] = attrs.field(factory=list)
    _holders: list[int] = attrs.field(factory=list)

    def encode(self, value: Any, path: KeyPath | None, *, key: bool = False) -> Any:
        """Return the node of a value; inside a key or a set there is no place for tensors."""
        try:
            if _is_plain(value):
                return value
            if id(value) in self._holders:
                raise StateError("a cycle: it holds itself")
            if len(self._holders) == DEEPEST:
                raise StateError("nested too deeply")
            self._holders.append(id(value))
            try:
                return self._encode_node(value, path, key)
            finally:
                self._holders.pop()
        except StateError as error:
            self.problems.append(f"{show_path(path)} ({error})")
            return None

    def _encode_node(self, value: Any, path: KeyPath | None, key: bool) -> Any:
        if isinstance(value, torch.Tensor):
            if key:
                raise StateError("a tensor as a key or in a set")
            return encode_tensor(value, path, self.store)
        kind = type(value)
        if kind is list:
            return [self.encode(each, (path, i), key=key) for i, each in enumerate(value)]
        if kind is dict:
            return self._encode_dict(value, path, key)
        if kind is numpy.ndarray:
            return encode_array(value, path, self.store)
        if kind in (bytes, bytearray) and len(value) >= LONG and not key:
            return encode_blob(value, path, self.store)
        if isinstance(value, numpy.generic) and kind is value.dtype.type:
            return {"$scalar": encode_scalar(value)}
        if kind not in _BY_TYPE:
            raise StateError(spell_type(value))

        def walk(child: object, *steps: object, key: bool = key) -> Any:
            return self.encode(child, (path, steps[0]) if steps else path, key=key)

        return {f"${_BY_TYPE[kind].name}": _BY_TYPE[kind].encode(value, walk)}

    def _encode_dict(self, value: dict[Any, Any], path: KeyPath | None, key: bool) -> Any:
        if all(type(k) is str and k[:1] != "$" and _is_plain(k) for k in value):
            return {k: self.encode(each, (path, k), key=key) for k, each in value.items()}
        pairs = [
            [self.encode(k, (path, k), key=True), self.encode(each, (path, k), key=key)]
            for k, each in value.items()
        ]
        return {"$dict": pairs}


def _is_plain(value: Any) -> bool:
    """Whether a value is itself in JSON and comes back as it was, from any reader of JSON."""
    kind = type(value)
    if kind is str:
        return _SURROGATE.search(value) is None
    if kind is int:
        return bool(-(2**63) <= value < 2**64)
    if kind is float:
        return math.isfinite(value)
    return value is None or kind is bool
