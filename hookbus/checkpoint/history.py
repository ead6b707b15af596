"""The history of a run: one line of JSON for each start, save, deletion and fallback."""

from __future__ import annotations

import json
import logging
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hookbus.checkpoint import files
from hookbus.checkpoint.names import take_path
from hookbus.errors import WriteError

NAME = "run.jsonl"

_logger = logging.getLogger("hookbus")
_guard = threading.Lock()  # a save behind training writes here too
os.register_at_fork(after_in_child=lambda: globals().update(_guard=threading.Lock()))


def append_record(run: Path, event: str, **values: Any) -> None:
    """Add a line and bring it to the disk; ``values`` are plain.

    Where that fails there is a WARNING: what it tells of has happened all the same.
    """
    record = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event}
    try:
        line = json.dumps({**record, **values}, separators=(",", ":")).encode() + b"\n"
        with _guard:
            files.append_line(run / NAME, line)
    except (WriteError, ValueError) as error:
        _logger.warning("the history of %s is not written: %s", run, error)


def history(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return what happened to a run, oldest first: a dict for each line of its ``run.jsonl``.

    Each has ``time`` (UTC, as text) and ``event``: ``"start"``, ``"save"``, ``"delete"`` or
    ``"fallback"``, and what belongs to that. A line that a crash cut short is left out; a run that
    has no history yet has none.

    Raises:
        CallError: ``run`` is no path.
        WriteError: the file is there and cannot be read.
    """
    records = []
    torn = 0
    for line in _read_lines(take_path("run", run) / NAME):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and "event" in record:
            records.append(record)
        else:
            torn += bool(line.strip())
    if torn:
        _logger.info("%s: %d lines that were cut short are left out", run, torn)
    return records


def _read_lines(path: Path) -> list[bytes]:
    with files.refused("read", path):
        try:
            with os.fdopen(files.open_file(path), "rb") as file:
                return file.read().splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return []
