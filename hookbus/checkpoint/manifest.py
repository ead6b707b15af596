"""The manifest: everything about a checkpoint but the bytes of its tensors, as sealed JSON."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import attrs
import xxhash

from hookbus.checkpoint.files import describe_failure, open_file
from hookbus.checkpoint.names import file_name
from hookbus.checkpoint.nodes import rebuild
from hookbus.checkpoint.rank_lists import RankFile, read_rank_files
from hookbus.checkpoint.shards import Shards
from hookbus.checkpoint.tensor_info import TensorInfo, make_header
from hookbus.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError

FORMAT = 1
NAME = "manifest.json"
SEAL = len(',"seal":""}\n') + 32  # bytes of the last member, from its comma on


_Check = Callable[[object, "attrs.Attribute[Any]", Any], None]


def _must_be(what: str, test: Callable[[Any], bool]) -> _Check:
    """Return a validator: a manifest made by hand can have a seal that fits."""

    def check(instance: object, field: attrs.Attribute[Any], value: Any) -> None:
        if not test(value):
            raise FormatError(f"{field.name} is {reprlib.repr(value)}, not {what}")

    return check


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _from(least: int) -> _Check:
    return _must_be(f"a whole number from {least} up", lambda v: type(v) is int and v >= least)


def _check_plain(instance: object, field: attrs.Attribute[Any], tree: Any) -> None:
    with _named(field.name):
        values = rebuild_plain(tree)
        if field.name == "metrics" and not all(isinstance(v, int | float) for v in values.values()):
            raise FormatError(f"{reprlib.repr(values)} are not numbers by name")


_text = _must_be("a string", _is_text)
_text_or_none = _must_be("a string or null", lambda v: v is None or _is_text(v))
_texts = _must_be("a list of strings", lambda v: type(v) is list and all(map(_is_text, v)))
_texts_by_name = _must_be(
    "a dict of strings", lambda v: type(v) is dict and all(map(_is_text, v.values()))
)
_moment = _must_be("a time in UTC", lambda v: type(v) is datetime and v.utcoffset() == timedelta(0))


@attrs.frozen
class FileInfo:
    """A file of tensors: its name, its size in bytes, the xxh3-128 of its header in hex."""

    name: str
    bytes: int
    header: str


@attrs.frozen(eq=False)
class PartInfo:
    """One part of a section; ``tensors`` are in the order in which they lie in ``file``.

    Of a part with ``shards`` there is a folder instead, and ``tensors`` are as they are on all
    ranks together, without a hash.
    Of a part that each rank has of its own there are only the lists of the ranks, by rank.
    """

    version: int = attrs.field(validator=_from(1))
    tree: Any
    file: FileInfo | None
    tensors: Mapping[str, TensorInfo]
    ranks: tuple[RankFile, ...] = ()
    shards: Shards | None = None

    @property
    def bytes(self) -> int:
        """The size of all tensors."""
        here = sum(info.bytes for info in self.tensors.values())
        return here + sum(each.tensors for each in self.ranks)

    def list_writers(self) -> list[int | None]:
        """Return the ranks that have files of this part; ``None`` where one file is everybody's."""
        ranks = range(len(self.ranks)) if self.shards is None else self.shards.ranks
        return [*ranks] or [None]


@attrs.frozen(eq=False)
class SectionManifest:
    """One plugin's state; ``parts`` by name, that without a name under ``None``."""

    kind: str = attrs.field(validator=_text)
    plugin: str = attrs.field(validator=_text)
    distribution: str | None = attrs.field(validator=_text_or_none)
    distribution_version: str | None = attrs.field(validator=_text_or_none)
    parts: Mapping[str | None, PartInfo]


@attrs.frozen(eq=False)
class Manifest:
    """What `manifest.json` says. ``progress``, ``metrics`` and ``settings`` are trees."""

    run_id: str = attrs.field(validator=_text)
    step: int = attrs.field(validator=_from(0))
    serial: int = attrs.field(validator=_from(0))
    created: datetime = attrs.field(validator=_moment)
    why: str = attrs.field(validator=_text)
    tag: str | None = attrs.field(validator=_text_or_none)
    notes: list[str] = attrs.field(validator=_texts)
    world_size: int = attrs.field(validator=_from(1))
    progress: Any = attrs.field(validator=_check_plain)
    metrics: Any = attrs.field(validator=_check_plain)
    settings: Any = attrs.field(validator=_check_plain)
    versions: dict[str, str] = attrs.field(validator=_texts_by_name)
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
        with os.fdopen(open_file(path), "rb") as file:
            data = file.read()
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"{path} is missing, so {folder} is no whole checkpoint"
        ) from error
    except OSError as error:
        raise describe_failure(path, error) from error
    body = data[:-SEAL]
    if not body or data != _add_seal(body):
        raise CorruptCheckpointError(
            f"{path}: its seal does not fit its {len(data)} bytes: changed or cut short"
        )
    with _named(str(path)):
        return data, _read(
            json.loads(body + b"}", object_pairs_hook=_take_pairs, parse_constant=_refuse_constant)
        )


