"""Which checkpoint is taken, and what of it: stages, steps, skip, only, missing_ok, init_from."""

from __future__ import annotations

import itertools
import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keepers import Keeper, make_bus

import hookbus
from hookbus.errors import (
    CallError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    HookbusError,
    ManyErrors,
    MissingSectionError,
    ResumeError,
    SaveError,
    UnclaimedSectionError,
)

torch.set_num_threads(1)

NAMES = ("a", "ab", "b", "c")


def save(run: Path, *steps: int, names: Iterator[str] | tuple[str, ...] = NAMES) -> Path:
    """Make a run whose keepers hold the step of each checkpoint; every second restores late."""
    keepers = make_keepers(names)
    with make_bus(**keepers) as bus:
        bus.resume(run)
        for step in steps:
            for keeper in keepers.values():
                keeper.tensor.fill_(step)
            bus.save(step=step)
    return run


def make_keepers(names: Iterator[str] | tuple[str, ...] = NAMES) -> dict[str, Keeper]:
    events = {"a": "restore_model", "c": "restore_model"}
    return {name: Keeper(events.get(name, "restore_training_state")) for name in names}


def read_values(keepers: dict[str, Keeper]) -> dict[str, int]:
    return {name: int(keeper.tensor[0]) for name, keeper in keepers.items()}


def read_folder(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def list_problems(error: HookbusError) -> list[HookbusError]:
    return list(error.exceptions) if isinstance(error, ManyErrors) else [error]


# -- laws ---------------------------------------------------------------------------------------

subsets = st.sets(st.sampled_from(NAMES)).map(lambda names: tuple(sorted(names)))
patterns = st.lists(st.sampled_from([*NAMES, "a*", "?", "*"]), max_size=2).map(tuple)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Path]:
    """A run with one checkpoint, of step 5, for every set of sections."""
    folder = tmp_path_factory.mktemp("runs")
    sets = [s for n in range(len(NAMES) + 1) for s in itertools.combinations(NAMES, n)]
    return {names: save(folder / f"run-{'-'.join(names)}", 5, names=names) for names in sets}


@settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    kind=st.sampled_from(["fit", "test", "warm"]),
    saved=subsets,
    here=subsets,
    skip=patterns,
    missing_ok=patterns,
    asked=st.none() | patterns,
)
def test_each_section_finds_its_plugin_or_is_left_out_by_name_or_is_an_error(
    runs: dict[tuple[str, ...], Path],
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    saved: tuple[str, ...],
    here: tuple[str, ...],
    skip: tuple[str, ...],
    missing_ok: tuple[str, ...],
    asked: tuple[str, ...] | None,
) -> None:
    """Source: NVIDIA-NeMo/Megatron-Bridge#5706, Lightning-AI/pytorch-lightning#2631"""
    run, options = runs[saved], {"skip": skip, "missing_ok": missing_ok}
    if kind == "test":
        options |= {"stage": "test", "only": asked}
    elif kind == "warm":
        asked = asked or ("a",)
        options |= {"init_from": run, "init_only": asked}
        run = tmp_path_factory.mktemp("warm")
    else:
        asked = None
    wanted = ("*",) if asked is None else asked
    claims = wanted if asked is not None or kind == "fit" else ()
    keepers = make_keepers(here)
    concerned = [name for name in here if kind != "test" or name in ("a", "c")]
    wrong_words = [
        p for p in asked or () if not any(fnmatchcase(n, p) for n in {*saved, *here, *missing_ok})
    ]
    missing = {
        name
        for name in concerned
        if name not in saved and matches(name, wanted) and not matches(name, skip + missing_ok)
    }
    unclaimed = {
        name
        for name in saved
        if name not in here and matches(name, claims) and not matches(name, skip)
    }
    with make_bus(**keepers) as bus:
        if wrong_words or missing or unclaimed:
            with pytest.raises(HookbusError) as caught:
                bus.resume(run, **options)
            problems = list_problems(caught.value)
            if wrong_words:
                assert [type(problem) for problem in problems] == [CallError] * len(wrong_words)
            else:
                assert len(problems) == len(missing) + len(unclaimed)
                for name, error in [(n, MissingSectionError) for n in missing] + [
                    (n, UnclaimedSectionError) for n in unclaimed
                ]:
                    assert any(f"{name!r}" in str(p) for p in problems if type(p) is error)
            assert set(read_values(keepers).values()) <= {0}
            return
        report = bus.resume(run, **options).report
        restored = {
            name
            for name in concerned
            if name in saved and matches(name, wanted) and not matches(name, skip)
        }
        assert read_values(keepers) == {name: 5 * (name in restored) for name in here}
        assert {n for n, each in report.sections.items() if each.status == "restored"} == restored
        assert report.sections.keys() == {*saved, *here}


