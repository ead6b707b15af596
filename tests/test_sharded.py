"""Sharded training in real processes: back on any number of ranks and any mesh, bit for bit.

Each start of the processes takes seconds, so one start does many things.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from crew import start

import hookbus

WAYS = ("fsdp", "tp", "2d", "ddp", "first", "behind", "meta")
Job = tuple[str, dict[str, Any]]


def call(world_size: int, *jobs: Job) -> list[list[dict[str, Any]]]:
    """Do things in some processes; return what each of them tells of each."""
    crew = start("sharded_run.py", world_size, json.dumps(jobs), timeout=280)
    assert None not in crew.told, crew.text
    return crew.told


def list_ways(world_size: int) -> list[str]:
    if world_size == 1:
        return ["plain", "fsdp", "tp", "behind", "meta"]
    return [how for how in WAYS if how != "2d" or world_size % 2 == 0]


def list_events(how: str) -> list[str]:
    events = ["restore_model", "configure_sharded"]
    return events[::-1] if how in ("behind", "meta") else events


def go_on(run: Path, how: str, steps: int, **options: Any) -> Job:
    return "run", {"folder": str(run), "how": how, "steps": steps, **options}


def go_on_in_every_way(run: Path, world_size: int) -> list[Job]:
    """Go on with copies of a run, and save nothing."""
    jobs = []
    for how in list_ways(world_size):
        copy = run.with_name(f"{run.name}-{how}-{world_size}")
        shutil.copytree(run, copy)
        jobs.append(go_on(copy, how, 1, seed=5, save="never"))
    return jobs


def check_back(told: list[list[dict[str, Any]]], jobs: list[Job], saved: dict[str, Any]) -> None:
    """Hold that each rank finds what was saved, sharded in any way."""
    for rank, each in enumerate(told):
        for (_, job), found in zip(jobs, each, strict=True):
            assert found["before"] == saved["after"], (rank, job)
            assert found["step"] == saved["step"] + 3
            assert found["events"] == list_events(job["how"])
            assert found["after"] != saved["after"]


def check_exact(told: list[list[dict[str, Any]]], hows: list[str]) -> None:
    for each in told:
        for how, found in zip(hows, each, strict=True):
            assert found == {
                "begins alike": True,
                "comes back": True,
                "ends alike": True,
                "events": list_events(how),
            }, how


def damage(run: Path, folder: Path) -> list[Path]:
    """Return copies of a run with the newest checkpoint's second shard gone, empty or changed."""
    newest, copies = hookbus.checkpoints(run)[-1].path, []
    for what in ("gone", "empty", "changed"):
        copies.append(folder / what)
        shutil.copytree(run, copies[-1])
        shard = copies[-1] / newest.name / "optimizer" / "rank00001.safetensors"
        data = shard.read_bytes()
        shard.unlink()
        if what != "gone":
            shard.write_bytes(b"" if what == "empty" else data[:-1] + bytes([data[-1] ^ 1]))
    return copies


def test_what_two_ranks_saved_comes_back_on_two_on_one_and_on_three(tmp_path: Path) -> None:
    """The bits of weights and moments, in every way to shard; those of parameters that are frozen
    by now, too. A lost or damaged shard is found, and the checkpoint before is taken.

    Source: deepspeedai/DeepSpeed#2898, Lightning-AI/pytorch-lightning#20373,
    Lightning-AI/pytorch-lightning#18358, pytorch/torchtitan#4011, facebookresearch/metaseq#158
    """
    run, frozen, twice = tmp_path / "run", tmp_path / "frozen", tmp_path / "twice"
    hows, still = ["first", "behind", "meta", "tp"], ["second.bias"]
    saving = [
        go_on(run, "behind", 3),
        go_on(frozen, "behind", 2, freeze=still),
        go_on(twice, "behind", 1),
        go_on(twice, "behind", 1),
    ]
    exactly = [("exactly", {"folder": str(tmp_path / f"exact-{how}"), "how": how}) for how in hows]
    told = call(2, *saving, *exactly)
    assert all(each == told[0] for each in told), "what is gathered is the same on all ranks"
    check_exact([each[4:] for each in told], hows)
    saved, stopped, first, _ = told[0][:4]
    assert not stopped["after"]["moments"]["unused.weight"], "it was never stepped"

    jobs, copies = go_on_in_every_way(run, 1), damage(twice, tmp_path)
    more = [go_on(frozen, "plain", 1, seed=5, still=still)]
    more += [go_on(copy, "behind", 0, save="never") for copy in copies]
    (told_by_one,) = call(1, *jobs, *more)
    check_back([told_by_one[: len(jobs)]], jobs, saved)
    thawed, *found = told_by_one[len(jobs) :]
    assert thawed["before"] == stopped["after"]
    assert thawed["before"]["moments"]["second.bias"]
    assert thawed["before"]["moments"]["second.bias"] == thawed["after"]["moments"]["second.bias"]
    assert [each["before"] == first["after"] for each in found] == [True] * 3
    assert [hookbus.checkpoints(copy)[-1].step for copy in copies] == [1] * 3

    jobs = go_on_in_every_way(run, 3)
    check_back(call(3, *jobs), jobs, saved)


def test_a_rank_holds_its_own_shards_and_one_tensor_more_and_reads_no_other_bytes(
    tmp_path: Path,
) -> None:
    """Source: pytorch/pytorch#149640, huggingface/lerobot#4009"""
    size = {"folder": str(tmp_path / "run"), "matrices": 6, "mebibytes": 24}
    saved = [told for (told,) in call(3, ("measure", {"save": True, **size}))]
    for told in saved:
        assert told["saving"] < 24
    for (told,) in call(2, ("measure", {"save": False, **size})):
        assert told["bits"] == saved[0]["bits"]
        assert told["resuming"] < told["own"] + 24 + 16  # what torch needs for itself besides
        assert told["shards"] <= told["read"] < told["shards"] + 1


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("how", "before"), [(how, n) for n in (1, 2, 3, 4) for how in WAYS if how in list_ways(n)]
)
def test_state_comes_back_on_any_number_of_ranks_sharded_in_any_way(
    tmp_path: Path, how: str, before: int
) -> None:
    run = tmp_path / "run"
    exactly = ("exactly", {"folder": str(tmp_path / "exact"), "how": how})
    told = call(before, go_on(run, how, 3), exactly)
    assert all(each == told[0] for each in told)
    check_exact([each[1:] for each in told], [how])
    for world_size in (1, 2, 3, 4):
        jobs = go_on_in_every_way(run, world_size)
        check_back(call(world_size, *jobs), jobs, told[0][0])
