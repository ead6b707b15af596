"""The nodes of a tree, read without a tensor: plain values, and what is known of each leaf.

torch is imported only where a node stands for one of its own types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from hookbus.checkpoint.kinds import DECODERS, read_dtype
from hookbus.checkpoint.tensor_info import TensorInfo, are_sizes
from hookbus.errors import CheckpointError, FormatError

LEAVES = ("$tensor", "$parameter", "$array", "$blob")
QUANTIZED = ("qint8", "quint8", "qint32")

Leaf = Callable[[str, Any], object]


def rebuild(tree: Any, leaf: Leaf) -> Any:
    """Put a state together with what ``leaf`` returns for the tag and payload of each leaf.

    Raises:
        FormatError: the tree holds what this version does not know.
    """
    try:
        return _decode(tree, leaf)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise FormatError(f"a state's tree cannot be read: {what}") from error


def list_names(payload: Any) -> list[str]:
    """Return the names of the tensors that a leaf is made of."""
    form = payload[0]
    return [form] if isinstance(form, str) else list(form["parts"].values())


def describe_leaf(tag: str, payload: Any, infos: Mapping[str, TensorInfo]) -> TensorInfo:
    """Return what is known of a leaf; a sparse or quantized tensor is described as a whole."""
    form = payload[0]
    if tag == "$array" and len(payload) > 1:
        _, name, shape = payload
        if read_dtype(name).itemsize * math.prod(shape) != infos[form].bytes:
            raise ValueError(f"an array {shape} of dtype {name} has {infos[form].bytes} bytes")
    if isinstance(form, str):
        return infos[form]
    parts = [infos[name] for name in form["parts"].values()]
    values = infos[form["parts"]["values"]]
    if not are_sizes(form["shape"]):
        raise ValueError(f"shape is {form['shape']!r}, not a list of sizes")
    return TensorInfo(
        values.name.removesuffix(".values"),
        form["is"] if form["is"] in QUANTIZED else values.dtype_name,
        tuple(form["shape"]),
        sum(part.bytes for part in parts),
        "+".join(part.hash for part in parts),
    )


def _decode(node: Any, leaf: Leaf) -> Any:
    if type(node) is list:
        return [_decode(each, leaf) for each in node]
    if type(node) is not dict:
        return node
    tag, payload = next(iter(node.items()), ("", None))
    if tag[:1] != "$":
        return {k: _decode(each, leaf) for k, each in node.items()}
    if tag in LEAVES:
        return leaf(tag, payload)
    if tag in ("$Size", "$dtype", "$device"):
        from hookbus.checkpoint.torch_kinds import TORCH_DECODERS

        return TORCH_DECODERS[tag](_decode(payload, leaf))
    if tag not in DECODERS:
        raise FormatError(f"a state's tree holds {tag!r}, which this version does not know")
    return DECODERS[tag](_decode(payload, leaf))
