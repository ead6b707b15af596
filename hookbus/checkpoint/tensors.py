"""One tensor and its bytes: what can be stored, how it is described, its place in a file.

A file is an ordinary safetensors file: the length of the header, the header, then the bytes of
each tensor in the order of its logical indices. Memory formats are kept beside it, in the manifest.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence

import attrs
import torch

from hookbus.errors import FormatError

PIECE = 4 * 2**20  # bytes hashed, read or written at a time: still in the cache for the second

# What a tensor is in a safetensors file: the name of its dtype there, and axes to add at the end.
# The last four travel as the bytes of another dtype, since safetensors stores them wrongly.
_STORED: dict[torch.dtype, tuple[str, tuple[int, ...]]] = {
    torch.float64: ("F64", ()),
    torch.float32: ("F32", ()),
    torch.float16: ("F16", ()),
    torch.bfloat16: ("BF16", ()),
    torch.float8_e4m3fn: ("F8_E4M3", ()),
    torch.float8_e4m3fnuz: ("F8_E4M3FNUZ", ()),
    torch.float8_e5m2: ("F8_E5M2", ()),
    torch.float8_e5m2fnuz: ("F8_E5M2FNUZ", ()),
    torch.complex64: ("C64", ()),
    torch.int64: ("I64", ()),
    torch.int32: ("I32", ()),
    torch.int16: ("I16", ()),
    torch.int8: ("I8", ()),
    torch.uint64: ("U64", ()),
    torch.uint32: ("U32", ()),
    torch.uint16: ("U16", ()),
    torch.uint8: ("U8", ()),
    torch.bool: ("BOOL", ()),
    torch.complex128: ("F64", (2,)),
    torch.complex32: ("F16", (2,)),
    torch.float8_e8m0fnu: ("U8", ()),
    torch.float4_e2m1fn_x2: ("U8", ()),
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _STORED}


@attrs.frozen
class TensorInfo:
    """What is known of a stored tensor without its data.

    ``bytes`` is its size in the file; ``hash`` the xxh3-128 of these bytes, in hex; ``stride`` is
    ``None`` where it follows from the shape.
    """

    name: str
    dtype: torch.dtype
    shape: torch.Size
    bytes: int
    hash: str
    stride: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{list(self.shape)} {dtype_name(self.dtype)}"

    def to_json(self) -> dict[str, object]:
        return {
            "dtype": dtype_name(self.dtype),
            "shape": list(self.shape),
            "bytes": self.bytes,
            "hash": self.hash,
            **({} if self.stride is None else {"stride": list(self.stride)}),
        }

    @staticmethod
    def from_json(
        name: str,
        *,
        dtype: str,
        shape: Sequence[int],
        bytes: int,
        hash: str,
        stride: Sequence[int] | None = None,
    ) -> TensorInfo:
        """Take what a manifest says.

        Raises:
            FormatError: no tensor that this version could have written is like that.
        """
        if dtype not in _DTYPES:
            raise FormatError(f"dtype {dtype!r}, which this version cannot read")
        itemsize = _DTYPES[dtype].itemsize
        if not _are_sizes(shape) or math.prod(max(n, 1) for n in shape) * itemsize >= 2**63:
            raise FormatError(f"shape is {shape!r}, not a list of sizes")
        if type(bytes) is not int or math.prod(shape) * itemsize != bytes:
            raise FormatError(f"bytes is {bytes!r} and not that of shape {shape} and {dtype}")
        if type(hash) is not str:
            raise FormatError(f"hash is {hash!r}, not a string")
        if stride is not None and not (_are_sizes(stride) and _is_dense(shape, stride)):
            raise FormatError(f"stride is {stride!r}, not that of a dense tensor of shape {shape}")
        kept = None if stride is None else tuple(stride)
        return TensorInfo(name, _DTYPES[dtype], torch.Size(shape), bytes, hash, kept)


def _are_sizes(values: object) -> bool:
    return type(values) is list and all(type(n) is int and 0 <= n < 2**63 for n in values)


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements lie side by side in some order of the axes; those of size 1 are free."""
    if len(stride) != len(shape):
        return False
    if 0 in shape:
        return True
    reach = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step != reach:
                return False
            reach *= size
    return True


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def find_problem(tensor: torch.Tensor) -> str | None:
    """Say why a dense tensor cannot be stored, or return ``None``."""
    if tensor.is_meta:
        return "on the meta device, so it has no data"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"nested or of layout {tensor.layout}"
    if tensor.dtype not in _STORED:
        return f"of dtype {dtype_name(tensor.dtype)}"
    if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
        return "larger than its storage (expanded, or its storage was freed); pass its .clone()"
    if overlaps_itself(tensor):
        return "overlapping itself; pass its .clone()"
    return None


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory: some stride is smaller than what lies below it."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and tensor.numel():
            if stride < reach:
                return True
            reach += stride * (size - 1)
    return False


