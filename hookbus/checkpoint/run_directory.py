"""The run directory: what is listed, deleted, set aside and swept."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

from hookbus.checkpoint import files
from hookbus.checkpoint.names import folders, list_entries, read_folder_name, take_path
from hookbus.checkpoint.reader import Checkpoint, open_checkpoint
from hookbus.errors import CallError, CheckpointError, WriteError

_TEMPORARY = re.compile(r"\.(step-[0-9]{8,}(?:-[1-9][0-9]*)?)\.[0-9]+-[0-9a-f]{16}\.tmp")

_logger = logging.getLogger("hookbus")
_in_hand = set[Path]()  # temporary folders that this process is writing now


def make_run_directory(run: Path) -> None:
    """Create a run directory, and what leads to it, unless it is there.

    Raises:
        WriteError: the disk refused, or a file is in the way.
    """
    if not run.is_dir():
        files.make_folders(run)


def checkpoints(run: str | os.PathLike[str]) -> list[Checkpoint]:
    """Return the complete checkpoints of a run, oldest first, by their manifests.

    Damaged ones, and those of a newer format, are left out, with a WARNING each. A run directory
    that is not there has none.

    Raises:
        CallError: ``run`` is no path.
    """
    found = []
    for folder in folders(take_path("run", run)):
        try:
            checkpoint = open_checkpoint(folder)
        except CheckpointError as error:
            _logger.warning("%s is left out: %s", folder, error)
        else:
            checkpoint.close()
            found.append(checkpoint)
    return sorted(found, key=lambda each: (each.step, each.serial, each.path.name))


def best(run: str | os.PathLike[str], metric: str, mode: str = "min") -> Checkpoint | None:
    """Return the checkpoint with the smallest or largest metric; of equal ones, the oldest.

    Those without the metric, or with nan, are left out; ``None`` if none is left.

    Raises:
        CallError: ``run`` is no path, ``metric`` no name, ``mode`` neither ``"min"`` nor
            ``"max"``.
    """
    if not isinstance(metric, str):
        raise CallError(f"metric={metric!r}: pass the name of a metric")
    if mode not in ("min", "max"):
        raise CallError(f"mode={mode!r}: pass 'min' or 'max'")
    return next(iter(sort_by_metric(checkpoints(run), metric, mode)), None)


def sort_by_metric(found: Iterable[Checkpoint], metric: str, mode: str) -> list[Checkpoint]:
    """Return those that have a metric, the best first; of equal ones, the one given first.

    Those without the metric, or with nan, are left out.
    """
    nan = float("nan")  # unequal to itself, and math.isnan would overflow at a large int
    valued = [(each.metrics.get(metric, nan), each) for each in found]
    able = [(value, each) for value, each in valued if value == value]
    able.sort(key=lambda pair: pair[0], reverse=mode == "max")
    return [each for _, each in able]


def sweep(run: Path) -> list[Path]:
    """Remove what dead saves left behind, and return it; nothing else is touched.

    Call it only while holding the run's lock: another process's save in hand looks the same.
    """
    swept = []
    for entry in list_entries(Path(run)):
        path = Path(entry.path)
        ours = _TEMPORARY.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        if ours and path.resolve() not in _in_hand:
            swept.append(path)
    if swept:  # a deletion may have died before its new name was on the disk
        files.sync_folder(run)
    for path in swept:
        _remove_hidden(path)
    return sorted(swept)


def remove_checkpoint(path: Path) -> None:
    """Delete a committed checkpoint: renamed first, so that none is ever seen half.

    A kill in between leaves what `sweep` removes, and so does a disk that refuses after it.

    Raises:
        WriteError: the disk refused, and it is whole under its name.
    """
    hidden = path.with_name(_name_temporary(path.name))
    files.rename_folder(path, hidden)
    files.sync_folder(path.parent)
    _remove_hidden(hidden)


def _remove_hidden(path: Path) -> None:
    """Remove what is no checkpoint any more; if it cannot be, it does no harm."""
    try:
        files.remove_folder(path)
    except WriteError as error:
        _logger.warning("%s is left over and stays: %s", path, error)


def name_aside(path: Path) -> Path:
    """Return the path that a damaged checkpoint is moved to: one that is free."""
    names = itertools.chain([""], (f"-{n}" for n in itertools.count(1)))
    return next(
        new for n in names if not os.path.lexists(new := path.with_name(f"damaged-{path.name}{n}"))
    )


def set_aside(path: Path, aside: Path) -> None:
    """Rename a damaged checkpoint, so that it is none any more.

    Raises:
        WriteError: the disk refused.
    """
    files.rename_folder(path, aside)
    files.sync_folder(path.parent)


def next_serial(run: Path, step: int) -> int:
    """Return the serial of the next checkpoint of a step: above all that have a name there."""
    names = [read_folder_name(entry.name) for entry in list_entries(run)]
    return max((serial for at, serial in filter(None, names) if at == step), default=-1) + 1


def _name_temporary(name: str) -> str:
    return f".{name}.{os.getpid()}-{secrets.token_hex(8)}.tmp"


@contextlib.contextmanager
def temporary_folder(run: Path, name: str) -> Iterator[Path]:
    """Make a hidden folder to write the checkpoint ``name`` in; remove it if that fails."""
    path = run / _name_temporary(name)
    key = path.resolve()
    _in_hand.add(key)
    try:
        files.create_folder(path)
        try:
            yield path
        except BaseException:
            try:
                if path.exists():
                    files.remove_folder(path)
            except WriteError as error:  # the first cause is the one to raise
                _logger.warning("%s could not be removed: %s", path, error)
            raise
    finally:
        _in_hand.discard(key)
