"""The manifest: everything about a checkpoint but the bytes of its tensors, as sealed JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import attrs
import xxhash

from hookbus.checkpoint.tensors import TensorInfo
from hookbus.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError

FORMAT = 1
NAME = "manifest.json"
SEAL = len(',"seal":""}\n') + 32  # bytes of the last member, from its comma on


@attrs.frozen
class FileInfo:
    """A file of tensors: its name, its size in bytes, the xxh3-128 of its header in hex."""

    name: str
    bytes: int
    header: str


@attrs.frozen(eq=False)
class PartInfo:
    """One part of a section; ``tensors`` are in the order in which they lie in ``file``."""

    version: int
    tree: Any
    file: FileInfo | None
    tensors: Mapping[str, TensorInfo]


@attrs.frozen(eq=False)
class SectionManifest:
    """One plugin's state; ``parts`` by name, that without a name under ``None``."""

    kind: str
    plugin: str
    distribution: str | None
    distribution_version: str | None
    parts: Mapping[str | None, PartInfo]


@attrs.frozen(eq=False)
class Manifest:
    """What `manifest.json` says. ``progress``, ``metrics`` and ``settings`` are trees."""

    run_id: str
    step: int
    serial: int
    created: datetime
    why: str
    notes: list[str]
    world_size: int
    progress: Any
    metrics: Any
    settings: Any
    versions: dict[str, str]
    sections: Mapping[str, SectionManifest]

    def seal(self) -> bytes:
        """Return the manifest as JSON whose last member is the hash of every byte before it."""
        written = attrs.asdict(self, recurse=False)
        written["created"] = self.created.isoformat(timespec="microseconds")
        written["sections"] = {name: _write_section(each) for name, each in self.sections.items()}
        text = json.dumps({"format": FORMAT, **written}, separators=(",", ":"), allow_nan=False)
        return _add_seal(text.encode()[:-1])


def read_manifest(folder: Path) -> tuple[bytes, Manifest]:
    """Read the manifest in a folder; return its bytes too.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        CorruptCheckpointError: a byte of it is not what was written, or it is missing.
        FormatError: it was written in another format than this version reads.
    """
    path = folder / NAME
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"there is no checkpoint {folder}")
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"{path} is missing, so {folder} is no whole checkpoint"
        ) from error
    except OSError as error:
        raise CorruptCheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    body = data[:-SEAL]
    if not body or data != _add_seal(body):
        raise CorruptCheckpointError(
            f"{path}: its seal does not fit its {len(data)} bytes: changed or cut short"
        )
    try:
        return data, _read(json.loads(body + b"}"))
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    except Exception as error:  # the seal fits, so somebody else wrote it
        raise FormatError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error


def _read(written: dict[str, Any]) -> Manifest:
    if (found := written.pop("format")) != FORMAT:
        raise FormatError(
            f"its format is {found}, and this version of hookbus reads {FORMAT}; read it with the"
            " version that wrote it, or a later one"
        )
    written["created"] = datetime.fromisoformat(written["created"])
    written["sections"] = {name: _read_section(s) for name, s in written["sections"].items()}
    return Manifest(**written)


def _add_seal(body: bytes) -> bytes:
    return body + b',"seal":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


def _write_section(section: SectionManifest) -> dict[str, Any]:
    written = attrs.asdict(section, recurse=False)
    written["parts"] = [
        {
            "part": name,
            "version": part.version,
            "tree": part.tree,
            "file": part.file and attrs.asdict(part.file),
            "tensors": {info.name: info.to_json() for info in part.tensors.values()},
        }
        for name, part in section.parts.items()
    ]
    return written


def _read_section(written: dict[str, Any]) -> SectionManifest:
    parts = {
        part["part"]: PartInfo(
            part["version"],
            part["tree"],
            part["file"] and FileInfo(**part["file"]),
            {name: TensorInfo.from_json(name, **info) for name, info in part["tensors"].items()},
        )
        for part in written.pop("parts")
    }
    return SectionManifest(**written, parts=parts)
