"""Several processes are one run: they go on bit for bit, and nobody is left waiting."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crew import start
from gang import LIMIT, Server
from test_hostile_files import reseal

import hookbus
from hookbus.errors import CorruptCheckpointError, FormatError
from hookbus.sequence import RESUME_EVENTS


@pytest.mark.parametrize(
    "world_size",
    [
        pytest.param(1, marks=pytest.mark.sweep),
        2,
        pytest.param(4, marks=pytest.mark.sweep),
    ],
)
def test_a_run_of_several_processes_goes_on_bit_for_bit(world_size: int, tmp_path: Path) -> None:
    """Source: huggingface/accelerate#3952, NVIDIA/Megatron-LM#6858"""
    crew = start("ddp_run.py", world_size, "check_exact", tmp_path)
    assert crew.status == 0, crew.text
    for told in crew.told:
        plain = told.pop("plain")
        assert told == dict.fromkeys(told, plain)


def test_one_of_several_without_a_group_is_told_that_it_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with hookbus.HookBus() as bus:
        bus.resume(tmp_path / "run")
    assert "there are 2 processes, and torch.distributed is not initialised" in caplog.text


def test_whoever_is_left_by_torchrun_in_a_collective_of_its_own_ends_and_is_told_why(
    tmp_path: Path,
) -> None:
    crew = start("ddp_run.py", 2, "break_on_one", tmp_path)
    assert crew.status != 0
    assert "KeyError: 'shadow'" in crew.text
    if crew.told[0] is not None:  # torchrun may have ended it before
        assert crew.told[0]["seconds"] < LIMIT
        assert "rank 1 is gone: it broke in the script: KeyError" in "".join(crew.told[0]["notes"])


# -- one dies ------------------------------------------------------------------------------------

RARELY = [81, pytest.param(3, marks=pytest.mark.sweep)]


@pytest.mark.parametrize("wait", [True, False], ids=["at once", "behind training"])
@pytest.mark.parametrize("every", RARELY)
def test_where_one_is_killed_in_a_save_the_others_end_and_the_next_start_goes_on(
    gang: Server, folder: Path, every: int, wait: bool
) -> None:
    told = gang.ask("kill_in_saves", folder, 2, every=every, wait=wait)
    assert told["kills"] >= 4
    assert told["slowest"] < LIMIT
    # Before the commit the one before is the newest, after it the new one.
    assert set(told["from"]) == {"step-00000004", "step-00000008"}


@pytest.mark.parametrize(
    ("victims", "events"),
    [
        ([1], ["resume_start", "restore_model", "restore_training_state"]),
        pytest.param([0, 1], RESUME_EVENTS, marks=pytest.mark.sweep),
    ],
    ids=["some", "every event"],
)
def test_where_one_is_killed_in_a_restore_event_the_others_end(
    gang: Server, folder: Path, victims: list[int], events: list[str]
) -> None:
    told = gang.ask("kill_in_events", folder, 2, victims=victims, events=list(events))
    assert told["kills"] == len(events) * len(victims)
    assert told["slowest"] < LIMIT


# -- one breaks ----------------------------------------------------------------------------------


def test_what_one_breaks_with_in_a_restore_event_is_raised_on_all(
    gang: Server, folder: Path
) -> None:
    told = gang.ask("break_in_events", folder, 2)
    assert list(told) == list(RESUME_EVENTS)
    for event, (victim, ends) in told.items():
        mine, other = ends[victim], ends[1 - victim]
        assert mine["error"] == "KeyError"
        assert other["error"] == "RankError"
        assert other["text"] == f"rank {victim} broke in {event}: KeyError: 'shadow'"
        assert "in complain" in other["notes"], "the traceback of the one that broke"
        assert f"'plugin0' broke in {event}" in other["notes"]
        assert max(mine["seconds"], other["seconds"]) < 5


def test_one_that_waits_in_a_collective_of_its_own_hears_of_it(gang: Server, folder: Path) -> None:
    waiting, broken = gang.ask("break_beside_a_collective", folder, 2)
    assert broken["error"] == "KeyError"
    assert "rank 1 is gone: it broke in configure_sharded: KeyError" in waiting["notes"]
    assert "in complain" in waiting["notes"]
    assert max(waiting["seconds"], broken["seconds"]) < LIMIT


def test_one_that_leaves_the_script_is_told_of_at_the_next_safe_point(
    gang: Server, folder: Path
) -> None:
    other, broken = gang.ask("leave_one_behind", folder, 2)
    assert broken["error"] == "KeyError"
    assert other["error"] == "RankError"
    assert "rank 1 is gone: it broke in the script: KeyError: 'shadow'" in other["text"]
    assert other["seconds"] < 5


