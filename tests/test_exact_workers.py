"""Data from worker processes goes on bit for bit, or is refused; so does torchdata's loader."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from exact import CUT, Parts, Save, Where, check_exact, cut_and_go_on, run_bus, run_plain
from scenes import (
    BATCH,
    SAMPLES,
    Points,
    Stream,
    make_body,
    make_loader,
    make_model,
)
from torch.utils import data
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import hookbus
from builtin_plugins import Loop
from hookbus.errors import SamplerError

# torchdata 0.11 with torch 2.13
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def make_scene(
    make: Callable[[], Any],
    *,
    kept: bool = True,
    attach: bool = True,
    left: int = 9,
    **options: Any,
) -> Callable[[], Parts]:
    """Three epochs over a loader that is kept or made in each; the first is left early."""

    def build() -> Parts:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        body = make_body(model, optimizer)
        loader = make() if kept else None

        def script(loop: Any, save: Save) -> None:
            for epoch in loop.epochs(3):
                for x in loop.batches(loader if kept else make(), **options):
                    body(loop.batch, x)
                    save(("body", epoch, loop.batch))
                    if epoch == 0 and loop.batch == left:
                        break
                torch.rand(1)
                save(("tail", epoch, 0))

        attached = {"model": model, "optimizer": optimizer}
        return Parts({**attached, "data": loader} if attach and kept else attached, script=script)

    return build


class Late(Points):
    """Draws only for some samples."""

    def __init__(self, *late: int) -> None:
        super().__init__()
        self.late = late

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + (torch.rand(1) if index in self.late else 0)


class Resumable(Stream):
    """A stream that can tell where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0

    def __iter__(self):
        worker = data.get_worker_info()
        n, i = (worker.num_workers, worker.id) if worker else (1, 0)
        while self.done < SAMPLES // n:
            self.done += 1
            yield torch.full((4,), float(self.done * n + i))
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


def stateful(workers: int, dataset: Callable[[], Any] = Points, **options: Any):
    return lambda: StatefulDataLoader(dataset(), BATCH, num_workers=workers, **options)


