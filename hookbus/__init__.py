"""An event-driven hook bus: start the same command again and training goes on bit for bit."""

from hookbus import errors
from hookbus.bus import HookBus
from hookbus.checkpoint import (
    Checkpoint,
    Metadata,
    SectionInfo,
    TensorInfo,
    best,
    checkpoints,
    history,
)
from hookbus.checkpoint import open_checkpoint as open
from hookbus.entry_points import Failed
from hookbus.hookspecs import hookimpl, hookspec
from hookbus.ordering import Place
from hookbus.registration import Registered
from hookbus.report import Change, Report, SectionReport
from hookbus.resume import Resume
from hookbus.save import Save
from hookbus.transfer import Transfer

__all__ = [
    "Change",
    "Checkpoint",
    "Failed",
    "HookBus",
    "Metadata",
    "Place",
    "Registered",
    "Report",
    "Resume",
    "Save",
    "SectionInfo",
    "SectionReport",
    "TensorInfo",
    "Transfer",
    "best",
    "checkpoints",
    "errors",
    "history",
    "hookimpl",
    "hookspec",
    "open",
]
