"""Which checkpoint a resume reads from."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import attrs

from hookbus.checkpoint import (
    Checkpoint,
    folders,
    history,
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
from hookbus.logs import logger
from hookbus.ranks import Ranks
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
    found = _look_into(run)
    if request.step is not None:
        return Choice(_choose_step(run, request, found), fresh=False)
    if found and request.may_fall_back:
        # Where the newest cannot say whose it is, it is that of the run that was started last.
        run_id = found[-1].run_id or _read_run_id(run)
        choice = _open_newest(_list_own(found, run_id))
        _warn_of_strangers(choice, found)
        return choice
    if found:
        return Choice(_open(found[-1].folder), fresh=False)
    if request.stage != "fit":
        raise CheckpointNotFoundError(
            f"{run} holds no checkpoint, and stage={request.stage!r} needs one"
        )
    if request.init_from is not None:
        return Choice(_open_source(Path(request.init_from)), fresh=True)
    return Choice(None, fresh=True)


def choose_together(ranks: Ranks, make: Callable[[], Choice]) -> Choice:
    """Let rank 0 choose, and all ranks open the very same checkpoint.

    Raises:
        RankError: another rank could not, or finds other bytes there.
    """
    with ranks.together("choosing a checkpoint"):
        choice = make() if ranks.is_first else None
    if choice is None or ranks.world_size > 1:
        told = ranks.share("the choice of a checkpoint", _write_choice(choice) if choice else None)
        with ranks.together("opening the checkpoint"):
            if choice is None:
                assert told is not None
                choice = _read_choice(*told)
        seal = choice.checkpoint.seal if choice.checkpoint else None
        ranks.agree("opening the checkpoint", {"the seal of its manifest": seal})
    return choice


def _write_choice(choice: Choice) -> tuple[Path | None, bool, dict[Path, str]]:
    path = choice.checkpoint.path if choice.checkpoint else None
    return path, choice.fresh, {folder: str(fault) for folder, fault in choice.damaged.items()}


def _read_choice(path: Path | None, fresh: bool, damaged: dict[Path, str]) -> Choice:
    checkpoint = open_checkpoint(path) if path else None
    faults = {folder: CorruptCheckpointError(text) for folder, text in damaged.items()}
    return Choice(checkpoint, fresh, faults)


def choose_older(than: Path) -> Choice:
    """Choose the newest checkpoint of the same run that is older, since this one is damaged.

    Raises:
        CorruptCheckpointError: there is none, or all are damaged.
    """
    found = _look_into(than.parent)
    position = [each.folder for each in found].index(than)
    return _open_newest(_list_own(found[:position], found[position].run_id))


def find_way_out(checkpoint: Path, wanted: Collection[str] | None = None) -> str:
    """Say what to do about a damaged checkpoint: which is the newest good one.

    ``wanted`` are the sections that matter; every byte of them is read.
    """
    for each in reversed(_look_into(checkpoint.parent)):
        if each.folder == checkpoint:
            continue
        try:
            other = open_checkpoint(each.folder)
            there = other.sections if wanted is None else set(wanted) & set(other.sections)
            other.verify(there)
        except CheckpointError:
            continue
        return (
            f"the newest good one is of step {other.step}; to go on from it, move {checkpoint} out"
            " of the run directory"
        )
    return f"there is no other good checkpoint in {checkpoint.parent}"


# -- inside -------------------------------------------------------------------------------------


@attrs.frozen
class _Found:
    """A folder with a checkpoint's name, and what its manifest says; a damaged one its name."""

    step: int
    serial: int
    folder: Path
    run_id: str | None


def _look_into(run: Path) -> list[_Found]:
    """Return what may be checkpoints of a run, oldest first by their manifests."""
    found = []
    for folder in folders(run):
        try:
            checkpoint = open_checkpoint(folder)
        except CheckpointError:
            step, serial = read_folder_name(folder.name) or (-1, 0)
            found.append(_Found(step, serial, folder, None))
        else:
            found.append(_Found(checkpoint.step, checkpoint.serial, folder, checkpoint.run_id))
    return sorted(found, key=lambda each: (each.step, each.serial, each.folder.name))


def _list_own(found: Sequence[_Found], run_id: str | None) -> list[_Found]:
    """Return those of a run, and those that cannot say whose they are; all if it is not known."""
    return [each for each in found if run_id is None or each.run_id in (None, run_id)]


def _open_newest(found: Sequence[_Found]) -> Choice:
    damaged: dict[Path, CorruptCheckpointError] = {}
    for each in reversed(found):
        try:
            return Choice(open_checkpoint(each.folder), fresh=False, damaged=damaged)
        except CorruptCheckpointError as error:
            damaged[each.folder] = error
    if not damaged:
        raise CorruptCheckpointError("there is no older checkpoint")
    raise CorruptCheckpointError(
        "; ".join(map(str, damaged.values()))
        + "; there is no other checkpoint, and nothing was moved"
    )


def _read_run_id(run: Path) -> str | None:
    """Return the id of the run that was started last in a run directory, if its history tells."""
    with contextlib.suppress(CheckpointError):
        starts = [each for each in history(run) if each["event"] == "start"]
        return starts[-1].get("run_id") if starts else None
    return None


def _warn_of_strangers(choice: Choice, found: Sequence[_Found]) -> None:
    assert choice.checkpoint is not None
    own = (None, choice.checkpoint.run_id)
    strangers = [each.folder.name for each in found if each.run_id not in own]
    if strangers:
        logger.warning(
            "%s holds checkpoints of another run too: %s; it goes on from %s, the newest",
            choice.checkpoint.path.parent,
            ", ".join(strangers),
            choice.checkpoint.path.name,
        )


def _choose_step(run: Path, request: Request, found: Sequence[_Found]) -> Checkpoint:
    steps = [each.step for each in found]
    if request.step not in steps:
        near = sorted({*steps}, key=lambda step: abs(step - (request.step or 0)))[:3]
        there = f"; the nearest are {', '.join(map(str, sorted(near)))}" if near else ""
        raise CheckpointNotFoundError(f"{run} has no checkpoint of step {request.step}{there}")
    wanted = found[len(steps) - 1 - steps[::-1].index(request.step)]
    if request.stage == "fit" and wanted != found[-1]:
        raise ResumeError(
            f"step {request.step} is older than the newest, {steps[-1]}, and a run has one future;"
            " start a run of its own from it:"
            f" resume(NEW, init_from={str(wanted.folder)!r}, init_only=('*',))"
        )
    return _open(wanted.folder)


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
    found = _look_into(source)
    if not found:
        raise CheckpointNotFoundError(
            f"init_from={str(source)!r} is neither a checkpoint nor a run that holds one"
        )
    return _open(found[-1].folder)
