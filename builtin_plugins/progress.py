"""Show on a terminal how a big checkpoint is verified or written; it saves nothing."""

from __future__ import annotations

import sys
import time

import rich.progress
from rich.console import Console
from rich.filesize import decimal

import hookbus

SHOWN_FROM = 64 * 2**20
"""Bytes from which a transfer is worth a bar."""

_SECONDS_BETWEEN_DRAWINGS = 0.1
_DONE = {"writing": "wrote", "verifying": "verified"}


class Progress:
    """Draw a bar on stderr for each transfer from 64 MiB up, and one line when it is over.

    Silent where stderr is not a terminal.
    """

    kind = "progress"

    def __init__(self) -> None:
        self._transfer: hookbus.Transfer | None = None
        self._bar: rich.progress.Progress | None = None
        self._drawn_at = 0.0

    @hookbus.hookimpl
    def bytes_moved(self, transfer: hookbus.Transfer) -> None:
        if transfer.total < SHOWN_FROM or sys.stderr is None or not sys.stderr.isatty():
            return
        if not transfer.ended:
            if transfer is not self._transfer:
                self._clear_bar()
                self._start_bar(transfer)
            self._draw_bar(transfer)
        elif transfer is self._transfer:
            self._clear_bar()
            if not transfer.failed:
                sys.stderr.write(_describe_end(transfer))
                sys.stderr.flush()

    def _start_bar(self, transfer: hookbus.Transfer) -> None:
        # No thread of its own and no capture of stdout: the bar moves when bytes do, and a
        # transfer that fails leaves nothing behind but its line.
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.DownloadColumn(),
            rich.progress.TransferSpeedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._bar.add_task(f"{transfer.what} step {transfer.step}", total=transfer.total)
        self._bar.start()
        self._bar.console.show_cursor(True)
        self._transfer, self._drawn_at = transfer, time.monotonic()

    def _draw_bar(self, transfer: hookbus.Transfer) -> None:
        assert self._bar is not None
        now = time.monotonic()
        if now - self._drawn_at >= _SECONDS_BETWEEN_DRAWINGS:
            self._bar.update(self._bar.task_ids[0], completed=transfer.done, refresh=True)
            self._drawn_at = now

    def _clear_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._transfer = self._bar = None


def _describe_end(transfer: hookbus.Transfer) -> str:
    rate = transfer.total / max(transfer.seconds, 1e-9) / 1e9
    return (
        f"{_DONE[transfer.what]} step {transfer.step}: {decimal(transfer.total)} "
        f"in {transfer.seconds:.1f} s, {rate:.2f} GB/s\n"
    )
