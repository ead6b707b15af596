"""Copies of a state's tensors, in memory that the next save uses again."""

from __future__ import annotations

from collections.abc import Collection

import attrs
import torch

from hookbus.checkpoint.tensors import describe
from hookbus.checkpoint.writer import Part, Section

_Key = tuple[str, str | None, str]  # section, part, tensor


class Staging:
    """Holds what one save has copied, until the next one copies over it.

    It takes as much memory on the host as the state has tensors; from the second save on nothing
    is allocated unless a tensor is new or has another shape, dtype or order of axes.
    """

    def __init__(self) -> None:
        self._buffers: dict[_Key, torch.Tensor] = {}

    def copy(self, sections: Collection[Section]) -> list[Section]:
        """Return the sections as they are now: their tensors may change from here on.

        What the last call returned must not be in use any more.
        """
        before, self._buffers = self._buffers, {}
        copied = [
            attrs.evolve(
                section,
                parts={
                    name: self._copy_part((section.name, name), part, before)
                    for name, part in section.parts.items()
                },
            )
            for section in sections
        ]
        _wait_for_copies(sections)
        return copied

    def _copy_part(
        self, who: tuple[str, str | None], part: Part, before: dict[_Key, torch.Tensor]
    ) -> Part:
        tensors = {}
        for name, live in part.flat.tensors.items():
            key = (*who, name)
            buffer = before.get(key)
            if buffer is None or describe(name, buffer) != describe(name, live):
                with torch.inference_mode(False):  # the next save may stand outside of it
                    buffer = torch.empty_like(live, device="cpu", pin_memory=live.is_cuda)
            _copy_into(buffer, live)
            self._buffers[key] = tensors[name] = buffer
        return attrs.evolve(part, flat=attrs.evolve(part.flat, tensors=tensors))


def _copy_into(buffer: torch.Tensor, live: torch.Tensor) -> None:
    plain = live.resolve_conj().resolve_neg()
    if live.itemsize == 1:  # some of these dtypes cannot be copied by every release
        buffer, plain = buffer.view(torch.uint8), plain.view(torch.uint8)
    with torch.no_grad():
        buffer.copy_(plain, non_blocking=live.is_cuda)


def _wait_for_copies(sections: Collection[Section]) -> None:
    tensors = (t for s in sections for p in s.parts.values() for t in p.flat.tensors.values())
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
