"""Scenes for the exactness tests: loaders, samplers and bodies as people write them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from exact import Parts
from torch import nn
from torch.utils import data

SAMPLES, BATCH = 18, 4


class Points(data.Dataset):
    """float32 [4] a sample, with noise from the streams that are named."""

    def __init__(self, *noise: str) -> None:
        self.noise = noise
        self.own = np.random.default_rng(5) if "own" in noise else None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        x = float(index)
        if "torch" in self.noise:
            x += torch.rand(1).item()
        if "python" in self.noise:
            x += random.random()
        if "numpy" in self.noise:
            x += np.random.rand()
        if "own" in self.noise:
            x += self.own.random()
        if "index" in self.noise:
            x += torch.rand(1, generator=torch.Generator().manual_seed(index)).item()
        if "reseed" in self.noise:
            torch.manual_seed(index)
            x += torch.rand(1).item()
        return torch.full((4,), x)


class Stream(data.IterableDataset):
    """The same points as a stream, plain, with noise, or through a shuffle buffer."""

    def __init__(self, kind: str = "plain") -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = data.get_worker_info()
        indices = list(range(SAMPLES))
        if worker is not None:
            indices = indices[worker.id :: worker.num_workers]
        buffer: list[int] = []
        for i in indices:
            if self.kind == "plain":
                yield torch.full((4,), float(i))
            elif self.kind == "torch":
                yield torch.full((4,), i + torch.rand(1).item())
            else:
                buffer.append(i)
                if len(buffer) >= 6:
                    yield torch.full((4,), float(buffer.pop(random.randrange(len(buffer)))))
        while buffer:
            yield torch.full((4,), float(buffer.pop(random.randrange(len(buffer)))))


class EagerGlobal(data.Sampler):
    def __iter__(self):
        return iter(torch.randperm(SAMPLES).tolist())

    def __len__(self):
        return SAMPLES


class EagerPython(EagerGlobal):
    def __iter__(self):
        indices = list(range(SAMPLES))
        random.shuffle(indices)
        return iter(indices)


class LazyGlobal(EagerGlobal):
    """Draws one index at a time from the stream that dropout uses too; has no memory."""

    def __iter__(self):
        for _ in range(SAMPLES):
            yield int(torch.randint(SAMPLES, (1,)))


class LazyMemory(EagerGlobal):
    """Draws without replacement, lazily: what is left is a memory that nobody saves."""

    def __iter__(self):
        left = list(range(SAMPLES))
        while left:
            yield left.pop(int(torch.randint(len(left), (1,))))


class OwnRandom(EagerGlobal):
    def __init__(self):
        self.stream = random.Random(3)

    def __iter__(self):
        indices = list(range(SAMPLES))
        self.stream.shuffle(indices)
        return iter(indices)


class OwnEpoch(EagerGlobal):
    """Counts its own epochs, and saves the count."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        return iter(torch.randperm(SAMPLES, generator=generator).tolist())

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


class ForgetfulEpoch(EagerGlobal):
    """The same, and nobody saves the count."""

    def __init__(self):
        self.epoch = 0

    __iter__ = OwnEpoch.__iter__


class UnevenBatches(data.Sampler):
    """Batches of 3, 4 or 5, in an order from numpy's global stream."""

    def __iter__(self):
        order, i = np.random.permutation(SAMPLES).tolist(), 0
        while i < SAMPLES:
            size = 3 + i % 3
            yield order[i : i + size]
            i += size

    def __len__(self):
        return 5


def make_loader(
    kind: str = "shuffle", noise: tuple[str, ...] = (), generator: bool = False, **options: Any
) -> data.DataLoader:
    own = torch.Generator().manual_seed(77) if generator else None
    points = Points(*noise)
    options = {"batch_size": BATCH, "generator": own, **options}
    match kind:
        case "sequential":
            pass
        case "shuffle":
            options["shuffle"] = True
        case "single":
            options |= {"batch_size": None, "shuffle": True}
        case "weighted":
            weights = torch.arange(1.0, SAMPLES + 1)
            options["sampler"] = data.WeightedRandomSampler(weights, SAMPLES, generator=own)
        case "replacement":
            options["sampler"] = data.RandomSampler(
                points, replacement=True, num_samples=38, generator=own
            )
        case "subset":
            options["sampler"] = data.SubsetRandomSampler(range(SAMPLES), generator=own)
        case "distributed":
            options["sampler"] = data.DistributedSampler(points, num_replicas=2, rank=0)
        case "uneven":
            del options["batch_size"]
            options["batch_sampler"] = UnevenBatches()
        case "batch sampler":
            del options["batch_size"]
            sampler = data.RandomSampler(points, generator=own)
            options["batch_sampler"] = data.BatchSampler(sampler, BATCH, drop_last=True)
        case _ if kind.startswith("stream"):
            return data.DataLoader(Stream(kind.partition(" ")[2] or "plain"), **options)
        case _:
            samplers = {
                "eager": EagerGlobal,
                "eager python": EagerPython,
                "lazy": LazyGlobal,
                "lazy memory": LazyMemory,
                "own random": OwnRandom,
                "own epoch": OwnEpoch,
                "forgetful epoch": ForgetfulEpoch,
            }
            options["sampler"] = samplers[kind]()
    return data.DataLoader(points, **options)


