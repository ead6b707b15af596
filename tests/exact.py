"""Runs a scene plainly, and on a bus with saves and cuts, and returns every bit that is left.

A scene builds everything anew from a seed. A run on a bus is cut by an exception right after a
checkpoint is committed; then everything is built again from another seed, as a new process would,
and goes on. Nothing of the first run is kept but the run directory.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

import hookbus
from builtin_plugins import Loop

Where = tuple[str, int, int]  # "body", epoch, batch; or "tail", epoch, 0


@attrs.define
class Parts:
    """What a scene builds: a loader, a body, what is attached, and what runs around the batches."""

    loader: Iterable[Any]
    body: Callable[[int, Any], None]
    attached: Mapping[str, object]
    head: Callable[[int], None] = lambda epoch: None
    tail: Callable[[int], None] = lambda epoch: None
    epochs: int = 3
    options: Mapping[str, Any] = attrs.Factory(dict)


class Cut(Exception):
    """The process is gone."""


CUT: list[Any] = ["cut"]


class _Cutter:
    @hookbus.hookimpl(trylast=True)
    def save_end(self, checkpoint: object) -> None:
        raise Cut


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def run_plain(build: Callable[[], Parts]) -> list[Any]:
    """Run without hookbus; return the digest and the places at which a run can be cut."""
    seed(0)
    parts = build()
    for epoch in range(parts.epochs):
        parts.head(epoch)
        for batch, x in enumerate(parts.loader, 1):
            parts.body(batch, x)
        parts.tail(epoch)
    return digest(parts.attached)


def list_places(build: Callable[[], Parts]) -> list[Where]:
    seed(0)
    parts = build()
    places: list[Where] = []
    for epoch in range(parts.epochs):
        parts.head(epoch)
        batch = 0
        for batch, _ in enumerate(parts.loader, 1):
            places.append(("body", epoch, batch))
        places.append(("tail", epoch, 0))
    return places


def run_bus(
    build: Callable[[], Parts],
    run: Path,
    *,
    saves: Iterable[Where] = (),
    cut: Where | None = None,
    seed_number: int = 0,
    block: tuple[str, ...] = (),
    **options: Any,
) -> list[Any]:
    """Run on a bus, saving at some places; at ``cut`` the run ends after its save.

    Returns the digest, or `CUT` if the run was cut.
    """
    seed(seed_number)
    parts = build()
    saves = {*saves, cut}
    bus = hookbus.HookBus(block=block)
    loop = Loop()
    try:
        bus.attach(**parts.attached, loop=loop)
        bus.resume(run, **options)

        def ask(where: Where) -> None:
            if where in saves:
                if where == cut:
                    bus.register(_Cutter(), "cutter")
                bus.save()

        for epoch in loop.epochs(parts.epochs):
            parts.head(epoch)
            for x in loop.batches(parts.loader, **parts.options):
                parts.body(loop.batch, x)
                ask(("body", epoch, loop.batch))
            parts.tail(epoch)
            ask(("tail", epoch, 0))
        return digest(parts.attached)
    except Cut as cut_short:
        # As a process would: loaders and their workers go now, not when garbage is collected.
        traceback.clear_frames(cut_short.__traceback__)
        return CUT
    finally:
        bus._let_go()


def digest(attached: Mapping[str, object]) -> list[Any]:
    """Return every bit that training leaves behind, to be compared with ``==``."""
    out: list[Any] = []
    for name, component in attached.items():
        if isinstance(component, torch.optim.Optimizer):
            out.append((name, to_bits([dict(group) for group in component.param_groups])))
            for group in component.param_groups:
                out += [(name, to_bits(component.state.get(p, {}))) for p in group["params"]]
        elif isinstance(component, torch.Generator):
            out.append((name, to_bits(component.get_state())))
        elif isinstance(component, torch.nn.Module) or hasattr(component, "last_epoch"):
            out.append((name, to_bits(component.state_dict())))
        elif isinstance(component, (dict, list)):
            out.append((name, to_bits(component)))
    out.append(("torch", to_bits(torch.get_rng_state())))
    out.append(("python", to_bits(random.getstate())))
    out.append(("numpy", to_bits(np.random.get_state(legacy=False))))
    return out


def to_bits(value: Any) -> Any:
    match value:
        case torch.Tensor():
            plain = value.detach().to_dense() if value.is_sparse else value.detach()
            data = plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return (str(value.dtype), tuple(value.shape), value.stride(), data)
        case np.ndarray():
            return (str(value.dtype), value.shape, value.tobytes())
        case Mapping():
            return {key: to_bits(each) for key, each in value.items()}
        case list() | tuple():
            return [to_bits(each) for each in value]
        case _ if callable(value):
            return None
        case float():
            return value.hex()
        case _:
            return value
