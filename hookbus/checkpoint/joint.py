"""Writes a checkpoint from several processes: each what is its own, and rank 0 commits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hookbus.checkpoint import files, run_directory
from hookbus.checkpoint.manifest import PartInfo, write_rank_list
from hookbus.checkpoint.peers import Peers
from hookbus.checkpoint.rank_lists import RankFile, Receipt, folder_of_ranks, name_list
from hookbus.checkpoint.reader import Checkpoint, open_checkpoint
from hookbus.checkpoint.shard_writer import Plans, describe_tensors, write_shards
from hookbus.checkpoint.writer import Draft, Parts, Section, write_part

Receipts = dict[tuple[str, str | None], Receipt]


def write_checkpoint_together(
    run: Path,
    *,
    peers: Peers,
    sections: Sequence[Section],
    previous: Checkpoint | None = None,
    before_commit: Callable[[], None] = lambda: None,
    on_bytes: Callable[[int], None] | None = None,
    plans: Plans | None = None,
    **facts: Any,
) -> Checkpoint:
    """Write a checkpoint like ``write_checkpoint``, all ranks together, and return it on each.

    ``sections`` are on rank 0 all that there is, on others the parts of their own and those with
    sharded tensors, which are written by all. Rank 0 makes the
    folder and commits it when every file of every rank is there and on the disk. If one rank
    breaks, nothing is left behind, and all raise. ``plans`` keeps for the next call who writes what
    of sharded tensors.

    Raises:
        RankError: another rank broke, or is gone.
    """
    is_first = peers.rank == 0
    checkpoint = draft = None
    with contextlib.ExitStack() as stack:
        folder = Path()
        with peers.together("opening a checkpoint"):
            if is_first:
                draft = Draft.make(run, sections, previous, world_size=peers.world_size, **facts)
                folder = stack.enter_context(run_directory.temporary_folder(run, draft.final.name))
                for name, part in _list_own(sections):
                    files.create_folder(folder / folder_of_ranks(name, part))
        folder = peers.share("the folder of a checkpoint", folder)
        with peers.together("writing a checkpoint"):
            parts = draft.write_parts(folder, sections, previous, on_bytes) if draft else {}
            receipts = _write_own(folder, peers.rank, sections, on_bytes)
        sharded = _write_sharded(folder, peers, sections, plans, on_bytes)
        every = peers.gather("what was written", receipts)
        with peers.together("committing a checkpoint"):
            if draft is not None:
                parts |= _check(folder, sections, every) | sharded
                draft.new_bytes += sum(r.list.tensors for each in every for r in each.values())
                draft.new_bytes += sum(each.bytes for each in sharded.values())
                for name, part in _list_own(sections):
                    files.sync_folder(folder / folder_of_ranks(name, part))
                checkpoint = draft.commit(folder, sections, parts, before_commit)
    path, new_bytes = peers.share(
        "the new checkpoint", checkpoint and (checkpoint.path, checkpoint.written)
    ) or (folder, None)
    with peers.together("opening the new checkpoint"):
        checkpoint = checkpoint or open_checkpoint(path)
    checkpoint.written = new_bytes
    checkpoint.rank = peers.rank
    return checkpoint


def _list_own(sections: Sequence[Section]) -> list[tuple[str, str | None]]:
    """Return the parts that each rank has of its own."""
    return [
        (section.name, name)
        for section in sections
        for name, part in section.parts.items()
        if part.per_rank
    ]


def _write_sharded(
    folder: Path,
    peers: Peers,
    sections: Sequence[Section],
    plans: Plans | None,
    on_bytes: Callable[[int], None] | None,
) -> Parts:
    """Write this rank's chunks; on rank 0, return the parts that all have written."""
    parts: Parts = {}
    for section in sections:
        for name, part in section.parts.items():
            if not part.is_sharded:
                continue
            place, flat = folder / folder_of_ranks(section.name, name), part.flat
            shards = write_shards(
                place, flat, peers, part.uncompared, plans=plans, on_bytes=on_bytes
            )
            if shards is not None:
                infos = describe_tensors(flat)
                key = section.name, name
                parts[key] = PartInfo(part.version, flat.tree, None, infos, (), shards)
    return parts


def _write_own(
    folder: Path, rank: int, sections: Sequence[Section], on_bytes: Callable[[int], None] | None
) -> Receipts:
    receipts: Receipts = {}
    found = {section.name: section for section in sections}
    for section, name in _list_own(sections):
        listed = name_list(section, name, rank)
        tensors = str(Path(listed).with_suffix(".safetensors"))
        info = write_part(folder / tensors, tensors, found[section].parts[name], on_bytes)
        data = write_rank_list(rank, info)
        files.write_file(folder / listed, [data])
        file = RankFile.describe(data, info.bytes)
        receipts[section, name] = Receipt(file, info.file.bytes if info.file else 0)
    return receipts


def _check(
    folder: Path, sections: Sequence[Section], every: Sequence[Mapping[Any, Receipt]]
) -> Parts:
    """Find every file of every rank here, as it was written.

    Raises:
        CorruptCheckpointError: one is not.
    """
    parts: Parts = {}
    versions = {(s.name, name): part.version for s in sections for name, part in s.parts.items()}
    for key in _list_own(sections):
        for rank, receipts in enumerate(every):
            receipts[key].check(folder / name_list(*key, rank), rank)
        lists = tuple(receipts[key].list for receipts in every)
        parts[key] = PartInfo(versions[key], None, None, {}, lists)
    return parts
