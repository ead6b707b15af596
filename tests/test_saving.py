"""When a save is written, what it holds, and what becomes of one that is never written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hookbus
from builtin_plugins import Loop
from hookbus.errors import (
    CallError,
    ManyErrors,
    MismatchError,
    ResumeError,
    SaveError,
    StateError,
    raise_all,
)


def start(run: Path | str, *, loop: bool = True, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.arange(16.0).view(8, 2)), batch_size=2)
    bus, pace = hookbus.HookBus(), Loop()
    bus.attach(model=model, optimizer=optimizer, data=loader)
    if loop:
        bus.attach(loop=pace)
    bus.resume(run, **options)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return bus, pace, loader, step


def list_steps(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in hookbus.checkpoints(run)]


def test_a_save_asked_for_in_a_loop_that_is_left_is_written_once_with_its_metrics(tmp_path) -> None:
    bus, loop, loader, step = start(tmp_path)
    for _ in loop.epochs(1):
        for (x,) in loop.batches(loader):
            step(x)
            bus.save(metrics={"a": 1})
            break
        break
    saved = bus.save(metrics={"b": 2})
    bus.close()
    assert [each.path for each in hookbus.checkpoints(tmp_path)] == [saved.path]
    assert saved.metrics == {"a": 1, "b": 2}


def test_several_saves_of_one_body_are_one_and_keep_all_metrics(tmp_path) -> None:
    bus, loop, loader, step = start(tmp_path)
    for _ in loop.epochs(1):
        for (x,) in loop.batches(loader):
            step(x)
            bus.save(metrics={"a": 1})
            bus.save(metrics={"b": torch.tensor(2.0)})
            bus.save()
    bus.close()
    assert list_steps(tmp_path) == [1, 2, 3, 4]
    assert hookbus.checkpoints(tmp_path)[0].metrics == {"a": 1, "b": 2.0}


def test_a_chdir_does_not_move_the_run(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    bus, loop, loader, step = start("run")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    for _ in loop.epochs(1):
        for (x,) in loop.batches(loader):
            step(x)
        bus.save()
    bus.close()
    assert list_steps(tmp_path / "run") == [4]
    assert not any((tmp_path / "other").iterdir())


@pytest.mark.parametrize("run", ["", None, 3, "a\0b", "runs/step-00000005"])
def test_what_is_no_path_of_a_run_is_refused(run, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CallError, match=r"run=|named like a checkpoint"):
        hookbus.HookBus().resume(run)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{"skip": ("loop",)}, {"missing_ok": ("loop",)}])
def test_a_loop_that_would_begin_below_the_newest_checkpoint_is_refused(options, tmp_path) -> None:
    with_loop = "skip" in options
    bus, loop, loader, step = start(tmp_path, loop=with_loop)
    if with_loop:
        for _ in loop.epochs(1):
            for (x,) in loop.batches(loader):
                step(x)
            bus.save()
    else:
        bus.save(step=300)
    bus.close()
    with pytest.raises(ResumeError, match=r"the loop would begin at step 0.*init_from="):
        start(tmp_path, **options)


def test_a_save_below_the_newest_checkpoint_is_refused(tmp_path) -> None:
    bus, _, _, _ = start(tmp_path, loop=False)
    bus.save(step=300)
    with pytest.raises(CallError, match="step=299 is below the newest checkpoint's, 300"):
        bus.save(step=299)


def train_until(ending: BaseException, run: Path) -> None:
    """Ask for a save in each body; the third raises ``ending`` before its step."""
    bus, loop, loader, step = start(run)
    try:
        for _ in loop.epochs(1):
            for (x,) in loop.batches(loader):
                bus.save()
                if loop.batch == 3:
                    raise ending
                step(x)
    finally:
        bus.close()


def test_close_while_an_exception_is_handled_writes_nothing_new(tmp_path, caplog) -> None:
    with pytest.raises(ZeroDivisionError):
        train_until(ZeroDivisionError(), tmp_path)
    assert list_steps(tmp_path) == [1, 2]
    assert "is not written, since ZeroDivisionError is being handled" in caplog.text


def test_a_system_exit_in_a_finally_still_writes(tmp_path, caplog) -> None:
    with pytest.raises(SystemExit):
        train_until(SystemExit(), tmp_path)
    assert [each.path.name for each in hookbus.checkpoints(tmp_path)][-1] == "step-00000002-1"
    assert "saved as things stand" in caplog.text


def test_save_is_refused_while_an_exception_of_the_run_is_handled(tmp_path) -> None:
    bus, loop, loader, _ = start(tmp_path)
    for _ in loop.epochs(1):
        for _ in loop.batches(loader):
            try:
                raise KeyError("x")
            except KeyError:
                with pytest.raises(SaveError, match="while KeyError is being handled"):
                    bus.save()
    bus.close()


def test_a_save_that_is_never_written_is_warned_of_when_the_process_ends(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, hookbus\n"
        "from builtin_plugins import Loop\n"
        "bus, loop = hookbus.HookBus(), Loop()\n"
        "bus.attach(model=torch.nn.Linear(1, 1), loop=loop)\n"
        "bus.resume(sys.argv[1])\n"
        "for _ in loop.steps(3):\n"
        "    bus.save()\n"
        "    break\n"
    )
    run = subprocess.run(
        [sys.executable, script, tmp_path / "run"], capture_output=True, text=True, check=True
    )
    assert "a save was asked for and never written" in run.stderr
    assert "call bus.close()" in run.stderr


def list_hashes(checkpoint) -> dict[tuple[str, str], str]:
    """Return the hash of each tensor by its section and name, and of each tree of plain values."""
    manifest = json.loads((checkpoint.path / "manifest.json").read_bytes())
    hashes = {}
    for name, section in manifest["sections"].items():
        for part in section["parts"]:
            hashes[name, f"{part['part']}: tree"] = json.dumps(part["tree"])
            for tensor, info in part["tensors"].items():
                hashes[name, f"{part['part']}: {tensor}"] = info["hash"]
    return hashes


def build_all(number: int) -> dict[str, object]:
    torch.manual_seed(number)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True)
    return {
        "model": model,
        "ema": torch.optim.swa_utils.AveragedModel(model),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 30),
        "scaler": torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2),
        "data": DataLoader(TensorDataset(torch.rand(8, 2)), 2, shuffle=True),
        "own": torch.Generator().manual_seed(number),
        "seen": {"loss": number / 3, "last": torch.rand(2)},
        "loop": Loop(),
    }


@pytest.mark.parametrize("forgets", [None, "exp_avg"])
def test_what_is_saved_right_after_a_resume_has_the_same_hashes_in_every_section(
    forgets, tmp_path
) -> None:
    """Source: KempnerInstitute/KempnerForge#114; with a forgotten moment it is named."""
    hashes = []
    for number in range(2):
        parts = build_all(number)
        with hookbus.HookBus() as bus:
            bus.attach(**parts)
            bus.resume(tmp_path)
            loop = parts["loop"]
            for _ in loop.epochs(2 if number == 0 else 0):
                for (x,) in loop.batches(parts["data"]):
                    parts["optimizer"].zero_grad()
                    loss = parts["model"](x + torch.rand(1, generator=parts["own"])).square().sum()
                    parts["scaler"].scale(loss).backward()
                    parts["scaler"].step(parts["optimizer"])
                    parts["scaler"].update()
                    parts["scheduler"].step()
                    parts["ema"].update_parameters(parts["model"])
                    parts["seen"]["loss"] += loss.item()
            if number == 1 and forgets:
                state = parts["optimizer"].state[parts["model"][0].weight]
                state[forgets] += 1
            hashes.append(list_hashes(bus.save(metrics={"number": number})))
    first, second = hashes
    differ = {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}
    assert len({section for section, _ in first}) == 10
    if forgets:
        ((section, tensor),) = differ
        assert section == "optimizer"
        assert tensor.endswith("model.0.weight.exp_avg")
    else:
        assert differ == set()


def test_many_problems_of_one_kind_are_of_that_kind() -> None:
    problems = [MismatchError("a"), ResumeError("b")]
    with pytest.raises(ResumeError) as caught:
        raise_all("two problems", problems)
    assert isinstance(caught.value, ManyErrors)
    assert str(caught.value) == "two problems:\n  - MismatchError: a\n  - ResumeError: b"
    with pytest.raises(ManyErrors) as mixed:
        raise_all("two problems", [MismatchError("a"), StateError("b")])
    assert not isinstance(mixed.value, ResumeError)


def test_nothing_is_written_where_nothing_was_counted(tmp_path) -> None:
    bus, loop, loader, step = start(tmp_path)
    for _ in loop.epochs(1):
        for (x,) in loop.batches(loader):
            step(x)
        bus.save()
    first = hookbus.checkpoints(tmp_path)[-1]
    assert bus.save().path == first.path
    assert bus.save(metrics={"final": 1.0}).path.name == "step-00000004-1"
    bus.close()
    assert sorted(os.listdir(tmp_path)) == [
        "run.jsonl",
        "run.lock",
        "step-00000004",
        "step-00000004-1",
    ]