# -- which checkpoint ---------------------------------------------------------------------------


def test_nothing_there_is_a_fresh_start_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Source: Lightning-AI/pytorch-lightning#7072"""
    text = f"{tmp_path / 'run'} holds no checkpoint yet: a fresh start"
    with make_bus(**make_keepers()) as bus:
        resume = bus.resume(tmp_path / "run")
    assert (resume.fresh, resume.step, resume.checkpoint) == (True, 0, None)
    assert capsys.readouterr().err == f"hookbus: {text}\n"
    assert {each.status for each in resume.report.sections.values()} == {"fresh"}
    with caplog.at_level(logging.INFO, "hookbus"), make_bus() as bus:
        bus.resume(tmp_path / "run")
    assert capsys.readouterr().err == ""
    assert caplog.messages == [text]


def test_a_step_or_a_stage_that_needs_a_checkpoint_says_what_there_is_and_makes_no_folder(
    tmp_path: Path,
) -> None:
    """Source: Lightning-AI/pytorch-lightning#7072"""
    run = save(tmp_path / "run", 1, 2, 9, 40)
    bus = make_bus(**make_keepers())
    for options, message in (
        ({"step": 7}, f"{run} has no checkpoint of step 7; the nearest are 1, 2, 9"),
        (
            {"step": 7, "stage": "test"},
            f"{run} has no checkpoint of step 7; the nearest are 1, 2, 9",
        ),
    ):
        with pytest.raises(CheckpointNotFoundError) as caught:
            bus.resume(run, **options)
        assert str(caught.value) == message
    typo = tmp_path / "rnu"
    for options, message in (
        ({"step": 7}, f"{typo} has no checkpoint of step 7"),
        ({"stage": "test"}, f"{typo} holds no checkpoint, and stage='test' needs one"),
        (
            {"init_from": tmp_path / "old"},
            f"init_from='{tmp_path / 'old'}' is neither a checkpoint nor a run that holds one",
        ),
    ):
        with pytest.raises(CheckpointNotFoundError) as caught:
            bus.resume(typo, **options)
        assert str(caught.value) == message
        assert not typo.exists()


def test_another_process_finds_the_newest_on_disk(tmp_path: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#14466"""
    script = "import sys, test_resume_stages as t; t.save(t.Path(sys.argv[1]), 3, 11)"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )
    keepers = make_keepers()
    with make_bus(**keepers) as bus:
        resume = bus.resume(tmp_path)
    assert (resume.fresh, resume.step) == (False, 11)
    assert read_values(keepers) == dict.fromkeys(NAMES, 11)


def test_called_again_it_rolls_the_run_back(tmp_path: Path) -> None:
    keepers = make_keepers()
    with make_bus(**keepers) as bus:
        bus.resume(save(tmp_path, 1))
        keepers["a"].tensor.fill_(8)
        bus.save(step=2)
        for keeper in keepers.values():
            keeper.tensor.fill_(9)
        bus.resume(tmp_path)
        assert read_values(keepers) == {"a": 8, "ab": 1, "b": 1, "c": 1}


