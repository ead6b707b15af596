"""Let one process train the models as they are."""

from __future__ import annotations

import attrs

import hookbus
from hookbus.errors import CallError


@attrs.define(eq=False)
class Single:
    """Wrap nothing, for scripts that choose a strategy by name; more processes are refused."""

    kind = "strategy"

    @hookbus.hookimpl
    def resume_start(self, resume: hookbus.Resume) -> None:
        if resume.world_size > 1:
            raise CallError(
                f"there are {resume.world_size} processes, and Single() is for one; register DDP()"
                " or FSDP2()"
            )

    @hookbus.hookimpl
    def restore_before_configure_sharded(self) -> bool | None:
        return True

    @hookbus.hookimpl
    def configure_sharded(self, resume: hookbus.Resume) -> None:
        return None