@pytest.mark.parametrize(
    "cases",
    [
        [(True, 1), (False, 0)],
        pytest.param([(True, 0), (False, 1)], marks=pytest.mark.sweep),
    ],
    ids=["some", "others"],
)
def test_where_one_breaks_in_a_save_no_checkpoint_is_made_and_all_raise(
    gang: Server, folder: Path, cases: list[tuple[bool, int]]
) -> None:
    """Source: mosaicml/composer#2146"""
    for case, told in gang.ask("break_in_saves", folder, 2, cases=cases).items():
        victim = int(case[-1])
        for rank, end in enumerate(told["ends"]):
            text = end["text"]
            assert "No space left on device" in text, case
            if case.startswith("True"):
                assert (f"rank {victim} broke" in text) == (rank != victim), case
                assert "WriteError" in end["kinds"], "of the kind of the first cause"
            else:
                assert end["error"] == "SaveError", case
            assert end["seconds"] < LIMIT
        assert told["starts"] == [0, 4], case
        assert told["again"] == [0, 0], case
        assert told["left"] == [], case


def test_where_one_breaks_in_the_first_copy_of_a_state_all_raise_and_the_next_save_is_made(
    gang: Server, folder: Path
) -> None:
    told = gang.ask("fill_up_in_the_copy", folder, 2)
    other, broken = told["told"]
    assert broken[0] == "RuntimeError"
    assert "can't allocate memory" in broken[1]
    assert other[0] == "RankError"
    assert other[1].startswith("rank 1 broke in copying the state: RuntimeError: ")
    assert told["checkpoints"] == [2]


def test_a_bus_has_two_groups_however_often_it_resumes_and_leaves_none(
    gang: Server, folder: Path
) -> None:
    assert gang.ask("count_groups", folder, 2) == [[0, 2, 2, 2, 2, 0]] * 2


def test_a_file_that_rank_0_does_not_see_is_no_checkpoint(gang: Server, folder: Path) -> None:
    """Source: TensorAuto/OpenTau#396"""
    told = gang.ask("lose_a_file", folder, 2)
    for end in told["ends"]:
        assert "CorruptCheckpointError" in end["kinds"]
        assert "what rank 1 wrote is not here: " in end["text"]
        assert "rng/rank00001.json" in end["text"]
    assert told["checkpoints"] == ["step-00000004"]
    assert told["left"] == []


# -- they differ ---------------------------------------------------------------------------------


def test_what_the_processes_disagree_on_is_one_error_on_all_before_anything_is_read(
    gang: Server, folder: Path
) -> None:
    """Source: TensorAuto/OpenTau#396"""
    told = gang.ask("disagree", folder, 2)
    words = {
        "directory": ("run directory", "/run", "/elsewhere"),
        "argument": ("step=", "null on rank 0", "8 on rank 1"),
        "order": ("the order of save_state", "on rank 0", "on rank 1"),
        "plugins": ("plugins", "plugin0", "on rank 1"),
    }
    for case, (what, first, second) in words.items():
        texts = {end["text"] for end in told[case]}
        assert len(texts) == 1, (case, texts)
        (text,) = texts
        assert all(end["error"] == "RankError" for end in told[case])
        assert text.startswith("resume(): the ranks differ: ")
        assert what in text, text
        assert first in text, text
        assert second in text, text
    assert told["starts"] == [0]


def test_replicas_that_differ_are_not_saved(gang: Server, folder: Path) -> None:
    told = gang.ask("diverge", folder, 2)
    for end in told["ends"]:
        assert end["error"] == "SaveError"
        assert end["text"].startswith(
            "section model: 0.weight of rank 1 differ from those of rank 0"
        )
    assert told["checkpoints"] == [4]
    assert told["left"] == []


def test_processes_at_different_places_are_told_so(gang: Server, folder: Path) -> None:
    for end in gang.ask("go_apart", folder, 2):
        assert end["error"] == "RankError"
        assert end["text"].startswith("the ranks are at different places: ")
        assert "something else on rank 1" in end["text"]
        assert end["seconds"] < 5


def test_closing_waits_for_nobody(gang: Server, folder: Path) -> None:
    assert gang.ask("close_early", folder, 2) == [0, 0]


# -- what one asks for, all do -------------------------------------------------------------------