def test_an_older_step_is_refused_with_a_way_out_that_works(tmp_path: Path) -> None:
    run, new = save(tmp_path / "run", 1, 2), tmp_path / "new"
    before = read_folder(run / "step-00000002")
    keepers = make_keepers()
    bus = make_bus(**keepers)
    with pytest.raises(ResumeError) as caught:
        bus.resume(run, step=1)
    first = run / "step-00000001"
    assert str(caught.value) == (
        "step 1 is older than the newest, 2, and a run has one future; start a run of its own from"
        f" it: resume(NEW, init_from={str(first)!r}, init_only=('*',))"
    )
    assert read_folder(run / "step-00000002") == before
    assert set(read_values(keepers).values()) == {0}
    resume = bus.resume(new, init_from=str(first), init_only=("*",))
    assert (resume.fresh, resume.step) == (True, 0)
    assert read_values(keepers) == dict.fromkeys(NAMES, 1)
    bus.save(step=5)
    assert bus.resume(new, init_from=str(first), init_only=("*",)).step == 5  # its own, from now on
    bus.close()
    assert hookbus.checkpoints(new)[0].run_id != hookbus.checkpoints(run)[0].run_id


def test_the_newest_step_by_its_number_and_an_older_one_to_test_are_fine(tmp_path: Path) -> None:
    run = save(tmp_path, 1, 2, 2)
    for step, stage, folder in ((2, "fit", "2-1"), (2, "test", "2-1"), (1, "test", "1")):
        with make_bus(**make_keepers()) as bus:
            checkpoint = bus.resume(run, step=step, stage=stage).checkpoint
            assert checkpoint is not None
            assert checkpoint.path.name == f"step-0000000{folder}"


def test_the_path_of_a_checkpoint_is_refused_with_the_arguments_to_pass(tmp_path: Path) -> None:
    run = save(tmp_path / "run", 1, 12)
    path = run / "step-00000012"
    said = (
        f"{path} is a checkpoint, not a run directory: pass {str(run)!r} (and step=12 for just this"
        f" one), or init_from={str(path)!r} to start a new run from it"
    )
    with pytest.raises(CallError) as caught:
        make_bus().resume(path)
    assert str(caught.value) == said
    (path / "manifest.json").unlink()  # a damaged one is a checkpoint too
    with pytest.raises(CallError) as caught:
        make_bus().resume(path)
    assert str(caught.value) == said
    best = (run / "step-00000001").rename(tmp_path / "best")
    with pytest.raises(CallError) as caught:
        make_bus().resume(best)
    assert str(caught.value) == (
        f"{best} is a checkpoint, not a run directory: pass init_from={str(best)!r} to start a new"
        " run from it"
    )
    (file := tmp_path / "file").touch()
    with pytest.raises(CallError) as caught:
        make_bus().resume(file)
    assert (
        str(caught.value) == f"{file} is a file; pass the run directory, which need not exist yet"
    )


def test_a_section_whose_file_is_gone_is_damage_and_not_a_missing_section(tmp_path: Path) -> None:
    """Source: NVIDIA-NeMo/Megatron-Bridge#5706"""
    run, keepers = save(tmp_path, 1), make_keepers()
    (run / "step-00000001" / "b.safetensors").unlink()
    with make_bus(**keepers) as bus:
        for options in ({}, {"missing_ok": ("b",)}):
            with pytest.raises(CorruptCheckpointError, match=r"b\.safetensors"):
                bus.resume(run, **options)
        assert set(read_values(keepers).values()) == {0}
        bus.resume(run, skip=("b",))  # what is not wanted is not read


# -- what of it ---------------------------------------------------------------------------------


def test_a_section_without_a_plugin_and_a_plugin_without_a_section_name_the_line_to_add(
    tmp_path: Path,
) -> None:
    """Source: Lightning-AI/pytorch-lightning#2631, NVIDIA-NeMo/Megatron-Bridge#5706"""
    run = save(tmp_path, 1, names=("a", "b"))
    with make_bus(a=Keeper(), new=Keeper()) as bus:
        with pytest.raises(ManyErrors) as caught:
            bus.resume(run)
        missing, unclaimed = caught.value.exceptions
        assert str(missing) == (
            f"plugin 'new' is on the bus and {run / 'step-00000001'} has no section 'new'; pass"
            " missing_ok=('new',) to start it fresh; nobody reads 'b' of the same kind: if it is"
            " the same under a former name, pass aliases={'new': 'b'}"
        )
        assert str(unclaimed) == (
            "the checkpoint has a section 'b', written by plugin 'Keeper', and nobody on the bus"
            " restores it; attach it, or pass skip=('b',)"
        )
        assert str(caught.value) == (
            "2 problems were found, and nothing was changed:\n"
            f"  - MissingSectionError: {missing}\n  - UnclaimedSectionError: {unclaimed}"
        )
        report = bus.resume(run, skip=("b",), missing_ok=("new",)).report
    assert {name: each.status for name, each in report.sections.items()} == {
        "a": "restored",
        "new": "missing",
        "b": "skipped",
    }
    assert "b" in hookbus.checkpoints(run)[-1].sections


