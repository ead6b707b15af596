"""Scripts as people write them, adversaries among them, go on bit for bit or are refused."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from exact import (
    CUT,
    Parts,
    Save,
    check_exact,
    run_bus,
    run_plain,
)
from scenes import (
    BATCH,
    SAMPLES,
    EagerGlobal,
    OwnEpoch,
    Points,
    Stream,
    data_scene,
    make_body,
    make_loader,
    make_model,
)
from torch.utils import data

from builtin_plugins import Loop
from hookbus.errors import SamplerError


def make_parts(
    make: Callable[[], Any],
    *,
    kept: bool = True,
    attach: bool = False,
    head: Callable[[Any, int], object] = lambda loader, epoch: None,
    tail: Callable[[Any, int], object] = lambda loader, epoch: None,
    take: Callable[[Any], torch.Tensor] = lambda x: x,
    epochs: int = 3,
    **options: Any,
) -> Parts:
    """A dropout network trained from the loader of ``make``, kept or made anew in each epoch."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    body = make_body(model, optimizer)
    loader = make() if kept else None

    def script(loop: Any, save: Save) -> None:
        for epoch in loop.epochs(epochs):
            source = loader if kept else make()
            head(source, epoch)
            for x in loop.batches(source, **options):
                body(loop.batch, take(x))
                save(("body", epoch, loop.batch))
            tail(source, epoch)
            save(("tail", epoch, 0))

    attached: dict[str, object] = {"model": model, "optimizer": optimizer}
    if attach:
        attached["data"] = loader
    return Parts(attached, script=script)


def seeded(make: Callable[..., Any], number: int | None = None, **options: Any):
    """A loader with a generator of its own, seeded by the count of calls or with one number."""
    count = itertools.count()

    def build() -> Any:
        generator = torch.Generator().manual_seed(next(count) if number is None else number)
        return make(generator=generator, shuffle=True, **options)

    return build


def plain_loader(**options: Any) -> data.DataLoader:
    return data.DataLoader(Points(), batch_size=BATCH, **options)


class Dicts(Points):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": super().__getitem__(index), "name": str(index), "pair": (index, [index])}


class Lists(Points):
    def __getitem__(self, index: list[int]) -> torch.Tensor:
        return torch.stack([super(Lists, self).__getitem__(each) for each in index])


class Sized(Stream):
    def __len__(self) -> int:
        return SAMPLES


