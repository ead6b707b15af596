"""A model of a disk that forgets, at a crash, what was not brought to it.

It starts as a copy of a folder, all of it safe, and makes the changes that `hookbus.testing.record`
noted. At any moment it can tell every folder that a crash may leave: bytes of a file are safe once
it was synced, names in a folder once that was. Without a sync each change of a name is kept or lost
by itself, in any combination; a rename is either made or not. Bytes are kept, lost, cut, or zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import attrs

from hookbus.testing import DiskChange

Tree = Mapping[str, "bytes | Tree"]
"""A folder as plain values."""

Fate = Literal["kept", "lost", "cut", "zeros"]
FATES: tuple[Fate, ...] = ("kept", "lost", "cut", "zeros")


@attrs.define(eq=False)
class File:
    data: bytes = b""
    safe: int = 0  # bytes, from the beginning

    def sync(self) -> None:
        self.safe = len(self.data)

    def show(self, fate: Fate) -> bytes:
        size = len(self.data)
        match fate:
            case "kept":
                return self.data
            case "lost":
                return self.data[: self.safe]
            case "cut":
                return self.data[: (self.safe + size) // 2]
            case "zeros":
                return self.data[: self.safe] + bytes(size - self.safe)


@attrs.define(eq=False)
class Folder:
    names: dict[str, File | Folder] = attrs.field(factory=dict)
    safe: dict[str, File | Folder] = attrs.field(factory=dict)
    pending: list[dict[str, File | Folder | None]] = attrs.field(factory=list)

    def change(self, names: dict[str, File | Folder | None]) -> None:
        self.pending.append(names)
        self.names = _change(self.names, names)

    def sync(self) -> None:
        self.safe, self.pending = dict(self.names), []

    def show(self, fate: Fate) -> Iterator[Tree]:
        """Yield every folder that may be left, if all unsynced bytes have one fate."""
        assert len(self.pending) < 8, "too many combinations"
        for lost in itertools.product((False, True), repeat=len(self.pending)):
            names = self.safe
            for change, is_lost in zip(self.pending, lost, strict=True):
                names = names if is_lost else _change(names, change)
            shown = [
                [node.show(fate)] if isinstance(node, File) else list(node.show(fate))
                for node in names.values()
            ]
            for each in itertools.product(*shown):
                yield dict(zip(names, each, strict=True))


def _change(
    names: Mapping[str, File | Folder], changes: Mapping[str, File | Folder | None]
) -> dict[str, File | Folder]:
    changed = {**names, **changes}
    return {name: node for name, node in changed.items() if node is not None}


class Disk:
    """What is on it now, and what would be left of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = _load(root)

    def make(self, change: DiskChange) -> None:
        name = change.path.name
        if change.kind == "fsync":
            self._find(change.path).sync()
            return
        folder = self._find(change.path.parent)
        assert isinstance(folder, Folder)
        match change.kind:
            case "mkdir":
                folder.change({name: Folder()})
            case "create":
                folder.change({name: File()})
            case "write":
                file = folder.names[name]
                assert isinstance(file, File)
                file.data += change.data
            case "link":
                assert change.target is not None
                other = self._find(change.target.parent)
                assert isinstance(other, Folder)
                other.change({change.target.name: folder.names[name]})
            case "rename":
                assert change.target is not None
                assert change.target.parent == change.path.parent
                folder.change({name: None, change.target.name: folder.names[name]})
            case "unlink" | "rmdir":
                folder.change({name: None})

    def list_states(self) -> Iterator[Tree]:
        """Yield every folder that a crash may leave now; the first is what a kill leaves."""
        for fate in FATES:
            yield from self.top.show(fate)

    def read_safe(self, path: Path) -> bytes:
        """Return the bytes of a file that no crash takes away."""
        node: File | Folder | None = self.top
        for name in path.relative_to(self.root).parts:
            node = node.safe.get(name) if isinstance(node, Folder) else None
        return node.data[: node.safe] if isinstance(node, File) else b""

    def list_names(self, path: Path) -> list[str]:
        """Return what is in a folder now; one that is not there is empty."""
        try:
            return list(self._find(path).names)
        except KeyError:
            return []

    def _find(self, path: Path) -> File | Folder:
        node: File | Folder = self.top
        for name in path.relative_to(self.root).parts:
            assert isinstance(node, Folder)
            node = node.names[name]
        return node


def _load(path: Path) -> Folder:
    folder = Folder()
    for entry in path.iterdir():
        if entry.is_dir():
            folder.names[entry.name] = _load(entry)
        else:
            data = entry.read_bytes()
            folder.names[entry.name] = File(data, len(data))
    folder.sync()
    return folder


def write_tree(tree: Tree, path: Path) -> None:
    """Make a folder as it was left."""
    path.mkdir()
    for name, node in tree.items():
        if isinstance(node, bytes):
            (path / name).write_bytes(node)
        else:
            write_tree(node, path / name)


def freeze(tree: Tree) -> object:
    """Return what is equal for equal folders, and hashable."""
    return frozenset(
        (name, node if isinstance(node, bytes) else freeze(node)) for name, node in tree.items()
    )
