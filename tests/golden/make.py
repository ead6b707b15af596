"""Makes the golden checkpoints of the format that is written now: `python tests/golden/make.py`.

A folder that is there is never made anew: a test loads it for ever, as people load what they have.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import random
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime, time, timedelta, timezone
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import data

import hookbus
from builtin_plugins import Loop
from hookbus.checkpoint.manifest import FORMAT

HERE = pathlib.Path(__file__).parent

# What format 1 stores; a later format has a list of its own.
DTYPES = (
    "bfloat16",
    "bool",
    "complex128",
    "complex32",
    "complex64",
    "float16",
    "float32",
    "float4_e2m1fn_x2",
    "float64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int16",
    "int32",
    "int64",
    "int8",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
)


# -- every kind of leaf ---------------------------------------------------------------------------


def make_leaves() -> dict[str, Any]:
    """Return a state with every kind of value that format 1 stores; no number is drawn."""
    shared = torch.arange(6.0)
    matrix = torch.arange(12.0).reshape(3, 4)
    versions = OrderedDict([("weight", torch.ones(2))])
    versions._metadata = OrderedDict([("", {"version": 2})])  # type: ignore[attr-defined]
    return {
        "dtypes": {name: make_tensor(getattr(torch, name)) for name in DTYPES},
        "tensors": {
            "empty": torch.empty(0, 3),
            "empty int64": torch.empty(2, 0, dtype=torch.int64),
            "zero-dim": torch.tensor(-0.0),
            "channels last": torch.arange(24.0)
            .reshape(1, 2, 3, 4)
            .to(memory_format=torch.channels_last),
            "transposed": torch.arange(6).reshape(2, 3).t(),
            "parameter": nn.Parameter(torch.tensor([1.0, float("nan")])),
            "frozen": nn.Parameter(torch.tensor([2.0]), requires_grad=False),
            "leaf": torch.tensor([3.0], requires_grad=True),
            "shared": [shared, (shared, {"again": shared})],
            "columns": [matrix[:, :1], matrix[:, 1:]],
        },
        "sparse": make_sparse(),
        "quantized": {
            "tensor": torch._make_per_tensor_quantized_tensor(
                torch.tensor([1, 2, 3], dtype=torch.int8), 0.5, 1
            ),
            "channel": torch._make_per_channel_quantized_tensor(
                torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8),
                torch.tensor([0.5, 0.25], dtype=torch.float64),
                torch.tensor([0, 1]),
                0,
            ),
        },
        "numpy": {
            **{
                name: np.frombuffer(make_bytes(4 * np.dtype(name).itemsize, name), name)
                for name in ("bool", "int8", "uint16", "int64", "float16", "float64", "complex128")
            },
            "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
            "big endian": np.array([1.5, -0.0], ">f4"),
            "text": np.array(["a", "bcd"]),
            "moments": np.array(["2026-01-02", "NaT"], "datetime64[D]"),
            "empty": np.empty((0, 2), np.float32),
            "zero-dim": np.array(7, np.int16),
            "scalar": np.float32(0.1),
            "moment": np.timedelta64(5, "ms"),
        },
        "generators": {
            "torch": torch.Generator().manual_seed(2**40 + 1).get_state(),
            "pcg64": np.random.Generator(np.random.PCG64(3)).bit_generator.state,
            "philox": np.random.Generator(np.random.Philox(key=4)).bit_generator.state,
        },
        "numbers": [
            *(0, -1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 3**200, True, False),
            *(0.1, -0.0, 5e-324, float("inf"), float("-inf"), float("nan")),
            struct.unpack(">d", bytes.fromhex("fff4000000000001"))[0],  # another nan
            complex(-0.0, float("nan")),
            None,
        ],
        "texts": ["", "plain", "ünï ☃ 𝄞", "\x00\n", "lone \ud800", "$dict"],
        "bytes": [
            b"",
            b"\x00\xff",
            bytearray(b"ab"),
            make_bytes(4096),
            bytearray(make_bytes(4100)),
        ],
        "containers": {
            "empty": [{}, [], (), set(), frozenset(), deque(), OrderedDict(), Counter()],
            "tuple": (1, (2, [3, (4,)])),
            "nested": [[[[[[{"deep": [torch.tensor([5])]}]]]]]],
            "keys": {1: "int", "1": "str", None: 0, (1, 2.5): 1, "$x": 2, "": 3, -0.0: 4, b"k": 5},
            "set": {3, "a", (1, 2)},
            "frozenset": frozenset({1.5}),
            "ordered": OrderedDict([("z", 1), ("a", 2)]),
            "versions": versions,
            "counter": Counter("abca"),
            "defaultdicts": [defaultdict(list, {"a": [1]}), defaultdict(None)],
            "deques": [deque([1, 2], maxlen=3), deque([torch.tensor([1.0])])],
            "slice": slice(1, None, 2),
            "range": range(9, 0, -2),
        },
        "torch": [torch.Size([2, 3]), torch.float8_e5m2, torch.device("cuda", 1)],
        "times": [
            pathlib.PurePosixPath("a/b").joinpath("..").as_posix(),
            date(2026, 1, 2),
            time(1, 2, 3, 4, fold=1),
            datetime(2026, 1, 2, 3, 4, 5, 6),
            datetime(2026, 1, 2, tzinfo=UTC),
            datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=-5), "There")),
            timedelta(-1, 2, 3),
        ],
        "path": pathlib.Path("a/../b"),
    }


def make_bytes(size: int, dtype: str = "") -> bytes:
    """Return bytes of many values; nans with payloads come about among floats."""
    return bytes(i % 2 if dtype == "bool" else (i * 73 + 41) % 256 for i in range(size))


def make_tensor(dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor [2, 3]."""
    plain = bytearray(make_bytes(6 * dtype.itemsize, "bool" if dtype == torch.bool else ""))
    return torch.frombuffer(plain, dtype=torch.uint8).view(dtype).reshape(2, 3)


