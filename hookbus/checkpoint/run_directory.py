"""The run directory: the names in it, what is listed, what is swept."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from hookbus.checkpoint import files
from hookbus.checkpoint.reader import Checkpoint, open_checkpoint
from hookbus.errors import CallError, CorruptCheckpointError, FormatError, WriteError

_FOLDER = re.compile(r"step-([0-9]{8,})(?:-([1-9][0-9]*))?")
_TEMPORARY = re.compile(r"\.(step-[0-9]{8,}(?:-[1-9][0-9]*)?)\.[0-9]+-[0-9a-f]{16}\.tmp")

_logger = logging.getLogger("hookbus")
_in_hand = set[Path]()  # temporary folders that this process is writing now


def folder_name(step: int, serial: int = 0) -> str:
    """Return the name of a checkpoint; ``serial`` counts those of one step, from 0."""
    return f"step-{step:08d}" + (f"-{serial}" if serial else "")


def read_folder_name(name: str) -> tuple[int, int] | None:
    """Return step and serial if a name is exactly one of ours."""
    match = _FOLDER.fullmatch(name)
    if match is None:
        return None
    step, serial = int(match[1]), int(match[2] or 0)
    return (step, serial) if folder_name(step, serial) == name else None


def make_run_directory(run: Path) -> None:
    """Create a run directory, and what leads to it, unless it is there.

    Raises:
        WriteError: the disk refused, or a file is in the way.
    """
    if not run.is_dir():
        with files.refused("create the run directory", run):
            run.mkdir(parents=True, exist_ok=True)
        files.sync_folder(run.parent)


def folders(run: Path) -> list[Path]:
    """Return the folders whose names are exactly those of checkpoints, by step, then serial.

    Nothing is opened: some may be damaged. A run directory that is not there has none.
    """
    found = [entry for entry in _scan(run) if entry.is_dir()]
    named = [(read_folder_name(entry.name), Path(entry.path)) for entry in found]
    return [path for name, path in sorted(n for n in named if n[0] is not None)]


def checkpoints(run: Path) -> list[Checkpoint]:
    """Return the complete checkpoints of a run, oldest first, by their manifests.

    Damaged ones, and those of a newer format, are left out, with a WARNING each.
    """
    found = []
    for folder in folders(Path(run)):
        try:
            checkpoint = open_checkpoint(folder)
        except (CorruptCheckpointError, FormatError) as error:
            _logger.warning("%s is left out: %s", folder, error)
        else:
            checkpoint.close()
            found.append(checkpoint)
    return sorted(found, key=lambda each: (each.step, each.serial, each.path.name))


def best(run: Path, metric: str, mode: str = "min") -> Checkpoint | None:
    """Return the checkpoint with the smallest or largest metric; of equal ones, the oldest.

    Those without the metric, or with nan, are left out.

    Raises:
        CallError: ``mode`` is neither ``"min"`` nor ``"max"``.
    """
    if mode not in ("min", "max"):
        raise CallError(f"mode={mode!r}: pass 'min' or 'max'")
    able = [c for c in checkpoints(run) if not math.isnan(c.metrics.get(metric, math.nan))]
    choose = min if mode == "min" else max
    return choose(able, key=lambda each: each.metrics[metric], default=None)


def sweep(run: Path) -> list[Path]:
    """Remove what dead saves left behind, and return it; nothing else is touched.

    Call it only while holding the run's lock: another process's save in hand looks the same.
    """
    swept = []
    for entry in _scan(Path(run)):
        path = Path(entry.path)
        ours = _TEMPORARY.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        if ours and path.resolve() not in _in_hand:
            files.remove_folder(path)
            swept.append(path)
    return sorted(swept)


def next_serial(run: Path, step: int) -> int:
    """Return the serial of the next checkpoint of a step: above all that have a name there."""
    names = [read_folder_name(entry.name) for entry in _scan(run)]
    return max((serial for at, serial in filter(None, names) if at == step), default=-1) + 1


@contextlib.contextmanager
def temporary_folder(run: Path, name: str) -> Iterator[Path]:
    """Make a hidden folder to write the checkpoint ``name`` in; remove it if that fails."""
    path = run / f".{name}.{os.getpid()}-{secrets.token_hex(8)}.tmp"
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


def _scan(run: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(run) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
