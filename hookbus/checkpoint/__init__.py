"""The checkpoint on disk. It knows no bus."""

from __future__ import annotations

from hookbus.checkpoint.history import append_record, history
from hookbus.checkpoint.lock import RunLock
from hookbus.checkpoint.names import (
    NAME_RULE,
    check_names,
    check_part,
    folders,
    is_name,
    read_folder_name,
    take_path,
)
from hookbus.checkpoint.reader import Checkpoint, Metadata, SectionInfo, open_checkpoint
from hookbus.checkpoint.run_directory import (
    best,
    checkpoints,
    make_run_directory,
    remove_checkpoint,
    set_aside,
    sweep,
)
from hookbus.checkpoint.staging import Staging
from hookbus.checkpoint.tensors import TensorInfo
from hookbus.checkpoint.tree import Flat, flatten, unflatten
from hookbus.checkpoint.writer import Part, Section, write_checkpoint

__all__ = [
    "NAME_RULE",
    "Checkpoint",
    "Flat",
    "Metadata",
    "Part",
    "RunLock",
    "Section",
    "SectionInfo",
    "Staging",
    "TensorInfo",
    "append_record",
    "best",
    "check_names",
    "check_part",
    "checkpoints",
    "flatten",
    "folders",
    "history",
    "is_name",
    "make_run_directory",
    "open_checkpoint",
    "read_folder_name",
    "remove_checkpoint",
    "set_aside",
    "sweep",
    "take_path",
    "unflatten",
    "write_checkpoint",
]
