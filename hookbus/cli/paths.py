"""What a path on the command line stands for."""

from __future__ import annotations

import os
from pathlib import Path

from hookbus.checkpoint import folders, read_folder_name, take_path
from hookbus.checkpoint.manifest import NAME
from hookbus.errors import CheckpointNotFoundError


def take_folder(path: str) -> Path:
    """Return a folder.

    Raises:
        CheckpointNotFoundError: there is none.
    """
    folder = take_path("PATH", path)
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"there is no folder {path}")
    return folder


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint, be it damaged: it has a manifest, or such a name."""
    name = os.path.basename(os.path.abspath(folder))
    return os.path.lexists(folder / NAME) or read_folder_name(name) is not None


def list_checkpoints(path: str) -> list[Path]:
    """Return the checkpoint that a path is, or those of the run directory that it is, by step.

    Raises:
        CheckpointNotFoundError: it is neither, or a run directory without checkpoints.
    """
    folder = take_folder(path)
    if is_checkpoint(folder):
        return [folder]
    found = folders(folder)
    if not found:
        raise CheckpointNotFoundError(f"{path} is no checkpoint, and there is none in it")
    return found
