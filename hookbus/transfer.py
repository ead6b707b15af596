"""How far the writing, verifying or reading of a checkpoint has come."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import attrs


@attrs.define(eq=False)
class Transfer:
    """Tell how many bytes of a checkpoint have gone by.

    One object is handed to each `transfer` event of one pass, with ``done`` (bytes) and
    ``seconds`` moved on between them; ``done`` equals ``total`` at the end. One that broke off
    has ``failed`` set in its last event.
    """

    what: Literal["writing", "verifying", "reading"]
    path: Path
    step: int
    total: int
    done: int = 0
    seconds: float = 0.0
    failed: bool = False