def make_sparse() -> dict[str, torch.Tensor]:
    dense = torch.tensor([[0.0, 1.0, 0.0, 2.0], [3.0, 0.0, 0.0, 0.0]])
    twice = torch.tensor([[0, 0], [1, 1]])
    return {
        "coo": dense.to_sparse_coo(),
        "coo with an index twice": torch.sparse_coo_tensor(
            twice, torch.tensor([1.0, 2.0]), (2, 2), check_invariants=True
        ),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((1, 2)),
        "bsc": dense.to_sparse_bsc((1, 2)),
    }


# -- a real run -----------------------------------------------------------------------------------


class Run:
    """A small training, built anew from a seed: everything that is attached, and its script."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.model = nn.Sequential(
            nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.3), nn.Linear(3, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.noise = torch.Generator().manual_seed(seed)
        points = data.TensorDataset(torch.arange(24.0).reshape(12, 2))
        self.loader = data.DataLoader(points, batch_size=2, shuffle=True)
        self.average = {"weight": self.model[0].weight.detach().clone(), "updates": 0}
        self.loop = Loop()

    def attach(self, bus: hookbus.HookBus) -> None:
        bus.attach(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            noise=self.noise,
            data=self.loader,
            average=self.average,
            loop=self.loop,
        )

    def train(self, each: Callable[[], None]) -> None:
        for _ in self.loop.epochs(3):
            for (x,) in self.loop.batches(self.loader):
                x = x + torch.randn(x.shape, generator=self.noise) * random.random()
                loss = self.model(x).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.average["weight"].lerp_(self.model[0].weight.detach(), 0.1)
                self.average["updates"] += 1
                each()
            self.scheduler.step()


# -- what must come back --------------------------------------------------------------------------


def describe(value: Any, seen: dict[Any, int] | None = None) -> Any:
    """Return a value as plain text and lists that tell types, bits, strides and what is shared."""
    seen = {} if seen is None else seen
    kind = type(value).__name__
    match value:
        case torch.Tensor():
            return [kind, *describe_tensor(value, seen)]
        case np.ndarray() | np.generic():
            order = value.flags.f_contiguous if isinstance(value, np.ndarray) else None
            return [kind, value.dtype.str, str(value.shape), order, value.tobytes().hex()]
        case float():
            return [kind, struct.pack(">d", value).hex()]
        case complex():
            return [kind, struct.pack(">dd", value.real, value.imag).hex()]
        case bytes() | bytearray():
            return [kind, value.hex()]
        case str():
            return [kind, value.encode("utf-8", "surrogatepass").hex()]
        case set() | frozenset():
            return [kind, sorted(json.dumps(describe(each)) for each in value)]
        case OrderedDict():
            return [kind, describe_items(value, seen), describe(vars(value), seen)]
        case defaultdict():
            return [kind, str(value.default_factory), describe_items(value, seen)]
        case Mapping():
            return [kind, describe_items(value, seen)]
        case deque():
            return [kind, value.maxlen, [describe(each, seen) for each in value]]
        case list() | tuple():
            return [kind, [describe(each, seen) for each in value]]
        case _:
            return [kind, repr(value)]


def describe_items(value: Mapping[Any, Any], seen: dict[Any, int]) -> list[Any]:
    return [[describe(key), describe(each, seen)] for key, each in value.items()]


def describe_tensor(tensor: torch.Tensor, seen: dict[Any, int]) -> Iterator[Any]:
    plain = tensor.detach()
    yield from (str(tensor.dtype), str(tensor.layout), list(tensor.shape), tensor.requires_grad)
    if tensor.is_quantized:
        yield str(tensor.qscheme())
        if tensor.qscheme() is torch.per_tensor_affine:
            yield from (tensor.q_scale(), tensor.q_zero_point())
            plain = tensor.int_repr()
        else:
            yield from (tensor.q_per_channel_axis(), tensor.q_per_channel_scales().tolist())
            yield tensor.q_per_channel_zero_points().tolist()
            plain = tensor.int_repr()
    elif tensor.layout is torch.sparse_coo:
        yield tensor.is_coalesced()
        yield from (describe(plain._indices()), describe(plain._values()))
        return
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from map(describe, (plain.crow_indices(), plain.col_indices(), plain.values()))
        return
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from map(describe, (plain.ccol_indices(), plain.row_indices(), plain.values()))
        return
    elif tensor.numel():
        yield seen.setdefault((plain.data_ptr(), plain.dtype, plain.shape), len(seen))
    yield list(torch.empty_like(plain, device="meta").stride()) if tensor.numel() else []
    yield plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()


def hash_sections(checkpoint: hookbus.Checkpoint) -> dict[str, str]:
    """Return a hash of what each part of each section reads as."""
    return {
        f"{name}/{part or ''}": hash_state(checkpoint.read(name, part))
        for name, section in checkpoint.sections.items()
        for part in section.parts
    }


def hash_state(state: Any) -> str:
    return hashlib.sha256(json.dumps(describe(state)).encode()).hexdigest()


class Keeper:
    """Saves a state as it is, and reads it."""

    kind = "golden"

    def __init__(self, state: Any) -> None:
        self.state = state

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self.state)

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        self.state = resume.read()


# -- making them ----------------------------------------------------------------------------------


def make(folder: pathlib.Path) -> None:
    """Write a run of leaves, a real run in the middle of its second epoch, and its hashes."""
    folder.mkdir()
    with hookbus.HookBus(load_plugins=False) as bus:
        bus.register(Keeper(make_leaves()), "leaves")
        bus.resume(folder / "leaves")
        metrics = {"loss": 0.1, "worst": float("inf"), "none": float("nan"), "count": 2**70}
        bus.save(step=3, metrics=metrics, tag="golden")
    run = Run(seed=1)
    with hookbus.HookBus() as bus:
        run.attach(bus)
        bus.resume(folder / "run")

        def save() -> None:
            if run.loop.step == 9:
                bus.save(metrics={"loss": 0.5})

        run.train(save)
    (checkpoint,) = hookbus.checkpoints(folder / "run")
    text = json.dumps(hash_sections(checkpoint), indent=1)
    (folder / "expected.json").write_text(text + "\n")
    for path in [*folder.glob("*/run.lock"), *folder.glob("*/run.jsonl")]:
        path.unlink()


if __name__ == "__main__":
    torch.set_num_threads(1)
    made = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / f"format_{FORMAT}"
    make(made)
