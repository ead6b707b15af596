"""Trains a small network that is sharded over several processes, and tells every bit of it.

Started by torchrun, with a list of things to do and their arguments as JSON.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from crew import tell
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hookbus
from builtin_plugins import FSDP2, Loop

SIZES = (6, 12, 4, 3)  # tensor parallelism of torch needs even ones in the middle


class Block(nn.Linear):
    """What is sharded by itself."""


class Net(nn.Module):
    """Layers of odd sizes, one frozen, one without gradients, two that are one, and a buffer that
    is in no state_dict.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = Block(SIZES[0], SIZES[1])
        self.second = Block(SIZES[1], SIZES[2])
        self.last = nn.Linear(SIZES[2], SIZES[3], bias=False)
        self.again = nn.Linear(SIZES[2], SIZES[3], bias=False)
        self.again.weight = self.last.weight
        self.unused = nn.Linear(2, 1)
        self.frozen = nn.Linear(SIZES[3], 5).requires_grad_(False)
        self.register_buffer("scale", torch.full((SIZES[0],), 0.5), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.second(torch.tanh(self.first(x * self.scale)))
        return self.frozen(self.last(hidden) + self.again(hidden.sin()))


def build(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


PLAN = {"first": ColwiseParallel(), "second": RowwiseParallel()}


def shard(model: nn.Module, how: str) -> nn.Module:
    """Spread a model over all ranks in one of the ways that people do."""
    size = dist.get_world_size()
    if how == "plain":
        return model
    if how == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if how == "tp":
        return parallelize_module(model, init_device_mesh("cpu", (size,)), PLAN)
    if how == "2d":
        across = 2 if size % 2 == 0 else 1
        mesh = init_device_mesh("cpu", (size // across, across), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], PLAN)
        return fully_shard(model, mesh=mesh["dp"])
    for layer in (model.first, model.second):
        fully_shard(layer)
    return fully_shard(model)


STRATEGIES: dict[str, dict[str, Any]] = {
    "first": {"weights_first": True},
    "behind": {},
    "meta": {"initial": lambda: build(0)},
}


def gather(state: Any) -> Any:
    """Return a state with every tensor whole, as text that stands for its bits."""
    if isinstance(state, torch.Tensor):
        whole = state.full_tensor() if isinstance(state, DTensor) else state
        data = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(state.dtype), list(state.shape), hashlib.sha256(data).hexdigest()[:12]]
    if isinstance(state, dict):
        return {str(key): gather(each) for key, each in state.items()}
    if isinstance(state, list | tuple):
        return [gather(each) for each in state]
    return state


def take_bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the bits of weights and moments by names that no wrapper changes."""
    weights = {k.removeprefix("module."): v for k, v in model.state_dict().items()}
    moments = {
        name.removeprefix("module."): optimizer.state.get(parameter, {})
        for name, parameter in model.named_parameters()
    }
    return {"weights": gather(weights), "moments": gather(moments)}


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)


def run(
    folder: str,
    how: str,
    steps: int,
    *,
    seed: int = 0,
    save: str = "at the end",
    still: tuple[str, ...] = (),
    freeze: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Go on with a run for some steps, and tell the bits right after the resume and at the end.

    ``still`` are frozen all along, ``freeze`` once it has trained.
    """
    with torch.device("meta" if how == "meta" else "cpu"):
        model: nn.Module = build(seed)
    for name in still:
        model.get_parameter(name).requires_grad_(False)
    events = Events()
    with hookbus.HookBus() as bus:
        loop = Loop()
        bus.register(events, "events")
        bus.attach(model=model, loop=loop)
        if how in STRATEGIES:
            bus.register(FSDP2((Block,), **STRATEGIES[how]), "strategy")
        with bus.resuming(folder) as resume:
            resume.configure_sharded(None if how in STRATEGIES else lambda _: shard(model, how))
            model = bus.components["model"]
            optimizer = make_optimizer(model)
            bus.attach(optimizer=optimizer)
        told = {"step": loop.step, "before": take_bits(model, optimizer), "events": events.fired}
        for _ in loop.steps(loop.step + steps):
            x = torch.randn(4, SIZES[0], generator=torch.Generator().manual_seed(loop.step))
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
            if save == "behind training":
                bus.save(wait=False)
        for name in freeze:
            model.get_parameter(name).requires_grad_(False)
        if save == "at the end":
            bus.save()
        told["after"] = take_bits(model, optimizer)
    return told


class Events:
    """Writes down which restore events fire."""

    def __init__(self) -> None:
        self.fired: list[str] = []

    @hookbus.hookimpl
    def restore_model(self) -> None:
        self.fired.append("restore_model")

    @hookbus.hookimpl
    def configure_sharded(self) -> None:
        self.fired.append("configure_sharded")


def run_exactly(folder: str, how: str) -> dict[str, Any]:
    """Train at once and in two parts, and tell whether the bits are those of one run."""
    whole = run(f"{folder}-whole", how, 6, save="never")
    behind = run(folder, how, 3, save="behind training")
    rest = run(folder, how, 3, seed=9)
    return {
        "begins alike": whole["before"] == behind["before"],
        "comes back": rest["before"] == behind["after"] and rest["step"] == 3,
        "ends alike": rest["after"] == whole["after"] != behind["after"],
        "events": rest["events"],
    }


# -- memory ---------------------------------------------------------------------------------------

MIB = 2**20


def read_kernel(file: str, key: str) -> int:
    """Return a number that the kernel keeps of this process."""
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


class Stack(nn.Module):
    """Matrices of 1 KiB a row."""

    def __init__(self, matrices: int, mebibytes: int) -> None:
        super().__init__()
        for i in range(matrices):
            self.register_parameter(f"m{i}", nn.Parameter(torch.empty(mebibytes * 1024, 256)))


class Peak:
    """The peak of this process's memory while something runs, in MiB above what was there."""

    def __enter__(self) -> Peak:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        self._before = read_kernel("status", "VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.mebibytes = (read_kernel("status", "VmHWM") - self._before) / 1024


def measure(folder: str, matrices: int, mebibytes: int, save: bool) -> dict[str, Any]:
    """Tell how much memory a save or a resume takes, and how much is read, on this rank."""
    with torch.device("meta"):
        model = Stack(matrices, mebibytes)
    told: dict[str, Any] = {}
    warm_up = fully_shard(nn.Linear(2, 2))  # what torch needs once
    torch.optim.SGD(warm_up.parameters(), lr=0.1, momentum=0.9).step()
    with hookbus.HookBus() as bus, Peak() as resuming:
        loop = Loop()
        bus.attach(model=model, loop=loop)
        bus.register(
            FSDP2(initial=None if not save else lambda: build_stack(matrices, mebibytes)), "s"
        )
        with bus.resuming(folder) as resume:
            resume.configure_sharded()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            bus.attach(optimizer=optimizer)
        if save:
            for _ in loop.steps(1):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                optimizer.zero_grad()
            with Peak() as saving:
                bus.save()
            told["saving"] = saving.mebibytes
    told["resuming"] = resuming.mebibytes
    shards = [each.to_local() for each in model.parameters()]
    moments = [each["momentum_buffer"].to_local() for each in optimizer.state.values()]
    told["own"] = sum(each.nbytes for each in shards + moments) / MIB
    told["bits"] = take_bits(model, optimizer)
    checkpoint = hookbus.checkpoints(folder)[-1]
    checkpoint.verify()
    before = read_kernel("io", "rchar")
    checkpoint.read_into("model", model.state_dict())
    told["read"] = (read_kernel("io", "rchar") - before) / MIB
    told["shards"] = sum(each.nbytes for each in shards) / MIB
    return told


def build_stack(matrices: int, mebibytes: int) -> Stack:
    torch.manual_seed(0)
    stack = Stack(matrices, mebibytes)
    for parameter in stack.parameters():
        nn.init.normal_(parameter)
    return stack


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    functions: dict[str, Callable[..., Any]] = {
        "run": run,
        "exactly": run_exactly,
        "measure": measure,
    }
    tell([functions[name](**given) for name, given in json.loads(sys.argv[1])])
    gc.collect()  # what is sharded must be gone before its processes part
    dist.destroy_process_group()
