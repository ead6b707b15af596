"""An event-driven hook bus: start the same command again and training goes on bit for bit."""

from hookbus import errors
from hookbus.bus import HookBus
from hookbus.checkpoint import Checkpoint, Metadata, TensorInfo, best, checkpoints
from hookbus.checkpoint import open_checkpoint as open
from hookbus.hookspecs import hookimpl, hookspec
from hookbus.report import Report
from hookbus.resume import Resume
from hookbus.save import Save
from hookbus.transfer import Transfer

__all__ = [
    "Checkpoint",
    "HookBus",
    "Metadata",
    "Report",
    "Resume",
    "Save",
    "TensorInfo",
    "Transfer",
    "best",
    "checkpoints",
    "errors",
    "hookimpl",
    "hookspec",
    "open",
]