class Prefetcher:
    """Wraps a loader as GPU prefetchers do."""

    def __init__(self, loader: data.DataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[torch.Tensor]:
        for x in self.loader:
            yield x * 1

    def __len__(self) -> int:
        return len(self.loader)


class Noisy:
    """A transform, a collate function and a dataset at once, with a stream of its own."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __call__(self, x: Any) -> Any:
        x = torch.stack(x) if isinstance(x, list) else x
        return x + float(self.stream.random())

    collate = __call__


class Transformed(Points):
    def __init__(self, *transforms: Any) -> None:
        super().__init__()
        self.transforms = transforms

    def __getitem__(self, index: int) -> torch.Tensor:
        return functools.reduce(lambda x, f: f(x), self.transforms, super().__getitem__(index))


def add_noise(x: list[torch.Tensor], stream: Any) -> torch.Tensor:
    return torch.stack(x) + float(stream.random())


def close_over(stream: Any) -> Callable[[Any], torch.Tensor]:
    return lambda x: add_noise(x, stream)


def alternate(attach: bool, generator: bool) -> Parts:
    """One loader in even epochs, another in odd ones."""
    loaders = [make_loader(generator=generator), make_loader("weighted", generator=generator)]
    parts = make_parts(lambda: None, kept=False, epochs=4)
    body = make_body(parts.attached["model"], parts.attached["optimizer"])

    def script(loop: Any, save: Save) -> None:
        for epoch in loop.epochs(4):
            for x in loop.batches(loaders[epoch % 2]):
                body(loop.batch, x)
                save(("body", epoch, loop.batch))
            save(("tail", epoch, 0))

    attached = {**parts.attached, **({"a": loaders[0], "b": loaders[1]} if attach else {})}
    return Parts(attached, script=script)


def seed_by_epoch() -> Parts:
    parts = make_parts(lambda: None, kept=False)
    body = make_body(parts.attached["model"], parts.attached["optimizer"])

    def script(loop: Any, save: Save) -> None:
        for epoch in loop.epochs(3):
            own = torch.Generator().manual_seed(epoch)
            loader = plain_loader(shuffle=True, generator=own)
            for x in loop.batches(loader):
                body(loop.batch, x)
                save(("body", epoch, loop.batch))
            save(("tail", epoch, 0))

    return attrs.evolve(parts, script=script)


def evaluate_in_body(**options: Any) -> Parts:
    """Goes through a held-out loader after every other batch, in eval mode."""
    held_out = make_loader("shuffle", **options)
    parts = data_scene()()
    model = parts.attached["model"]

    def evaluate() -> None:
        model.eval()
        for x in held_out:
            model(x / SAMPLES)
            torch.rand(1)
        model.train()

    def script(loop: Any, save: Save) -> None:
        for epoch in loop.epochs(2):
            for x in loop.batches(parts.loader):
                parts.body(loop.batch, x)
                if loop.batch % 2 == 0:
                    evaluate()
                save(("body", epoch, loop.batch))
            model.eval()
            save(("tail", epoch, 0))
            model.train()

    attached = {**parts.attached, "held_out": held_out}
    return attrs.evolve(parts, attached=attached, script=script)


def draw_in_odd_places() -> Parts:
    """Draws between the making of the iterator and its first batch, and before each epoch."""
    parts = data_scene("shuffle", generator=True)()

    def script(loop: Any, save: Save) -> None:
        random.random()
        for epoch in loop.epochs(3):
            torch.rand(1)
            batches = iter(loop.batches(parts.loader))
            torch.rand(2)
            for batch, x in enumerate(batches, 1):
                parts.body(batch, x)
                save(("body", epoch, loop.batch))
                np.random.rand()
            torch.rand(3)
            save(("tail", epoch, 0))
            random.random()
        torch.rand(4)

    return attrs.evolve(parts, script=script)


class Bar:
    """Wraps what is iterated, keeps it, and has its length, as progress bars do."""

    def __init__(self, inside: Any) -> None:
        self.inside, self.total = inside, len(inside)

    def __iter__(self) -> Iterator[Any]:
        yield from self.inside


def train_in_functions() -> Parts:
    """Epochs and batches go through functions and named bars, one of which is left early."""
    parts = data_scene("shuffle")()

    def script(loop: Any, save: Save) -> None:
        bars = [Bar(each) if isinstance(loop, Loop) else each for each in [loop.epochs(3)]]
        for epoch in bars[0]:
            train(loop, epoch, save)
            save(("tail", epoch, 0))

    def train(loop: Any, epoch: int, save: Save) -> None:
        batches = loop.batches(parts.loader)
        bar = Bar(batches) if isinstance(loop, Loop) else batches
        for batch, x in enumerate(bar):
            parts.body(batch + 1, x)
            save(("body", epoch, loop.batch))
            if epoch == 1 and loop.batch == 3:
                break

    return attrs.evolve(parts, script=script)


SCRIPTS: dict[str, Callable[[], Parts]] = {
    "a loader made in each epoch": lambda: make_parts(
        lambda: plain_loader(shuffle=True), kept=False
    ),
    "a loader made in each epoch, seeded by it": seed_by_epoch,
    "a loader made in each epoch, of one seed": lambda: make_parts(
        seeded(plain_loader, 5), kept=False
    ),
    "a kept loader, own generator": lambda: make_parts(seeded(plain_loader, 5)),
    "a kept loader, own generator, attached": lambda: make_parts(
        seeded(plain_loader, 5), attach=True
    ),
    "a kept loader, seeded in each epoch": lambda: make_parts(
        seeded(plain_loader, 5), head=lambda loader, epoch: loader.generator.manual_seed(epoch)
    ),
    "a kept loader, seeded in each epoch, attached": lambda: make_parts(
        seeded(plain_loader, 5),
        head=lambda loader, epoch: loader.generator.manual_seed(epoch),
        attach=True,
    ),
    "a generator drawn from in the epoch's own code": lambda: make_parts(
        seeded(plain_loader, 5),
        tail=lambda loader, epoch: torch.rand(1, generator=loader.generator),
    ),
    "an even division, own generator": lambda: make_parts(
        seeded(functools.partial(data.DataLoader, Points(), batch_size=6), 5)
    ),
    "dicts": lambda: make_parts(
        lambda: data.DataLoader(Dicts(), BATCH, shuffle=True), take=lambda x: x["x"]
    ),
    "tuples": lambda: make_parts(
        lambda: data.DataLoader(
            data.TensorDataset(torch.arange(72.0).view(18, 4), torch.arange(18)),
            BATCH,
            shuffle=True,
        ),
        take=lambda x: x[0],
    ),
    "a sized stream": lambda: make_parts(lambda: data.DataLoader(Sized(), BATCH)),
    "a stream without batching": lambda: make_parts(lambda: data.DataLoader(Stream(), None)),
    "a list as sampler": lambda: make_parts(lambda: plain_loader(sampler=[5, 3, 1, 2, 9, 9, 0])),
    "lists as batch sampler": lambda: make_parts(
        lambda: data.DataLoader(Points(), batch_sampler=[[1, 2], [3], [4, 5, 6]])
    ),
    "a batch sampler as sampler": lambda: make_parts(
        lambda: data.DataLoader(
            Lists(),
            batch_size=None,
            sampler=data.BatchSampler(data.RandomSampler(range(SAMPLES)), BATCH, drop_last=False),
        )
    ),
    "a batch sampler around a sampler with a state": lambda: make_parts(
        lambda: data.DataLoader(
            Points(), batch_sampler=data.BatchSampler(OwnEpoch(), BATCH, drop_last=True)
        )
    ),
    "no batches at all": lambda: make_parts(
        list, tail=lambda loader, epoch: torch.rand(1), epochs=2
    ),
    "a list of batches": lambda: make_parts(lambda: list(torch.arange(80.0).view(5, 4, 4))),
    "a wrapped loader": lambda: make_parts(lambda: Prefetcher(plain_loader(shuffle=True))),
    "a wrapped loader, own generator": lambda: make_parts(
        lambda: Prefetcher(seeded(plain_loader, 5)())
    ),
    "two loaders in a zip": lambda: make_parts(
        lambda: zip(make_loader(), make_loader("replacement"), strict=False),
        kept=False,
        take=lambda x: x[0] + x[1][: len(x[0])],
    ),
    "a generator function": lambda: make_parts(
        lambda: (x + torch.rand(1, generator=torch.Generator()) for x in make_loader()), kept=False
    ),
    "noise in a collate function": lambda: make_parts(
        lambda: plain_loader(shuffle=True, collate_fn=lambda x: add_noise(x, random))
    ),
    "own noise in a collate object": lambda: make_parts(
        lambda: plain_loader(collate_fn=Noisy(np.random.default_rng(3)))
    ),
    "own noise in a collate method": lambda: make_parts(
        lambda: plain_loader(collate_fn=Noisy(random.Random(3)).collate)
    ),
    "own noise in a partial function": lambda: make_parts(
        lambda: plain_loader(
            collate_fn=functools.partial(add_noise, stream=np.random.default_rng(3))
        )
    ),
    "own noise in a closure": lambda: make_parts(
        lambda: plain_loader(collate_fn=close_over(random.Random(3)))
    ),
    "own noise in a transform": lambda: make_parts(
        lambda: data.DataLoader(
            data.ConcatDataset(
                [Transformed(Noisy(random.Random(3))), data.Subset(Points("own"), [1, 2])]
            ),
            BATCH,
            shuffle=True,
        )
    ),
    "two loaders in turn": lambda: alternate(attach=False, generator=False),
    "two attached loaders in turn": lambda: alternate(attach=True, generator=True),
    "evaluation in the body": evaluate_in_body,
    "evaluation in the body, own generator": lambda: evaluate_in_body(generator=True),
    "draws in odd places": draw_in_odd_places,
    "functions and bars": train_in_functions,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_goes_on_bit_for_bit(name: str, tmp_path) -> None:
    """Source: Lightning-AI/pytorch-lightning#19764; determined-ai/determined#6708."""
    check_exact(SCRIPTS[name], tmp_path, every=2)


class Seedable(EagerGlobal):
    """Counts its own epochs, as accelerate's does, and the script sets them or forgets it."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        yield from order.tolist()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_a_sampler_that_counts_epochs_is_exact_if_the_script_sets_them(tmp_path) -> None:
    """Source: huggingface/accelerate#4071."""
    check_exact(
        lambda: make_parts(
            lambda: plain_loader(sampler=Seedable()),
            head=lambda loader, epoch: loader.sampler.set_epoch(epoch),
        ),
        tmp_path,
    )


class Behind(data.Sampler):
    """Stands around another sampler, as those of accelerate and Lightning do."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)


def wrap_twice() -> tuple[data.DistributedSampler, data.DataLoader]:
    inner = data.DistributedSampler(Points(), num_replicas=2, rank=1)
    batches = data.BatchSampler(Behind(Behind(inner)), 2, drop_last=False)
    return inner, data.DataLoader(Points(), batch_sampler=batches)


def distribute(sets_epoch: bool, seen: list[int]) -> Parts:
    """Four epochs over a distributed sampler in two others; notes its epoch at each batch."""
    inner, loader = wrap_twice()
    parts = make_parts(lambda: None, kept=False)
    body = make_body(parts.attached["model"], parts.attached["optimizer"])

    def script(loop: Any, save: Save) -> None:
        for epoch in loop.epochs(4):
            if sets_epoch:
                inner.set_epoch(epoch)
            for x in loop.batches(loader):
                seen.append(inner.epoch)
                body(loop.batch, x)
                save(("body", epoch, loop.batch))
            save(("tail", epoch, 0))

    return attrs.evolve(parts, attached={**parts.attached, "data": loader}, script=script)


def test_the_epoch_that_the_script_sets_reaches_a_sampler_inside_others(tmp_path) -> None:
    """Source: huggingface/accelerate#4071."""
    build = functools.partial(distribute, True, [])
    check_exact(build, tmp_path / "exact", every=2)
    for cut, first in ((("tail", 2, 0), 3), (("body", 3, 2), 3)):
        seen: list[int] = []
        run = tmp_path / cut[0]
        assert run_bus(build, run, cut=cut) is CUT
        run_bus(functools.partial(distribute, True, seen), run, seed_number=9)
        assert seen[0] == first
    with pytest.raises(SamplerError, match="set_epoch was not called"):
        run_bus(functools.partial(distribute, False, []), tmp_path / "body", seed_number=9)


@pytest.mark.parametrize("attach", [True, False])
def test_a_script_that_sets_the_epoch_now_and_then_is_exact_or_told_to_attach(
    attach: bool, tmp_path, caplog
) -> None:
    def build() -> Parts:
        parts = data_scene("distributed", epochs=5, attach=attach)()
        sampler = parts.loader.sampler
        return attrs.evolve(parts, head=lambda e: None if e % 2 else sampler.set_epoch(e))

    assert run_bus(build, tmp_path, cut=("tail", 2, 0)) is CUT
    assert (run_bus(build, tmp_path, seed_number=9) == run_plain(build)) is attach
    told = [text for text in caplog.messages if "sampler.epoch was 2 when saved and is 0" in text]
    assert len(told) == (0 if attach else 1)


def test_an_epoch_is_limited_by_islice_inside(tmp_path) -> None:
    def build() -> Parts:
        parts = data_scene()()
        body = parts.body

        def script(loop: Any, save: Save) -> None:
            for epoch in loop.epochs(3):
                for x in loop.batches(itertools.islice(parts.loader, 3)):
                    body(loop.batch, x)
                    save(("body", epoch, loop.batch))
                save(("tail", epoch, 0))

        return attrs.evolve(parts, script=script)

    check_exact(build, tmp_path)


class Starting(EagerGlobal):
    """Starts where its state says, once; ``ends_at`` is its state after a pass."""

    def __init__(self, ends_at: int) -> None:
        self.ends_at = ends_at
        self.done = self.start = 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1)).tolist()
        for done, index in enumerate(order[self.start :], self.start + 1):
            self.done = done
            yield index
        self.done, self.start = self.ends_at, 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.done = state["done"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_that_starts_where_its_state_says_is_exact(workers: int, tmp_path) -> None:
    check_exact(
        lambda: make_parts(
            lambda: plain_loader(sampler=Starting(0), num_workers=workers), attach=True
        ),
        tmp_path,
        every=2 if workers else 1,
    )


class Stateful(EagerGlobal):
    """Counts samples from epoch to epoch; nothing tells it the epoch."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        for i in range(SAMPLES):
            self.drawn += 1
            yield (i * self.drawn) % SAMPLES


REFUSED = {
    "a sampler whose epoch nobody sets, at the border": (
        lambda: make_parts(lambda: plain_loader(sampler=Seedable()), attach=True),
        ("tail", 0, 0),
        "sampler.epoch was 1, is 0",
    ),
    "a sampler whose epoch nobody sets, in an epoch": (
        lambda: make_parts(lambda: plain_loader(sampler=Seedable()), attach=True),
        ("body", 1, 2),
        "set_epoch was not called",
    ),
    "a sampler that counts, kept and not attached": (
        lambda: make_parts(lambda: plain_loader(sampler=Stateful())),
        ("tail", 0, 0),
        "sampler.drawn was 18, is 0",
    ),
    "set_epoch only in the first run": (
        data_scene("distributed"),
        ("body", 1, 2),
        "set_epoch was not called",
    ),
    "a sampler that ends at its end": (
        lambda: make_parts(lambda: plain_loader(sampler=Starting(SAMPLES)), attach=True),
        ("tail", 0, 0),
        "it ended after 0 of 5 batches, since its sampler starts its next pass at the state it is",
    ),
    "an iterator that lives on": (
        lambda: make_living_iterator(),
        ("body", 1, 2),
        "the contents of the 2 batches",
    ),
    "a generator drawn from before batches()": (
        lambda: make_parts(
            seeded(plain_loader, 5),
            head=lambda loader, epoch: torch.rand(1, generator=loader.generator),
        ),
        ("tail", 0, 0),
        "was drawn from before batches() and after the resume; attach the loader",
    ),
}


def make_living_iterator() -> Parts:
    """Takes four batches an epoch from an iterator that goes on from epoch to epoch."""
    parts = make_parts(lambda: None, kept=False)
    body = make_body(parts.attached["model"], parts.attached["optimizer"])
    stream = iter(torch.arange(160.0).view(-1, 4, 4))

    def script(loop: Any, save: Save) -> None:
        for epoch in loop.epochs(3):
            for x in loop.batches(itertools.islice(stream, 4)):
                body(loop.batch, x)
                save(("body", epoch, loop.batch))

    return attrs.evolve(parts, script=script)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_repeated_is_refused_before_a_step(name: str, tmp_path) -> None:
    build, cut, hint = REFUSED[name]
    assert run_bus(build, tmp_path, cut=cut) is CUT
    after = build if name != "set_epoch only in the first run" else forget_the_epoch
    with pytest.raises(SamplerError) as caught:
        run_bus(after, tmp_path, seed_number=9)
    assert hint in str(caught.value)


def forget_the_epoch() -> Parts:
    return attrs.evolve(data_scene("distributed")(), head=lambda epoch: None)
