"""The progress bar, seen through a real pseudo-terminal."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

import hookbus
from builtin_plugins.progress import SHOWN_FROM, Progress
from hookbus.errors import CorruptCheckpointError
from hookbus.transfer import Transfer


class Terminal:
    """A real pseudo-terminal in place of stderr."""

    def __enter__(self) -> Terminal:
        self._far, self._near = os.openpty()
        os.set_blocking(self._far, False)
        self._stream = open(self._near, "w", encoding="utf-8")
        # Not in a fixture: pytest puts its own stderr back between setup and test.
        self._redirection = contextlib.redirect_stderr(self._stream)
        self._redirection.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._redirection.__exit__(None, None, None)
        self._stream.close()
        os.close(self._far)

    def read(self) -> str:
        """Read what was shown since the last call."""
        self._stream.flush()
        shown = b""
        while True:
            try:
                shown += os.read(self._far, 65536)
            except BlockingIOError:
                return shown.decode()


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


def make_transfer(total: int = 2 * SHOWN_FROM, **changes: object) -> Transfer:
    return Transfer("verifying", Path("runs/demo/step-00000300"), 300, total, **changes)  # type: ignore[arg-type]


def pass_through(transfer: Transfer, progress: Progress) -> None:
    for done in (0, transfer.total // 2, transfer.total):
        transfer.done, transfer.seconds = done, 2.0 * done / transfer.total
        progress.bytes_moved(transfer)
    transfer.ended = True
    progress.bytes_moved(transfer)


def test_a_big_transfer_draws_a_bar_and_ends_in_one_line() -> None:
    with Terminal() as terminal:
        transfer = make_transfer()
        progress = Progress()
        progress.bytes_moved(transfer)
        bar = terminal.read()
        assert "verifying step 300" in bar
        assert "━" in bar
        transfer.done, transfer.seconds = transfer.total, 2.0
        progress.bytes_moved(transfer)
        assert "verified step 300" not in terminal.read()  # the last bytes need not be right
        transfer.ended = True
        progress.bytes_moved(transfer)
        ending = terminal.read()
        assert ending.count("verified step 300: 134.2 MB in 2.0 s, 0.07 GB/s\r\n") == 1
        assert ending.index("\x1b[2K") < ending.index(
            "verified step 300"
        )  # the bar is wiped out first


def test_a_bar_takes_no_thread_no_stdout_and_no_cursor() -> None:
    with Terminal() as terminal:
        threads, stdout = threading.active_count(), sys.stdout
        Progress().bytes_moved(make_transfer())
        shown = terminal.read()
        assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
        assert (threading.active_count(), sys.stdout) == (threads, stdout)


def test_a_transfer_that_failed_takes_its_bar_away_and_claims_nothing() -> None:
    with Terminal() as terminal:
        transfer = make_transfer()
        progress = Progress()
        progress.bytes_moved(transfer)
        terminal.read()
        transfer.done = transfer.total
        transfer.ended = transfer.failed = True
        progress.bytes_moved(transfer)
        assert terminal.read().endswith("\x1b[2K")


def test_a_transfer_that_went_silent_gives_way_to_the_next() -> None:
    with Terminal() as terminal:
        progress = Progress()
        progress.bytes_moved(make_transfer(done=5))
        terminal.read()
        other = make_transfer()
        other.step = 301
        progress.bytes_moved(other)
        shown = terminal.read()
        assert shown.rindex("\x1b[2K") < shown.index("verifying step 301")


def test_a_small_transfer_is_not_worth_a_line() -> None:
    with Terminal() as terminal:
        pass_through(make_transfer(SHOWN_FROM - 1), Progress())
        assert terminal.read() == ""


@pytest.mark.parametrize("stderr", [io.StringIO(), None], ids=["a file", "none at all"])
def test_nothing_is_shown_where_stderr_is_no_terminal(
    stderr: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich believe in a terminal
    monkeypatch.setattr(sys, "stderr", stderr)
    pass_through(make_transfer(), Progress())
    assert stderr is None or stderr.getvalue() == ""


def test_a_bus_tells_of_writing_and_verifying(tmp_path: Path) -> None:
    with Terminal() as terminal:
        weights = torch.ones(SHOWN_FROM // 4 + 1)
        for resumed in (False, True):
            with hookbus.HookBus() as bus:
                bus.attach(weights=weights)
                bus.resume(tmp_path)
                if not resumed:
                    bus.save(step=1)
        shown = terminal.read()
        for word in ("wrote", "verified"):
            assert shown.count(f"{word} step 1: 67.1 MB") == 1


def test_a_verification_that_fails_does_not_claim_to_be_done(tmp_path: Path) -> None:
    weights = torch.ones(SHOWN_FROM // 4 + 1)
    with hookbus.HookBus() as bus:
        bus.attach(weights=weights)
        bus.resume(tmp_path)
        bus.save(step=1)
    file = tmp_path / "step-00000001" / "weights.safetensors"
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\1")
    with Terminal() as terminal, hookbus.HookBus() as bus:
        bus.attach(weights=weights)
        with pytest.raises(CorruptCheckpointError):
            bus.resume(tmp_path)
        shown = terminal.read()
        assert "verifying step 1" in shown
        assert "verified" not in shown
