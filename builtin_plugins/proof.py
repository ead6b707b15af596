"""Proof that data is repeated: one digest of all that went by, equal in every process."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import xxhash

START = ""
_BYTES = 65536


def extend(digest: str, value: object) -> str:
    """Return the digest of what went by, with ``value`` (indices, or a batch) after it.

    Of a tensor or array its dtype, shape and first 64 KiB count; of a tensor that is not on the
    CPU, or not of plain numbers, only the former.
    """
    so_far = xxhash.xxh3_128(digest.encode())
    _feed(so_far, value)
    return so_far.hexdigest()


def _feed(so_far: xxhash.xxh3_128, value: object) -> None:
    match value:
        case torch.Tensor():
            so_far.update(f"{value.dtype} {tuple(value.shape)}".encode())
            if value.device.type == "cpu" and value.layout is torch.strided and _is_plain(value):
                first = value.detach().reshape(-1)[: _BYTES // value.element_size()]
                so_far.update(first.contiguous().view(torch.uint8).numpy().data)
        case np.ndarray() if not value.dtype.hasobject:
            so_far.update(f"{value.dtype} {value.shape}".encode())
            first_ = value.reshape(-1)[: _BYTES // max(value.itemsize, 1)]
            so_far.update(np.ascontiguousarray(first_).view(np.uint8).data)
        case np.ndarray() | np.generic():
            _feed(so_far, value.tolist())
        case Mapping():
            for key, each in value.items():
                _feed(so_far, key)
                _feed(so_far, each)
        case list() | tuple():
            if all(type(each) is int for each in value):
                so_far.update(repr(tuple(value)).encode())
                return
            so_far.update(f"({len(value)}".encode())
            for each in value:
                _feed(so_far, each)
        case int() | str() | bytes() | float() | None:
            so_far.update(repr(value).encode())
        case _:
            # Its repr may hold an address.
            so_far.update(type(value).__qualname__.encode())


def _is_plain(tensor: torch.Tensor) -> bool:
    return not (tensor.is_complex() or tensor.is_quantized or tensor.is_neg())
