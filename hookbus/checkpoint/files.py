"""What is done to the disk. Every call that changes a run directory stands here.

The lock's own file apart, which holds nothing that is missed. Each change is announced before it is
made, so that tests can record it, refuse it, or let the process die there (`hookbus.testing`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

from hookbus.errors import CheckpointError, CorruptCheckpointError, ReadError, WriteError

Piece = bytes | memoryview
Kind = Literal["mkdir", "create", "write", "fsync", "link", "rename", "unlink", "rmdir"]
Watcher = Callable[[Kind, Path, Path | None, Piece], None]

watcher: Watcher | None = None
"""Told of each change before it is made: its kind, its path, the new name, the bytes."""


def _announce(kind: Kind, path: Path, target: Path | None = None, data: Piece = b"") -> None:
    if watcher is not None:
        watcher(kind, path, target, data)


@contextlib.contextmanager
def refused(what: str, path: Path) -> Iterator[None]:
    """Turn what the operating system says into a `WriteError` with its number and file name."""
    try:
        yield
    except OSError as error:
        raise WriteError(error.errno, f"cannot {what}: {error.strerror}", str(path)) from error


def create_folder(path: Path) -> None:
    with refused("create a folder", path):
        _announce("mkdir", path)
        os.mkdir(path)


def make_folders(path: Path) -> None:
    """Create a folder, and what leads to it, and bring their names to the disk.

    Raises:
        WriteError: the disk refused, or a file is in the way.
    """
    missing = [path, *(folder for folder in path.parents if not os.path.exists(folder))]
    for folder in reversed(missing):
        with refused("create the run directory", folder):
            _announce("mkdir", folder)
            folder.mkdir(exist_ok=True)  # another process may start now too
        sync_folder(folder.parent)


def write_file(path: Path, pieces: Iterable[Piece]) -> int:
    """Write a new file and bring it to the disk; return its size in bytes.

    Raises:
        WriteError: the disk refused; what was written by then stays.
    """
    size = 0
    with refused("create", path):
        _announce("create", path)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for piece in pieces:
            with refused("write", path), memoryview(piece) as data:
                _announce("write", path, data=data)
                written = 0
                while written < len(data):
                    written += os.write(file, data[written:])
                size += written
        with refused("bring to the disk", path):
            _announce("fsync", path)
            os.fsync(file)
    finally:
        os.close(file)
    return size


def link_file(path: Path, target: Path) -> bool:
    """Give a file one more name, and say whether the file system can and the file is there."""
    try:
        _announce("link", path, target)
        os.link(path, target)
    except OSError:
        return False
    return True


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a file, which is made if need be, and bring it to the disk.

    A last line that a crash cut short is ended first, so that this one stands alone.
    """
    made = not path.exists()
    with refused("append to", path):
        if made:
            _announce("create", path)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                line = b"\n" + line
            _announce("write", path, data=line)
            while line:
                line = line[os.write(file, line) :]
            _announce("fsync", path)
            os.fsync(file)
        finally:
            os.close(file)
    if made:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    with refused("bring to the disk", path):
        _announce("fsync", path)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def rename_folder(path: Path, target: Path) -> None:
    """Give a folder its final name.

    Raises:
        WriteError: there is something of that name.
    """
    with refused(f"rename to {target.name}", path):
        _announce("rename", path, target)
        os.rename(path, target)


def remove_folder(path: Path) -> None:
    """Remove a folder and what is in it; of a link, only the link."""
    with refused("remove", path):
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        _announce("unlink", path)
        os.unlink(path)
        return
    for name in os.listdir(path):
        _remove(path / name)
    _announce("rmdir", path)
    os.rmdir(path)


def describe_failure(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file that cannot be read: is it damaged, or only not for us now?

    What is missing, of another kind, or refused by the disk itself is damaged. Anything else, such
    as too many open files, may be right again in a moment.
    """
    damage = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.EIO)
    if error.errno in damage:
        return CorruptCheckpointError(f"{path}: cannot be read: {error.strerror}")
    return ReadError(error.errno, f"cannot be read: {error.strerror}", str(path))


def open_file(path: Path) -> int:
    """Open a regular file for reading and return its descriptor; a pipe is not waited for.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor
