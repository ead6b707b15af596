"""Every crash point: whatever moment of a save, a deletion or a start is the last one of a run.

The changes of the disk are recorded; up to each of them, every folder that a crash may leave is
built (`lossy`) and the run is started there. It must go on from the newest checkpoint, find nothing
damaged that was committed, tidy up, and save.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from keepers import Keeper, make_bus
from lossy import Disk, freeze, write_tree

import hookbus
from builtin_plugins import KeepLast, SavePolicy
from hookbus.checkpoint import append_record, files, run_directory, set_aside, writer
from hookbus.checkpoint.names import read_folder_name
from hookbus.errors import HookbusError
from hookbus.testing import DiskChange, record


def start(run: Path, *steps: int, wait: bool = True, keep: int | None = None) -> None:
    """Go on with a run and save these steps; a state is made of its step."""
    keeper = Keeper("restore_training_state")
    policy = SavePolicy(keep=KeepLast(keep) if keep else None)
    with make_bus(a=keeper, policy=policy) as bus:
        bus.resume(run)
        for step in steps:
            keeper.tensor.fill_(step)
            bus.save(step=step, wait=wait)


def flip_newest(run: Path) -> None:
    file = hookbus.checkpoints(run)[-1].path / "a.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@attrs.frozen
class Scenario:
    """What stands on the disk safely, and what is done while it may crash."""

    before: Callable[[Path], object]
    act: Callable[[Path], object]
    damaged: frozenset[str] = frozenset()

    def record(self, root: Path) -> tuple[Disk, list[DiskChange]]:
        root.mkdir()
        run = root / "runs" / "demo"
        self.before(run)
        disk = Disk(root)
        with record() as changes:
            self.act(run)
        return disk, changes


def share(run: Path) -> None:
    """Save twice what is the same, so that the second shares the file of the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "SHARED_FROM", 0)
        start(run, 3, 3)
    first, second = (each.path / "a.safetensors" for each in hookbus.checkpoints(run)[-2:])
    assert first.samefile(second)


SCENARIOS: dict[str, Scenario] = {
    "the first save": Scenario(lambda run: None, lambda run: start(run, 1)),
    "a save": Scenario(lambda run: start(run, 1, 2), lambda run: start(run, 3)),
    "a save behind training": Scenario(
        lambda run: start(run, 1, 2), lambda run: start(run, 3, wait=False)
    ),
    "two saves of one step": Scenario(
        lambda run: start(run, 1, 2), lambda run: start(run, 3, 3, wait=False)
    ),
    "a save that shares a file": Scenario(lambda run: start(run, 1, 2), share),
    "a deletion": Scenario(lambda run: start(run, 1, 2), lambda run: start(run, 3, keep=2)),
    "saves and deletions behind training": Scenario(
        lambda run: start(run, 1, 2), lambda run: start(run, 3, 4, wait=False, keep=1)
    ),
    "a fallback": Scenario(
        lambda run: (start(run, 1, 2, 3), flip_newest(run)), start, frozenset({"step-00000003"})
    ),
}


@attrs.define
class Promise:
    """Which checkpoints must be there after a crash, and which may, by name."""

    run: Path
    live: set[str]
    must: set[str]
    may: set[str]
    history: bytes = b""

    @classmethod
    def make(cls, disk: Disk) -> Promise:
        run = disk.root / "runs" / "demo"
        names = {name for name in disk.list_names(run) if read_folder_name(name)}
        return cls(run, set(names), set(names), set(names))

    def follow(self, change: DiskChange, disk: Disk) -> None:
        """A rename gives and takes names; what it gave is certain once the folder is synced."""
        self.history = disk.read_safe(self.run / "run.jsonl")
        if change.kind == "rename":
            assert change.target is not None
            self.live -= {change.path.name}
            self.must -= {change.path.name}
            if read_folder_name(change.target.name):
                self.live |= {change.target.name}
                self.may |= {change.target.name}
        elif change.kind == "fsync" and change.path == self.run:
            self.must, self.may = set(self.live), set(self.live)