LOADERS = {
    "made in each epoch, persistent": make_scene(
        lambda: make_loader(num_workers=1, persistent_workers=True), kept=False
    ),
    "kept, persistent, left early": make_scene(
        lambda: make_loader(num_workers=1, persistent_workers=True), left=2
    ),
    "kept, persistent, not attached, left early": make_scene(
        lambda: make_loader(num_workers=1, persistent_workers=True), left=2, attach=False
    ),
    "a stream in persistent workers": make_scene(
        lambda: make_loader("stream", num_workers=1, persistent_workers=True)
    ),
    "a stream in persistent workers, not attached": make_scene(
        lambda: make_loader("stream", num_workers=1, persistent_workers=True), attach=False
    ),
    "torchdata's distributed sampler": make_scene(
        lambda: data.DataLoader(
            Points(), BATCH, sampler=StatefulDistributedSampler(Points(), 1, 0), num_workers=1
        )
    ),
    "torchdata": make_scene(stateful(0)),
    "torchdata, shuffle": make_scene(stateful(0, shuffle=True)),
    "torchdata, shuffle, not attached": make_scene(stateful(0, shuffle=True), attach=False),
    "torchdata, shuffle, made in each epoch": make_scene(stateful(0, shuffle=True), kept=False),
    "torchdata, shuffle, own generator": make_scene(
        lambda: stateful(0, shuffle=True, generator=torch.Generator().manual_seed(1))()
    ),
    "torchdata, noise": make_scene(stateful(0, lambda: Points("torch", "python"), shuffle=True)),
    "torchdata, a stream": make_scene(stateful(0, Stream)),
    "torchdata, a stream with a state": make_scene(stateful(0, Resumable)),
    "torchdata, two workers": make_scene(stateful(2, shuffle=True)),
    "torchdata, two workers, not attached": make_scene(stateful(2, shuffle=True), attach=False),
    "torchdata, two workers that draw, replayed": make_scene(
        stateful(2, lambda: Points("torch")), replay=True
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_goes_on_bit_for_bit(name: str, tmp_path) -> None:
    """Source: meta-pytorch/data#1437, huggingface/accelerate#3110."""
    check_exact(LOADERS[name], tmp_path, every=1 if "workers" not in name else 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_torchdata_goes_on_in_a_stream_that_is_cut_again_in_the_same_epoch(
    workers: int, tmp_path
) -> None:
    """It counts what it loads again twice, so that it said a place further on the second time."""
    build = make_scene(stateful(workers, Stream))
    cuts: list[Where] = [("body", 1, 2), ("body", 1, 3), ("body", 1, 4)]
    assert cut_and_go_on(build, tmp_path, cuts) == run_plain(build)


def test_torchdata_goes_on_in_a_stream_with_a_state_in_workers(tmp_path) -> None:
    # Not at the last batches: there torchdata itself starts such a worker's stream again.
    build = make_scene(stateful(2, Resumable))
    cuts: list[Where] = [("body", 0, 1), ("body", 1, 2), ("body", 1, 4), ("tail", 1, 0)]
    assert cut_and_go_on(build, tmp_path, cuts) == run_plain(build)


CHANGES = {
    "more workers, which draw": (
        make_scene(lambda: make_loader(noise=("torch",))),
        make_scene(lambda: make_loader(noise=("torch",), num_workers=2)),
        "num_workers 0 → 2",
    ),
    "fewer workers, which drew": (
        make_scene(lambda: make_loader(noise=("index", "python"), num_workers=2)),
        make_scene(lambda: make_loader(noise=("index", "python"), num_workers=1), replay=True),
        "num_workers 2 → 1",
    ),
    "no workers, where some drew": (
        make_scene(lambda: make_loader(noise=("numpy",), num_workers=1)),
        make_scene(lambda: make_loader(noise=("numpy",)), replay=True),
        "num_workers 1 → 0",
    ),
    "no workers, and later data draws": (
        make_scene(lambda: data.DataLoader(Late(17), BATCH, num_workers=1)),
        make_scene(lambda: data.DataLoader(Late(17), BATCH)),
        "num_workers 1 → 0",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize(
    "cut", [("body", 1, 2), ("tail", 0, 0)], ids=["in an epoch", "at a border"]
)
def test_draws_that_workers_make_otherwise_are_refused(name: str, cut: Where, tmp_path) -> None:
    """Source: huggingface/accelerate#3110."""
    before, after, hint = CHANGES[name]
    assert run_bus(before, tmp_path, cut=cut) is CUT
    with pytest.raises(SamplerError) as caught:
        run_bus(after, tmp_path, seed_number=9)
    assert hint in str(caught.value)


def test_torchdata_does_not_repeat_a_stream_that_shares_a_stream(tmp_path) -> None:
    build = make_scene(stateful(0, lambda: Stream("torch")))
    assert run_bus(build, tmp_path, cut=("body", 1, 3)) is CUT
    with pytest.raises(SamplerError, match="give the dataset a generator of its own"):
        run_bus(build, tmp_path, seed_number=9)


def test_draws_of_workers_after_a_skip_are_refused_before_they_are_trained_on(tmp_path) -> None:
    build = make_scene(lambda: data.DataLoader(Late(17), BATCH, num_workers=2, prefetch_factor=1))
    assert run_bus(build, tmp_path, cut=("body", 0, 2)) is CUT
    with pytest.raises(SamplerError, match="and others than before would have"):
        run_bus(build, tmp_path, seed_number=9)
    replaying = make_scene(
        lambda: data.DataLoader(Late(17), BATCH, num_workers=2, prefetch_factor=1), replay=True
    )
    assert run_bus(replaying, tmp_path, seed_number=9) == run_plain(build)


@pytest.mark.parametrize("before", [0, 1])
def test_a_sampler_that_draws_as_it_goes_is_refused_with_other_workers(before, tmp_path) -> None:
    builds = [make_scene(lambda n=n: make_loader("lazy", num_workers=n)) for n in (0, 1)]
    assert run_bus(builds[before], tmp_path, cut=("tail", 0, 0)) is CUT
    with pytest.raises(SamplerError, match=f"num_workers {before} → {1 - before}"):
        run_bus(builds[1 - before], tmp_path, seed_number=9)


def test_a_run_that_draws_further_ahead_from_a_moving_stream_is_refused(tmp_path) -> None:
    builds = [
        make_scene(lambda n=n: make_loader("replacement", generator=True, num_workers=n))
        for n in (0, 1)
    ]
    assert run_bus(builds[0], tmp_path, cut=("body", 1, 7)) is CUT
    with pytest.raises(SamplerError, match="this run draws 2 batches ahead, the saved one 0"):
        run_bus(builds[1], tmp_path, seed_number=9)


@pytest.mark.parametrize("workers", [0, 2])
def test_skipping_loads_no_sample(workers: int, tmp_path) -> None:
    """Source: open-mmlab/mmengine#1520."""
    loads = torch.zeros(1, dtype=torch.int64).share_memory_()

    class Counted(Points):
        def __len__(self) -> int:
            return 400

        def __getitem__(self, index: int) -> torch.Tensor:
            loads[0] += 1
            return super().__getitem__(index)

    def build() -> Parts:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader = data.DataLoader(Counted(), 4, shuffle=True, num_workers=workers)
        attached = {"model": model, "optimizer": optimizer, "data": loader}
        return Parts(attached, loader, make_body(model, optimizer), epochs=1)

    assert run_bus(build, tmp_path, cut=("body", 0, 90)) is CUT
    loads.zero_()
    assert run_bus(build, tmp_path, seed_number=9) is not CUT
    assert loads.item() == 40


def test_no_worker_is_started_before_the_first_batch(tmp_path) -> None:
    """Source: huggingface/accelerate#4204."""
    loader = stateful(2, shuffle=True)()
    with hookbus.HookBus() as bus:
        loop = Loop()
        bus.attach(data=loader, more=make_loader(num_workers=2), loop=loop)
        bus.resume(tmp_path)
        before = torch.get_rng_state()
        bus.save(metrics={"a": 1})
        assert not multiprocessing.active_children()
        assert torch.equal(before, torch.get_rng_state())
        assert loader._iterator is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_loader(num_workers=2),
        lambda: make_loader(num_workers=1, persistent_workers=True, generator=True),
        stateful(2, shuffle=True),
        stateful(0, shuffle=True),
    ],
    ids=["workers", "persistent workers", "torchdata, workers", "torchdata"],
)
def test_a_save_before_the_first_batch_changes_none(make: Callable[[], Any], tmp_path) -> None:
    """Source: huggingface/accelerate#4204."""

    def build() -> Parts:
        parts = make_scene(make)()

        def script(loop: Any, save: Save) -> None:
            save(("start", 0, 0))
            parts.script(loop, save)

        return attrs.evolve(parts, script=script)

    expected = run_plain(build)
    assert run_bus(build, tmp_path, saves=[("start", 0, 0)]) == expected
    assert len(hookbus.checkpoints(tmp_path)) == 1
    assert run_bus(build, tmp_path, seed_number=9) == expected


def test_workers_that_are_spawned_are_watched_too(tmp_path) -> None:
    build = make_scene(
        lambda: data.DataLoader(
            Points("numpy"), BATCH, num_workers=1, multiprocessing_context="spawn"
        )
    )
    assert run_bus(build, tmp_path, cut=("body", 0, 2)) is CUT
    with pytest.raises(SamplerError, match="its workers drew random numbers"):
        run_bus(build, tmp_path, seed_number=9)
