"""What of a state goes into the file of tensors: tensors, numpy arrays and long bytes.

Each becomes a node of the tree that names its tensors. A *form* is how one torch tensor is stored:
the name of a dense one, or a dict with the names of the parts of a sparse or quantized one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy
import torch
from numpy.typing import NDArray

from hookbus.checkpoint.dtensors import Cut, find_cut, is_dtensor, take_local
from hookbus.checkpoint.kinds import read_dtype, spell_type
from hookbus.checkpoint.nodes import QUANTIZED
from hookbus.checkpoint.tensors import dtype_name, find_overlaps, find_problem, view_key
from hookbus.errors import StateError

LONG = 4096  # bytes from which on a bytes or bytearray is stored beside the tensors

KeyPath = tuple["KeyPath | None", object]  # the path of the holder, and the last step
Node = dict[str, Any]

_ARRAYS = {
    *(numpy.dtype(f"int{bits}") for bits in (8, 16, 32, 64)),
    *(numpy.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)),
    *(numpy.dtype(f"float{bits}") for bits in (16, 32, 64)),
    *(numpy.dtype(name) for name in ("bool", "complex64", "complex128")),
}
_COMPRESSED = {
    "sparse_csr": (torch.sparse_csr, torch.Tensor.crow_indices, torch.Tensor.col_indices),
    "sparse_csc": (torch.sparse_csc, torch.Tensor.ccol_indices, torch.Tensor.row_indices),
    "sparse_bsr": (torch.sparse_bsr, torch.Tensor.crow_indices, torch.Tensor.col_indices),
    "sparse_bsc": (torch.sparse_bsc, torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}


def list_steps(path: KeyPath | None) -> list[object]:
    """Return the keys and positions that lead to a place in a state."""
    steps = []
    while path is not None:
        path, step = path
        steps.append(step)
    return steps[::-1]


def show_path(path: KeyPath | None) -> str:
    return "".join(f"[{step!r}]" for step in list_steps(path)) or "the state itself"


@attrs.frozen(eq=False)
class Store:
    """The tensors of one file, by name; one that is met again as the same view keeps its name.

    Of a sharded tensor it has what this rank holds, and its cut.
    """

    tensors: dict[str, torch.Tensor] = attrs.field(factory=dict)
    cuts: dict[str, Cut] = attrs.field(factory=dict)
    _paths: list[KeyPath | None] = attrs.field(factory=list)
    _names: dict[tuple[object, ...], str] = attrs.field(factory=dict)

    def put(self, tensor: torch.Tensor, path: KeyPath | None) -> str:
        """Keep a dense tensor, shared, and return its name in the file.

        Raises:
            StateError: it cannot be stored.
        """
        cut = find_cut(tensor) if is_dtensor(tensor) else None
        if is_dtensor(tensor):
            tensor = take_local(tensor)
        if problem := find_problem(tensor):
            raise StateError(f"a tensor {problem}")
        key = view_key(tensor) if cut is None else _shard_key(tensor, cut)
        if key is not None and key in self._names:
            return self._names[key]
        name = self._choose_name(path)
        self.tensors[name] = tensor.detach()
        if cut is not None:
            self.cuts[name] = cut
        self._paths.append(path)
        if key is not None:
            self._names[key] = name
        return name

    def list_overlaps(self) -> Iterator[str]:
        """Say which tensors share memory without being the same view."""
        for first, second in find_overlaps(list(self.tensors.values())):
            yield (
                f"{show_path(self._paths[second])} (shares memory with"
                f" {show_path(self._paths[first])} and is another view; pass its .clone())"
            )

    def _choose_name(self, path: KeyPath | None) -> str:
        """Join the keys with dots; number the name where that says nothing, or the same twice."""
        steps = list_steps(path)
        wanted = ".".join(s if isinstance(s, str) else repr(s) for s in steps)
        wanted = wanted.encode("utf-8", "replace").decode() or "tensor"
        names = itertools.chain([wanted], (f"{wanted}~{n}" for n in itertools.count(1)))
        return next(n for n in names if n not in self.tensors and n != "__metadata__")


def _shard_key(local: torch.Tensor, cut: Cut) -> tuple[object, ...] | None:
    """Return what two sharded tensors that are one have in common, on a rank without rows too."""
    place = local.untyped_storage().data_ptr()
    shape = (local.dtype, local.storage_offset(), local.shape, local.stride())
    return (local.device, place, cut, *shape) if place else None


# -- from a value to a node ----------------------------------------------------------------------


def encode_tensor(tensor: torch.Tensor, path: KeyPath | None, store: Store) -> Node:
    """Return the node of a tensor or parameter.

    Raises:
        StateError: it cannot be stored.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not is_dtensor(tensor):
        raise StateError(f"{spell_type(tensor)}, a subclass of torch.Tensor")
    tag = "$parameter" if isinstance(tensor, torch.nn.Parameter) else "$tensor"
    grad = tensor.requires_grad and tensor.is_leaf
    return {tag: [_encode_form(tensor.detach(), path, store), grad]}