def test_a_plugin_that_has_no_section_any_more_does_not_claim_the_one_of_its_name(
    tmp_path: Path,
) -> None:
    class LooksAfter:
        component = "something"

        @hookbus.hookimpl
        def safe_point(self) -> None: ...

    run = save(tmp_path, 1, names=("a",))
    with make_bus(a=LooksAfter()) as bus:
        assert bus.components == {"a": "something"}
        with pytest.raises(UnclaimedSectionError, match="section 'a'"):
            bus.resume(run)


def test_the_report_tells_what_became_of_each_section(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Empty(Keeper):
        @hookbus.hookimpl
        def save_state(self, save: hookbus.Save) -> None: ...

    class Forgets:
        @hookbus.hookimpl
        def save_state(self, save: hookbus.Save) -> None: ...

        @hookbus.hookimpl
        def restore_model(self) -> None: ...

    def make(forgets: object) -> dict[str, object]:
        return {"a": Keeper(), "b": Keeper("restore_training_state"), "e": Empty(), "f": forgets}

    with make_bus(**make(Keeper())) as bus:
        bus.resume(tmp_path)
        bus.save(step=1)
    with make_bus(**make(Forgets())) as bus:
        report = bus.resume(tmp_path).report
    assert caplog.messages == ["plugin 'f' has a section and did not read it"]
    assert [(s.name, s.status, s.event, s.bytes) for s in report.sections.values()] == [
        ("a", "restored", "restore_model", 12),
        ("b", "restored", "restore_training_state", 12),
        ("e", "empty", None, 0),
        ("f", "fresh", None, 0),
    ]
    assert list(report.events) == [
        "resume_start",
        "on_setup",
        "restore_model",
        "pre_configure_sharded",
        "configure_sharded",
        "restore_training_state",
        "resume_end",
    ]


def test_a_section_that_a_stage_has_no_use_for_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_bus(**make_keepers()) as bus:
        bus.resume(save(tmp_path, 1), stage="test")
    assert caplog.messages == []


@pytest.mark.parametrize("way", ["resume", "resuming"])
def test_only_and_init_only_that_match_nothing_are_errors_and_the_others_are_warned_of(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = save(tmp_path / "run", 1, names=("a",))

    def resume(run: Path, **options: Any) -> hookbus.Resume:
        with make_bus(a=Keeper()) as bus:
            if way == "resume":
                return bus.resume(run, **options)
            with bus.resuming(run, **options) as resume:
                return resume

    for run_, options, message in (
        (run, {"stage": "test", "only": ("x",)}, "only=('x',) matches none of a"),
        (
            tmp_path / "new",
            {"init_from": run, "init_only": ("model",)},
            "init_only=('model',) matches none of a",
        ),
    ):
        with pytest.raises(CallError) as caught:
            resume(run_, **options)
        assert str(caught.value) == message
    with pytest.raises(ManyErrors, match="nothing was changed"):
        resume(run, stage="test", only=("x", "y*"))
    report = resume(run, skip=("b*",), missing_ok=("c",)).report
    assert report.notes == [
        "skip=('b*',) matches none of a, c",
        "missing_ok=('c',) matches none of a",
    ]
    assert caplog.messages[-2:] == report.notes


def test_what_a_test_asks_for_must_be_there_before_the_weights_come_back(tmp_path: Path) -> None:
    run, keeper = save(tmp_path, 1), Keeper()
    with make_bus(a=keeper) as bus:
        resume = bus.prepare(run, stage="test", only=("a", "b"))
        with pytest.raises(UnclaimedSectionError, match="section 'b'"):
            resume.restore_model()
    assert keeper.restored == 0


def test_a_warm_start_from_a_run_takes_its_newest_checkpoint_and_the_model(tmp_path: Path) -> None:
    old = tmp_path / "old"
    kept = {"model": Keeper(), "state": Keeper("restore_training_state")}
    with make_bus(**kept) as bus:
        bus.resume(old)
        for step in (1, 2):
            for keeper in kept.values():
                keeper.tensor.fill_(step)
            bus.save(step=step)
    for source, value in ((old, 2), (old / "step-00000001", 1)):
        new = tmp_path / f"new{value}"
        fresh = {"model": Keeper(), "state": Keeper("restore_training_state"), "more": Keeper()}
        with make_bus(**fresh) as bus:
            resume = bus.resume(new, init_from=source)
            assert (resume.fresh, resume.step) == (True, 0)
            assert str(resume.report).startswith(f"warm start from {old / 'step-0000000'}{value}")
            bus.save(step=1)
        assert read_values(fresh) == {"model": value, "state": 0, "more": 0}
    with make_bus(net=Keeper()) as bus, pytest.raises(UnclaimedSectionError) as caught:
        bus.resume(tmp_path / "other", init_from=old)  # not silently from scratch
    assert "section 'model'" in str(caught.value)


# -- other stages -------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_another_stage_only_reads_and_leaves_training_state_and_streams_alone(
    stage: Any, tmp_path: Path
) -> None:
    def build() -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved = build()
    with hookbus.HookBus() as bus:
        bus.attach(**saved)
        bus.resume(tmp_path)
        bus.save(step=1)
    before = read_folder(tmp_path)
    live = build()
    live["optimizer"].param_groups[0]["lr"] = 0.5
    random.seed(4)
    streams = random.getstate(), torch.get_rng_state().tolist()
    with hookbus.HookBus() as trains, hookbus.HookBus() as bus:
        trains.attach(**build())
        trains.resume(tmp_path)  # holds the lock, which a reader does not ask for
        random.setstate(streams[0])
        torch.set_rng_state(torch.tensor(streams[1], dtype=torch.uint8))
        bus.attach(**live)
        report = bus.resume(tmp_path, stage=stage).report
        assert report.stage == stage
        with pytest.raises(SaveError) as caught:
            bus.save(step=2)
        assert str(caught.value) == (
            f"the last resume was for stage {stage!r}, which only reads; call bus.resume(RUN) to"
            " train"
        )
    assert torch.equal(live["model"].weight, saved["model"].weight)
    assert live["optimizer"].param_groups[0]["lr"] == 0.5
    assert (random.getstate(), torch.get_rng_state().tolist()) == streams
    after = read_folder(tmp_path)
    theirs = ("run.lock", "run.jsonl")  # of the one that trains
    assert {k: v for k, v in after.items() if k not in theirs} == {
        k: v for k, v in before.items() if k not in theirs
    }
    assert report.sections["model"].status == "restored"
    assert report.sections["optimizer"].status == "fresh"


def test_what_an_evaluation_does_not_attach_is_left_alone(tmp_path: Path) -> None:
    keepers = make_keepers(("a",))
    with make_bus(**keepers) as bus:
        report = bus.resume(save(tmp_path, 1), stage="test").report
    assert read_values(keepers) == {"a": 1}
    assert {name: each.status for name, each in report.sections.items()} == {
        "a": "restored",
        "ab": "unclaimed",
        "b": "unclaimed",
        "c": "unclaimed",
    }


# -- settings -----------------------------------------------------------------------------------


def test_a_setting_that_changes_the_bits_is_noted_with_both_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Source: huggingface/transformers#18070"""
    run = save(tmp_path, 1)
    torch.set_num_threads(2)
    try:
        with make_bus(**make_keepers()) as bus:
            report = bus.resume(run).report
    finally:
        torch.set_num_threads(1)
    (change,) = report.changes
    assert str(change) == (
        "threads: saved 1, run has 2; the run's is used, so not bit for bit (it decides how sums"
        " round)"
    )
    assert (change.setting, change.then, change.exact) == ("threads", "adapt", False)
    assert caplog.messages == [
        f"{run} goes on with other settings than it was saved with:\n  {change}"
    ]
    assert f"changed: {change}" in str(report)
    assert report.to_dict()["changes"][0]["saved"] == "1"
    with make_bus(**make_keepers()) as bus:
        assert bus.resume(run).report.changes == []
