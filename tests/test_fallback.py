"""Where the newest checkpoint is damaged, a run goes on from the newest good one, and says so."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from keepers import WAYS, Keeper, Way, make_bus

import hookbus
from hookbus.errors import CorruptCheckpointError, FormatError, ReadError


def save(run: Path, *steps: int, **more: Any) -> None:
    keeper = Keeper("restore_training_state")
    with make_bus(a=keeper, **more) as bus:
        bus.resume(run)
        for step in steps:
            keeper.tensor.fill_(step)
            bus.save(step=step)


def find(run: Path, step: int) -> Path:
    return run / f"step-{step:08d}"


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def list_names(run: Path) -> list[str]:
    return sorted(name for name in os.listdir(run) if "step-" in name)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (
        lambda path: flip(path / "a.safetensors"),
        "a.safetensors: tensor 'tensor' ([3] float32, 12 bytes from",
    ),
    "a shard of no bytes": (
        lambda path: os.truncate(path / "a.safetensors", 0),
        "a.safetensors: has 0 bytes, saved were",
    ),
    "a file that is not there": (
        lambda path: (path / "a.safetensors").unlink(),
        "a.safetensors: cannot be read: No such file or directory",
    ),
    "a manifest cut short": (
        lambda path: os.truncate(path / "manifest.json", 100),
        "manifest.json: its seal does not fit its 100 bytes",
    ),
    "no manifest": (
        lambda path: (path / "manifest.json").unlink(),
        "manifest.json is missing, so",
    ),
    "an empty folder": (
        lambda path: [each.unlink() for each in path.iterdir()],
        "manifest.json is missing, so",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("way", WAYS)
def test_the_newest_good_one_is_taken_and_the_damaged_one_is_kept_under_another_name(
    way: Way, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Source: pytorch/torchtitan#4011; pytorch/torchtitan#315; facebookresearch/metaseq#158."""
    save(tmp_path, 1, 2, 3)
    do, text = DAMAGES[damage]
    do(find(tmp_path, 3))
    before = sorted(path.name for path in find(tmp_path, 3).iterdir())
    keeper = Keeper("restore_training_state")
    with make_bus(a=keeper) as bus:
        report = way(bus, tmp_path, "fit").report
        assert keeper.tensor.tolist() == [2.0] * 3
        assert (report.step, report.checkpoint) == (2, str(find(tmp_path, 2)))
        (note,) = report.notes
        assert note.startswith("step-00000003 is damaged and was moved to damaged-step-00000003: ")
        assert text in note
        assert note in caplog.text
        assert list_names(tmp_path) == ["damaged-step-00000003", "step-00000001", "step-00000002"]
        moved = tmp_path / "damaged-step-00000003"
        assert sorted(path.name for path in moved.iterdir()) == before
        bus.save(step=3)  # the name is free again
    assert [each.step for each in hookbus.checkpoints(tmp_path)] == [1, 2, 3]
    (record,) = [each for each in hookbus.history(tmp_path) if each["event"] == "fallback"]
    assert record["checkpoint"] == "step-00000003"
    assert record["moved_to"] == "damaged-step-00000003"
    assert text in record["why"]


def test_several_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4)
    flip(find(tmp_path, 2) / "a.safetensors")
    (find(tmp_path, 3) / "manifest.json").unlink()
    flip(find(tmp_path, 4) / "a.safetensors")
    with make_bus(a=Keeper("restore_training_state")) as bus:
        report = bus.resume(tmp_path).report
        assert report.step == 1
        assert len(report.notes) == 3
        bus.save(step=4)
        assert list_names(tmp_path) == [
            *(f"damaged-step-0000000{step}" for step in (2, 3, 4)),
            "step-00000001",
            "step-00000004",
        ]
    flip(find(tmp_path, 4) / "a.safetensors")
    with make_bus(a=Keeper("restore_training_state")) as bus:
        bus.resume(tmp_path)
    assert "damaged-step-00000004-1" in list_names(tmp_path)