def rebuild_plain(tree: Any) -> dict[str, Any]:
    """Return the values of a tree that holds no tensors, by name.

    Raises:
        FormatError: it is something else.
    """
    values = rebuild(tree, _refuse_leaf)
    if type(values) is not dict or not all(map(_is_text, values)):
        raise FormatError(f"{reprlib.repr(values)} are not values by name")
    return values


def write_rank_list(rank: int, part: PartInfo) -> bytes:
    """Return what one rank has of a part of its own, as JSON."""
    tensors = {info.name: info.to_json() for info in part.tensors.values()}
    written = {"format": FORMAT, "rank": rank, "tree": part.tree, "tensors": tensors}
    return json.dumps(written, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def read_rank_list(path: Path, file_name: str, rank: int, part: PartInfo) -> PartInfo:
    """Return what one rank has of a part, from its list at ``path``.

    Raises:
        CorruptCheckpointError: the list is missing, or a byte of it is not what was written.
        FormatError: no version could have written it.
    """
    data = part.ranks[rank].read(path)
    with _named(str(path)):
        written = json.loads(data, object_pairs_hook=_take_pairs, parse_constant=_refuse_constant)
        if (written["format"], written["rank"]) != (FORMAT, rank):
            raise FormatError(f"it is of format {written['format']} and rank {written['rank']}")
        stored = _read_tensors(written["tensors"])
        file = describe_file(file_name, stored.values()) if stored else None
        return PartInfo(part.version, written["tree"], file, stored)


def describe_file(name: str, infos: Iterable[TensorInfo]) -> FileInfo:
    """Describe the file that holds these tensors in this order."""
    infos = list(infos)
    header = make_header(infos)
    size = len(header) + sum(info.bytes for info in infos)
    return FileInfo(name, size, xxhash.xxh3_128_hexdigest(header))


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Turn whatever is wrong with what was read into a `FormatError` that says where."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # the seal fits, so somebody else wrote it
        raise FormatError(f"{where}: cannot be read: {type(error).__name__}: {error}") from error


def _take_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    taken = dict(pairs)
    if len(taken) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FormatError(f"the key {twice!r} stands there twice")
    return taken


def _refuse_constant(text: str) -> object:
    raise FormatError(f"it holds {text}, which JSON has not")


def _refuse_leaf(tag: str, payload: Any) -> object:
    raise FormatError(f"{tag} stands where only plain values can")


def _read(written: dict[str, Any]) -> Manifest:
    found = written.pop("format")
    if type(found) is not int or found != FORMAT:
        raise FormatError(
            f"its format is {found!r}, and this version of hookbus reads {FORMAT}; read it with the"
            " version that wrote it, or a later one"
        )
    with _named("created"):
        written["created"] = datetime.fromisoformat(written["created"])
    with _named("sections"):
        sections = written["sections"].items()
    written["sections"] = {name: _read_section(name, section) for name, section in sections}
    manifest = Manifest(**written)
    for name, section in manifest.sections.items():
        for part in section.parts.values():
            if part.ranks and len(part.ranks) != manifest.world_size:
                raise FormatError(
                    f"section {name!r} has lists of {len(part.ranks)} processes, and"
                    f" {manifest.world_size} saved it"
                )
    return manifest


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
            **({"ranks": [attrs.astuple(each) for each in part.ranks]} if part.ranks else {}),
            **({} if part.shards is None else {"shards": part.shards.to_json()}),
        }
        for name, part in section.parts.items()
    ]
    return written


def _read_section(name: str, written: dict[str, Any]) -> SectionManifest:
    with _named(f"section {name!r}"):
        file_name(name, None)  # checked, also where there is no file
        parts = dict(_read_part(name, **part) for part in written["parts"])
        if len(parts) < len(written["parts"]):
            raise FormatError("two parts are of one name")
        return SectionManifest(**{**written, "parts": parts})


def _read_part(
    section: str,
    *,
    part: Any,
    version: Any,
    tree: Any,
    file: Any,
    tensors: Any,
    ranks: Any = (),
    shards: Any = None,
) -> tuple[str | None, PartInfo]:
    with _named(f"part {part!r}"):
        stored = _read_tensors(tensors)
        if part is not None and not _is_text(part):
            raise FormatError(f"its name is {part!r}, not a string or null")
        name = file_name(section, part)
        if shards is not None:
            if file is not None or ranks:
                raise FormatError(f"file is {file!r}, and its tensors are in files of the ranks")
            placed = Shards.from_json(stored, **shards)
            return part, PartInfo(version, tree, None, stored, (), placed)
        if ranks and (stored or tree is not None):
            raise FormatError("each rank has its own, and there is one of all")
        made = describe_file(name, stored.values()) if stored else None
        if file != (fitting := made and attrs.asdict(made)):
            raise FormatError(f"file is {file!r}, and its tensors make it {fitting}")
        return part, PartInfo(version, tree, made, stored, read_rank_files(ranks))


def _read_tensors(tensors: dict[str, Any]) -> dict[str, TensorInfo]:
    stored, name, items = dict[str, TensorInfo](), "", tensors.items()
    try:
        for name, written in items:
            stored[name] = TensorInfo.from_json(name, **written)
    except Exception:  # there may be very many: a `with` for each takes longer than the rest
        with _named(f"tensor {name!r}"):
            raise
    return stored