def view_key(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return what two tensors that are the same view have in common; ``None`` without elements."""
    if not tensor.numel():
        return None
    bits = (tensor.is_conj(), tensor.is_neg())
    place = (tensor.device, tensor.data_ptr(), tensor.dtype)
    return (*place, tensor.shape, tensor.stride(), *bits)


def find_overlaps(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return pairs of positions of tensors that share a byte of memory, in ascending order."""
    spans = [
        (str(tensor.device), *_span(tensor), position)
        for position, tensor in enumerate(tensors)
        if tensor.numel()
    ]
    pairs = list[tuple[int, int]]()
    cluster, where, start, end = list[int](), "", 0, 0
    for device, first, last, position in sorted(spans):
        if device == where and first < end:
            cluster.append(position)
            end = max(end, last)
        else:
            pairs += _find_pairs(cluster, tensors, start, end)
            cluster, where, start, end = [position], device, first, last
    pairs += _find_pairs(cluster, tensors, start, end)
    return sorted(pairs)


def _find_pairs(
    cluster: Sequence[int], tensors: Sequence[torch.Tensor], start: int, end: int
) -> Iterator[tuple[int, int]]:
    """Mark the bytes of tensors whose spans meet: those of a matrix's columns share none."""
    if len(cluster) < 2:
        return
    marks = torch.zeros(end - start, dtype=torch.bool, device="cpu")
    for index, position in enumerate(cluster):
        view = _view_bytes(marks, tensors[position], start)
        if view.any():
            alone = torch.zeros_like(marks)
            _view_bytes(alone, tensors[position], start).fill_(True)
            earlier = (p for p in cluster[:index] if _view_bytes(alone, tensors[p], start).any())
            other = next(earlier)
            yield min(other, position), max(other, position)
        view.fill_(True)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the one behind its last."""
    last = sum(st * (size - 1) for st, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _view_bytes(marks: torch.Tensor, tensor: torch.Tensor, start: int) -> torch.Tensor:
    """Return the part of ``marks``, one for each byte from ``start``, that ``tensor`` covers."""
    size = tensor.itemsize
    strides = (*(stride * size for stride in tensor.stride()), 1)
    return marks.as_strided((*tensor.shape, size), strides, tensor.data_ptr() - start)


# -- from a tensor to bytes and back ------------------------------------------------------------


def describe(name: str, tensor: torch.Tensor) -> TensorInfo:
    """Describe a dense tensor as it will be stored, the hash still empty.

    Strides are those that ``clone()`` gives it: its own where it is dense, its order of axes where
    it has gaps.
    """
    shape = tensor.shape
    stride: tuple[int, ...] | None = torch.empty_like(tensor, device="meta").stride()
    if stride == torch.empty(shape, device="meta").stride():
        stride = None
    return TensorInfo(name, tensor.dtype, shape, tensor.numel() * tensor.itemsize, "", stride)


def make_header(infos: Iterable[TensorInfo]) -> bytes:
    """Return the head of a safetensors file that holds these tensors in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for info in infos:
        code, axes = _STORED[info.dtype]
        end = start + info.bytes
        entries[info.name] = {
            "dtype": code,
            "shape": [*info.shape, *axes],
            "data_offsets": [start, end],
        }
        start = end
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header


def order_names(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return names in the order in which they are stored: each is aligned if wide ones lead."""
    return [name for name, _ in sorted(tensors, key=lambda pair: -pair[1].itemsize)]


def take_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes in logical order: its own memory if it is dense and on the CPU."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return view_bytes(plain)


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU as bytes, shared."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def allocate(info: TensorInfo) -> torch.Tensor:
    """Return an uninitialised tensor on the CPU, contiguous in the order of its indices."""
    return torch.empty(info.shape, dtype=info.dtype, device="cpu")


def lay_out(tensor: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """Return a contiguous tensor with the strides it had when it was saved."""
    if info.stride is None:
        return tensor
    laid = torch.empty_strided(info.shape, info.stride, dtype=info.dtype, device="cpu")
    if info.dtype.itemsize == 1:  # some of these dtypes cannot be copied by every release
        laid.view(torch.uint8).copy_(tensor.view(torch.uint8))
        return laid
    return laid.copy_(tensor)


def split_bytes(data: memoryview) -> Iterator[memoryview]:
    """Yield views of ``data``, a few MiB each, in order."""
    for start in range(0, len(data), PIECE):
        yield data[start : start + PIECE]