def check(run: Path, promise: Promise, damaged: frozenset[str]) -> None:
    """Start a run as a crash left it, and hold it to everything that was promised."""
    there = {path.name for path in run.glob("step-*")}
    assert promise.must <= there <= promise.may, "what was committed is there, and nothing else"
    for name in there - damaged:
        hookbus.open(run / name).verify()
    lost = sorted(path.name for path in run.glob("damaged-*"))
    newest = max((read_folder_name(name) or (0, 0) for name in there - damaged), default=(0, 0))
    keeper = Keeper("restore_training_state")
    with make_bus(a=keeper) as bus:
        resume = bus.resume(run)
        assert resume.fresh == (not there)
        assert keeper.tensor.tolist() == [newest[0]] * 3, "the newest is taken"
        assert len(resume.report.notes) == len(there & damaged), "nothing else is found damaged"
        saved = bus.save(step=newest[0] + 1)
    aside = [f"damaged-{name}" for name in there & damaged] + lost
    names = {*there - damaged, *aside, saved.path.name, "run.lock", "run.jsonl"}
    assert set(os.listdir(run)) == names, "nothing is left over"
    assert len(aside) == len(damaged)
    for name in aside:
        files_there = {path.name for path in (run / name).iterdir()}
        assert files_there == {"a.safetensors", "manifest.json"}, "what is damaged is all kept"
    assert (run / "run.jsonl").read_bytes().startswith(promise.history)
    records = hookbus.history(run)
    told = {each["moved_to"] for each in records if each["event"] == "fallback"}
    assert set(aside) <= told, "each that was moved is told of"
    assert len(records) >= promise.history.count(b"\n") + 2, "each line stands alone"
    assert records[-1]["checkpoint"] == saved.path.name


@attrs.frozen
class Found:
    """The different folders that were tried, and what was wrong with the first bad one."""

    seen: set[object] = attrs.field(factory=set)
    faults: list[str] = attrs.field(factory=list)

    def crash(
        self,
        disk: Disk,
        promise: Promise,
        changes: Sequence[DiskChange],
        folder: Path,
        damaged: frozenset[str] = frozenset(),
    ) -> None:
        """Crash before each change, and after the last, until something is wrong."""
        for number, change in enumerate([*changes, None]):
            for tree in disk.list_states():
                frozen = freeze(tree), frozenset(promise.must), frozenset(promise.may)
                if frozen in self.seen:
                    continue
                self.seen.add(frozen)
                write_tree(tree, folder)
                try:
                    check(folder / "runs" / "demo", promise, damaged)
                except (AssertionError, HookbusError) as error:
                    self.faults.append(f"crashed before {number}, {change}: {error}")
                shutil.rmtree(folder)
                if self.faults:
                    return
            if change is not None:
                disk.make(change)
                promise.follow(change, disk)


def crash_everywhere(name: str, folder: Path) -> Found:
    disk, changes = SCENARIOS[name].record(folder / "recorded")
    found = Found()
    found.crash(disk, Promise.make(disk), changes, folder / "crashed", SCENARIOS[name].damaged)
    assert found.faults or len(found.seen) > len(changes)
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_goes_on_from_the_newest_checkpoint_whatever_moment_was_its_last(
    name: str, folder: Path
) -> None:
    """Source: petuum/adaptdl#81; Lightning-AI/pytorch-lightning#688."""
    assert crash_everywhere(name, folder).faults == []


def crash_twice(name: str, folder: Path) -> Found:
    """Kill a run wherever it leaves something; cut the power at each change of the next start."""
    found = Found()
    disk, changes = SCENARIOS[name].record(folder / "recorded")
    promise = Promise.make(disk)
    for change in changes:
        disk.make(change)
        promise.follow(change, disk)
        if not any(name.startswith(".step") for name in disk.list_names(promise.run)):
            continue
        shutil.rmtree(disk.root)
        write_tree(next(disk.list_states()), disk.root)  # as a kill leaves it
        with record() as more:
            start(promise.run)
        found.crash(*copy.deepcopy((disk, promise)), more, folder / "crashed")
        if found.faults:
            break
    return found


