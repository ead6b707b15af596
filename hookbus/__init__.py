"""An event-driven hook bus: start the same command again and training goes on bit for bit.

The bus and what belongs to it are imported when they are first asked for: they need torch, and
whoever only looks at a checkpoint should not wait for it.
"""

import importlib.util
import typing

from hookbus import errors
from hookbus.checkpoint import (
    Checkpoint,
    Damage,
    Metadata,
    SectionInfo,
    TensorInfo,
    best,
    checkpoints,
    history,
    sort_by_metric,
)
from hookbus.checkpoint import open_checkpoint as open

if typing.TYPE_CHECKING:
    from hookbus.bus import HookBus
    from hookbus.entry_points import Failed
    from hookbus.hookspecs import hookimpl, hookspec
    from hookbus.migrations import migrate
    from hookbus.ordering import Place
    from hookbus.registration import Registered
    from hookbus.report import Change, Report, SectionReport
    from hookbus.resume import Resume
    from hookbus.save import Save
    from hookbus.transfer import Transfer
else:
    _LATER = {
        "Change": "hookbus.report",
        "HookBus": "hookbus.bus",
        "Failed": "hookbus.entry_points",
        "hookimpl": "hookbus.hookspecs",
        "hookspec": "hookbus.hookspecs",
        "migrate": "hookbus.migrations",
        "Place": "hookbus.ordering",
        "Registered": "hookbus.registration",
        "Report": "hookbus.report",
        "SectionReport": "hookbus.report",
        "Resume": "hookbus.resume",
        "Save": "hookbus.save",
        "Transfer": "hookbus.transfer",
    }

    def __getattr__(name):
        if name in _LATER:
            globals()[name] = found = getattr(importlib.import_module(_LATER[name]), name)
            return found
        if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")  # as if all were imported
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *_LATER})


__all__ = [
    "Change",
    "Checkpoint",
    "Damage",
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
    "migrate",
    "open",
    "sort_by_metric",
]
