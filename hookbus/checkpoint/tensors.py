"""One tensor in memory: what can be stored, how it is described, its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from hookbus.checkpoint.tensor_info import STORED, TensorInfo


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def find_problem(tensor: torch.Tensor) -> str | None:
    """Say why a dense tensor cannot be stored, or return ``None``."""
    if tensor.is_meta:
        return "on the meta device, so it has no data"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"nested or of layout {tensor.layout}"
    if dtype_name(tensor.dtype) not in STORED:
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
    size = tensor.numel() * tensor.itemsize
    return TensorInfo(name, dtype_name(tensor.dtype), tuple(shape), size, "", stride)


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
