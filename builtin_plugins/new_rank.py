"""What a process draws from that the checkpoint, saved by fewer, does not know."""

from __future__ import annotations

import xxhash

import hookbus


def has_no_streams(resume: hookbus.Resume) -> bool:
    """Whether the checkpoint has no streams for this process; nobody else's are to be repeated.

    Where several processes had the same ones, they are everybody's.
    """
    saved = resume.checkpoint
    return saved is not None and resume.is_new_rank and (saved.world_size == 1 or resume.is_own())


def choose_seed(resume: hookbus.Resume) -> int:
    """Return the seed for the section being restored: the xxh3-64 of run id, step, rank and name.

    So each resume of one checkpoint, on every machine, gives a new process the same numbers.
    """
    assert resume.checkpoint is not None
    saved = resume.checkpoint
    words = f"{saved.run_id} {saved.step} {resume.rank} {resume.name}"
    return xxhash.xxh3_64_intdigest(words.encode()) >> 1
