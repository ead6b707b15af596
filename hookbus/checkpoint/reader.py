"""Reads a checkpoint: its manifest at once, its tensors when they are asked for.

torch is imported where tensors are made, and not before: looking at a checkpoint needs none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from hookbus.checkpoint.manifest import (
    NAME,
    SEAL,
    FileInfo,
    Manifest,
    PartInfo,
    SectionManifest,
    read_manifest,
    rebuild_plain,
)
from hookbus.checkpoint.names import folders, part_name, take_path
from hookbus.checkpoint.nodes import describe_leaf, rebuild
from hookbus.checkpoint.tensor_file import TensorFile, open_tensors
from hookbus.checkpoint.tensor_info import TensorInfo
from hookbus.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    MissingSectionError,
)

SectionFile = tuple[Path, FileInfo, PartInfo]


@attrs.frozen(eq=False)
class Metadata:
    """A part of a section without its data.

    ``state`` is the state with a `TensorInfo` where a tensor or array was; ``tensors`` has those
    of the file by name.
    """

    state: Any
    version: int
    tensors: dict[str, TensorInfo]


@attrs.frozen
class SectionInfo:
    """What a checkpoint says about one plugin's state; ``bytes`` are those of its tensors."""

    name: str
    kind: str
    plugin: str
    distribution: str | None
    distribution_version: str | None
    parts: tuple[str | None, ...]
    bytes: int

    @property
    def empty(self) -> bool:
        """Whether the plugin wrote nothing."""
        return not self.parts


@attrs.frozen
class Damage:
    """One thing that is not as it was written: in which file, and in which tensor if in one."""

    file: str
    tensor: str | None
    text: str


