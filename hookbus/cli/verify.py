"""``hookbus verify``: is every byte of a checkpoint what was written?"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import attrs
import rich.progress
import typer
from rich.console import Console

from hookbus.checkpoint import Checkpoint, Damage, open_checkpoint
from hookbus.checkpoint.manifest import NAME
from hookbus.cli.output import AsJson, escape, print_json, print_table, show, show_bytes
from hookbus.cli.paths import list_checkpoints
from hookbus.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError

SHOWN_FROM = 64 * 2**20  # bytes from which reading is worth a bar

_COLUMNS = {
    "checkpoint": False,
    "step": True,
    "bytes": True,
    "seconds": True,
    "GB/s": True,
    "state": False,
}


@attrs.define(eq=False)
class _Verdict:
    """What was found about one checkpoint; ``bytes`` are those of its tensors."""

    path: Path
    checkpoint: Checkpoint | None = None
    damage: list[Damage] = attrs.field(factory=list)
    gone: bool = False
    seconds: float = 0.0

    @property
    def bytes(self) -> int | None:
        return None if self.checkpoint is None else self.checkpoint.bytes

    @property
    def state(self) -> str:
        if self.gone:
            return "deleted meanwhile"
        if not self.damage:
            return "good"
        files = dict[str, list[str]]()
        for each in self.damage:
            files.setdefault(each.file, []).extend([each.tensor] if each.tensor else [])
        named = (f"{file} ({', '.join(names)})" if names else file for file, names in files.items())
        return f"damaged: {', '.join(named)}"


def verify(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help="Checkpoints, or runs: all of theirs.",
            show_default=False,
        ),
    ],
    as_json: AsJson = False,
) -> int:
    """Read and hash every byte of checkpoints.

    The exit status is 1 if anything is damaged.
    """
    verdicts = [_open(folder) for path in paths for folder in list_checkpoints(path)]
    with _watch(sum(verdict.bytes or 0 for verdict in verdicts)) as on_bytes:
        for verdict in verdicts:
            _read(verdict, on_bytes)
    if as_json:
        print_json([_to_json(verdict) for verdict in verdicts])
    else:
        print_table(_COLUMNS, map(_make_row, verdicts))
        for damage in (each for verdict in verdicts for each in verdict.damage):
            print(escape(damage.text))
    return int(any(verdict.damage for verdict in verdicts))


def _open(folder: Path) -> _Verdict:
    verdict = _Verdict(folder)
    with _noting(verdict):
        verdict.checkpoint = open_checkpoint(folder)
        verdict.checkpoint.close()  # one manifest at a time is held in memory
    return verdict


def _read(verdict: _Verdict, on_bytes: Callable[[int], None]) -> None:
    if verdict.checkpoint is None:
        return
    started = time.perf_counter()
    with _noting(verdict):
        verdict.damage = verdict.checkpoint.list_damage(on_bytes=on_bytes)
    verdict.checkpoint.close()
    verdict.seconds = time.perf_counter() - started


@contextmanager
def _noting(verdict: _Verdict) -> Iterator[None]:
    """Note what is wrong with a manifest; a run that goes on may delete what is listed."""
    try:
        yield
    except CheckpointNotFoundError:
        verdict.gone = True
    except (CorruptCheckpointError, FormatError) as error:
        verdict.damage = [Damage(NAME, None, str(error))]


@contextmanager
def _watch(total: int) -> Iterator[Callable[[int], None]]:
    """Draw a bar on stderr if there is much to read and somebody looks."""
    if total < SHOWN_FROM or sys.stderr is None or not sys.stderr.isatty():
        yield lambda count: None
        return
    bar = rich.progress.Progress(
        rich.progress.TextColumn("verifying"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)


def _make_row(verdict: _Verdict) -> list[str]:
    size, seconds = verdict.bytes, verdict.seconds
    return [
        str(verdict.path),
        show(verdict.checkpoint and verdict.checkpoint.step),
        show_bytes(size),
        f"{seconds:.3f}",
        f"{size / seconds / 1e9:.2f}" if size and seconds else "-",
        verdict.state,
    ]


def _to_json(verdict: _Verdict) -> dict[str, object]:
    return {
        "path": str(verdict.path),
        "step": verdict.checkpoint and verdict.checkpoint.step,
        "bytes": verdict.bytes,
        "seconds": verdict.seconds,
        "state": "deleted" if verdict.gone else "damaged" if verdict.damage else "good",
        "damage": [attrs.asdict(each) for each in verdict.damage],
    }
