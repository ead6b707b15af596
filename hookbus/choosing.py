"""Which checkpoint a resume reads from."""

from __future__ import annotations

from pathlib import Path

from hookbus.checkpoint import (
    Checkpoint,
    checkpoints,
    folders,
    open_checkpoint,
    read_folder_name,
)
from hookbus.errors import (
    CallError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ResumeError,
)
from hookbus.resume import Request


def check_run(run: Path) -> None:
    """Refuse the path of a checkpoint, and of a file, where a run directory belongs."""
    named = read_folder_name(run.name)
    if (run / "manifest.json").is_file() or (named and run.is_dir()):
        here = (
            f"pass {str(run.parent)!r} (and step={named[0]} for just this one), or"
            if named
            else "pass"
        )
        raise CallError(
            f"{run} is a checkpoint, not a run directory: {here} init_from={str(run)!r} to start a"
            " new run from it"
        )
    if run.exists() and not run.is_dir():
        raise CallError(f"{run} is a file; pass the run directory, which need not exist yet")


def choose(run: Path, request: Request) -> tuple[Checkpoint | None, bool]:
    """Return the checkpoint to read from, if any, and whether the run itself is fresh.

    Raises:
        CheckpointNotFoundError: what was asked for is not there.
        CorruptCheckpointError: the one to take is damaged; the newest good one is named.
        ResumeError: an older step than the newest, which would leave two futures in one run.
    """
    candidates = folders(run)
    if request.step is not None:
        return _choose_step(run, request, candidates), False
    if candidates:
        return _open_newest(run, candidates), False
    if request.stage != "fit":
        raise CheckpointNotFoundError(
            f"{run} holds no checkpoint, and stage={request.stage!r} needs one"
        )
    if request.init_from is not None:
        return _open_source(Path(request.init_from)), True
    return None, True


def _choose_step(run: Path, request: Request, candidates: list[Path]) -> Checkpoint:
    wanted = [folder for folder in candidates if _read_step(folder) == request.step]
    if not wanted:
        steps = sorted({_read_step(folder) for folder in candidates})
        near = sorted(steps, key=lambda step: abs(step - (request.step or 0)))[:3]
        there = f"; the nearest are {', '.join(map(str, sorted(near)))}" if near else ""
        raise CheckpointNotFoundError(f"{run} has no checkpoint of step {request.step}{there}")
    if request.stage == "fit" and wanted[-1] != candidates[-1]:
        raise ResumeError(
            f"step {request.step} is older than the newest, {_read_step(candidates[-1])}, and a"
            " run has one future; start a run of its own from it:"
            f" resume(NEW, init_from={str(wanted[-1])!r}, init_only=('*',))"
        )
    return _open_newest(run, candidates, wanted[-1])


def _open_newest(run: Path, candidates: list[Path], wanted: Path | None = None) -> Checkpoint:
    try:
        return open_checkpoint(wanted or candidates[-1])
    except CorruptCheckpointError as error:
        good = checkpoints(run)
        error.add_note(
            f"the newest good checkpoint of {run} is step {good[-1].step}; to go on from it, move"
            f" {wanted or candidates[-1]} out of the run directory"
            if good
            else f"there is no good checkpoint in {run}"
        )
        raise


def _open_source(source: Path) -> Checkpoint:
    if (source / "manifest.json").is_file():
        return open_checkpoint(source)
    candidates = folders(source) if source.is_dir() else []
    if not candidates:
        raise CheckpointNotFoundError(
            f"init_from={str(source)!r} is neither a checkpoint nor a run that holds one"
        )
    return _open_newest(source, candidates)


def _read_step(folder: Path) -> int:
    return int(folder.name.split("-")[1])
