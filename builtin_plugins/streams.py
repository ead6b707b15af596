"""What random numbers are drawn from: generators of four kinds, and those of the process."""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash

Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

# What is saved of streams: as they were when the epoch was handed out, when its iterator was made,
# and when the run was saved.
SLOTS = ("head", "epoch", "now")

# Attributes that lead from a loader to what draws for it; their plurals, lists of them, as well.
_LEADS = (
    "sampler",
    "batch_sampler",
    "dataset",
    "transform",
    "target_transform",
    "collate_fn",
    "loader",
    "dataloader",
    "iterable",
)
_MEMBERS = 100


def read_stream(generator: Generator) -> Any:
    """Return a copy of a generator's state: plain values, a numpy array, or a uint8 tensor."""
    match generator:
        case torch.Generator():
            return generator.get_state()
        case np.random.Generator():
            return generator.bit_generator.state
        case np.random.RandomState():
            return generator.get_state(legacy=False)
        case _:
            return generator.getstate()


def put_stream(generator: Generator, state: Any) -> None:
    """Put a state from `read_stream` into a generator of the same kind; the state is copied."""
    match generator:
        case torch.Generator():
            generator.set_state(state)
        case np.random.Generator():
            generator.bit_generator.state = state
        case np.random.RandomState():
            generator.set_state(state)
        case _:
            generator.setstate(state)


def seed_stream(generator: Generator, seed: int) -> None:
    """Put a generator where a seed puts a new one of its kind."""
    match generator:
        case torch.Generator():
            generator.manual_seed(seed)
        case np.random.Generator():
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        case np.random.RandomState():
            generator.seed(seed % 2**32)
        case _:
            generator.seed(seed)


def seed_process_streams(seed: int) -> None:
    """Seed python's, numpy's and torch's streams, and those of each accelerator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def name_kind(generator: Generator) -> str:
    """Return what must not differ between save and resume, such as ``Generator PCG64``."""
    match generator:
        case torch.Generator():
            return f"torch.Generator on {generator.device.type}"
        case np.random.Generator():
            return f"numpy Generator {type(generator.bit_generator).__name__}"
        case np.random.RandomState():
            return "numpy RandomState"
        case _:
            return "random.Random"


def read_process_streams() -> dict[str, Any]:
    """Return a copy of python's, numpy's and torch's streams, and of each accelerator in use."""
    streams = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    for name, module in _list_accelerators():
        streams[name] = module.get_rng_state_all()
    return streams


def put_process_streams(streams: Mapping[str, Any]) -> None:
    """Put back what `read_process_streams` returned; the states are copied."""
    random.setstate(streams["python"])
    np.random.set_state(streams["numpy"])
    torch.set_rng_state(streams["torch"])
    for name, module in _list_accelerators():
        # Devices that were not there keep the stream they have.
        for index, state in enumerate(streams.get(name, ())[: module.device_count()]):
            module.set_rng_state(state, index)


def digest(state: object) -> str:
    """Return a digest of a stream's state that is good within this process."""
    match state:
        case torch.Tensor():
            return xxhash.xxh3_64_hexdigest(state.numpy().data)
        case np.ndarray():
            return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(state).data)
        case Mapping():
            return "/".join(digest(value) for value in state.values())
        case list() | set():
            return "/".join(digest(value) for value in state)
        case _:
            try:
                return format(hash(state), "x")
            except TypeError:  # a tuple with something changeable in it
                return repr(state)


def list_holders(loader: object) -> Iterator[tuple[str, object]]:
    """Yield a loader and what it draws through, each once, with the way there.

    Ways are such as ``""``, ``"batch_sampler.sampler"`` or ``"dataset.transform"``.
    """
    seen: set[int] = set()

    def walk(holder: object, way: str) -> Iterator[tuple[str, object]]:
        if id(holder) in seen or isinstance(holder, (type, types.ModuleType)):
            return
        seen.add(id(holder))
        yield way, holder
        for name, value in list_attributes(holder).items():
            if name.rstrip("s") in _LEADS:
                members = value[:_MEMBERS] if isinstance(value, (list, tuple)) else [value]
                for number, member in enumerate(members):
                    place = f"{name}.{number}" if member is not value else name
                    yield from walk(member, f"{way}.{place}" if way else place)

    yield from walk(loader, "")


def list_attributes(holder: object) -> Mapping[str, Any]:
    """Return what an object holds by name: attributes, or what a function was bound to."""
    match holder:
        case functools.partial():
            positional = {str(i): value for i, value in enumerate(holder.args)}
            return {"transform": holder.func, **positional, **holder.keywords}
        case types.MethodType():
            return {"transform": holder.__self__}
        case types.FunctionType(__closure__=tuple(cells)):
            names = holder.__code__.co_freevars
            return {n: c.cell_contents for n, c in zip(names, cells, strict=True) if _is_full(c)}
        case _:
            return getattr(holder, "__dict__", {})


def find_streams(loader: object) -> dict[str, Generator]:
    """Return the generators held by a loader, its samplers, its dataset and what they go through.

    They are named by the way to them and their kind, such as
    ``sampler.generator (torch.Generator on cpu)``; each is named once.
    """
    found: dict[str, Generator] = {}
    seen: set[int] = set()
    for way, holder in list_holders(loader):
        for name, value in list_attributes(holder).items():
            if isinstance(value, GENERATORS) and id(value) not in seen:
                seen.add(id(value))
                if not isinstance(value, random.SystemRandom):
                    found[f"{way}.{name} ({name_kind(value)})".lstrip(".")] = value
    return found


def is_fresh(generator: Generator) -> bool | None:
    """Whether a torch generator stands where its seed put it; of others nobody can tell."""
    if not isinstance(generator, torch.Generator):
        return None
    seeded = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    return torch.equal(seeded.get_state(), generator.get_state())


def _is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _list_accelerators() -> Iterator[tuple[str, Any]]:
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available() and module.is_initialized():
            yield name, module
