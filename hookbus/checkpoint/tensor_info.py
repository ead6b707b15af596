"""What is known of a stored tensor without its data, and how a file of tensors begins.

A file is an ordinary safetensors file: the length of the header, the header, then the bytes of
each tensor in the order of its logical indices. Memory formats are kept beside it, in the manifest.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

from hookbus.errors import FormatError

if TYPE_CHECKING:
    import torch

PIECE = 4 * 2**20  # bytes hashed, read or written at a time: still in the cache for the second


@attrs.frozen
class StoredAs:
    """How a dtype is stored: bytes an element, its name in the file, and axes to add at the end."""

    itemsize: int
    code: str
    axes: tuple[int, ...] = ()


# By the names that torch gives them. The last four travel as the bytes of another dtype, since
# safetensors stores them wrongly.
STORED = {
    "float64": StoredAs(8, "F64"),
    "float32": StoredAs(4, "F32"),
    "float16": StoredAs(2, "F16"),
    "bfloat16": StoredAs(2, "BF16"),
    "float8_e4m3fn": StoredAs(1, "F8_E4M3"),
    "float8_e4m3fnuz": StoredAs(1, "F8_E4M3FNUZ"),
    "float8_e5m2": StoredAs(1, "F8_E5M2"),
    "float8_e5m2fnuz": StoredAs(1, "F8_E5M2FNUZ"),
    "complex64": StoredAs(8, "C64"),
    "int64": StoredAs(8, "I64"),
    "int32": StoredAs(4, "I32"),
    "int16": StoredAs(2, "I16"),
    "int8": StoredAs(1, "I8"),
    "uint64": StoredAs(8, "U64"),
    "uint32": StoredAs(4, "U32"),
    "uint16": StoredAs(2, "U16"),
    "uint8": StoredAs(1, "U8"),
    "bool": StoredAs(1, "BOOL"),
    "complex128": StoredAs(16, "F64", (2,)),
    "complex32": StoredAs(4, "F16", (2,)),
    "float8_e8m0fnu": StoredAs(1, "U8"),
    "float4_e2m1fn_x2": StoredAs(1, "U8"),
}


@attrs.frozen
class TensorInfo:
    """What is known of a stored tensor without its data.

    ``dtype_name`` and ``sizes`` are ``dtype`` and ``shape`` without torch. ``bytes`` is its size
    in the file; ``hash`` the xxh3-128 of these bytes, in hex; ``stride`` is ``None`` where it
    follows from the shape.
    """

    name: str
    dtype_name: str
    sizes: tuple[int, ...]
    bytes: int
    hash: str
    stride: tuple[int, ...] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype, as torch has it."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype_name)
        return dtype

    @property
    def shape(self) -> torch.Size:
        """The shape, as torch has it."""
        import torch

        return torch.Size(self.sizes)

    def __str__(self) -> str:
        return f"{list(self.sizes)} {self.dtype_name}"

    def to_json(self) -> dict[str, object]:
        return {
            "dtype": self.dtype_name,
            "shape": list(self.sizes),
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
        if dtype not in STORED:
            raise FormatError(f"dtype {dtype!r}, which this version cannot read")
        itemsize = STORED[dtype].itemsize
        size = math.prod(shape) * itemsize if are_sizes(shape) else 2**63
        if (size or math.prod(n for n in shape if n) * itemsize) >= 2**63:
            raise FormatError(f"shape is {shape!r}, not a list of sizes")
        if type(bytes) is not int or size != bytes:
            raise FormatError(f"bytes is {bytes!r} and not that of shape {shape} and {dtype}")
        if type(hash) is not str:
            raise FormatError(f"hash is {hash!r}, not a string")
        if stride is not None and not (are_sizes(stride) and _is_dense(shape, stride)):
            raise FormatError(f"stride is {stride!r}, not that of a dense tensor of shape {shape}")
        kept = None if stride is None else tuple(stride)
        return TensorInfo(name, dtype, tuple(shape), bytes, hash, kept)


def are_sizes(values: object) -> bool:
    if type(values) is not list:
        return False
    for n in values:  # noqa: SIM110 - all() takes twice as long, and there may be very many
        if type(n) is not int or not 0 <= n < 2**63:
            return False
    return True


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


_quote = json.JSONEncoder(ensure_ascii=False).encode


def make_header(infos: Iterable[TensorInfo]) -> bytes:
    """Return the head of a safetensors file that holds these tensors in this order."""
    entries = ['"__metadata__":{"format":"pt"}']
    start = 0
    for info in infos:
        stored = STORED[info.dtype_name]
        shape = ",".join(map(str, info.sizes + stored.axes))
        end = start + info.bytes
        entries.append(
            f'{_quote(info.name)}:{{"dtype":"{stored.code}","shape":[{shape}],'
            f'"data_offsets":[{start},{end}]}}'
        )
        start = end
    header = f"{{{','.join(entries)}}}".encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header


def split_bytes(data: memoryview) -> Iterator[memoryview]:
    """Yield views of ``data``, a few MiB each, in order."""
    for start in range(0, len(data), PIECE):
        yield data[start : start + PIECE]
