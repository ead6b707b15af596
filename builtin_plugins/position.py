"""Where a run stands."""

from __future__ import annotations

from typing import Any, Literal

import attrs

Where = Literal["start", "head", "body", "code", "tail"]
"""Before the first epoch; in an epoch before its first batch; at a batch; in the epoch's own code
after the batches; after that code."""


@attrs.define
class Position:
    """What is done, as plain values.

    ``batch`` counts within the ``call`` of ``batches()`` in this epoch. ``kind`` and ``limit`` are
    those of the ``epochs()`` or ``steps()`` that counted last; ``finished`` holds, by kind, the
    limit under which the run was ended early.
    """

    where: Where = "start"
    epoch: int = 0
    call: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0
    kind: str | None = None
    limit: int = 0
    finished: dict[str, int] = attrs.Factory(dict)

    def to_dict(self) -> dict[str, Any]:
        """Return it as a resume takes it up: it knows no way into an epoch's own code.

        An epoch that was left in its own code counts as done, one of which no batch was handed
        out has not begun.
        """
        plain = attrs.asdict(self)
        if self.where == "code":
            plain["where"] = "tail"
        elif self.where == "head":
            plain |= (
                {"where": "tail", "epoch": self.epoch - 1} if self.epoch else {"where": "start"}
            )
        return plain