def _encode_form(tensor: torch.Tensor, path: KeyPath | None, store: Store) -> str | Node:
    layout = str(tensor.layout).removeprefix("torch.")
    if layout == "sparse_coo":
        parts = {"indices": tensor._indices(), "values": tensor._values()}
        extra: Node = {"coalesced": tensor.is_coalesced()}
    elif layout in _COMPRESSED:
        _, compressed, plain = _COMPRESSED[layout]
        parts = {"compressed": compressed(tensor), "plain": plain(tensor)}
        parts["values"] = tensor.values()
        extra = {}
    elif tensor.is_quantized and dtype_name(tensor.dtype) in QUANTIZED:
        layout = dtype_name(tensor.dtype)
        parts = {"values": tensor.int_repr()}
        if tensor.qscheme() is torch.per_tensor_affine:
            extra = {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
        elif tensor.qscheme() is torch.per_channel_affine:
            parts["scales"] = tensor.q_per_channel_scales()
            parts["zero_points"] = tensor.q_per_channel_zero_points()
            extra = {"axis": tensor.q_per_channel_axis()}
        else:
            raise StateError(f"quantized by {tensor.qscheme()}")
    else:
        return store.put(tensor, path)
    names = {part: store.put(value, (path, part)) for part, value in parts.items()}
    return {"is": layout, "shape": list(tensor.shape), "parts": names, **extra}


def encode_array(array: NDArray[Any], path: KeyPath | None, store: Store) -> Node:
    """Return the node of an array; a dtype that torch has not is stored as bytes.

    Raises:
        StateError: it holds objects or records.
    """
    if array.dtype.kind in "OV":
        raise StateError(f"a numpy array of dtype {array.dtype}")
    kept = array.dtype in _ARRAYS
    raw = array if kept else _view_array(array)
    if not raw.flags.writeable or any(s < 0 or s % raw.itemsize for s in raw.strides):
        raw = raw.copy(order="K")  # torch takes no such memory
    name = store.put(torch.from_numpy(raw), path)
    return {"$array": [name] if kept else [name, array.dtype.str, list(array.shape)]}


def _view_array(array: NDArray[Any]) -> NDArray[numpy.uint8]:
    if not array.dtype.itemsize:
        return numpy.empty(0, numpy.uint8)
    return numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)


def encode_blob(data: bytes | bytearray, path: KeyPath | None, store: Store) -> Node:
    """Return the node of long bytes; they are copied, since a shared bytearray cannot grow."""
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return {"$blob": [store.put(tensor, path), type(data).__name__]}


# -- and back ------------------------------------------------------------------------------------


def decode_leaf(tag: str, payload: Any, tensors: Mapping[str, torch.Tensor]) -> object:
    """Return the tensor, parameter, array or bytes of a leaf; memory is shared with ``tensors``."""
    if tag == "$blob":
        data = tensors[payload[0]].numpy().tobytes()
        return data if payload[1] == "bytes" else bytearray(data)
    if tag == "$array":
        array = tensors[payload[0]].numpy()
        return array if len(payload) == 1 else _decode_array(array, *payload[1:])
    form, grad = payload
    tensor = tensors[form] if isinstance(form, str) else _decode_form(form, tensors)
    if tag == "$parameter":
        return torch.nn.Parameter(tensor.detach(), requires_grad=grad)
    return tensor.detach().requires_grad_() if grad else tensor


def _decode_array(raw: NDArray[numpy.uint8], name: str, shape: list[int]) -> NDArray[Any]:
    dtype = read_dtype(name)
    if raw.size and not dtype.itemsize:
        raise ValueError(f"an array of dtype {name} has {raw.size} bytes")
    return raw.view(dtype).reshape(shape) if dtype.itemsize else numpy.ndarray(shape, dtype)


def _decode_form(form: Node, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Put a sparse or quantized tensor together from its parts.

    Indices are checked: a file made to harm must not make torch read memory that is not its own.
    """
    parts = {part: tensors[name] for part, name in form["parts"].items()}
    kind, shape, values = form["is"], torch.Size(form["shape"]), parts["values"]
    if kind == "sparse_coo":
        return torch.sparse_coo_tensor(
            parts["indices"],
            values,
            shape,
            is_coalesced=form["coalesced"],
            check_invariants=True,
        )
    if kind in _COMPRESSED:
        return torch.sparse_compressed_tensor(
            parts["compressed"],
            parts["plain"],
            values,
            shape,
            layout=_COMPRESSED[kind][0],
            check_invariants=True,
        )
    if "axis" in form:
        return torch._make_per_channel_quantized_tensor(
            values, parts["scales"], parts["zero_points"], form["axis"]
        )
    return torch._make_per_tensor_quantized_tensor(values, form["scale"], form["zero_point"])
