"""Which checkpoint a resume reads from."""

from __future__ import annotations

import os
from pathlib import Path

from hookbus.checkpoint import (
    Checkpoint,
    checkpoints,
    folders,
    open_checkpoint,
    read_folder_name,
    take_path,
)
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


def choose(run: Path, request: Request) -> tuple[Checkpoint | None, bool]:
    """Return the checkpoint to read from, if any, and whether the run itself is fresh.

    Raises:
        CheckpointNotFoundError: what was asked for is not there.
        CorruptCheckpointError: the one to take is damaged; the newest good one is named.
        ResumeError: an older step than the newest, which would leave two futures in one run.
    """
    candidates = sorted(folders(run), key=_read_place)
    if request.step is not None:
        return _choose_step(run, request, candidates), False
    if candidates:
        return _open(run, candidates[-1]), False
    if request.stage != "fit":
        raise CheckpointNotFoundError(
            f"{run} holds no checkpoint, and stage={request.stage!r} needs one"
        )
    if request.init_from is not None:
        return _open_source(Path(request.init_from)), True
    return None, True


def find_way_out(checkpoint: Path) -> str:
    """Say what to do about a damaged checkpoint."""
    good = [each for each in checkpoints(checkpoint.parent) if each.path != checkpoint]
    if not good:
        return f"there is no other checkpoint in {checkpoint.parent}"
    return (
        f"the newest other one is of step {good[-1].step}; to go on from it, move {checkpoint} out"
        " of the run directory"
    )


def _choose_step(run: Path, request: Request, candidates: list[Path]) -> Checkpoint:
    steps = [_read_place(folder)[0] for folder in candidates]
    if request.step not in steps:
        near = sorted({*steps}, key=lambda step: abs(step - (request.step or 0)))[:3]
        there = f"; the nearest are {', '.join(map(str, sorted(near)))}" if near else ""
        raise CheckpointNotFoundError(f"{run} has no checkpoint of step {request.step}{there}")
    wanted = candidates[len(steps) - 1 - steps[::-1].index(request.step)]
    if request.stage == "fit" and wanted != candidates[-1]:
        raise ResumeError(
            f"step {request.step} is older than the newest, {steps[-1]}, and a run has one future;"
            " start a run of its own from it:"
            f" resume(NEW, init_from={str(wanted)!r}, init_only=('*',))"
        )
    return _open(run, wanted)


def _open(run: Path, path: Path) -> Checkpoint:
    try:
        return open_checkpoint(path)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{error}; {find_way_out(path)}") from error


def _open_source(source: Path) -> Checkpoint:
    with refused("look into", source):
        is_checkpoint = (source / "manifest.json").is_file()
    if is_checkpoint:
        return open_checkpoint(source)
    candidates = sorted(folders(source), key=_read_place)
    if not candidates:
        raise CheckpointNotFoundError(
            f"init_from={str(source)!r} is neither a checkpoint nor a run that holds one"
        )
    return _open(source, candidates[-1])


def _read_place(folder: Path) -> tuple[int, int]:
    """Return step and serial from the manifest; from the name where it cannot be read."""
    try:
        checkpoint = open_checkpoint(folder)
    except CheckpointError:
        return read_folder_name(folder.name) or (-1, 0)
    return checkpoint.step, checkpoint.serial