def test_an_older_damaged_one_is_nobody_s_business(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    flip(find(tmp_path, 1) / "a.safetensors")
    with make_bus(a=Keeper("restore_training_state")) as bus:
        assert bus.resume(tmp_path).report.notes == []
    assert list_names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("kind", ["tensors", "manifests"])
def test_if_none_is_good_nothing_is_moved_and_all_faults_are_told(
    kind: str, tmp_path: Path
) -> None:
    save(tmp_path, 1, 2)
    for step in (1, 2):
        flip(find(tmp_path, step) / ("a.safetensors" if kind == "tensors" else "manifest.json"))
    before = list_names(tmp_path)
    keeper = Keeper("restore_training_state")
    with make_bus(a=keeper) as bus, pytest.raises(CorruptCheckpointError) as caught:
        bus.resume(tmp_path)
    assert list_names(tmp_path) == before
    assert str(find(tmp_path, 1)) in str(caught.value)
    assert str(find(tmp_path, 2)) in str(caught.value)
    assert str(caught.value).endswith("nothing was moved")
    assert keeper.tensor.tolist() == [0.0] * 3


@pytest.mark.parametrize(
    "options",
    [{"fallback": False}, {"step": 3}, {"stage": "test"}, {"stage": "test", "step": 3}],
    ids=str,
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_where_one_is_asked_for_it_is_an_error_that_names_the_newest_good_one(
    damage: str, options: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path, 1, 2, 3)
    flip(find(tmp_path, 2) / "a.safetensors")
    DAMAGES[damage][0](find(tmp_path, 3))
    before = list_names(tmp_path)
    with make_bus(a=Keeper()) as bus, pytest.raises(CorruptCheckpointError) as caught:
        bus.resume(tmp_path, **options)
    assert DAMAGES[damage][1] in str(caught.value)
    assert "the newest good one is of step 1" in str(caught.value)
    assert list_names(tmp_path) == before


def test_a_newer_format_is_no_damage(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    manifest = find(tmp_path, 2) / "manifest.json"
    body = manifest.read_bytes()[: -len(',"seal":""}\n') - 32].replace(b'"format":1', b'"format":9')
    seal = xxhash.xxh3_128_hexdigest(body).encode()
    manifest.write_bytes(body + b',"seal":"' + seal + b'"}\n')
    with make_bus(a=Keeper()) as bus, pytest.raises(FormatError, match="its format is 9"):
        bus.resume(tmp_path)
    assert list_names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_section_that_is_not_read_is_not_verified(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, b=Keeper())
    flip(find(tmp_path, 2) / "b.safetensors")
    with make_bus(a=Keeper("restore_training_state"), b=Keeper()) as bus:
        assert bus.resume(tmp_path, skip=("b",)).step == 2
    with make_bus(a=Keeper("restore_training_state"), b=Keeper()) as bus:
        assert bus.resume(tmp_path).step == 1


def test_a_warm_start_from_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    save(tmp_path / "old", 1, 2)
    flip(find(tmp_path / "old", 2) / "a.safetensors")
    with make_bus(a=Keeper()) as bus, pytest.raises(CorruptCheckpointError) as caught:
        bus.resume(tmp_path / "new", init_from=tmp_path / "old", init_only=("a",))
    assert "the newest good one is of step 1" in str(caught.value)
    assert list_names(tmp_path / "old") == ["step-00000001", "step-00000002"]


# -- the history --------------------------------------------------------------------------------


def test_the_history_tells_how_each_start_began(tmp_path: Path) -> None:
    save(tmp_path / "one", 1)
    save(tmp_path / "one", 2)
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path / "two", init_from=tmp_path / "one", init_only=("a",))
    starts = [r for r in hookbus.history(tmp_path / "one") if r["event"] == "start"]
    starts += hookbus.history(tmp_path / "two")
    assert [(r["how"], r["step"]) for r in starts] == [("fresh", 0), ("resumed", 1), ("warm", 0)]
    assert starts[0]["checkpoint"] is None
    assert starts[1]["checkpoint"] == str(find(tmp_path / "one", 1))
    assert starts[2]["checkpoint"] == str(find(tmp_path / "one", 2))
    assert starts[0]["run_id"] == starts[1]["run_id"] != starts[2]["run_id"]
    assert starts[0]["versions"]["torch"]


def test_a_torn_line_is_left_out_and_the_next_one_stands_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    file = tmp_path / "run.jsonl"
    whole = hookbus.history(tmp_path)
    os.truncate(file, file.stat().st_size - 5)
    assert hookbus.history(tmp_path) == whole[:-1]
    save(tmp_path, 2)
    events = [(record["event"], record["step"]) for record in hookbus.history(tmp_path)]
    assert events == [("start", 0), ("start", 1), ("save", 2)]


def test_a_run_that_is_not_there_has_no_history(tmp_path: Path) -> None:
    assert hookbus.history(tmp_path / "none") == []
    with pytest.raises(hookbus.errors.CallError):
        hookbus.history(3)
    (tmp_path / "run.jsonl").mkdir()
    with pytest.raises(hookbus.errors.WriteError, match="cannot read"):
        hookbus.history(tmp_path)


def test_changed_settings_are_in_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        save(tmp_path, 2)
    finally:
        torch.set_num_threads(threads)
    start = [record for record in hookbus.history(tmp_path) if record["event"] == "start"][-1]
    [change] = start["changes"]
    assert change["why"] == "it decides how sums round"
    values = {name: change[name] for name in ("setting", "saved", "now", "then", "exact")}
    assert values == {
        "setting": "threads",
        "saved": str(threads),
        "now": str(threads + 1),
        "then": "adapt",
        "exact": False,
    }


def test_a_fallback_stays_in_its_run(tmp_path: Path) -> None:
    save(tmp_path / "own", 1, 5)
    save(tmp_path / "other", 3)
    shutil.copytree(find(tmp_path / "other", 3), find(tmp_path / "own", 3))
    for damage in ("a.safetensors", "manifest.json"):
        run = tmp_path / damage
        shutil.copytree(tmp_path / "own", run)
        flip(find(run, 5) / damage)
        with make_bus(a=Keeper("restore_training_state")) as bus:
            assert bus.resume(run).step == 1


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ESTALE])
def test_a_file_that_cannot_be_read_right_now_is_not_taken_for_damaged(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 2)

    def refuse(path: Path) -> int:
        raise OSError(number, os.strerror(number), str(path))

    for module in ("tensor_file", "manifest"):
        with monkeypatch.context() as patch, make_bus(a=Keeper()) as bus:
            patch.setattr(f"hookbus.checkpoint.{module}.open_file", refuse)
            with pytest.raises(ReadError) as caught:
                bus.resume(tmp_path)
            assert caught.value.errno == number
        assert list_names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_link_that_leads_round_in_a_circle_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name in ("latest", "step-00000007"):
        (tmp_path / name).symlink_to(name)
    with make_bus(a=Keeper("restore_training_state")) as bus:
        assert bus.resume(tmp_path).step == 1


def test_a_renamed_checkpoint_does_not_win_over_a_later_save_of_its_step(tmp_path: Path) -> None:
    save(tmp_path, 20)
    find(tmp_path, 20).rename(find(tmp_path, 30))
    keeper = Keeper("restore_training_state")
    with make_bus(a=keeper) as bus:
        bus.resume(tmp_path)
        keeper.tensor.fill_(7)
        bus.save(step=20)
    keeper = Keeper("restore_training_state")
    with make_bus(a=keeper) as bus:
        bus.resume(tmp_path)
    assert keeper.tensor.tolist() == [7.0] * 3


def test_damage_that_only_sizes_let_pass_says_how_to_find_it_before(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    flip(find(tmp_path, 2) / "a.safetensors")
    with make_bus(a=Keeper("restore_training_state")) as bus:
        with pytest.raises(CorruptCheckpointError) as caught:
            bus.resume(tmp_path, verify="sizes")
        assert any("start again with verify='hashes'" in note for note in caught.value.__notes__)
        assert bus.resume(tmp_path).step == 1
