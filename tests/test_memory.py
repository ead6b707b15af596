"""A resume takes no more memory than the run, keeps nothing, and moves nothing to a device."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import seed, to_bits
from torch import nn

import hookbus
from builtin_plugins import Loop
from builtin_plugins.search import find_instances

SCRIPT = """
import resource, sys
import torch
import hookbus
from builtin_plugins import Loop

torch.set_num_threads(1)
layers = [torch.nn.Parameter(torch.full((2_500_000,), float(i))) for i in range(20)]
model = torch.nn.ParameterList(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with hookbus.HookBus() as bus:
    loop = Loop()
    bus.attach(model=model, optimizer=optimizer, loop=loop)
    bus.resume(sys.argv[1])
    for _ in loop.steps(int(sys.argv[2])):
        optimizer.zero_grad()
        for layer in layers:
            layer.grad = torch.ones_like(layer)
        optimizer.step()
    if sys.argv[3] == "save":
        bus.save()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, float(model[3].sum()))
"""


def run_child(run: Path, steps: int, then: str) -> tuple[int, str]:
    """Train in a process of its own; return its peak in MiB and a sum of weights."""
    child = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(run), str(steps), then]
    result = subprocess.run(child, capture_output=True, text=True, check=True)
    peak, weights = result.stdout.split()
    return int(peak), weights


def test_the_peak_of_a_resume_is_that_of_the_run(tmp_path) -> None:
    """Source: Lightning-AI/pytorch-lightning#18059; huggingface/transformers#22159."""
    whole, expected = run_child(tmp_path / "whole", 2, "end")
    saved, _ = run_child(tmp_path / "run", 1, "save")
    files = (tmp_path / "run").glob("step-*/*.safetensors")
    assert sum(file.stat().st_size for file in files) > 400_000_000
    resumed, weights = run_child(tmp_path / "run", 2, "end")
    assert weights == expected
    assert saved < 1.3 * whole
    assert resumed < 1.3 * whole


def build() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "tensor": torch.rand(1000),
        "own": torch.Generator(),
    }


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with a checkpoint of three steps."""
    seed(0)
    components, loop = build(), Loop()
    with hookbus.HookBus() as bus:
        bus.attach(**components, loop=loop)
        bus.resume(tmp_path)
        for _ in loop.steps(3):
            components["model"](torch.rand(8, 64)).sum().backward()
            components["optimizer"].step()
            components["optimizer"].zero_grad()
            components["scheduler"].step()
        bus.save()
    return tmp_path


def list_tensors() -> list[torch.Tensor]:
    gc.collect()
    return find_instances([torch.Tensor])


def test_nothing_of_a_checkpoint_is_alive_after_the_resume(run) -> None:
    """Source: huggingface/transformers#12718."""
    seed(1)
    components = build()
    before = {id(tensor) for tensor in list_tensors()}
    assert id(components["tensor"]) in before
    with hookbus.HookBus() as bus:
        bus.attach(**components, loop=Loop())
        bus.resume(run)
        state = [v for each in components["optimizer"].state.values() for v in each.values()]
        known = before | {id(tensor) for tensor in state}
        more = [each for each in list_tensors() if id(each) not in known]
        # Streams are kept to be put back: some KiB, of torch's generators and of numpy's.
        assert {each.dtype for each in more} <= {torch.uint8, torch.uint32}
        assert sum(each.nbytes for each in more) < 64 * 1024
        assert len(more) < 10


class Reader:
    """Takes its state as fresh tensors, and breaks or lets them go."""

    def __init__(self, breaks: bool = False) -> None:
        self.breaks = breaks
        self.tensor: weakref.ref[torch.Tensor] | None = None

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(torch.ones(1000))

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        tensor = resume.read()
        self.tensor = weakref.ref(tensor)
        if self.breaks:
            raise ValueError("broken")


@pytest.mark.parametrize("breaks", [False, True])
def test_what_a_plugin_read_is_let_go_of_even_if_it_breaks(breaks: bool, tmp_path) -> None:
    """Source: huggingface/transformers#12718."""
    with hookbus.HookBus() as bus:
        bus.register(Reader(), "reader")
        bus.resume(tmp_path)
        bus.save(step=1)
    reader = Reader(breaks)
    with hookbus.HookBus() as bus:
        bus.register(reader, "reader")
        with pytest.raises(ValueError, match="broken") if breaks else contextlib.nullcontext():
            bus.resume(tmp_path)
        gc.collect()
        assert reader.tensor is not None
        assert reader.tensor() is None


@contextlib.contextmanager
def use_default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("context", [lambda: torch.device("meta"), use_default_device])
def test_a_default_device_changes_nothing(context, run, tmp_path) -> None:
    """Source: huggingface/lerobot#4009; pytorch/ignite#2076."""

    def resume(context: Any) -> tuple[Any, Any]:
        seed(1)
        components, loop = build(), Loop()
        with hookbus.HookBus() as bus:
            bus.attach(**components, loop=loop)
            with context():
                bus.resume(run)
            optimizer = components["optimizer"]
            bits = [to_bits(optimizer.state[p]) for p in components["model"].parameters()]
            bits += [to_bits(components["model"].state_dict()), to_bits(components["tensor"])]
            bits += [to_bits(torch.get_rng_state()), to_bits(components["own"].get_state())]
            with context():
                saved = bus.save(metrics={"again": 1})
            return bits, saved.read("model")

    expected, weights = resume(contextlib.nullcontext)
    bits, again = resume(context)
    assert bits == expected
    assert to_bits(again) == to_bits(weights)
