"""When a policy saves, and what it keeps."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from keepers import Keeper, make_bus
from torch.utils.data import DataLoader, TensorDataset

import hookbus
from builtin_plugins import (
    EveryEpochs,
    EverySeconds,
    EverySteps,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepTagged,
    Loop,
    OverheadTarget,
    SavePolicy,
)
from builtin_plugins.keep import Keep
from builtin_plugins.rules import warn_once
from builtin_plugins.when import Moment
from hookbus.checkpoint import RunLock
from hookbus.errors import CallError, CheckpointNotFoundError, CorruptCheckpointError, SaveError
from hookbus.testing import faulty_storage


def train(
    run: Path,
    policy: SavePolicy,
    *,
    epochs: int = 2,
    steps: int | None = None,
    loaded_steps: int | None = None,
    losses: Iterable[float] = (),
    crash_at: int | None = None,
) -> None:
    """Train on four batches an epoch; ``losses`` are those after each epoch."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(16.0).view(8, 2)), batch_size=2)
    losses = iter(losses)
    bus, loop = hookbus.HookBus(), Loop()
    bus.register(policy)
    bus.attach(model=model, optimizer=optimizer, data=loader, loop=loop)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        if loop.step == crash_at:
            raise KeyboardInterrupt

    with bus:
        bus.resume(run)
        if steps is not None:
            for _ in loop.steps(steps):
                step(torch.ones(2))
            return
        if loaded_steps is not None:
            for (x,) in loop.steps(loaded_steps, loader):
                step(x)
            return
        for _ in loop.epochs(epochs):
            for (x,) in loop.batches(loader):
                step(x)
            if (loss := next(losses, None)) is not None:
                loop.metrics["loss"] = loss


def list_names(run: Path) -> list[str]:
    return sorted(name.removeprefix("step-") for name in os.listdir(run) if "step-" in name)


def list_steps(run: Path) -> list[int]:
    return [int(name) for name in list_names(run)]


# -- when ---------------------------------------------------------------------------------------


TWICE = {"every 1e-09 seconds": ["00000004-1", "00000008-1"]}


