"""The fault kit does what it says: it crashes, refuses, waits and records."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from keepers import Keeper, make_bus

import hookbus
from hookbus import testing
from hookbus.errors import CallError, SaveError, WriteError
from hookbus.testing import Crash, DiskChange, crash_at, faulty_storage, record


def save(run: Path, step: int, *, wait: bool = True) -> None:
    keeper = Keeper()
    with make_bus(a=keeper) as bus:
        bus.resume(run)
        keeper.tensor.fill_(step)
        bus.save(step=step, wait=wait)


def list_names(run: Path) -> list[str]:
    return sorted(name for name in os.listdir(run) if "step-" in name)


def test_the_example_in_the_docstring_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"::\n\n((?:    .*\n|\n)+)", testing.__doc__ or "")
    loop, disk = map(textwrap.dedent, blocks)
    names = {"run": tmp_path / "run", "errno": errno, "event": threading.Event()}
    exec(loop, names)
    assert len(names["changes"]) > 15
    exec(disk, names)


def test_every_public_name_has_a_docstring() -> None:
    assert all(getattr(testing, name).__doc__ for name in testing.__all__)
    assert testing.__all__ == sorted(testing.__all__)


# -- record -------------------------------------------------------------------------------------


def test_what_is_recorded_is_every_change_in_order_with_its_bytes(tmp_path: Path) -> None:
    run = tmp_path / "deep" / "run"
    with record() as changes:
        save(run, 1)
    told = []
    for change in changes:
        name = "HIDDEN" if change.path.name.startswith(".step") else change.path.name
        target = change.target.name if change.target else None
        if told[-1:] != [(change.kind, name, target)]:  # a write may come in pieces
            told.append((change.kind, name, target))
    assert told == [
        ("mkdir", "deep", None),
        ("fsync", tmp_path.name, None),
        ("mkdir", "run", None),
        ("fsync", "deep", None),
        ("create", "run.jsonl", None),
        ("write", "run.jsonl", None),
        ("fsync", "run.jsonl", None),
        ("fsync", "run", None),
        ("mkdir", "HIDDEN", None),
        ("create", "a.safetensors", None),
        ("write", "a.safetensors", None),
        ("fsync", "a.safetensors", None),
        ("create", "manifest.json", None),
        ("write", "manifest.json", None),
        ("fsync", "manifest.json", None),
        ("fsync", "HIDDEN", None),
        ("rename", "HIDDEN", "step-00000001"),
        ("fsync", "run", None),
        ("write", "run.jsonl", None),
        ("fsync", "run.jsonl", None),
    ]
    for name in ("a.safetensors", "manifest.json"):
        written = b"".join(c.data for c in changes if c.path.name == name)
        assert written == (run / "step-00000001" / name).read_bytes()


def test_a_removal_is_recorded_file_by_file_and_leaves_what_a_link_leads_to(
    tmp_path: Path,
) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").touch()
    (folder / "link").symlink_to(tmp_path / "kept")
    with record() as changes:
        hookbus.checkpoint.files.remove_folder(folder)
    told = [(change.kind, change.path.name) for change in changes]
    assert sorted(told) == sorted(
        [("unlink", "file"), ("rmdir", "inner"), ("unlink", "link"), ("rmdir", "folder")]
    )
    assert told[-1] == ("rmdir", "folder")
    assert os.listdir(tmp_path) == ["kept"]
    assert os.listdir(tmp_path / "kept") == ["file"]


def test_nothing_is_recorded_after_the_block(tmp_path: Path) -> None:
    with record() as changes:
        pass
    save(tmp_path, 1)
    assert changes == []


# -- crash_at -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [True, False])
def test_a_crash_leaves_the_disk_as_it_was_at_that_moment(wait: bool, tmp_path: Path) -> None:
    save(tmp_path, 1)
    with crash_at(on="rename", path="step-*") as crash:
        save(tmp_path, 2, wait=wait)
        raise AssertionError("the block goes on after a crash")
    assert crash.happened
    assert crash.change.target == tmp_path / "step-00000002"
    hidden, old = list_names(tmp_path)
    assert (hidden[:15], old) == (".step-00000002.", "step-00000001")
    assert len(os.listdir(tmp_path / hidden)) == 2  # nothing was tidied up
    save(tmp_path, 3)
    assert list_names(tmp_path) == ["step-00000001", "step-00000003"]


def test_the_number_counts_changes_that_fit(tmp_path: Path) -> None:
    with crash_at(2, "create", path="*.safetensors") as crash, make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path)
        bus.save(step=1)
        bus.save(step=2)
    assert (crash.change.kind, crash.change.path.name) == ("create", "a.safetensors")
    assert [each.step for each in hookbus.checkpoints(tmp_path)] == [1]


def test_after_a_crash_no_thread_reaches_the_disk(tmp_path: Path) -> None:
    gate = threading.Event()
    bus = make_bus(a=Keeper())
    bus.resume(tmp_path)
    with crash_at(on="create", path="other") as crash:
        with faulty_storage(error=None, on="create", path="a.safetensors", gate=gate) as slow:
            bus.save(step=1, wait=False)
            with pytest.raises(Crash):
                hookbus.checkpoint.files.write_file(tmp_path / "other", [b"data"])
            del slow
        assert crash.happened
    assert not (tmp_path / "other").exists()
    assert hookbus.checkpoints(tmp_path) == []
    with pytest.raises(SaveError, match="failed behind training: Crash: before DiskChange"):
        bus.close()


def test_a_block_that_does_not_crash_says_so_and_raises_what_is_raised(tmp_path: Path) -> None:
    with crash_at(1000) as crash:
        save(tmp_path, 1)
    assert not crash.happened
    with pytest.raises(ValueError, match="mine"), crash_at(1000):
        raise ValueError("mine")
    with pytest.raises(CallError, match="number=0: pass a whole number from 1 up"), crash_at(0):
        pass


def crash_and_break(run: Path) -> None:
    with crash_at(on="create"):
        with contextlib.suppress(Crash):
            save(run, 1)
        raise AssertionError("mine")


def test_what_has_nothing_to_do_with_the_crash_is_raised(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="mine"):
        crash_and_break(tmp_path)


# -- faulty_storage -----------------------------------------------------------------------------


def test_the_disk_is_full_by_default_and_says_so_as_an_operating_system_does(
    tmp_path: Path,
) -> None:
    with faulty_storage() as storage, pytest.raises(WriteError) as caught:
        save(tmp_path / "run", 1)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "run")
    assert isinstance(caught.value.__cause__, OSError)
    assert storage.met == [DiskChange("mkdir", tmp_path / "run")]


def test_the_first_ones_pass(tmp_path: Path) -> None:
    with faulty_storage(on=("write", "fsync"), path="*.safetensors", after=2) as storage:
        with pytest.raises(WriteError, match="cannot bring to the disk: No space"):
            save(tmp_path, 1)
        storage.error = None
        save(tmp_path, 2)
    assert [change.kind for change in storage.met] == ["fsync", "write", "write", "fsync"]


def test_a_gate_is_waited_for_and_opens_at_the_end_of_the_block(tmp_path: Path) -> None:
    gate = threading.Event()
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path)
        with faulty_storage(error=None, on="create", gate=gate):
            bus.save(step=1, wait=False)
            assert hookbus.checkpoints(tmp_path) == []
            assert not gate.is_set()
    assert [each.step for each in hookbus.checkpoints(tmp_path)] == [1]


def test_a_slow_disk_takes_longer(tmp_path: Path) -> None:
    with faulty_storage(error=None, delay=0.1, on="rename"), make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path)
        assert bus.save(step=1).seconds >= 0.1


FITS: list[tuple[Callable[[DiskChange], bool], bool]] = [
    (lambda change: change.fits(None, "*"), True),
    (lambda change: change.fits("rename", "*"), True),
    (lambda change: change.fits("write", "*"), False),
    (lambda change: change.fits(("write", "rename"), "step-*"), True),
    (lambda change: change.fits(None, ".step-*"), True),
    (lambda change: change.fits(None, "step-00000002"), False),
    (lambda change: change.fits(None, "/run/*"), True),
]


@pytest.mark.parametrize(("ask", "answer"), FITS)
def test_a_change_fits_by_kind_and_by_either_name(
    ask: Callable[[DiskChange], bool], answer: bool
) -> None:
    change = DiskChange("rename", Path("/run/.step-00000001.tmp"), Path("/run/step-00000001"))
    assert ask(change) is answer


def test_the_kit_needs_no_test_framework() -> None:
    code = "import sys, hookbus.testing; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: crash_at(on="renam"), "on='renam': pass one of mkdir, create, write, fsync, "),
        (lambda: faulty_storage(on="writ"), "on='writ': pass one of mkdir, "),
        (lambda: faulty_storage(on=["write"]), "on=['write']: pass one of mkdir, "),
        (lambda: crash_at(path=3), "path=3: pass a shell pattern, as a str"),
        (lambda: faulty_storage(error="full"), "error='full': pass OSError("),
        (lambda: faulty_storage(error=OSError), "error=<class 'OSError'>: pass OSError("),
        (lambda: faulty_storage(after=None), "after=None: pass a whole number from 0 up"),
        (lambda: faulty_storage(delay=-1), "delay=-1: pass seconds"),
    ],
)
def test_what_could_never_be_met_is_refused(make, message: str) -> None:
    with pytest.raises(CallError) as caught, make():
        pass
    assert str(caught.value).startswith(message)