def make_body(
    model: nn.Module, optimizer: torch.optim.Optimizer, accumulate: int = 1
) -> Callable[[int, torch.Tensor], None]:
    def body(batch: int, x: torch.Tensor) -> None:
        loss = ((model(x.view(-1, 4) / SAMPLES) - 1) ** 2).mean() / accumulate
        loss.backward()
        if batch % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()

    return body


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def data_scene(
    kind: str = "shuffle",
    noise: tuple[str, ...] = (),
    *,
    attach: bool = True,
    accumulate: int = 1,
    validation: Callable[[], data.DataLoader] | None = None,
    head: Callable[[], object] = lambda: None,
    tail: Callable[[], object] = lambda: None,
    epochs: int = 3,
    options: dict[str, Any] | None = None,
    **loader_options: Any,
) -> Callable[[], Parts]:
    """A dropout network that is trained from one kind of loader."""

    def build() -> Parts:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = make_loader(kind, noise, **loader_options)
        held_out = validation() if validation else None

        def run_head(epoch: int) -> None:
            if kind == "distributed":
                loader.sampler.set_epoch(epoch)
            head()

        def run_tail(epoch: int) -> None:
            if held_out is not None:
                for _ in held_out:
                    torch.rand(1)
            tail()

        attached: dict[str, object] = {"model": model, "optimizer": optimizer}
        if attach:
            attached["data"] = loader
        if held_out is not None and attach:
            attached["held_out"] = held_out
        if loader.generator is not None:
            attached["witness"] = loader.generator  # so that its bits are compared at the end
        body = make_body(model, optimizer, accumulate)
        return Parts(attached, loader, body, run_head, run_tail, epochs, options or {})

    return build


def make_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 1)
    )


def make_matrices() -> nn.Module:
    """Only matrices, for optimizers that take nothing else."""
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 1, bias=False))


class Embedding(nn.Module):
    """Has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SAMPLES + 1, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x[:, 0] * SAMPLES).round().long()).sum(1)


def training_scene(
    make_optimizer: Callable[[Any], Any],
    make_scheduler: Callable[[Any], Any] | None = None,
    *,
    net: Callable[[], nn.Module] = make_net,
    scheduled: str = "batch",
    accumulate: int = 1,
    clear: str = "last",
    overflow: tuple[int, ...] | None = None,
    ema: bool = False,
    samples_a_batch: int = 5,
) -> Callable[[], Parts]:
    """A run of two epochs; ``overflow`` has a gradient scaler and the batches that overflow."""

    def build() -> Parts:
        model = net()
        optimizer = make_optimizer(model.parameters())
        scheduler = make_scheduler(optimizer) if make_scheduler else None
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3, backoff_factor=0.25)
        scaler = None if overflow is None else scaler
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True) if ema else None
        seen = {"loss": 0.0}

        def find_loss(x: torch.Tensor) -> torch.Tensor:
            return ((model(x / SAMPLES) - 1) ** 2).mean() / accumulate

        def body(batch: int, x: torch.Tensor) -> None:
            if clear == "first" and (batch - 1) % accumulate == 0:
                optimizer.zero_grad()
            if clear == "first, zeros" and (batch - 1) % accumulate == 0:
                optimizer.zero_grad(set_to_none=False)
            loss = find_loss(x)
            seen["loss"] += loss.item()
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(lambda: close(x))
            elif scaler is None:
                loss.backward()
                if batch % accumulate == 0:
                    optimizer.step()
            else:
                scaler.scale(loss * (float("inf") if batch in overflow else 1)).backward()
                if batch % accumulate == 0:
                    scaler.step(optimizer)
                    scaler.update()
            if batch % accumulate == 0:
                if clear == "last":
                    optimizer.zero_grad()
                if scheduler is not None and scheduled == "batch":
                    scheduler.step()
                if average is not None:
                    average.update_parameters(model)

        def close(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = find_loss(x)
            loss.backward()
            return loss

        def tail(epoch: int) -> None:
            if scheduler is None or scheduled != "epoch":
                return
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(seen["loss"])
            else:
                scheduler.step()

        attached = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "scaler": scaler,
            "ema": average,
            "data": make_loader(batch_size=samples_a_batch),
            "seen": seen,
        }
        attached = {name: each for name, each in attached.items() if each is not None}
        return Parts(attached, attached["data"], body, tail=tail, epochs=2)

    return build
