"""The lock on a run directory: one process at a time, and in it the newest holder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
from datetime import UTC, datetime
from pathlib import Path

import attrs

from hookbus.checkpoint.files import refused
from hookbus.errors import RunLockedError

NAME = "run.lock"

_File = tuple[int, int]  # the device and the number of a file


@attrs.define(eq=False)
class _Held:
    descriptor: int
    holder: RunLock


# Of this process. A POSIX lock belongs to the process: closing *any* descriptor of the file drops
# it. So a file that is held here is never opened again, and its one descriptor goes from holder to
# holder. What was forked holds nothing.
_held = dict[_File, _Held]()
_guard = threading.Lock()


def _forget() -> None:
    global _guard
    _held.clear()
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_forget)


class RunLock:
    """The right to write in a run directory, held by this process and not by what it forked."""

    def __init__(self, run: Path) -> None:
        self.path = Path(run) / NAME
        self._file: _File | None = None

    @property
    def lost(self) -> bool:
        """Whether a newer lock of this process has taken it over, or this process was forked."""
        return self._file is not None and not self._is_held()

    def take(self) -> None:
        """Hold the lock; an older one of this process on the same run learns that it is lost.

        Raises:
            RunLockedError: another process holds it; the message says which.
            WriteError: the lock's file cannot be made or locked.
        """
        with _guard:
            while True:
                file = self._find_file()
                if file is not None and file in _held:
                    self._lock(_held[file].descriptor)
                    _held[file].holder = self
                    self._file = file
                    return
                if self._take_file():
                    return

    def renew(self) -> None:
        """Make sure that the lock is held, if it is not lost: any ``close`` of its file drops it.

        Raises:
            RunLockedError: another process has taken it meanwhile, or the file that is held is
                not in the run directory any more.
        """
        with _guard:
            if self._file is not None and self._is_held():
                if not self._is_there(self._file):
                    raise RunLockedError(
                        f"{self.path.parent} was removed or replaced while this process held it, so"
                        " nothing is written; put it back, or resume into another run directory"
                    )
                self._lock(_held[self._file].descriptor)

    def release(self) -> None:
        """Let the run go; nothing happens if the lock is not held, or not any more."""
        with _guard:
            if self._file is not None and self._is_held():
                os.close(_held.pop(self._file).descriptor)
            self._file = None

    def _is_held(self) -> bool:
        held = _held.get(self._file) if self._file is not None else None
        return held is not None and held.holder is self

    def _is_there(self, file: _File) -> bool:
        """Whether the file of the lock's name is this one; none has the number of one held open."""
        return self._find_file() == file

    def _find_file(self) -> _File | None:
        """Return the file of the lock's name, if there is one."""
        with refused("look for the run's lock", self.path):
            try:
                return _identify(os.stat(self.path))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def _take_file(self) -> bool:
        """Open and lock the file; say whether it is still the one of that name."""
        with refused("open the run's lock", self.path):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        kept = False
        try:
            self._lock(descriptor)
            file = _identify(os.fstat(descriptor))
            kept = self._is_there(file)
            if kept:
                _write_owner(descriptor, self.path)
                _held[file] = _Held(descriptor, self)
                self._file = file
            return kept
        finally:
            if not kept:
                os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        with refused("lock", self.path):
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                raise RunLockedError(
                    f"{self.path.parent} is in use by {_read_owner(descriptor)}; wait until it has"
                    " ended, or pass another run directory"
                ) from error


def _identify(status: os.stat_result) -> _File:
    return status.st_dev, status.st_ino


def _write_owner(descriptor: int, path: Path) -> None:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
    with refused("write", path):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode() + b"\n", 0)


def _read_owner(descriptor: int) -> str:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {owner['pid']} on {owner['host']} since {owner['started']}"
    except (LookupError, TypeError, ValueError):  # it has only just been locked
        return "another process"