class Checkpoint:
    """One committed checkpoint. Nothing here changes it, and no file of it is kept open.

    ``created`` is in UTC; ``metrics``, ``progress`` and ``settings`` are what was saved with it,
    ``why``, ``tag`` and ``notes`` say what made it. ``sections`` go by the plugins' names. Only
    the bus that wrote it knows ``seconds``, from the call of ``save`` to the commit, ``blocked``,
    those of them in which training stood still, and ``written``, the bytes of tensors that the
    checkpoint before did not have.
    """

    def __init__(self, path: Path, manifest: Manifest, seal: bytes) -> None:
        self.path = path
        self.step = manifest.step
        self.serial = manifest.serial
        self.created: datetime = manifest.created
        self.run_id = manifest.run_id
        self.why = manifest.why
        self.tag = manifest.tag
        self.seconds: float | None = None
        self.blocked: float | None = None
        self.written: int | None = None
        self.notes = tuple(manifest.notes)
        self.world_size = manifest.world_size
        self.versions: dict[str, str] = manifest.versions
        self.progress: dict[str, Any] = rebuild_plain(manifest.progress)
        self.metrics: dict[str, float] = rebuild_plain(manifest.metrics)
        self.settings: dict[str, Any] = rebuild_plain(manifest.settings)
        self.sections: Mapping[str, SectionInfo] = MappingProxyType(
            {
                name: SectionInfo(
                    name,
                    section.kind,
                    section.plugin,
                    section.distribution,
                    section.distribution_version,
                    tuple(section.parts),
                    sum(info.bytes for p in section.parts.values() for info in p.tensors.values()),
                )
                for name, section in manifest.sections.items()
            }
        )
        self._seal = seal
        self._manifest: Manifest | None = manifest

    @property
    def bytes(self) -> int:
        """The size of all tensors."""
        return sum(section.bytes for section in self.sections.values())

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path} of step {self.step}>"

    def read(self, section: str, part: str | None = None) -> Any:
        """Load a state. Its tensors and arrays are fresh, on the CPU, and share nothing.

        Raises:
            MissingSectionError: there is no such section or part.
            CorruptCheckpointError: the bytes are not those that were saved.
            FormatError: the state holds what this version does not know.
        """
        from hookbus.checkpoint.loading import load

        found = self._find_part(section, part)
        with self._name_section(section, part), self._open(found) as file:
            return load(file, found)

    def read_into(
        self, section: str, tree: Any, part: str | None = None, *, partial: bool = False
    ) -> Any:
        """Copy a state into ``tree``, in place, and return ``tree``.

        Bytes go straight into the memory of tensors that are contiguous and on the CPU, through
        one tensor of that size for others. A container with tensors below it must have the same
        keys on both sides; one of plain values takes the saved ones. Where something cannot be
        changed, such as a tuple, it is replaced in what holds it (at the top: in what is returned).
        With ``partial``, keys that only one side has are left out.

        Raises:
            MissingSectionError: there is no such section or part.
            MismatchError: names, shapes, dtypes or shared tensors differ; all of them are named,
                and nothing was changed.
            CorruptCheckpointError: the bytes are not those that were saved.
        """
        from hookbus.checkpoint.loading import load_into

        found, who = self._find_part(section, part), part_name(section, part)
        with self._name_section(section, part), self._open(found) as file:
            return load_into(file, found, tree, who=who, partial=partial)

    def metadata(self, section: str, part: str | None = None) -> Metadata:
        """Return what a state looks like, without reading its data.

        Raises:
            MissingSectionError: there is no such section or part.
            FormatError: the state holds what this version does not know.
        """
        found = self._find_part(section, part)
        with self._name_section(section, part):
            return describe_part(found)

    def get_version(self, section: str, part: str | None = None) -> int:
        """Return the version of a state's layout.

        Raises:
            MissingSectionError: there is no such section or part.
        """
        return self._find_part(section, part).version

    def tensors(self, section: str, part: str | None = None) -> dict[str, TensorInfo]:
        """Return what is known of each tensor in a state's file, by name, in the file's order.

        Raises:
            MissingSectionError: there is no such section or part.
        """
        return dict(self._find_part(section, part).tensors)

    def verify(
        self,
        sections: Collection[str] | None = None,
        *,
        hashes: bool = True,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """Check that every byte of the checkpoint, or of some sections, is what was written.

        Without ``hashes`` the data of the tensors is not read: the manifest, headers and sizes
        are. ``on_bytes`` is told the number of bytes of tensors as they are read.

        Raises:
            CorruptCheckpointError: something is not; all of it is named.
            MissingSectionError: there is no such section.
        """
        if damage := self.list_damage(sections, hashes=hashes, on_bytes=on_bytes):
            raise CorruptCheckpointError("; ".join(each.text for each in damage))

    def list_damage(
        self,
        sections: Collection[str] | None = None,
        *,
        hashes: bool = True,
        on_bytes: Callable[[int], None] | None = None,
    ) -> list[Damage]:
        """Return all that `verify` would name, that of the manifest first.

        Raises:
            MissingSectionError: there is no such section.
        """
        damage = list[Damage]()
        for name in self.sections if sections is None else sections:
            for part in self._find_section(name).parts.values():
                damage += self._find_damage(part, hashes, on_bytes)
        try:
            self._load_manifest()
        except CorruptCheckpointError as error:
            damage.insert(0, Damage(NAME, None, str(error)))
        return damage

    def list_files(self) -> dict[tuple[str, str | None], SectionFile]:
        """Return the file of each part that has one, by section and part.

        Raises:
            CorruptCheckpointError, CheckpointNotFoundError: the manifest, if it was let go of.
        """
        return {
            (name, part): (self.path / info.file.name, info.file, info)
            for name, section in self._get_manifest().sections.items()
            for part, info in section.parts.items()
            if info.file is not None
        }

    def close(self) -> None:
        """Let go of what is held in memory; it is read again if it is asked for."""
        self._manifest = None

    def _find_damage(
        self, part: PartInfo, hashes: bool, on_bytes: Callable[[int], None] | None
    ) -> Iterator[Damage]:
        if part.file is None:
            return
        try:
            with self._open(part) as file:
                for info in part.tensors.values() if hashes else ():
                    try:
                        file.check(info, on_bytes)
                    except CorruptCheckpointError as error:
                        yield Damage(part.file.name, info.name, str(error))
        except CorruptCheckpointError as error:
            yield Damage(part.file.name, None, str(error))

    def _open(self, part: PartInfo) -> AbstractContextManager[TensorFile]:
        if part.file is None:
            return nullcontext(TensorFile(self.path, -1, {}))
        return open_tensors(self.path / part.file.name, part.file, part.tensors)

    @contextmanager
    def _name_section(self, section: str, part: str | None) -> Iterator[None]:
        try:
            yield
        except FormatError as error:
            who = part_name(section, part)
            raise FormatError(f"{self.path / NAME}: section {who!r}: {error}") from error

    def _find_section(self, name: str) -> SectionManifest:
        sections = self._get_manifest().sections
        if name not in sections:
            there = ", ".join(sections) or "none"
            raise MissingSectionError(f"{self.path} has no section {name!r}; it has {there}")
        return sections[name]

    def _find_part(self, section: str, part: str | None) -> PartInfo:
        parts = self._find_section(section).parts
        if part not in parts:
            what = "no state without a part" if part is None else f"no part {part!r}"
            there = ", ".join(name or "one without a name" for name in parts) or "none"
            raise MissingSectionError(
                f"section {section!r} of {self.path} has {what}; it has {there}"
            )
        return parts[part]

    def _get_manifest(self) -> Manifest:
        manifest = self._manifest  # which another thread may let go of
        if manifest is None:
            self._manifest = manifest = self._load_manifest()
        return manifest

    def _load_manifest(self) -> Manifest:
        data, manifest = read_manifest(self.path)
        if data[-SEAL:] != self._seal:
            raise CorruptCheckpointError(f"{self.path / NAME}: was changed since it was opened")
        return manifest


def describe_part(part: PartInfo) -> Metadata:
    """Return what a state looks like, without its data.

    Raises:
        FormatError: the state holds what this version does not know.
    """

    def leaf(tag: str, payload: Any) -> object:
        return describe_leaf(tag, payload, part.tensors)

    return Metadata(rebuild(part.tree, leaf), part.version, dict(part.tensors))


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a committed checkpoint: its manifest is read and checked, its tensors are not read.

    Raises:
        CallError: ``path`` is no path.
        CheckpointNotFoundError: there is no checkpoint, or ``path`` is a run directory.
        CorruptCheckpointError: the manifest is damaged or missing.
        FormatError: it was written in a newer format, or says what no version writes.
    """
    folder = take_path("path", path)
    # `Path.exists` would raise a plain error for a folder that may not be looked into.
    if not os.path.exists(folder / NAME) and folders(folder):
        raise CheckpointNotFoundError(
            f"{folder} is a run directory, not a checkpoint; pass the path of one of"
            f" hookbus.checkpoints({str(folder)!r})"
        )
    data, manifest = read_manifest(folder)
    return Checkpoint(folder, manifest, data[-SEAL:])
