"""Which checkpoint a resume reads from."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import attrs

from hookbus.checkpoint import (
    Checkpoint,
    open_checkpoint,
    read_folder_name,
    take_path,
)
from hookbus.checkpoint import folders as list_folders
from hookbus.checkpoint.files import refused
from hookbus.errors import (
    CallError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ResumeError,
)
from hookbus.request import Request


def check_run(run: str | os.PathLike[str]) -> Path:
    """Return the run directory's absolute path, so that a later ``chdir`` does not move the run.

    Raises:
        CallError: it is no path, or that of a checkpoint or a file.
        WriteError: it may not be looked into.
    """
    path = take_path("run", run).absolute()
    with refused("look into", path):
        _check_kind(path)
    return path


def _check_kind(path: Path) -> None:
    named = read_folder_name(path.name)
    if named or (path / "manifest.json").is_file():
        here = (
            f"pass {str(path.parent)!r} (and step={named[0]} for just this one), or"
            if named
            else "pass"
        )
        what = "is a checkpoint, not a run directory"
        if not path.is_dir():
            what = "is named like a checkpoint, which a run directory must not be"
        raise CallError(f"{path} {what}: {here} init_from={str(path)!r} to start a new run from it")
    if path.exists() and not path.is_dir():
        raise CallError(f"{path} is a file; pass the run directory, which need not exist yet")


@attrs.frozen(eq=False)
class Choice:
    """What a resume reads from, if anything, and whether the run itself is fresh.

    ``damaged`` are newer checkpoints that were passed over, with what is wrong with each.
    """

    checkpoint: Checkpoint | None
    fresh: bool
    damaged: Mapping[Path, CorruptCheckpointError] = attrs.field(factory=dict)


def choose(run: Path, request: Request) -> Choice:
    """Choose the checkpoint to read from.

    Raises:
        CheckpointNotFoundError: what was asked for is not there.
        CorruptCheckpointError: the one to take is damaged; the newest good one is named.
        ResumeError: an older step than the newest, which would leave two futures in one run.
    """
    folders = _list_folders(run)
    if request.step is not None:
        return Choice(_choose_step(run, request, folders), fresh=False)
    if folders and request.may_fall_back:
        return _open_newest(folders)
    if folders:
        return Choice(_open(folders[-1]), fresh=False)
    if request.stage != "fit":
        raise CheckpointNotFoundError(
            f"{run} holds no checkpoint, and stage={request.stage!r} needs one"
        )
    if request.init_from is not None:
        return Choice(_open_source(Path(request.init_from)), fresh=True)
    return Choice(None, fresh=True)


def choose_older(than: Path) -> Choice:
    """Choose the newest checkpoint of the same run that is older, since this one is damaged.

    Raises:
        CorruptCheckpointError: there is none, or all are damaged.
    """
    folders = _list_folders(than.parent)
    return _open_newest(folders[: folders.index(than)])


def find_way_out(checkpoint: Path, wanted: Collection[str] | None = None) -> str:
    """Say what to do about a damaged checkpoint: which is the newest good one.

    ``wanted`` are the sections that matter; every byte of them is read.
    """
    for folder in reversed(_list_folders(checkpoint.parent)):
        if folder == checkpoint:
            continue
        try:
            other = open_checkpoint(folder)
            there = other.sections if wanted is None else set(wanted) & set(other.sections)
            other.verify(there)
        except CheckpointError:
            continue
        return (
            f"the newest good one is of step {other.step}; to go on from it, move {checkpoint} out"
            " of the run directory"
        )
    return f"there is no other good checkpoint in {checkpoint.parent}"


def _open_newest(folders: Sequence[Path]) -> Choice:
    damaged: dict[Path, CorruptCheckpointError] = {}
    for folder in reversed(folders):
        try:
            return Choice(open_checkpoint(folder), fresh=False, damaged=damaged)
        except CorruptCheckpointError as error:
            damaged[folder] = error
    if not damaged:
        raise CorruptCheckpointError("there is no older checkpoint")
    raise CorruptCheckpointError(
        "; ".join(map(str, damaged.values())) + "; there is no other checkpoint, and nothing was"
        " moved"
    )


def _choose_step(run: Path, request: Request, folders: Sequence[Path]) -> Checkpoint:
    steps = [_read_place(folder)[0] for folder in folders]
    if request.step not in steps:
        near = sorted({*steps}, key=lambda step: abs(step - (request.step or 0)))[:3]
        there = f"; the nearest are {', '.join(map(str, sorted(near)))}" if near else ""
        raise CheckpointNotFoundError(f"{run} has no checkpoint of step {request.step}{there}")
    wanted = folders[len(steps) - 1 - steps[::-1].index(request.step)]
    if request.stage == "fit" and wanted != folders[-1]:
        raise ResumeError(
            f"step {request.step} is older than the newest, {steps[-1]}, and a run has one future;"
            " start a run of its own from it:"
            f" resume(NEW, init_from={str(wanted)!r}, init_only=('*',))"
        )
    return _open(wanted)


def _open(path: Path) -> Checkpoint:
    try:
        return open_checkpoint(path)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{error}; {find_way_out(path)}") from error


def _open_source(source: Path) -> Checkpoint:
    with refused("look into", source):
        is_checkpoint = (source / "manifest.json").is_file()
    if is_checkpoint:
        return open_checkpoint(source)
    folders = _list_folders(source)
    if not folders:
        raise CheckpointNotFoundError(
            f"init_from={str(source)!r} is neither a checkpoint nor a run that holds one"
        )
    return _open(folders[-1])


def _list_folders(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, oldest first by their manifests."""
    return sorted(list_folders(run), key=lambda folder: (*_read_place(folder), folder.name))


def _read_place(folder: Path) -> tuple[int, int]:
    """Return step and serial from the manifest; from the name where it cannot be read."""
    try:
        checkpoint = open_checkpoint(folder)
    except CheckpointError:
        return read_folder_name(folder.name) or (-1, 0)
    return checkpoint.step, checkpoint.serial
