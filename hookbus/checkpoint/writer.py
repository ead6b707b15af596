"""Writes a checkpoint: all of it, or nothing that is seen."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import xxhash

from hookbus.checkpoint import files, run_directory
from hookbus.checkpoint.manifest import (
    NAME,
    SEAL,
    Manifest,
    PartInfo,
    SectionManifest,
    describe_file,
)
from hookbus.checkpoint.names import check_names, file_name, folder_name, part_name
from hookbus.checkpoint.reader import Checkpoint, SectionFile
from hookbus.checkpoint.tensor_file import open_tensors
from hookbus.checkpoint.tensor_info import split_bytes
from hookbus.checkpoint.tensor_writer import write_tensors
from hookbus.checkpoint.tensors import describe, order_names, take_bytes
from hookbus.checkpoint.tree import Flat, flatten
from hookbus.errors import CallError, CheckpointError, StateError, WriteError

SHARED_FROM = 64 * 2**10
"""Bytes from which a file that has not changed is shared: that small ones stand alone, so that
damage to one is damage to one checkpoint, is worth more than their space."""


@attrs.frozen(eq=False)
class Part:
    """A state to write, and the version of its layout.

    ``per_rank`` says that each process has its own; ``None``, that it has where they differ.
    ``uncompared`` are the names of tensors that are rank 0's though they may differ.
    """

    flat: Flat
    version: int
    per_rank: bool | None = False
    uncompared: frozenset[str] = frozenset()

    @property
    def is_sharded(self) -> bool:
        """Whether each of several processes has a piece of some tensor."""
        return bool(self.flat.cuts)


@attrs.frozen(eq=False)
class Section:
    """What one plugin saves: its parts by name; none, if it wrote nothing."""

    name: str
    kind: str
    plugin: str
    distribution: str | None
    distribution_version: str | None
    parts: dict[str | None, Part]


def write_checkpoint(
    run: Path,
    *,
    run_id: str,
    step: int,
    sections: Sequence[Section],
    progress: Mapping[str, Any],
    metrics: Mapping[str, float],
    settings: Mapping[str, Any],
    versions: Mapping[str, str],
    why: str,
    tag: str | None = None,
    notes: Sequence[str] = (),
    world_size: int = 1,
    previous: Checkpoint | None = None,
    before_commit: Callable[[], None] = lambda: None,
    on_bytes: Callable[[int], None] | None = None,
) -> Checkpoint:
    """Write a checkpoint of ``step`` into a run directory that is there, and return it.

    It is written under a hidden name, brought to the disk, and renamed: under its final name it is
    complete. A second one of a step gets a serial. Tensors are read once, one at a time, without a
    copy where they are dense and on the CPU; they must not change until this returns. A part from
    64 KiB up whose tensors are those of ``previous``, by their hashes, is not written again: the
    two checkpoints share the file. ``before_commit`` may still refuse. ``on_bytes`` is told the
    number of bytes of tensors as they are written.

    Raises:
        CallError: a section's name cannot be a file's, or two differ only by case.
        StateError: ``progress``, ``metrics`` or ``settings`` hold what cannot be stored.
        WriteError: ``run`` is not there, or the disk refused; nothing is left behind.
    """
    draft = Draft.make(
        run,
        sections,
        previous,
        run_id=run_id,
        step=step,
        progress=progress,
        metrics=metrics,
        settings=settings,
        versions=versions,
        why=why,
        tag=tag,
        notes=notes,
        world_size=world_size,
    )
    with run_directory.temporary_folder(run, draft.final.name) as folder:
        parts = draft.write_parts(folder, sections, previous, on_bytes)
        return draft.commit(folder, sections, parts, before_commit)


Parts = dict[tuple[str, str | None], PartInfo]


@attrs.define(eq=False)
class Draft:
    """A checkpoint that is being written: what its manifest says but for its sections."""

    run: Path
    final: Path
    manifest: Manifest
    file_names: dict[tuple[str, str | None], str]
    new_bytes: int = 0

    @classmethod
    def make(
        cls,
        run: Path,
        sections: Sequence[Section],
        previous: Checkpoint | None,
        *,
        run_id: str,
        step: int,
        progress: Mapping[str, Any],
        metrics: Mapping[str, float],
        settings: Mapping[str, Any],
        versions: Mapping[str, str],
        why: str,
        tag: str | None,
        notes: Sequence[str],
        world_size: int,
    ) -> Draft:
        check_names([section.name for section in sections])
        file_names = _name_files(sections)
        manifest = Manifest(
            run_id=run_id,
            step=step,
            serial=0,
            created=datetime.now(UTC),
            why=why,
            tag=tag,
            notes=list(notes),
            world_size=world_size,
            progress=_write_plain("progress", progress),
            metrics=_write_plain("metrics", _take_numbers(metrics)),
            settings=_write_plain("settings", settings),
            versions=dict(versions),
            sections={},
        )
        if not run.is_dir():  # one that somebody took away is not made anew behind their back
            raise WriteError(
                errno.ENOENT, "the run directory is gone; nothing is written", str(run)
            )
        serial = run_directory.next_serial(run, step)
        if previous is not None and previous.step == step:
            serial = max(serial, previous.serial + 1)  # whatever its folder is called by now
        manifest = attrs.evolve(manifest, serial=serial)
        return cls(run, run / folder_name(step, serial), manifest, file_names)

    def write_parts(
        self,
        folder: Path,
        sections: Sequence[Section],
        previous: Checkpoint | None,
        on_bytes: Callable[[int], None] | None,
    ) -> Parts:
        """Write the parts that are of all ranks; one process has no others."""
        files_before, parts = _list_files(previous), Parts()
        for section in sections:
            for name, part in section.parts.items():
                if (part.per_rank or part.is_sharded) and self.manifest.world_size > 1:
                    continue
                path = folder / self.file_names[section.name, name]
                before = files_before.get((section.name, name))
                shared = _share_part(path, part, before, on_bytes)
                parts[section.name, name] = shared or write_part(path, path.name, part, on_bytes)
                self.new_bytes += 0 if shared else part.flat.bytes
        return parts

    def commit(
        self,
        folder: Path,
        sections: Sequence[Section],
        parts: Parts,
        before_commit: Callable[[], None],
    ) -> Checkpoint:
        """Write the manifest, bring all to the disk, and give the folder its final name."""
        written = {
            section.name: SectionManifest(
                kind=section.kind,
                plugin=section.plugin,
                distribution=section.distribution,
                distribution_version=section.distribution_version,
                parts={name: parts[section.name, name] for name in section.parts},
            )
            for section in sections
        }
        manifest = attrs.evolve(self.manifest, sections=written)
        sealed = manifest.seal()
        files.write_file(folder / NAME, [sealed])
        files.sync_folder(folder)
        before_commit()
        files.rename_folder(folder, self.final)
        files.sync_folder(self.run)
        checkpoint = Checkpoint(self.final, manifest, sealed[-SEAL:])
        checkpoint.written = self.new_bytes
        return checkpoint


def _name_files(sections: Sequence[Section]) -> dict[tuple[str, str | None], str]:
    named: dict[tuple[str, str | None], str] = {}
    taken: dict[str, str] = {}
    for section in sections:
        for part in section.parts:
            who = part_name(section.name, part)
            named[section.name, part] = file_name(section.name, part)
            lower = who.lower()
            if lower in taken:
                raise CallError(
                    f"{taken[lower]!r} and {who!r} are one file; rename a part or section"
                )
            taken[lower] = who
    return named


def _list_files(
    previous: Checkpoint | None,
) -> dict[tuple[str, str | None], SectionFile]:
    try:
        return previous.list_files() if previous is not None else {}
    except CheckpointError:  # it was deleted, or is damaged: nothing can be shared with it
        return {}


def _share_part(
    path: Path,
    part: Part,
    before: SectionFile | None,
    on_bytes: Callable[[int], None] | None,
) -> PartInfo | None:
    """Share a file of the checkpoint before if it holds the very same tensors; else ``None``."""
    if before is None:
        return None
    path_before, file, info = before
    if file.bytes < SHARED_FROM:
        return None
    tensors = part.flat.tensors
    names = order_names(tensors.items())
    stored = list(info.tensors.values())
    if names != [each.name for each in stored]:
        return None
    for each in stored:  # what has changed has mostly changed from the first tensor on
        tensor = tensors[each.name]
        if describe(each.name, tensor) != attrs.evolve(each, hash=""):
            return None
        digest = xxhash.xxh3_128()
        for piece in split_bytes(take_bytes(tensor)):
            digest.update(piece)
        if digest.hexdigest() != each.hash:
            return None
    try:  # damage there must not be handed on while the right bytes are here
        with open_tensors(path_before, file, info.tensors) as opened:
            for each in stored:
                opened.check(each)
    except CheckpointError:
        return None
    if not files.link_file(path_before, path):
        return None
    if on_bytes is not None:
        on_bytes(part.flat.bytes)
    return PartInfo(part.version, part.flat.tree, file, info.tensors)


def write_part(
    path: Path, name: str, part: Part, on_bytes: Callable[[int], None] | None
) -> PartInfo:
    """Write the tensors of a part, if it has any; the checkpoint calls the file ``name``."""
    if not part.flat.tensors:
        return PartInfo(part.version, part.flat.tree, None, {})
    stored, _ = write_tensors(path, part.flat.tensors, on_bytes)
    return PartInfo(part.version, part.flat.tree, describe_file(name, stored.values()), stored)


def _write_plain(what: str, values: Mapping[str, Any]) -> Any:
    try:
        flat = flatten(dict(values))
    except StateError as error:
        raise StateError(f"{what}: {error}") from error
    if flat.tensors:
        raise StateError(f"{what}: {', '.join(flat.tensors)}: tensors belong into a section")
    return flat.tree


def _take_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Take a tensor or numpy value of no dimension by value."""
    taken = {
        name: value.item() if getattr(value, "ndim", None) == 0 else value
        for name, value in metrics.items()
    }
    if wrong := {n: type(v).__name__ for n, v in taken.items() if not isinstance(v, int | float)}:
        listed = ", ".join(f"{name!r} is a {kind}" for name, kind in wrong.items())
        raise StateError(f"metrics are numbers: {listed}")
    return taken