@pytest.mark.parametrize("name", ["a save", "a deletion"])
def test_a_power_cut_during_the_start_after_a_kill_loses_nothing(name: str, folder: Path) -> None:
    found = crash_twice(name, folder)
    assert found.faults == []
    assert len(found.seen) > 100


# -- negative controls: writers that are wrong, and are caught ------------------------------------


def write_unsynced(path: Path, pieces: Iterable[files.Piece]) -> int:
    data = b"".join(pieces)
    files._announce("create", path)
    files._announce("write", path, data=data)
    return path.write_bytes(data)


def write_after_rename(path: Path, pieces: Iterable[files.Piece]) -> int:
    """Give the folder its final name before the manifest is in it."""
    if path.name == "manifest.json":
        final = path.parent.with_name(path.parent.name.split(".")[1])
        REAL["rename_folder"](path.parent, final)
        REAL["sync_folder"](final.parent)
        path = final / path.name
    return REAL["write_file"](path, pieces)


def make_unsynced(path: Path) -> None:
    for folder in reversed([path, *path.parents]):
        if not folder.exists():
            files._announce("mkdir", folder)
            folder.mkdir()


def remove_unrenamed(path: Path) -> None:
    files.remove_folder(path)


def remove_unsynced(path: Path) -> None:
    hidden = path.with_name(run_directory._name_temporary(path.name))
    files.rename_folder(path, hidden)
    files.remove_folder(hidden)


def sweep_unsynced(run: Path) -> None:
    for path in run.glob(".step-*"):
        files.remove_folder(path)


def remove_aside(path: Path, aside: Path) -> None:
    files.remove_folder(path)


def tell_later(run: Path, event: str, **values: Any) -> None:
    """Keep a line of the history until the next one is moved aside."""
    UNTOLD.append((run, event, values))


def move_and_tell(path: Path, aside: Path) -> None:
    set_aside(path, aside)
    run, event, values = UNTOLD.pop()
    append_record(run, event, **values)


def append_torn(path: Path, line: bytes) -> None:
    """Add a line without ending the one that a crash cut short."""
    files._announce("write", path, data=line)
    with path.open("ab") as file:
        file.write(line)
        files._announce("fsync", path)


REAL = {name: getattr(files, name) for name in ("write_file", "rename_folder", "sync_folder")}

UNTOLD: list[tuple[Path, str, dict[str, Any]]] = []

BREACHES: dict[str, tuple[dict[str, Any], str]] = {
    "files are not synced": ({"files.write_file": write_unsynced}, "a save"),
    "folders are not synced": ({"files.sync_folder": lambda path: None}, "a save"),
    "the folder gets its name before the manifest": (
        {
            "files.write_file": write_after_rename,
            "files.rename_folder": lambda path, target: None,
            "files.sync_folder": lambda path: None,
        },
        "a save",
    ),
    "what leads to the run is not synced": (
        {"files.make_folders": make_unsynced},
        "the first save",
    ),
    "a deletion does not rename": (
        {"run_writer.remove_checkpoint": remove_unrenamed},
        "a deletion",
    ),
    "a deletion does not sync": ({"run_writer.remove_checkpoint": remove_unsynced}, "a deletion"),
    "a damaged one is deleted": ({"fallback.set_aside": remove_aside}, "a fallback"),
    "a fallback is told after the move": (
        {"fallback.append_record": tell_later, "fallback.set_aside": move_and_tell},
        "a fallback",
    ),
    "a line is added to a torn one": ({"files.append_line": append_torn}, "a save"),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_is_caught(breach: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patches, name = BREACHES[breach]
    for target, replacement in patches.items():
        module = "hookbus.checkpoint." if target.startswith("files") else "hookbus."
        monkeypatch.setattr(module + target, replacement)
    assert crash_everywhere(name, folder).faults != []


def test_a_sweep_without_a_sync_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookbus.bus.sweep", sweep_unsynced)
    assert crash_twice("a deletion", folder).faults != []
