"""A disk that is full, broken, read-only or slow costs a save, and nothing else.

The first cause is told with its number; earlier checkpoints stay whole; nothing is left under any
name; the run goes on with the same bits, and its next save works once the disk does.
"""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import run_plain, seed
from keepers import Keeper, make_bus
from scenes import training_scene

import hookbus
from builtin_plugins import KeepLast, Loop, SavePolicy
from hookbus.errors import SaveError, WriteError
from hookbus.testing import Storage, faulty_storage

FAULTS: dict[str, dict[str, Any]] = {
    "full, at once": {"on": "mkdir"},
    "full, at a new file": {"on": "create", "path": "b.safetensors"},
    "full, in a file": {"on": "write", "path": "*.safetensors", "after": 3},
    "full, at the manifest": {"on": "write", "path": "manifest.json"},
    "broken, at a file": {"error": errno.EIO, "on": "fsync", "path": "a.safetensors"},
    "broken, at the manifest": {"error": errno.EIO, "on": "fsync", "path": "manifest.json"},
    "broken, at the folder": {"error": errno.EIO, "on": "fsync", "path": ".step-*"},
    "broken, at the rename": {"error": errno.EIO, "on": "rename"},
    "read-only": {"error": errno.EROFS},
    "over quota": {"error": errno.EDQUOT, "on": "write"},
}


def make_fault(fault: dict[str, Any]) -> AbstractContextManager[Storage]:
    number = fault.get("error", errno.ENOSPC)
    return faulty_storage(**{**fault, "error": OSError(number, os.strerror(number))})


def save(bus: hookbus.HookBus, step: int | None, wait: bool) -> None:
    """Save, and wait for what is written behind training."""
    bus.save(step=step, wait=wait)
    if not wait:
        bus._saver.finish()


def list_names(run: Path) -> list[str]:
    return sorted(os.listdir(run))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("wait", [True, False])
def test_a_fault_costs_one_save_and_names_its_cause(wait: bool, fault: str, tmp_path: Path) -> None:
    """Source: XavierXiao/Dreambooth-Stable-Diffusion#45; google/orbax#605."""
    keeper = Keeper()
    with make_bus(a=keeper, b=Keeper()) as bus:
        bus.resume(tmp_path)
        keeper.tensor.fill_(1)
        bus.save(step=1)
        keeper.tensor.fill_(2)
        before = list_names(tmp_path)
        kind = WriteError if wait else SaveError
        with make_fault(FAULTS[fault]), pytest.raises(kind) as caught:
            save(bus, 2, wait)
        cause = caught.value if wait else caught.value.__cause__
        assert isinstance(cause, WriteError)
        assert cause.errno == FAULTS[fault].get("error", errno.ENOSPC)
        assert os.strerror(cause.errno) in str(caught.value)
        assert cause.filename.startswith(str(tmp_path))
        assert list_names(tmp_path) == before
        hookbus.checkpoints(tmp_path)[0].verify()
        assert keeper.tensor.tolist() == [2.0] * 3
        save(bus, 3, wait)
    first, second = hookbus.checkpoints(tmp_path)
    assert (first.step, second.step) == (1, 3)
    assert first.read("a").tolist() == [1.0] * 3
    assert second.read("a").tolist() == [2.0] * 3
    second.verify()


