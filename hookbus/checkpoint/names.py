"""What a run directory, a checkpoint in it and its files are called."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

from hookbus.checkpoint.files import refused
from hookbus.errors import CallError, HookbusError, raise_all

_FOLDER = re.compile(r"step-([0-9]{8,})(?:-([1-9][0-9]*))?")
_SECTION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,99}")
_PART = re.compile(r"[A-Za-z0-9_-]{1,100}")
NAME_RULE = "up to 100 letters, digits, _ . - : only, and the first no . - or :"


def take_path(argument: str, path: str | os.PathLike[str]) -> Path:
    """Return a user's path.

    Raises:
        CallError: it is none.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise CallError(f"{argument}={path!r}: pass a path, as a str or pathlib.Path")
    return Path(text)


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


def list_entries(run: Path) -> list[os.DirEntry[str]]:
    """Return what is in a folder; one that is not there is empty.

    Raises:
        WriteError: it may not be looked into.
    """
    with refused("look into", run):
        try:
            with os.scandir(run) as entries:
                return list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []


def folders(run: Path) -> list[Path]:
    """Return the folders whose names are exactly those of checkpoints, by step, then serial.

    Nothing is opened: some may be damaged. A run directory that is not there has none.
    """
    named = [(read_folder_name(entry.name), entry) for entry in list_entries(run)]
    ours = [(name, Path(entry.path)) for name, entry in named if name and _is_folder(entry)]
    return [path for _, path in sorted(ours)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads round in a circle
        return False


def is_name(name: object) -> TypeGuard[str]:
    """Whether a section can be called so."""
    return isinstance(name, str) and _SECTION.fullmatch(name) is not None


def check_names(names: Sequence[str]) -> None:
    """Refuse names of sections that cannot be names of files everywhere.

    Raises:
        CallError: letters that a file's name cannot have everywhere, or equal but for case.
    """
    problems: list[HookbusError] = [
        CallError(f"section {name!r}: {NAME_RULE}") for name in names if not is_name(name)
    ]
    folded = Counter(name.lower() for name in names)
    for lower in (lower for lower, count in folded.items() if count > 1):
        same = [name for name in names if name.lower() == lower]
        problems.append(
            CallError(
                f"sections {' and '.join(map(repr, same))} are equal but for case; rename one"
            )
        )
    raise_all("sections cannot be named so", problems)


def check_part(part: str) -> None:
    """Refuse the name of a part that cannot be in a file's name everywhere.

    Raises:
        CallError: another letter than letters, digits, ``_ -``, or more than 100.
    """
    if not isinstance(part, str) or not _PART.fullmatch(part):
        raise CallError(f"part={part!r}: up to 100 letters, digits, _ and - only")


def part_name(section: str, part: str | None) -> str:
    return section if part is None else f"{section}.{part}"


def file_name(section: str, part: str | None) -> str:
    """Return the name of a part's file of tensors.

    Raises:
        CallError: it cannot be one everywhere.
    """
    check_names([section])
    if part is not None:
        check_part(part)
    return part_name(section, part).replace(":", "+") + ".safetensors"
