"""How far the writing, verifying or reading of a checkpoint has come."""

from __future__ import annotations

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

    what: Literal["writing", "verifying", "reading"]
    path: Path
    step: int
    total: int
    done: int = 0
    seconds: float = 0.0
    ended: bool = False
    failed: bool = False
