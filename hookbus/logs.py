"""Where hookbus says things."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("hookbus")


def say(text: str) -> None:
    """Say one line that nobody may miss: to the log if it shows, else on stderr."""
    if logger.hasHandlers() and logger.isEnabledFor(logging.INFO):
        logger.info(text)
    else:
        print(f"hookbus: {text}", file=sys.stderr, flush=True)
