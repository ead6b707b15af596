"""The checkpoint on disk. It knows no bus.

What makes tensors is imported when it is first asked for: whoever only looks at a checkpoint, such
as the command line, need not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from hookbus.checkpoint.reader import (
    Checkpoint,
    Damage,
    Metadata,
    SectionInfo,
    open_checkpoint,
)
from hookbus.checkpoint.run_directory import (
    best,
    checkpoints,
    make_run_directory,
    name_aside,
    remove_checkpoint,
    set_aside,
    sort_by_metric,
    sweep,
)
from hookbus.checkpoint.tensor_info import TensorInfo

if TYPE_CHECKING:
    from hookbus.checkpoint.in_memory import InMemory
    from hookbus.checkpoint.joint import write_checkpoint_together
    from hookbus.checkpoint.staging import Staging
    from hookbus.checkpoint.tensors import take_bytes
    from hookbus.checkpoint.tree import Flat, flatten, unflatten
    from hookbus.checkpoint.writer import Part, Section, write_checkpoint
else:

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Not by a module's name, as the package does: in this room no text becomes an import.
        from hookbus.checkpoint import in_memory, joint, staging, tensors, tree, writer

        found = vars(in_memory) | vars(joint) | vars(staging) | vars(tensors) | vars(tree)
        found |= vars(writer)
        globals().update({each: found[each] for each in __all__ if each in found})
        return globals()[name]

    def __dir__():
        return sorted({*globals(), *__all__})


__all__ = [
    "NAME_RULE",
    "Checkpoint",
    "Damage",
    "Flat",
    "InMemory",
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
    "name_aside",
    "open_checkpoint",
    "sort_by_metric",
    "read_folder_name",
    "remove_checkpoint",
    "set_aside",
    "sweep",
    "take_bytes",
    "take_path",
    "unflatten",
    "write_checkpoint",
    "write_checkpoint_together",
]
