"""What the plain types of torch are as JSON: the rest of the closed list."""

from __future__ import annotations

import torch

from hookbus.checkpoint.kinds import Kind
from hookbus.checkpoint.tensors import dtype_name

_DTYPES = {dtype_name(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}

_KINDS = (
    Kind("Size", torch.Size, lambda v, walk: walk(list(v)), torch.Size),
    Kind("dtype", torch.dtype, lambda v, walk: dtype_name(v), lambda p: _DTYPES[p]),
    Kind("device", torch.device, lambda v, walk: str(v), torch.device),
)
TORCH_BY_TYPE = {kind.type: kind for kind in _KINDS}
TORCH_DECODERS = {f"${kind.name}": kind.decode for kind in _KINDS}
