"""The command ``hookbus``: what it knows, and how an error becomes one line and a status."""

from __future__ import annotations

import importlib.metadata
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from hookbus.cli import history, inspect, new_plugin, plugins, verify
from hookbus.cli.output import escape
from hookbus.errors import CorruptCheckpointError, FormatError, HookbusError
from hookbus.logs import logger

FINDING = 1
BAD_USE = 2
INTERRUPTED = 130  # as shells say it of SIGINT

# Plain text in place of rich's panels: an error is one line here.
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
for command in (
    history.history,
    inspect.inspect,
    new_plugin.new_plugin,
    plugins.plugins,
    verify.verify,
):
    app.command()(command)

# typer has click's errors from click or from a copy of its own, by version: this is UsageError.
_UsageError: Any = typer.BadParameter.__mro__[1]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"hookbus {importlib.metadata.version('hookbus')}")
        raise typer.Exit


@app.callback()
def hookbus(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Look at the checkpoints of training runs, and at plugins.

    The exit status is 0 if all is well, 1 for a finding such as a damaged checkpoint, and 2 for
    bad use.
    """


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status; an error is one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path or a name may hold any character
            stream.reconfigure(errors="backslashreplace")
    try:
        status = app(list(arguments), prog_name="hookbus", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # a full disk is told of here, and not as Python ends
        return status if isinstance(status, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except _UsageError as error:
        return _report(f"{error.format_message().rstrip('.')}; see hookbus --help", BAD_USE)
    except (CorruptCheckpointError, FormatError) as error:
        return _report(str(error), FINDING)
    except RecursionError:
        return _report("what was read is nested too deeply to be shown", FINDING)
    except (HookbusError, OSError) as error:
        return _report(str(error), BAD_USE)


def run() -> None:
    """Be the command: what is piped into ``head`` ends with it, as any command does."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    logger.addHandler(_OneLine(logging.WARNING))
    status = main(sys.argv[1:])
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:  # which was told of, and Python would do so again as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


class _OneLine(logging.Handler):
    """Says what the library warns of in the same way as an error."""

    def emit(self, record: logging.LogRecord) -> None:
        _report(record.getMessage(), 0)


def _report(text: str, status: int) -> int:
    print(f"hookbus: {escape(text)}", file=sys.stderr)
    return status