def test_a_signal_to_one_saves_on_all_and_ends_all(gang: Server, folder: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#21406"""
    told = gang.ask("signal_one", folder, 2)
    assert told["status"] == [143, 143]
    assert told["step"] == 5
    assert told["why"] == "SIGTERM"
    assert told["exact"]
    assert told["seconds"] < 5


def test_a_save_that_one_asks_for_is_made_by_all_and_clocks_are_those_of_the_first(
    gang: Server, folder: Path
) -> None:
    told = gang.ask("ask_on_one", folder, 2)
    assert told == [[[2, "rank 1 alone", {}], [4, "all", {"loss": 0.0}]]] * 2


@pytest.mark.parametrize(
    ("world_size", "saves"), [(2, 6), pytest.param(4, 20, marks=pytest.mark.sweep)]
)
def test_processes_that_come_late_commit_one_checkpoint(
    gang: Server, folder: Path, world_size: int, saves: int
) -> None:
    """Source: huggingface/transformers#28015"""
    told = gang.ask("save_at_odd_moments", folder, world_size, saves=saves)
    assert told["steps"] == [list(range(saves))] * world_size
    assert told["own"] == [{"rank": rank} for rank in range(world_size)]


def test_one_may_wait_alone_for_a_save_behind_training(gang: Server, folder: Path) -> None:
    told = gang.ask("wait_on_one", folder, 2)
    for waited, during, taken in told:
        assert waited == [2], "it is there, and nobody has been told"
        assert during == told[0][1], "all are told at one place"
        assert taken == [2]


# -- what is damaged -----------------------------------------------------------------------------


def test_the_newest_checkpoint_is_the_newest_that_is_good_for_all(
    gang: Server, folder: Path
) -> None:
    """Source: mosaicml/composer#2146, NVIDIA-NeMo/Automodel#3254"""
    told = gang.ask("damage", folder, 2)
    for end in told["strict"]:
        assert "CorruptCheckpointError" in end["kinds"]
        assert "rng/rank00001.safetensors" in end["text"]
    assert told["starts"] == [0, 4]
    assert told["moved"] == ["damaged-step-00000008"]
    assert told["exact"]
    assert told["left"] == []


def test_damage_to_any_file_of_any_process_is_found(gang: Server, folder: Path) -> None:
    gang.ask("save_own", folder, 2)
    checkpoint = hookbus.open(folder / "run" / "step-00000001")
    checkpoint.verify()
    files = [path for path in checkpoint.path.rglob("*") if path.is_file()]
    own = checkpoint.path / "own"
    assert {path.name for path in own.iterdir()} == {
        f"rank0000{rank}.{kind}" for rank in (0, 1) for kind in ("json", "safetensors")
    }
    for path in files:
        data = path.read_bytes()
        for place in range(0, len(data), max(len(data) // 20, 1)):
            changed = bytearray(data)
            changed[place] ^= 1
            for damaged in (bytes(changed), data[:place], data + b" "):
                path.write_bytes(damaged)
                with pytest.raises(CorruptCheckpointError):
                    hookbus.open(checkpoint.path).verify()
        path.unlink()
        with pytest.raises(CorruptCheckpointError):
            hookbus.open(checkpoint.path).verify()
        path.write_bytes(data)
    hookbus.open(checkpoint.path).verify()


def test_lists_that_no_version_writes_are_refused(gang: Server, folder: Path) -> None:
    gang.ask("save_own", folder, 2)
    checkpoint = hookbus.open(folder / "run" / "step-00000001")
    changes: dict[str, Callable[[dict[str, Any]], object]] = {
        "section 'own' has lists of 1 processes, and 2 saved it": lambda p: p["ranks"].pop(),
        "is no list of a rank": lambda p: p["ranks"].__setitem__(0, [1, 2, 3]),
        "each rank has its own, and there is one of all": lambda p: p.update(tree=[]),
    }
    kept = (checkpoint.path / "manifest.json").read_bytes()
    for text, change in changes.items():
        reseal(checkpoint, lambda m, change=change: change(m["sections"]["own"]["parts"][0]))
        with pytest.raises(FormatError, match=re.escape(text)):
            hookbus.open(checkpoint.path)
        (checkpoint.path / "manifest.json").write_bytes(kept)


# -- another number of processes -----------------------------------------------------------------


def list_seen(start: list[Any]) -> list[int]:
    return [sample for told in start for sample in told["seen"]]


@pytest.mark.parametrize("numbers", [[1, 2], pytest.param([1, 2, 3, 4], marks=pytest.mark.sweep)])
def test_what_is_left_of_an_epoch_is_dealt_out_to_another_number(
    gang: Server, folder: Path, numbers: list[int]
) -> None:
    """Source: pytorch/torchtitan#409, huggingface/transformers#14994"""
    told = gang.ask("change_number", folder, 1, numbers=numbers)
    assert len(told) == len(numbers) ** 2
    for case, (begun, once, twice, last) in told.items():
        first, second = (int(number) for number in case.split(" to "))
        assert once == twice, "a new process draws the same numbers in each resume"
        everything = list_seen(begun) + list_seen(once) + list_seen(last)
        assert set(everything) == set(range(48)), case
        left = 48 - 8 * first - 4 * second  # samples for the last start, which share alike
        assert len(everything) - 48 == -left % first, case
        assert len({each["weights"] for each in once}) == 1
        assert len({each["moments"] for each in once}) == 1
        notes = [note for each in once for note in each["notes"]]
        if first == second:
            assert notes == []
            continue
        assert f"world size: saved {first}, run has {second}" in notes[-1]
        draws = [each["draws"] for each in once]
        assert len({str(each) for each in draws}) == second, "streams of their own"
        for rank in range(first, second):
            assert f"rng: rank {rank} is new, and its streams are seeded" in notes


def test_a_loader_that_deals_out_nothing_goes_on_where_it_was_or_says_why_not(
    gang: Server, folder: Path
) -> None:
    told = gang.ask("change_loaders", folder, 1)
    (begun,), (old, new) = told["plain"]
    assert begun["seen"] == list(range(8))
    assert old["seen"] == new["seen"] == list(range(8, 48))
    (begun,), (old, new) = told["shuffled"]
    assert sorted(begun["seen"] + old["seen"]) == list(range(48))
    assert len(new["seen"]) == 40
    assert new["seen"] != old["seen"], "in an order of its own"
    for end in told["stream"][1]:
        assert "SamplerError" in end["kinds"]
        assert "go on with 1 until the epoch is over" in end["text"]
    assert "SamplerError" in told["forgotten"][0]["kinds"]
    assert "set_epoch was not called" in told["forgotten"][0]["text"]


def test_a_rest_is_dealt_out_to_nobody_where_a_sampler_deals_out_to_others(
    gang: Server, folder: Path
) -> None:
    told = gang.ask("deal_to_others", folder, 2)
    assert [len(list_seen([end])) for end in told["same number"]] == [40, 40]
    for case in ("all", "one of them", "inexact", "dealt before"):
        who = "rank 1 has num_replicas=2" if case == "one of them" else "rank 0 has num_replicas=1"
        for end in told[case]:
            assert end["kinds"][0] == "SamplerError", case
            assert f"{who} and rank=0" in end["text"], case
            assert "change the number of processes at the end of an epoch" in end["text"]
    assert len({*list_seen(told["right"])}) == 48 - 2 * 4 - 2 * 4


# -- strategies ----------------------------------------------------------------------------------


def test_ddp_wraps_what_is_trained_and_goes_on_in_one_process_too(
    gang: Server, folder: Path
) -> None:
    """Source: Lightning-AI/pytorch-lightning#18358"""
    told = gang.ask("train_ddp", folder, 2)
    for start_ in ("whole", "begun", "again"):
        for end in told[start_]:
            assert end["wrapped"] == ["DistributedDataParallel", "Linear"]
    assert told["names"] == ["weight", "bias"]
    for whole, begun, again in zip(told["whole"], told["begun"], told["again"], strict=True):
        assert begun["last"] == again["first"]
        assert again["last"] == whole["last"]
        restored = again["events"].index("restore_model")
        assert restored < again["events"].index("configure_sharded")
    (alone,) = told["alone"]
    assert alone["wrapped"] == ["Linear", "Linear"]
    assert alone["first"] == told["begun"][0]["last"]


def test_three_processes_are_told_that_ddp_sums_in_another_order(
    gang: Server, folder: Path
) -> None:
    for notes in gang.ask("tell_of_sums", folder, 3):
        assert any("find_unused_parameters=True" in note for note in notes)


def test_ddp_leaves_each_process_the_buffers_that_came_back(gang: Server, folder: Path) -> None:
    told = gang.ask("keep_buffers", folder, 2)
    for name in ("each", "first"):
        whole, begun, again = (told[f"{name} {start}"] for start in ("whole", "begun", "again"))
        assert begun[0][2:] != begun[1][2:], "they differ by rank"
        assert [each[:2] for each in again] == [each[2:] for each in begun]
        assert [each[2:] for each in again] == [each[2:] for each in whole]


def test_what_is_sharded_by_a_strategy_is_rolled_back(gang: Server, folder: Path) -> None:
    for first, told in gang.ask("roll_back_shards", folder, 2).items():
        for saved, last, back, again in told:
            assert back == saved != last, first
            assert again == last, first
