"""The checkpoint on disk. It knows no bus."""

from __future__ import annotations

from hookbus.checkpoint.lock import RunLock
from hookbus.checkpoint.names import check_names, folders, read_folder_name
from hookbus.checkpoint.reader import Checkpoint, Metadata, SectionInfo, open_checkpoint
from hookbus.checkpoint.run_directory import (
    best,
    checkpoints,
    make_run_directory,
    sweep,
)
from hookbus.checkpoint.tensors import TensorInfo
from hookbus.checkpoint.tree import Flat, flatten, unflatten
from hookbus.checkpoint.writer import Part, Section, write_checkpoint

__all__ = [
    "Checkpoint",
    "Flat",
    "Metadata",
    "Part",
    "RunLock",
    "Section",
    "SectionInfo",
    "TensorInfo",
    "best",
    "check_names",
    "checkpoints",
    "flatten",
    "folders",
    "make_run_directory",
    "open_checkpoint",
    "read_folder_name",
    "sweep",
    "unflatten",
    "write_checkpoint",
]
