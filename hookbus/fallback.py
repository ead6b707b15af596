"""Before anything is changed: verify the checkpoint, and fall back where it is damaged."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from hookbus.checkpoint import Checkpoint, append_record, name_aside, set_aside
from hookbus.choosing import choose_older, choose_together, find_way_out
from hookbus.errors import CorruptCheckpointError, HookbusError
from hookbus.logs import logger
from hookbus.resume import Resume

Watch = Callable[..., AbstractContextManager[Callable[[int], None]]]


def find_good(resume: Resume, watch: Watch) -> None:
    """Verify the checkpoint; if it is damaged, take the newest good one and move this one aside.

    Nothing is moved before a good one is found.

    Raises:
        CorruptCheckpointError: none is good, or only this one may be taken.
    """
    damaged, ranks = dict(resume.damaged), resume.ranks
    while True:
        assert resume.checkpoint is not None
        path = resume.checkpoint.path
        error = _find_damage(resume, resume.checkpoint, watch)
        if error is None:
            break
        if not resume.request.may_fall_back or resume.fresh:
            with ranks.together("looking for another checkpoint"):
                if ranks.is_first:
                    way_out = find_way_out(path, resume.list_wanted())
                    raise CorruptCheckpointError(f"{error}; {way_out}") from error
        damaged[path] = error
        try:
            choice = choose_together(ranks, functools.partial(choose_older, path))
        except CorruptCheckpointError as none:
            texts = [*map(str, damaged.values()), f"{none}, and nothing was moved"]
            raise CorruptCheckpointError("; ".join(texts)) from none
        damaged.update(choice.damaged)
        resume.fall_back(choice)
    with ranks.together("moving what is damaged"):
        aside = _move_aside(resume.run, damaged) if ranks.is_first else {}
    for path, name in (ranks.share("what was moved", aside) if damaged else {}).items():
        text = f"{path.name} is damaged and was moved to {name}: {damaged[path]}"
        resume.report.note(text)
        if ranks.is_first:
            logger.warning("%s: %s", resume.run, text)


def _move_aside(run: Path, damaged: Mapping[Path, HookbusError]) -> dict[Path, str]:
    """Rename what is damaged; return the new names.

    The history is told before: a start that dies in between would leave a folder that nobody can
    explain, and the next one finds nothing damaged any more.
    """
    moved = dict[Path, str]()
    for path, fault in damaged.items():
        aside = name_aside(path)
        append_record(run, "fallback", checkpoint=path.name, moved_to=aside.name, why=str(fault))
        set_aside(path, aside)
        moved[path] = aside.name
    return moved


def _find_damage(
    resume: Resume, checkpoint: Checkpoint, watch: Watch
) -> CorruptCheckpointError | None:
    """Return what is wrong with a checkpoint; all ranks return it if one of them finds it."""
    found = None
    with resume.ranks.together("verifying the checkpoint"):
        try:
            _verify(resume, checkpoint, watch)
        except CorruptCheckpointError as error:
            found = error
    told = resume.ranks.gather("what is damaged", found and str(found))
    if not any(told) and resume.request.verify == "hashes":
        checkpoint.trust(resume.list_wanted())  # each rank has seen its share
    return found or next((CorruptCheckpointError(text) for text in told if text), None)


def _verify(resume: Resume, checkpoint: Checkpoint, watch: Watch) -> None:
    """Look at every byte, or at the sizes; of several processes each takes a share of the files."""
    wanted, share = resume.list_wanted(), (resume.rank, resume.world_size)
    total = sum(checkpoint.sections[name].bytes for name in wanted) // resume.world_size
    if resume.request.verify == "sizes":
        checkpoint.verify(wanted, hashes=False, share=share)
    else:
        with watch("verifying", checkpoint.path, checkpoint.step, total) as on_bytes:
            checkpoint.verify(wanted, on_bytes=on_bytes, share=share)
