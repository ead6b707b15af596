"""The progress bar, seen through a real pseudo-terminal."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

import pytest
import torch

import hookbus
from builtin_plugins.progress import SHOWN_FROM, Progress
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
    return Transfer("reading", Path("runs/demo/step-00000300"), 300, total, **changes)  # type: ignore[arg-type]


def pass_through(transfer: Transfer, progress: Progress) -> None:
    for done in (0, transfer.total // 2, transfer.total):
        transfer.done, transfer.seconds = done, 2.0 * done / transfer.total
        progress.transfer(transfer)


def test_a_big_transfer_draws_a_bar_and_ends_in_one_line() -> None:
    with Terminal() as terminal:
        transfer = make_transfer()
        progress = Progress()
        progress.transfer(transfer)
        bar = terminal.read()
        assert "reading step 300" in bar
        assert "━" in bar
        transfer.done, transfer.seconds = transfer.total, 2.0
        progress.transfer(transfer)
        progress.transfer(transfer)  # the end may be told twice
        ending = terminal.read()
        assert ending.count("read step 300: 134.2 MB in 2.0 s, 0.07 GB/s\r\n") == 1
        assert ending.index("\x1b[2K") < ending.index("read step 300")  # the bar is wiped out first


def test_the_cursor_stays_visible_even_if_a_transfer_never_ends() -> None:
    with Terminal() as terminal:
        Progress().transfer(make_transfer())
        shown = terminal.read()
        assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_a_transfer_that_failed_takes_its_bar_away_and_claims_nothing() -> None:
    with Terminal() as terminal:
        transfer = make_transfer()
        progress = Progress()
        progress.transfer(transfer)
        terminal.read()
        transfer.failed = True
        for done in (5, transfer.total):
            transfer.done = done
            progress.transfer(transfer)
        assert terminal.read().endswith("\x1b[2K")


def test_a_transfer_that_went_silent_gives_way_to_the_next() -> None:
    with Terminal() as terminal:
        progress = Progress()
        progress.transfer(make_transfer(done=5))
        pass_through(make_transfer(), progress)
        assert terminal.read().count("read step 300: ") == 1


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