@pytest.mark.parametrize(
    ("when", "steps"),
    [
        (EverySteps(3), [3, 6]),
        (EverySteps(1), [1, 2, 3, 4, 5, 6, 7, 8]),
        (EverySteps(3) | EverySteps(4), [3, 4, 6, 8]),
        (EveryEpochs(1), [4, 8]),
        (EveryEpochs(2), [8]),
        (EverySteps(3) | EveryEpochs(), [3, 4, 6, 8]),
        (EverySeconds(1000), []),
        (EverySeconds(1e-9), [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
    ids=str,
)
@pytest.mark.parametrize("wait", [True, False])
def test_a_run_is_saved_when_any_rule_wants_it(
    when: Any, steps: list[int], wait: bool, tmp_path: Path
) -> None:
    train(tmp_path, SavePolicy(when=when, wait=wait))
    # A second one of a step only where both the step and the end of its epoch are safe points.
    names = list_names(tmp_path)
    assert sorted({int(name.partition("-")[0]) for name in names}) == steps
    assert [name for name in names if "-" in name] == TWICE.get(str(when), [])


@pytest.mark.parametrize("when", [EverySteps(3), EverySteps(3) | EverySeconds(1000)])
def test_the_same_rules_work_without_a_loader(when: Any, tmp_path: Path) -> None:
    train(tmp_path, SavePolicy(when=when), steps=7)
    assert list_steps(tmp_path) == [3, 6]


@pytest.mark.parametrize(
    ("steps", "saved"), [(8, [4, 8]), (9, [4, 8]), (7, [4]), (3, []), (12, [4, 8, 12])]
)
def test_steps_of_a_loader_have_epochs_too(steps: int, saved: list[int], tmp_path: Path) -> None:
    """The last step may be the end of one, and no batch is asked for after it."""
    train(tmp_path, SavePolicy(when=EveryEpochs()), loaded_steps=steps)
    assert list_steps(tmp_path) == saved


def test_counting_goes_on_after_a_crash(tmp_path: Path) -> None:
    policy = {"when": EverySteps(3)}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, SavePolicy(**policy), crash_at=5)
    train(tmp_path, SavePolicy(**policy), epochs=3)
    assert list_steps(tmp_path) == [3, 6, 9, 12]


def test_the_end_of_an_epoch_is_saved_with_the_weights_and_the_metric_of_its_validation(
    tmp_path: Path,
) -> None:
    train(tmp_path, SavePolicy(when=EveryEpochs()), losses=(3.0, 2.0))
    saved = hookbus.checkpoints(tmp_path)
    assert [each.metrics for each in saved] == [{"loss": 3.0}, {"loss": 2.0}]
    assert [each.progress["where"] for each in saved] == ["tail", "tail"]
    assert [each.why for each in saved] == ["every epoch", "every epoch"]


def moment(**changes: Any) -> Moment:
    plain = {"step": 9, "step_before": 8, "epoch": 0, "epoch_ended": False, "running": 5.0}
    return Moment(
        **{**plain, "seconds": 99.0, "saving": False, "blocked": 0.1, "writing": 1.0, **changes}
    )


@pytest.mark.parametrize(
    ("changes", "due"),
    [
        ({"running": 4.9}, False),  # 0.1 s are 2 % of 5 s
        ({"running": 5.0}, True),
        ({"blocked": 0.2, "running": 9.9}, False),
        ({"blocked": 0.2, "running": 10.0}, True),
        ({"writing": 7.0, "running": 6.0}, False),  # it is still being written
        ({"blocked": None, "writing": None, "running": 0.0}, True),  # measure
        ({"blocked": None, "writing": None, "step": 0}, False),
        ({"blocked": None, "writing": None, "saving": True}, False),
        ({"running": 60.0, "saving": True}, False),  # it takes longer than the one before
    ],
)
def test_an_overhead_is_kept_by_the_time_that_the_last_save_took(
    changes: dict[str, Any], due: bool
) -> None:
    assert OverheadTarget(0.02).is_due(moment(**changes)) is due


def test_seconds_go_on_between_two_starts(tmp_path: Path) -> None:
    """So a run that never lasts so long is saved all the same."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, SavePolicy(when=EverySeconds(1000)), crash_at=1)
    assert list_steps(tmp_path) == []
    history = tmp_path / "run.jsonl"
    began = datetime.now(UTC) - timedelta(seconds=1001)
    record = json.loads(history.read_text()) | {"time": began.isoformat()}
    history.write_text(json.dumps(record) + "\n")
    train(tmp_path, SavePolicy(when=EverySeconds(1000)))
    assert list_steps(tmp_path) == [1]


def test_steps_without_a_loader_have_no_epochs_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    train(tmp_path, SavePolicy(when=EveryEpochs(3) | EverySteps(4)), steps=6)
    assert list_steps(tmp_path) == [4]
    told = [text for text in caplog.messages if "loop.steps(n) without a loader" in text]
    assert told == ["EveryEpochs(3): loop.steps(n) without a loader has no epochs"]


def test_a_policy_that_comes_late_knows_the_run(tmp_path: Path) -> None:
    train(tmp_path, SavePolicy(when=EverySteps(2)))
    model, loop = torch.nn.Linear(2, 1), Loop()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hookbus.HookBus() as bus:
        bus.attach(model=model, optimizer=optimizer, loop=loop)
        bus.resume(tmp_path, skip=("data",))
        bus.register(SavePolicy(when=EverySteps(8), keep=KeepLast(1)))
        for _ in loop.steps(9):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
    assert list_steps(tmp_path) == [8]


def test_what_is_superfluous_goes_at_the_first_safe_point(tmp_path: Path) -> None:
    """A start may have died before it could delete, or may have had no such rule."""
    train(tmp_path, SavePolicy(when=EverySteps(1)), epochs=1)
    assert list_steps(tmp_path) == [1, 2, 3, 4]
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, SavePolicy(when=EverySteps(100), keep=KeepLast(2)), crash_at=6)
    assert list_steps(tmp_path) == [3, 4]


def test_checkpoints_of_another_run_take_no_places(tmp_path: Path) -> None:
    save_losses(tmp_path / "other", [0.1, 0.1], None)
    run = tmp_path / "run"
    save_losses(run, [5.0, 1.0, 9.0], None, first=7)
    for name in ("step-00000001", "step-00000002"):
        shutil.copytree(tmp_path / "other" / name, run / name)
    save_losses(run, [7.0], KeepBest("loss"), first=10)
    assert list_steps(run) == [1, 2, 8, 10]


def test_a_rule_that_returns_nothing_is_told_which(tmp_path: Path) -> None:
    class Mine(Keep):
        def choose(self, checkpoints: Any) -> Any:
            return None

    with pytest.raises(CallError, match=r"Mine.choose returned a NoneType; return those to keep"):
        save_losses(tmp_path, [1.0], Mine())


def test_the_overhead_is_known_from_the_history_after_a_resume(tmp_path: Path) -> None:
    train(tmp_path, SavePolicy(when=OverheadTarget(1e-9)), epochs=1)
    assert list_steps(tmp_path) == [1]
    train(tmp_path, SavePolicy(when=OverheadTarget(1e-9)), epochs=2)
    assert list_steps(tmp_path) == [1]


# -- keep ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "steps"),
    [
        (KeepLast(1), [8]),
        (KeepLast(3), [6, 7, 8]),
        (KeepEvery(steps=3), [3, 6, 8]),
        (KeepLast(2) | KeepEvery(steps=4), [4, 7, 8]),
        (KeepTagged(), [8]),
        (KeepBest("loss"), [8]),
        (None, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
    ids=str,
)
@pytest.mark.parametrize("wait", [True, False])
def test_what_no_rule_keeps_is_deleted_and_the_newest_stays(
    keep: Any, steps: list[int], wait: bool, tmp_path: Path
) -> None:
    train(tmp_path, SavePolicy(when=EverySteps(1), keep=keep, wait=wait))
    assert list_steps(tmp_path) == steps


def test_age_is_by_step_and_not_by_the_letters_of_a_name(tmp_path: Path) -> None:
    """Source: huggingface/transformers#27138; huggingface/accelerate#1163."""
    for steps, expected in (
        ((9_800, 9_900, 10_000), [9_900, 10_000]),
        (tuple(range(12)), [10, 11]),
        ((99_999_999, 100_000_000, 100_000_001), [100_000_000, 100_000_001]),
    ):
        run = tmp_path / str(steps[0])
        with make_bus(a=Keeper(), policy=SavePolicy(keep=KeepLast(2))) as bus:
            bus.resume(run)
            for step in steps:
                bus.save(step=step)
        assert list_steps(run) == expected


def save_losses(run: Path, losses: Iterable[float], keep: Any, *, first: int = 1) -> None:
    with make_bus(a=Keeper(), policy=SavePolicy(keep=keep)) as bus:
        bus.resume(run)
        for step, loss in enumerate(losses, first):
            bus.save(step=step, metrics={"loss": loss})


@pytest.mark.parametrize(
    ("keep", "steps"),
    [
        (KeepBest("loss", 2), [2, 4, 6]),
        (KeepBest("loss", 1, mode="max"), [1, 6]),
        (KeepBest("other", 2), [6]),
    ],
    ids=str,
)
def test_the_best_are_kept_beside_the_newest(keep: Any, steps: list[int], tmp_path: Path) -> None:
    """Source: huggingface/transformers#25136."""
    save_losses(tmp_path, [9.0, 1.0, float("nan"), 2.0, float("nan"), 5.0], keep)
    assert list_steps(tmp_path) == steps


def test_a_metric_that_no_checkpoint_has_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_losses(tmp_path, [3.0, 2.0, 1.0], KeepBest("los"))
    told = [text for text in caplog.messages if text.startswith("KeepBest")]
    assert told == ["KeepBest('los'): no checkpoint has it; they have ['loss']"]


def test_the_best_of_all_starts_are_kept(tmp_path: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#4911."""
    save_losses(tmp_path, [5.0, 4.0, 6.0, 3.0, 7.0], KeepBest("loss", 3))
    assert list_steps(tmp_path) == [1, 2, 4, 5]
    save_losses(tmp_path, [1.0, 2.0], KeepBest("loss", 3), first=6)
    assert list_steps(tmp_path) == [4, 6, 7]


def test_what_is_tagged_is_kept(tmp_path: Path) -> None:
    with make_bus(a=Keeper(), policy=SavePolicy(keep=KeepLast(1) | KeepTagged())) as bus:
        bus.resume(tmp_path)
        for step in range(5):
            bus.save(step=step, tag="paper" if step == 2 else None)
    assert list_steps(tmp_path) == [2, 4]
    assert [each.tag for each in hookbus.checkpoints(tmp_path)] == ["paper", None]


def test_what_is_not_of_this_run_is_never_touched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Source: pytorch/torchtitan#4292."""
    other = tmp_path / "other"
    with make_bus(a=Keeper()) as bus:
        bus.resume(other)
        foreign = bus.save(step=0)
    run = tmp_path / "run"
    save_losses(run, [1.0], None)
    beside = ["step-00000003.backup", "foo-step-00000003", "step-3", "step-0000000x", "damaged-x"]
    for name in beside:
        (run / name).mkdir(parents=True)
    shutil.copytree(foreign.path, run / foreign.path.name)
    with make_bus(a=Keeper(), policy=SavePolicy(keep=KeepLast(1))) as bus:
        bus.resume(run, skip=("a",))
        assert "holds checkpoints of another run too: step-00000000; it goes on" in caplog.text
        for step in (3, 4, 5):
            bus.save(step=step)
    ours = {"run.lock", "run.jsonl", "step-00000005"}
    assert {*beside, foreign.path.name, *ours} == set(os.listdir(run))


def test_nothing_is_deleted_if_the_save_comes_to_nothing(tmp_path: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#1150."""
    keeper = Keeper()
    with make_bus(a=keeper) as bus:
        bus.resume(tmp_path)
        bus.save(step=1)
        bus.save(step=2)
    with make_bus(a=keeper, policy=SavePolicy(keep=KeepLast(1))) as bus:
        bus.resume(tmp_path)
        keeper.tensor = object()
        with pytest.raises(hookbus.errors.StateError):
            bus.save(step=3)
    assert list_steps(tmp_path) == [1, 2]


class Damager:
    """Damages what was just committed, before anybody else hears of it."""

    @hookbus.hookimpl(tryfirst=True)
    def save_end(self, checkpoint: hookbus.Checkpoint) -> None:
        file = checkpoint.path / "a.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)


def test_nothing_is_deleted_before_the_new_one_was_read_and_found_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bus = make_bus(a=Keeper(), policy=SavePolicy(keep=KeepLast(1)))
    bus.resume(tmp_path)
    first = bus.save(step=1)
    bus.register(Damager(), "damager")
    second = bus.save(step=2)
    assert list_steps(tmp_path) == [1, 2]
    assert f"{first.path} is not deleted: {second.path}" in caplog.text
    with pytest.raises(CorruptCheckpointError, match="is damaged"):
        bus.delete(first)
    bus.close()


def test_the_newest_and_what_is_not_of_the_run_cannot_be_deleted_by_hand(tmp_path: Path) -> None:
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path / "other")
        other = bus.save(step=1)
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path / "run")
        first = bus.save(step=1)
        with pytest.raises(SaveError, match="is the newest checkpoint of its run"):
            bus.delete(first)
        second = bus.save(step=2)
        with pytest.raises(SaveError, match="is no checkpoint in"):
            bus.delete(other)
        copy = first.path.with_name("step-00000000")
        shutil.copytree(other.path, copy)
        with pytest.raises(SaveError, match="is of another run"):
            bus.delete(hookbus.open(copy))
        bus.delete(first, why="by hand")
        assert [each.path for each in hookbus.checkpoints(tmp_path / "run")][1:] == [second.path]
    (deleted,) = [r for r in hookbus.history(tmp_path / "run") if r["event"] == "delete"]
    assert (deleted["step"], deleted["why"]) == (1, "by hand")


def test_the_one_that_was_resumed_from_stays_until_a_newer_one_is_good(tmp_path: Path) -> None:
    keep = KeepLast(1)
    save_losses(tmp_path, [1.0], keep)
    with make_bus(a=Keeper(), policy=SavePolicy(keep=keep), damager=Damager()) as bus:
        bus.resume(tmp_path)
        bus.save(step=2)
    assert list_steps(tmp_path) == [1, 2]


def test_old_checkpoints_are_deleted_behind_training(tmp_path: Path) -> None:
    save_losses(tmp_path, [1.0, 1.0, 1.0], None)
    gate = threading.Event()
    with (
        make_bus(a=Keeper(), policy=SavePolicy(keep=KeepLast(1))) as bus,
        faulty_storage(error=None, on="unlink", gate=gate) as disk,  # a wait for it would not end
    ):
        bus.resume(tmp_path)
        for step in (4, 5):
            bus.save(step=step, wait=False)
            bus._saver.writer._background.wait()
            bus._saver.collect_done()
        assert [each.step for each in hookbus.checkpoints(tmp_path)][-2:] == [4, 5]
        gate.set()
        bus.wait()
        assert list_steps(tmp_path) == [5]
        assert len(disk.met) > 4
    deleted = [each["step"] for each in hookbus.history(tmp_path) if each["event"] == "delete"]
    assert deleted == [1, 2, 3, 4]


def test_who_waits_for_a_save_waits_for_what_is_deleted_after_it(tmp_path: Path) -> None:
    with make_bus(a=Keeper(), policy=SavePolicy(keep=KeepLast(1))) as bus:
        bus.resume(tmp_path)
        with faulty_storage(error=None, on="unlink", delay=0.05):
            for step in (1, 2):
                bus.save(step=step)
        assert list_steps(tmp_path) == [2]


def test_a_bus_that_lost_the_run_deletes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_losses(tmp_path, [1.0, 1.0], None)
    gate = threading.Event()
    bus = make_bus(a=Keeper(), policy=SavePolicy(keep=KeepLast(1)))
    bus.resume(tmp_path)
    with faulty_storage(error=None, on="unlink", gate=gate):
        bus.save(step=3, wait=False)
        bus._saver.writer._background.wait()
        bus._saver.collect_done()
        newer = RunLock(tmp_path)
        newer.take()
        gate.set()
        with pytest.raises(SaveError, match=r"took .* over"):
            bus.delete(hookbus.checkpoints(tmp_path)[0])
        bus.close()
    newer.release()
    # The first one may have been on its way.
    assert [each.step for each in hookbus.checkpoints(tmp_path)][-2:] == [2, 3]
    assert "step-00000002 is not deleted: a newer bus" in caplog.text


def test_a_deletion_is_renamed_first_and_swept_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_losses(tmp_path, [1.0, 1.0], None)

    def die(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hookbus.checkpoint.files.remove_folder", die)
        save_losses(tmp_path, [1.0], KeepLast(2), first=3)
    assert [each.step for each in hookbus.checkpoints(tmp_path)] == [2, 3]
    assert len(os.listdir(tmp_path)) == 2 + len(["run.lock", "run.jsonl", "hidden"])
    save_losses(tmp_path, [], None)
    assert len(os.listdir(tmp_path)) == 2 + len(["run.lock", "run.jsonl"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KeepLast(0), "pass a whole number from 1 up, not KeepLast(0)"),
        (lambda: KeepLast(True), "pass a whole number from 1 up, not KeepLast(True)"),
        (lambda: KeepBest("x", 0), "pass a whole number from 1 up, not KeepBest('x', 0)"),
        (lambda: KeepBest(1), "pass the name of a metric, not KeepBest(1)"),
        (lambda: KeepBest("x", mode="low"), "pass mode='min' or 'max', not 'low'"),
        (lambda: KeepEvery(steps=0), "pass a whole number from 1 up, not KeepEvery(steps=0)"),
        (lambda: EverySteps(0), "pass a whole number from 1 up, not EverySteps(0)"),
        (lambda: EveryEpochs(1.0), "pass a whole number from 1 up, not EveryEpochs(1.0)"),
        (lambda: EverySeconds(0), "pass a number above 0, not EverySeconds(0)"),
        (lambda: EverySeconds(float("nan")), "pass a number above 0, not EverySeconds(nan)"),
        (
            lambda: OverheadTarget(2),
            "pass a share of the time, such as 0.02, not OverheadTarget(2)",
        ),
        (lambda: SavePolicy(when=500), "when=500: pass a rule such as EverySteps(500)"),
        (lambda: SavePolicy(keep=3), "keep=3: pass a rule such as KeepLast(3)"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(make: Any, message: str) -> None:
    with pytest.raises(CallError) as caught:
        make()
    assert str(caught.value) == message


def test_rules_of_two_sorts_do_not_mix() -> None:
    with pytest.raises(TypeError):
        EverySteps(1) | KeepLast(1)


def test_why_a_run_was_saved_is_in_the_checkpoint_and_in_the_history(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hookbus")
    train(tmp_path, SavePolicy(when=EverySteps(4) | EveryEpochs(2), keep=KeepLast(1)))
    records = [r for r in hookbus.history(tmp_path) if r["event"] != "start"]
    saves = [(r["checkpoint"], r["why"]) for r in records if r["event"] == "save"]
    assert saves == [
        ("step-00000004", "every 4 steps"),
        ("step-00000008", "every 4 steps"),
        ("step-00000008-1", "every 2 epochs"),
    ]
    deletions = [(r["checkpoint"], r["why"]) for r in records if r["event"] == "delete"]
    assert deletions == [(name, "no rule keeps it") for name, _ in saves[:2]]
    assert hookbus.checkpoints(tmp_path)[0].why == "every 2 epochs"


# -- what people do -----------------------------------------------------------------------------


def test_a_deletion_that_failed_is_tried_again(tmp_path: Path) -> None:
    with make_bus(a=Keeper(), policy=SavePolicy(keep=KeepLast(1))) as bus:
        bus.resume(tmp_path)
        bus.save(step=1)
        with faulty_storage(OSError(errno.EACCES, "no"), on="rename", path="*.step-00000001.*"):
            bus.save(step=2)
        assert list_steps(tmp_path) == [1, 2]
        bus.save(step=3)
    assert list_steps(tmp_path) == [3]


def test_what_cannot_be_removed_is_no_checkpoint_any_more_and_hinders_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refuse = OSError(errno.EACCES, "no")
    with (
        faulty_storage(refuse, on="unlink"),
        make_bus(a=Keeper(), policy=SavePolicy(keep=KeepLast(1))) as bus,
    ):
        bus.resume(tmp_path)
        bus.save(step=1)
        bus.save(step=2)
    assert [each.step for each in hookbus.checkpoints(tmp_path)] == [2]
    assert "is left over and stays" in caplog.text
    with faulty_storage(refuse, on="unlink"), make_bus(a=Keeper()) as bus:
        assert bus.resume(tmp_path).step == 2
    assert [r["step"] for r in hookbus.history(tmp_path) if r["event"] == "delete"] == [1]


def test_two_policies_that_keep_are_refused(tmp_path: Path) -> None:
    bus = make_bus(policy=SavePolicy(keep=KeepLast(1)), more=SavePolicy(when=EverySteps(5)))
    with pytest.raises(CallError, match=r"give one of them keep=A \| B"):
        bus.register(SavePolicy(keep=KeepTagged()), "tags")
    assert [each.name for each in bus.plugins] == ["policy", "more"]
    bus.close()


def test_a_rule_may_return_checkpoints_that_it_has_opened_itself(tmp_path: Path) -> None:
    class KeepAll(Keep):
        def choose(self, checkpoints: Any) -> Any:
            return hookbus.checkpoints(tmp_path)

    with make_bus(a=Keeper(), policy=SavePolicy(keep=KeepAll())) as bus:
        bus.resume(tmp_path)
        for step in range(4):
            bus.save(step=step)
    assert list_steps(tmp_path) == [0, 1, 2, 3]


def test_the_last_good_one_stays_where_the_newest_has_gone(tmp_path: Path) -> None:
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path)
        first, second, third = (bus.save(step=step) for step in (1, 2, 3))
        bus.delete(first)
        shutil.rmtree(third.path)
        with pytest.raises(CheckpointNotFoundError):
            bus.delete(second)
    assert list_steps(tmp_path) == [2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, "x"), "delete(None): pass some of hookbus.checkpoints(run)"),
        (("path", "x"), "delete('path'): pass some of hookbus.checkpoints(run)"),
        ((1, ""), "delete(1): pass some of hookbus.checkpoints(run)"),
    ],
)
def test_what_is_no_checkpoint_cannot_be_deleted(
    arguments: Any, message: str, tmp_path: Path
) -> None:
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path)
        first = bus.save(step=1)
        bus.save(step=2)
        with pytest.raises(CallError) as caught:
            bus.delete(arguments[0], why=arguments[1])
        assert str(caught.value) == message
        with pytest.raises(CallError, match="why='': pass a word or two"):
            bus.delete(first, why="")
    assert list_steps(tmp_path) == [1, 2]


def test_a_relative_path_is_one_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with make_bus(a=Keeper()) as bus:
        bus.resume("run")
        bus.save(step=1)
        bus.save(step=2)
        bus.delete(hookbus.checkpoints("run")[0])
    assert list_steps(tmp_path / "run") == [2]


def test_after_a_failed_save_the_overhead_is_measured_again(tmp_path: Path) -> None:
    policy = SavePolicy(when=OverheadTarget(0.5), wait=True)
    with pytest.raises(hookbus.errors.WriteError), faulty_storage(on="create", path="*.json"):
        train(tmp_path, policy, steps=3)
    train(tmp_path, SavePolicy(when=OverheadTarget(0.5), wait=True), steps=3)
    assert list_steps(tmp_path)[0] == 1


@pytest.mark.parametrize(
    "line", ['{"event":"save"}', '{"event":"save","blocked":"x","seconds":NaN}', "[[["]
)
def test_a_history_that_is_odd_costs_no_resume(line: str, tmp_path: Path) -> None:
    train(tmp_path, SavePolicy(when=EverySteps(4)), steps=4)
    with (tmp_path / "run.jsonl").open("a") as file:
        file.write(line + "\n")
    train(tmp_path, SavePolicy(when=EverySteps(4) | OverheadTarget(0.01)), steps=8)
    assert 8 in list_steps(tmp_path)


def test_a_policy_without_a_loop_says_that_it_cannot_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_bus(a=Keeper(), policy=SavePolicy(when=EverySteps(1))) as bus:
        bus.resume(tmp_path)
    assert "there is no loop on the bus to save by" in caplog.text


def test_a_step_that_was_saved_is_not_saved_again_right_after_a_resume(tmp_path: Path) -> None:
    train(tmp_path, SavePolicy(when=EverySteps(4)), epochs=1)
    train(tmp_path, SavePolicy(when=EverySteps(4)), epochs=1)
    assert list_names(tmp_path) == ["00000004"]