@pytest.mark.parametrize("wait", [True, False])
def test_a_disk_that_becomes_read_only_leaves_what_the_next_start_sweeps(
    wait: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot be tidied up: the first cause is raised all the same."""
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path)
        bus.save(step=1)
        kind = WriteError if wait else SaveError
        with make_fault({"error": errno.EROFS, "after": 2}), pytest.raises(kind) as caught:
            save(bus, 2, wait)
        cause = caught.value if wait else caught.value.__cause__
        assert cause.errno == errno.EROFS
        assert "a.safetensors" in cause.filename
        assert "could not be removed" in caplog.text
        assert [each.step for each in hookbus.checkpoints(tmp_path)] == [1]
        save(bus, 3, wait)
    assert len(list_names(tmp_path)) == 5
    with make_bus(a=Keeper()) as bus:
        assert bus.resume(tmp_path).step == 3
    assert list_names(tmp_path) == ["run.jsonl", "run.lock", "step-00000001", "step-00000003"]


@pytest.mark.parametrize("wait", [True, False])
def test_a_checkpoint_whose_name_could_not_be_synced_is_whole_and_the_save_is_told_as_failed(
    wait: bool, tmp_path: Path
) -> None:
    """Nobody knows whether it would outlive a power cut; it is not taken away for that."""
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path)
        with (
            make_fault({"error": errno.EIO, "on": "fsync", "path": tmp_path.name}),
            pytest.raises((WriteError, SaveError), match="cannot bring to the disk"),
        ):
            save(bus, 1, wait)
        bus.save(step=2)
    found = hookbus.checkpoints(tmp_path)
    assert [each.step for each in found] == [1, 2]
    for each in found:
        each.verify()


@pytest.mark.parametrize("on", ["rename", "unlink", "rmdir"])
def test_what_cannot_be_deleted_is_whole_or_gone(
    on: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_bus(a=Keeper(), policy=SavePolicy(keep=KeepLast(1))) as bus:
        bus.resume(tmp_path)
        bus.save(step=1)
        with make_fault({"error": errno.EIO, "on": on, "path": "*.step-00000001.*"}):
            bus.save(step=2)
    assert ("is not deleted: [Errno 5]" in caplog.text) == (on == "rename")
    assert ("is left over and stays: [Errno 5]" in caplog.text) == (on != "rename")
    steps = [each.step for each in hookbus.checkpoints(tmp_path)]
    assert steps == ([1, 2] if on == "rename" else [2])
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path)
    assert len(list_names(tmp_path)) == len(steps) + len(["run.lock", "run.jsonl"])


def test_a_history_that_cannot_be_written_is_warned_of_and_costs_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path)
        with faulty_storage(path="run.jsonl"):
            bus.save(step=1)
        assert "the history of" in caplog.text
        assert "No space left on device" in caplog.text
        bus.save(step=2)
    told = [each["step"] for each in hookbus.history(tmp_path) if each["event"] == "save"]
    assert told == [2]
    assert [each.step for each in hookbus.checkpoints(tmp_path)] == [1, 2]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_start_on_a_disk_that_takes_nothing_is_refused_with_the_cause(
    number: int, tmp_path: Path
) -> None:
    with make_fault({"error": number}), make_bus(a=Keeper()) as bus:
        with pytest.raises(WriteError) as caught:
            bus.resume(tmp_path / "run")
        assert caught.value.errno == number
    assert os.listdir(tmp_path) == []


def test_a_slow_disk_holds_up_nothing_but_the_next_save(tmp_path: Path) -> None:
    gate, loop = threading.Event(), Loop()
    with make_bus(a=Keeper()) as bus:
        bus.register(loop, "loop")
        bus.resume(tmp_path)
        with faulty_storage(error=None, on="write", gate=gate) as slow:
            steps = loop.epochs(5)
            next(steps)
            bus.save(wait=False)
            for _ in range(3):
                next(steps)  # training goes on
            assert hookbus.checkpoints(tmp_path) == []
            assert len(slow.met) <= 1
    assert [each.step for each in hookbus.checkpoints(tmp_path)] == [0]


# -- a real full disk -----------------------------------------------------------------------------


@contextmanager
def mount(folder: Path, size: str) -> Iterator[None]:
    """Put a small disk there; skip the test where that is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    try:
        done = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        done = False
    if not done:
        pytest.skip("no disk can be mounted here; a full one is injected in the tests above")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("wait", [True, False])
def test_a_disk_that_is_really_full_costs_one_save(wait: bool, tmp_path: Path) -> None:
    keeper = Keeper()
    keeper.tensor = torch.ones(50_000)  # 200 kB
    with mount(tmp_path, "1m"), make_bus(a=keeper) as bus:
        run = tmp_path / "run"
        bus.resume(run)
        bus.save(step=1)
        filler = tmp_path / "filler"
        filler.write_bytes(bytes(700_000))
        before = list_names(run)
        keeper.tensor.fill_(2)
        with pytest.raises(WriteError if wait else SaveError) as caught:
            save(bus, 2, wait)
        cause = caught.value if wait else caught.value.__cause__
        assert cause.errno == errno.ENOSPC
        assert cause.filename.endswith("a.safetensors")
        assert list_names(run) == before
        hookbus.checkpoints(run)[0].verify()
        filler.unlink()
        save(bus, 3, wait)
        assert [each.step for each in hookbus.checkpoints(run)] == [1, 3]
        assert torch.equal(hookbus.checkpoints(run)[-1].read("a"), torch.full((50_000,), 2.0))
        bus.close()


def test_a_disk_that_is_really_read_only_refuses_the_save_and_the_start(tmp_path: Path) -> None:
    with mount(tmp_path, "1m"):
        run = tmp_path / "run"
        with make_bus(a=Keeper()) as bus:
            bus.resume(run)
            bus.save(step=1)
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        with make_bus(a=Keeper()) as bus:
            with pytest.raises(WriteError, match="Read-only file system") as caught:
                bus.resume(run)
            assert caught.value.errno == errno.EROFS
            assert bus.resume(run, stage="test").step == 1  # it is only read
        subprocess.run(["mount", "-o", "remount,rw", tmp_path], check=True)
        with make_bus(a=Keeper()) as bus:
            assert bus.resume(run).step == 1
            bus.save(step=2)


# -- the law: a run is not changed by a save that fails -------------------------------------------


@pytest.mark.parametrize("fault", ["full, in a file", "broken, at the rename"])
@pytest.mark.parametrize("wait", [True, False])
def test_a_save_that_fails_changes_no_bit_of_the_run(
    wait: bool, fault: str, tmp_path: Path
) -> None:
    build = training_scene(torch.optim.AdamW, ema=True)
    expected = run_plain(build)
    seed(0)
    parts, loop = build(), Loop()
    with hookbus.HookBus() as bus:
        bus.attach(**parts.attached, loop=loop)
        bus.resume(tmp_path)
        parts.epochs = 1
        parts.run(loop, lambda where: None)
        before = parts.digest()
        with make_fault(FAULTS[fault]), pytest.raises((WriteError, SaveError)):
            save(bus, None, wait)
        assert parts.digest() == before
        bus.save(wait=wait)
        parts.epochs = 2
        parts.run(loop, lambda where: None)
        assert parts.digest() == expected
    (checkpoint,) = hookbus.checkpoints(tmp_path)
    checkpoint.verify()
    seed(99)
    parts, loop = build(), Loop()
    with hookbus.HookBus() as bus:
        bus.attach(**parts.attached, loop=loop)
        bus.resume(tmp_path)
        parts.run(loop, lambda where: None)
        assert parts.digest() == expected
