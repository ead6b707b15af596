"""Sharded training in real processes: back on any number of ranks and any mesh, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from crew import start

import hookbus

IN_FRONT = ["restore_model", "configure_sharded"]
BEHIND = IN_FRONT[::-1]
WAYS = ("fsdp", "tp", "2d", "ddp", "first", "behind", "meta")


def call(world_size: int, function: str, **arguments: Any) -> list[dict[str, Any]]:
    crew = start("sharded_run.py", world_size, function, json.dumps(arguments), timeout=280)
    assert None not in crew.told, crew.text
    return crew.told


def list_ways(world_size: int) -> list[str]:
    if world_size == 1:
        return ["plain", "fsdp", "tp", "behind", "meta"]
    return [how for how in WAYS if how != "2d" or world_size % 2 == 0]


def check_back(saved: dict[str, Any], source: Path, world_size: int, hows: list[str]) -> None:
    """Hold that what was saved is there on each rank, sharded in any way."""
    copies = source.with_name(f"{source.name}-to-{world_size}")
    for how in hows:
        shutil.copytree(source, f"{copies}-{how}")
    for told in call(world_size, "run_all", folder=str(copies), hows=hows, steps=1, seed=5):
        for how in hows:
            assert told[how]["before"] == saved["after"], (how, world_size)
            assert told[how]["step"] == saved["step"] + 3
            assert told[how]["events"] == (BEHIND if how in ("behind", "meta") else IN_FRONT)
            assert told[how]["after"] != saved["after"]


@pytest.mark.parametrize(
    ("how", "before", "after"),
    [
        ("behind", 2, (1, 3)),
        *(
            pytest.param(how, before, (1, 2, 3, 4), marks=pytest.mark.sweep)
            for how in WAYS
            for before in (1, 2, 3, 4)
            if how in list_ways(before)
        ),
    ],
)
def test_state_comes_back_on_any_number_of_ranks_sharded_in_any_way(
    tmp_path: Path, how: str, before: int, after: tuple[int, ...]
) -> None:
    """Source: deepspeedai/DeepSpeed#2898"""
    source = tmp_path / "run"
    saved = call(before, "run", folder=str(source), how=how, steps=3)
    assert all(told == saved[0] for told in saved), "what is gathered is the same on all ranks"
    for world_size in after:
        check_back(saved[0], source, world_size, list_ways(world_size))


@pytest.mark.parametrize(
    ("hows", "world_size"),
    [
        (["first", "behind", "meta", "tp"], 2),
        pytest.param(["2d", "fsdp", "ddp"], 4, marks=pytest.mark.sweep),
        pytest.param([*WAYS], 2, marks=pytest.mark.sweep),
    ],
)
def test_training_goes_on_bit_for_bit_and_both_orders_are_one(
    tmp_path: Path, hows: list[str], world_size: int
) -> None:
    """Source: Lightning-AI/pytorch-lightning#20373, Lightning-AI/pytorch-lightning#18358"""
    folder = str(tmp_path / "run")
    for told in call(world_size, "run_exactly", folder=folder, hows=hows):
        for how in hows:
            events = BEHIND if how in ("behind", "meta") else IN_FRONT
            assert told[how] == {
                "begins alike": True,
                "comes back": True,
                "ends alike": True,
                "events": events,
            }, how


def test_a_parameter_that_is_frozen_by_now_keeps_its_moments(tmp_path: Path) -> None:
    still = ["second.bias"]
    folder = str(tmp_path / "run")
    saved = call(2, "run", folder=folder, how="behind", steps=2, freeze=still)[0]
    assert saved["after"]["moments"]["second.bias"]
    assert not saved["after"]["moments"]["unused.weight"], "it was never stepped"
    told = call(1, "run", folder=folder, how="plain", steps=1, seed=5, still=still)[0]
    assert told["before"] == saved["after"]
    kept = [each["moments"]["second.bias"] for each in (told["before"], told["after"])]
    assert kept[0] == kept[1]


def test_a_rank_holds_its_own_shards_and_one_tensor_more_and_reads_no_other_bytes(
    tmp_path: Path,
) -> None:
    """Source: pytorch/pytorch#149640, huggingface/lerobot#4009"""
    size = {"folder": str(tmp_path / "run"), "matrices": 6, "mebibytes": 24}
    saved = call(3, "measure", save=True, **size)
    for told in saved:
        assert told["saving"] < 24
    for told in call(2, "measure", save=False, **size):
        assert told["bits"] == saved[0]["bits"]
        assert told["resuming"] < told["own"] + 24 + 16  # what torch needs for itself besides
        assert told["shards"] <= told["read"] < told["shards"] + 1


def test_a_lost_or_damaged_shard_is_found_by_all_and_the_one_before_is_taken(
    tmp_path: Path,
) -> None:
    """Source: pytorch/torchtitan#4011, facebookresearch/metaseq#158"""
    run = tmp_path / "run"
    saved = [call(2, "run", folder=str(run), how="behind", steps=1)[0] for _ in range(2)]
    newest = hookbus.checkpoints(run)[-1].path
    for number, damage in enumerate(("lose", "empty", "flip")):
        copy = tmp_path / damage
        shutil.copytree(run, copy)
        shard = copy / newest.name / "optimizer" / "rank00001.safetensors"
        data = shard.read_bytes()
        shard.unlink()
        if damage != "lose":
            shard.write_bytes(b"" if damage == "empty" else data[:-1] + bytes([data[-1] ^ 1]))
        world_size = 1 + number % 2
        how = "plain" if world_size == 1 else "tp"
        for told in call(world_size, "run", folder=str(copy), how=how, steps=0, save="never"):
            assert told["step"] == 1
            assert told["before"] == saved[0]["after"]
        assert [each.step for each in hookbus.checkpoints(copy)] == [1]
