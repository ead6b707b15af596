"""What random numbers are drawn from: generators of four kinds, and those of the process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash

Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

# Attributes that lead from a loader to what draws for it.
_PATHS = ("sampler", "batch_sampler", "dataset")


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
            return xxhash.xxh3_64_hexdigest(state.numpy())
        case np.ndarray():
            return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(state))
        case Mapping():
            return "/".join(digest(value) for value in state.values())
        case list():
            return "/".join(digest(value) for value in state)
        case _:
            return format(hash(state), "x")


def find_streams(loader: object) -> dict[str, Generator]:
    """Return the generators held as attributes by a loader, its samplers and its dataset.

    They are named by the way to them, such as ``sampler.generator``; each is named once.
    """
    found: dict[str, Generator] = {}
    seen: set[int] = set()

    def walk(holder: object, path: str) -> None:
        if id(holder) in seen:
            return
        seen.add(id(holder))
        for name, value in getattr(holder, "__dict__", {}).items():
            if isinstance(value, GENERATORS):
                if not isinstance(value, random.SystemRandom) and id(value) not in seen:
                    seen.add(id(value))
                    found[f"{path}{name}"] = value
            elif name in _PATHS:
                walk(value, f"{path}{name}.")

    walk(loader, "")
    return found


def _list_accelerators() -> Iterator[tuple[str, Any]]:
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available() and module.is_initialized():
            yield name, module
