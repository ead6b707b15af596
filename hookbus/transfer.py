"""How far the writing or verifying of a checkpoint has come."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import attrs


@attrs.define(eq=False)
class Transfer:
    """Tell how many bytes of a checkpoint have gone by.

    One object is handed to each `bytes_moved` event of one pass, with ``done`` (bytes) and
    ``seconds`` moved on between them. ``ended`` is set in the last event only: all bytes may have
    gone by while a damaged one is still to be told of, or the commit is to come. ``failed`` says
    that it ended with an exception.
    """

    what: Literal["writing", "verifying"]
    path: Path
    step: int
    total: int
    done: int = 0
    seconds: float = 0.0
    ended: bool = False
    failed: bool = False


@contextlib.contextmanager
def watched(
    fire: Callable[[str, Mapping[str, object]], object],
    what: Literal["writing", "verifying"],
    path: Path,
    step: int,
    total: int,
) -> Iterator[Callable[[int], None]]:
    """Fire `bytes_moved` at the start, as bytes go by, and at the end; yield what is told them."""
    transfer = Transfer(what, path, step, total)
    started = time.perf_counter()

    def on_bytes(count: int) -> None:
        transfer.done += count
        transfer.seconds = time.perf_counter() - started
        fire("bytes_moved", {"transfer": transfer})

    on_bytes(0)
    try:
        yield on_bytes
    except BaseException:
        transfer.failed = True
        raise
    finally:
        transfer.ended = True  # whoever shows a bar takes it away
        on_bytes(0)
