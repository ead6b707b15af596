"""Runs a scene plainly, and on a bus with saves and cuts, and returns every bit that is left.

A scene builds everything anew from a seed, and its script is written once: it runs on a `Loop`, or
on a `PlainLoop` without any bus. A cut run ends by an exception right after a checkpoint is
committed; then everything is built again from another seed, as a new process would, and goes on.
Nothing of the first run is kept but the run directory.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import hookbus
from builtin_plugins import Loop

Where = tuple[str, int, int]
"""``("body", epoch, batch)`` or ``("tail", epoch, 0)``: a place at which a script saves."""

Save = Callable[[Where], None]

EVERY = pytest.mark.parametrize(
    "every", [3, pytest.param(1, marks=pytest.mark.sweep)], ids=["some places", "every place"]
)
"""For `check_exact`: some of the checkpoints, and all of them in the long sweeps."""


@attrs.define
class Parts:
    """What a scene builds: what is attached, and a script that saves where it is asked to.

    The script defaults to epochs of ``body`` over the batches of ``loader``, with ``head`` and
    ``tail`` around them.
    """

    attached: Mapping[str, object]
    loader: Iterable[Any] = ()
    body: Callable[[int, Any], None] = lambda batch, x: None
    head: Callable[[int], None] = lambda epoch: None
    tail: Callable[[int], None] = lambda epoch: None
    epochs: int = 3
    options: Mapping[str, Any] = attrs.Factory(dict)
    script: Callable[[Any, Save], None] | None = None
    witnesses: Mapping[str, object] = attrs.Factory(dict)  # compared, and not attached
    plugins: Mapping[str, object] = attrs.Factory(dict)  # registered instead of attached

    def run(self, loop: Any, save: Save) -> None:
        if self.script is not None:
            self.script(loop, save)
            return
        for epoch in loop.epochs(self.epochs):
            self.head(epoch)
            for x in loop.batches(self.loader, **self.options):
                self.body(loop.batch, x)
                save(("body", epoch, loop.batch))
            self.tail(epoch)
            save(("tail", epoch, 0))

    def digest(self) -> list[Any]:
        return digest({**self.attached, **self.witnesses})


Build = Callable[[], Parts]


class PlainLoop:
    """What a script runs on when there is no bus: the loops that people write."""

    def __init__(self) -> None:
        self.epoch = self.batch = self.step = 0
        self._finished = self._stepped = False

    def epochs(self, n: int) -> Iterator[int]:
        self._finished = False
        for epoch in range(self.epoch, n):
            self.epoch = epoch
            yield self.epoch
            if self._finished:
                break
        self.epoch += 1

    def batches(self, loader: Iterable[Any], **options: Any) -> Iterator[Any]:
        self.batch = 0
        for x in loader if not self._finished else ():
            yield from self._hand_out(x)
            if self._finished:
                break

    def steps(self, n: int, loader: Iterable[Any] | None = None) -> Iterator[Any]:
        self._finished, self.batch = False, 0
        while self.step < n and not self._finished:
            for x in itertools.count() if loader is None else loader:
                yield from self._hand_out(x)
                if self.step >= n or self._finished:
                    break
            self.epoch, self.batch = self.epoch + 1, 0

    def finish(self) -> None:
        self._finished = True

    def _hand_out(self, x: Any) -> Iterator[Any]:
        self.batch += 1
        self._stepped = False
        yield x
        self.step += self._stepped

    def note_step(self, *_: object) -> None:
        self._stepped = True


class Cut(BaseException):
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


def run_plain(build: Build) -> list[Any]:
    """Run without hookbus; return the digest."""
    parts = _run_plain(build, lambda where: None)
    return parts.digest()


def list_places(build: Build) -> list[Where]:
    """Return the places at which the script saves, in order."""
    places: list[Where] = []
    _run_plain(build, places.append)
    return places


def _run_plain(build: Build, save: Save) -> Parts:
    seed(0)
    parts, loop = build(), PlainLoop()
    handle = register_optimizer_step_post_hook(loop.note_step)
    try:
        parts.run(loop, save)
    finally:
        handle.remove()
    return parts


def run_bus(
    build: Build,
    run: Path,
    *,
    saves: Collection[Where] = (),
    cut: Where | None = None,
    crash: Where | None = None,
    seed_number: int = 0,
    block: tuple[str, ...] = (),
    wait: bool = True,
    **options: Any,
) -> list[Any]:
    """Run on a bus, saving at some places; without ``wait`` behind training.

    At ``cut`` the run ends after its save, at ``crash`` without one. Returns the digest, or `CUT`
    if the run ended before its end.
    """
    bus = hookbus.HookBus(block=block)
    try:
        return _run(bus, build, run, saves, cut, crash, seed_number, wait, options)
    except Cut as gone:
        traceback.clear_frames(gone.__traceback__)
        return CUT
    except Exception as error:
        # As with the end of a process, loaders and their workers go now, and not when garbage is
        # collected, in whatever order.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        bus._let_go()
        del bus  # the traceback keeps this frame


def _run(
    bus: hookbus.HookBus,
    build: Build,
    run: Path,
    saves: Collection[Where],
    cut: Where | None,
    crash: Where | None,
    seed_number: int,
    wait: bool,
    options: Mapping[str, Any],
) -> list[Any]:
    seed(seed_number)
    parts = build()
    loop = Loop()
    for name, plugin in parts.plugins.items():
        bus.register(plugin, name)
    bus.attach(**{n: each for n, each in parts.attached.items() if n not in parts.plugins})
    bus.attach(loop=loop)
    bus.resume(run, **options)

    def save(where: Where) -> None:
        if where == crash:
            raise Cut
        if where == cut:
            bus.register(_Cutter(), "cutter")
        if where == cut or where in saves:
            bus.save(wait=wait)

    parts.run(loop, save)
    return parts.digest()


def cut_and_go_on(build: Build, run: Path, cuts: Iterable[Where], **options: Any) -> list[Any]:
    """Cut a run at each place in turn, and let it end."""
    for number, cut in enumerate(cuts):
        assert run_bus(build, run, cut=cut, seed_number=number, **options) is CUT, cut
    return run_bus(build, run, seed_number=99, **options)


def check_exact(build: Build, folder: Path, *, every: int = 1) -> None:
    """Hold a scene to both laws.

    On a bus, saving or not, it ends with the bits of the plain loop; and so does a run that goes
    on from a checkpoint of any place (or of each ``every``-th one).
    """
    expected = run_plain(build)
    assert run_bus(build, folder / "silent") == expected, "transparency"
    whole = folder / "saving"
    assert run_bus(build, whole, saves=list_places(build)) == expected, "transparency, saving"
    for checkpoint in hookbus.checkpoints(whole)[::every]:
        run = folder / f"from-{checkpoint.path.name}"
        shutil.copytree(checkpoint.path, run / checkpoint.path.name, copy_function=os.link)
        assert run_bus(build, run, seed_number=99) == expected, checkpoint.path.name


def digest(components: Mapping[str, object]) -> list[Any]:
    """Return every bit that training leaves behind, to be compared with ``==``."""
    out: list[Any] = []
    for name, component in components.items():
        if isinstance(component, torch.optim.Optimizer):
            out.append((name, to_bits([dict(group) for group in component.param_groups])))
            for group in component.param_groups:
                out += [(name, to_bits(component.state.get(p, {}))) for p in group["params"]]
        elif isinstance(component, torch.Generator):
            out.append((name, to_bits(component.get_state())))
        elif isinstance(component, random.Random):
            out.append((name, component.getstate()))
        elif isinstance(component, np.random.Generator):
            out.append((name, to_bits(component.bit_generator.state)))
        elif isinstance(component, torch.utils.data.DataLoader):
            continue
        elif hasattr(component, "state_dict"):
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
