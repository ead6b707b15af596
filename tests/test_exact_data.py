"""Wherever a run is cut, it goes on with the same data: loaders, samplers, workers, streams."""

from __future__ import annotations

import inspect
import random

import attrs
import numpy as np
import pytest
import torch
from exact import (
    CUT,
    EVERY,
    Parts,
    Where,
    check_exact,
    cut_and_go_on,
    list_places,
    run_bus,
    run_plain,
    seed,
)
from scenes import data_scene, make_loader
from torch.utils import data

import hookbus
from builtin_plugins import Loop
from hookbus.errors import MismatchError, SamplerError


def set_epoch_seldom() -> Parts:
    """Sets the sampler's epoch in every other epoch only, so that it goes on mattering."""
    parts = data_scene("distributed", epochs=4)()

    def head(epoch: int) -> None:
        if epoch % 2 == 0:
            parts.loader.sampler.set_epoch(epoch)

    return attrs.evolve(parts, head=head)


IN_PROCESS = {
    "sequential": data_scene("sequential"),
    "shuffle": data_scene("shuffle"),
    "shuffle, drop last": data_scene("shuffle", drop_last=True),
    "shuffle, own generator": data_scene("shuffle", generator=True),
    "not attached": data_scene("shuffle", attach=False),
    "not attached, own generator": data_scene("shuffle", attach=False, generator=True),
    "no batching": data_scene("single"),
    "weighted": data_scene("weighted"),
    "weighted, own generator": data_scene("weighted", generator=True),
    "replacement": data_scene("replacement"),
    "replacement, own generator": data_scene("replacement", generator=True),
    "subset": data_scene("subset", generator=True),
    "distributed": data_scene("distributed"),
    "distributed, of a seldom set epoch": set_epoch_seldom,
    "batch sampler": data_scene("batch sampler"),
    "uneven batches": data_scene("uneven"),
    "eager sampler": data_scene("eager"),
    "eager sampler, python": data_scene("eager python"),
    "sampler's own random": data_scene("own random"),
    "sampler with a state": data_scene("own epoch"),
    "noise of all kinds": data_scene("shuffle", ("torch", "python", "numpy")),
    "dataset's own generator": data_scene("shuffle", ("own",)),
    "seeded by index": data_scene("shuffle", ("index",)),
    "stream": data_scene("stream"),
    "stream through a buffer": data_scene("stream buffer"),
    "accumulation": data_scene("shuffle", ("torch",), accumulate=4),
    "validation": data_scene(validation=lambda: make_loader("sequential")),
    "shuffled validation": data_scene(validation=lambda: make_loader("shuffle")),
    "validation, own generator": data_scene(
        validation=lambda: make_loader("shuffle", generator=True)
    ),
    "head and tail draw": data_scene(
        head=lambda: (torch.rand(1), random.random()),
        tail=lambda: (torch.rand(1), np.random.rand()),
    ),
}


def test_every_sampler_of_torch_is_here() -> None:
    loaders = [build().loader for build in IN_PROCESS.values()]
    loaders = [each for each in loaders if isinstance(each, data.DataLoader)]
    tried = {type(each.sampler) for each in loaders} | {
        type(each.batch_sampler) for each in loaders
    }
    every = {
        each
        for each in (*vars(data).values(), *vars(data.sampler).values())
        if inspect.isclass(each) and issubclass(each, data.Sampler)
    }
    assert every - {data.Sampler} <= tried


@pytest.mark.parametrize("name", IN_PROCESS)
@EVERY
def test_a_run_is_the_plain_one_and_goes_on_bit_for_bit_from_any_batch(
    every: int, name: str, tmp_path
) -> None:
    """Source: huggingface/accelerate#2016, huggingface/accelerate#4233,
    huggingface/accelerate#4071, huggingface/transformers#46628, huggingface/transformers#11323,
    Lightning-AI/pytorch-lightning#19764, Lightning-AI/pytorch-lightning#5325,
    Lightning-AI/pytorch-lightning#850, NVIDIA-NeMo/Megatron-Bridge#5257, pytorch/pytorch#122697.
    """
    check_exact(IN_PROCESS[name], tmp_path, every=every)


@pytest.mark.parametrize("name", [name for name in IN_PROCESS if name != "accumulation"])
def test_a_run_cut_three_times_in_one_epoch_goes_on_bit_for_bit(name: str, tmp_path) -> None:
    build = IN_PROCESS[name]
    cuts: list[Where] = [("body", 1, 1), ("body", 1, 2), ("body", 1, 3), ("tail", 1, 0)]
    assert cut_and_go_on(build, tmp_path, cuts) == run_plain(build)


WORKERS = {
    "two workers": data_scene("shuffle", num_workers=2),
    "two workers, own generator": data_scene("shuffle", num_workers=2, generator=True),
    "two workers, prefetch 4": data_scene("replacement", num_workers=2, prefetch_factor=4),
    "two workers, not attached": data_scene("shuffle", attach=False, num_workers=2),
    "two workers, seeded by index": data_scene("shuffle", ("index",), num_workers=2),
    "two workers, reseeded by index": data_scene("shuffle", ("reseed",), num_workers=2),
    "two workers that draw, replayed": data_scene(
        "shuffle", ("torch", "python", "numpy"), num_workers=2, options={"replay": True}
    ),
    "persistent workers": data_scene("shuffle", num_workers=2, persistent_workers=True),
    "persistent workers, not attached": data_scene(
        "shuffle", attach=False, num_workers=1, persistent_workers=True
    ),
    "persistent validation": data_scene(
        validation=lambda: make_loader("shuffle", num_workers=1, persistent_workers=True)
    ),
    "validation with workers": data_scene(
        validation=lambda: make_loader("sequential", num_workers=1)
    ),
    "stream in workers": data_scene("stream", num_workers=2),
    "stream in workers that draw": data_scene("stream torch", num_workers=2),
}


