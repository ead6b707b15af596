"""``hookbus history``: what happened to a run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from hookbus.checkpoint import history as read_history
from hookbus.cli.output import (
    AsJson,
    escape,
    print_json,
    print_table,
    show,
    show_bytes,
    show_time,
)
from hookbus.cli.paths import is_checkpoint, take_folder

_COLUMNS = {
    "time (UTC)": False,
    "event": False,
    "step": True,
    "blocked": True,
    "seconds": True,
    "bytes": True,
    "what": False,
}


def history(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)],
    as_json: AsJson = False,
) -> int:
    """Show each start, save, deletion and fallback of a run.

    Of a save: how many seconds training was blocked, and how many it took in all.
    """
    folder = take_folder(run)
    records = read_history(folder)
    if as_json:
        print_json(records)
    elif not records:
        what = "is a checkpoint; its run is the folder above" if is_checkpoint(folder) else ""
        print(f"{escape(run)} {what or 'has no history'}")
    else:
        print_table(_COLUMNS, map(_make_row, records))
    return 0


def _make_row(record: Mapping[str, Any]) -> list[str]:
    """Return the cells of a record; a line of the file may be anything."""
    return [
        _show_moment(record.get("time")),
        show(record["event"]),
        show(record.get("step")),
        _show_seconds(record.get("blocked")),
        _show_seconds(record.get("seconds")),
        show_bytes(record.get("bytes")),
        "; ".join(part for part in _describe(record) if part),
    ]


def _describe(record: Mapping[str, Any]) -> list[str]:
    if record["event"] == "start":
        how, checkpoint = show(record.get("how")), record.get("checkpoint")
        from_where = f" from {Path(str(checkpoint)).name}" if checkpoint else ""
        changes = record.get("changes")
        return [how + from_where, f"changed: {_show_changes(changes)}" if changes else ""]
    if record["event"] == "fallback":
        what = f"{show(record.get('checkpoint'))} moved to {show(record.get('moved_to'))}"
        return [what, show(record.get("why"))]
    metrics = record.get("metrics")
    return [show(record.get("why")), show(metrics) if metrics else ""]


def _show_changes(changes: object) -> str:
    if not isinstance(changes, list) or not all(isinstance(each, Mapping) for each in changes):
        return show(changes)
    return ", ".join(
        f"{show(each.get('setting'))} {show(each.get('saved'))} → {show(each.get('now'))}"
        for each in changes
    )


def _show_moment(value: object) -> str:
    with contextlib.suppress(TypeError, ValueError):
        return show_time(datetime.fromisoformat(value))  # type: ignore[arg-type]
    return show(value)


def _show_seconds(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) >= 1e15:
        return show(value)
    return f"{value:.2f}"
