"""What a run directory, a checkpoint in it and its files are called."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hookbus.checkpoint.files import refused
from hookbus.errors import CallError, HookbusError, raise_all

_FOLDER = re.compile(r"step-([0-9]{8,})(?:-([1-9][0-9]*))?")
_SECTION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")


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
    found = [entry for entry in list_entries(run) if entry.is_dir()]
    named = [(read_folder_name(entry.name), Path(entry.path)) for entry in found]
    return [path for name, path in sorted(n for n in named if n[0] is not None)]


def check_names(names: Sequence[str]) -> None:
    """Refuse names of sections that cannot be names of files everywhere.

    Raises:
        CallError: another letter than letters, digits, ``_ . - :``, or equal but for case.
    """
    problems: list[HookbusError] = [
        CallError(f"section {name!r}: letters, digits, _ . - : only, and the first no . - or :")
        for name in names
        if not _SECTION.fullmatch(name)
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


def part_name(section: str, part: str | None) -> str:
    return section if part is None else f"{section}.{part}"


def file_name(section: str, part: str | None) -> str:
    """Return the name of a part's file of tensors.

    Raises:
        CallError: it cannot be one everywhere.
    """
    who = part_name(section, part)
    check_names([who])
    return who.replace(":", "+") + ".safetensors"