@pytest.mark.parametrize("name", WORKERS)
def test_a_run_with_workers_goes_on_bit_for_bit(name: str, tmp_path) -> None:
    """Source: huggingface/accelerate#4204, NVIDIA-NeMo/Megatron-Bridge#5257."""
    check_exact(WORKERS[name], tmp_path, every=3)


def test_a_run_goes_on_bit_for_bit_with_fewer_workers_or_none(tmp_path) -> None:
    """Source: huggingface/accelerate#3110."""
    builds = {n: data_scene("shuffle", num_workers=n) for n in (0, 1, 2)}
    expected = run_plain(builds[0])
    for before in builds:
        for after in builds:
            run = tmp_path / f"{before}-{after}"
            assert run_bus(builds[before], run, cut=("body", 1, 2)) is CUT
            assert run_bus(builds[after], run, seed_number=9) == expected, (before, after)


REFUSED = {
    "lazy memory": (data_scene("lazy memory"), "state_dict"),
    "lazy sampler": (data_scene("lazy"), "state_dict"),
    "forgetful epoch": (data_scene("forgetful epoch"), "state_dict"),
    "workers that draw": (
        data_scene("shuffle", ("python",), num_workers=1),
        "pass batches(loader, replay=True)",
    ),
    "persistent workers that draw": (
        data_scene("shuffle", ("numpy",), num_workers=1, persistent_workers=True),
        "pass batches(loader, inexact_ok=True)",
    ),
    "stream that shares a stream": (
        data_scene("stream torch"),
        "give the dataset a generator of its own",
    ),
    "workers out of order": (data_scene(num_workers=2, in_order=False), "in_order=False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_data_that_cannot_be_repeated_is_refused_before_a_step(name: str, tmp_path) -> None:
    build, hint = REFUSED[name]
    assert run_bus(build, tmp_path, cut=("body", 1, 3)) is CUT
    with pytest.raises(SamplerError) as caught:
        run_bus(build, tmp_path, seed_number=9)
    assert hint in str(caught.value)


@pytest.mark.parametrize("name", [name for name in REFUSED if "workers" in name])
def test_inexact_ok_goes_on_and_says_so(name: str, tmp_path, caplog) -> None:
    build, _ = REFUSED[name]
    assert run_bus(build, tmp_path, cut=("body", 1, 3)) is CUT
    inexact = lambda: attrs.evolve(build(), options={"inexact_ok": True})  # noqa: E731
    run_bus(inexact, tmp_path, seed_number=9)
    assert "going on, as inexact_ok=True says" in caplog.text


def test_a_changed_batch_size_or_dataset_is_found(tmp_path) -> None:
    assert run_bus(data_scene(), tmp_path, cut=("body", 1, 2)) is CUT
    with pytest.raises(MismatchError) as refused:
        run_bus(data_scene(batch_size=3), tmp_path)
    assert str(refused.value).startswith(
        "data: batch_size was 4 when saved and is 3 in the run: 2 batches of epoch 1 are done"
    )
    assert "pass batch_size=4 until this epoch is over, or start it again" in str(refused.value)
    with pytest.raises(SamplerError, match="dataset or batch size changed"):
        run_bus(data_scene("sequential"), tmp_path)


def test_a_changed_batch_size_of_a_loader_that_is_not_attached_is_found(tmp_path) -> None:
    assert run_bus(data_scene(attach=False), tmp_path, cut=("body", 1, 2)) is CUT
    with pytest.raises(SamplerError, match=r"batch_size=4.*now.*batch_size=3"):
        run_bus(data_scene(batch_size=3, attach=False), tmp_path)


def test_a_changed_batch_size_or_dataset_is_told_at_an_epoch_s_border(tmp_path, caplog) -> None:
    """Source: huggingface/transformers#18070"""
    assert run_bus(data_scene(), tmp_path, cut=("tail", 0, 0)) is CUT
    seed(9)
    parts = data_scene(batch_size=3, drop_last=True)()
    with hookbus.HookBus() as bus:
        bus.attach(**parts.attached, loop=Loop())
        changes = list(map(str, bus.resume(tmp_path).report.changes))
    assert changes == [
        "data: batch_size: saved 4, run has 3; the run's is used, so not bit for bit (other"
        " batches are drawn)",
        "data: drop_last: saved False, run has True; the run's is used, so not bit for bit (other"
        " batches are drawn)",
    ]
    (warning,) = [m for m in caplog.messages if "not bit for bit" in m]
    assert all(change in warning for change in changes)


def test_a_sampler_that_remembers_and_cannot_tell_is_warned_of_once(tmp_path, caplog) -> None:
    run_bus(data_scene("forgetful epoch"), tmp_path, saves=list_places(data_scene()))
    warnings = [
        r
        for r in caplog.records
        if "ForgetfulEpoch, 18 samples): sampler.epoch changes" in r.message
    ]
    assert len(warnings) == 1


BLOCKED = {
    "rng": data_scene("sequential"),
    "loop": data_scene(),
    "optimizer": data_scene(),
    "loader": data_scene(),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_negative_control_without_one_of_them_the_bits_differ(name: str, tmp_path) -> None:
    build = BLOCKED[name]
    assert run_bus(build, tmp_path, cut=("body", 1, 2), block=(name,)) is CUT
    assert run_bus(build, tmp_path, seed_number=9, block=(name,)) != run_plain(build)
