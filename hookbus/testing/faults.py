"""Faults: a process that dies, a disk that refuses or is slow, and a list of what is done."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, get_args

import attrs

from hookbus.background import wait_for_writers
from hookbus.checkpoint import files
from hookbus.checkpoint.files import Kind, Piece
from hookbus.errors import CallError

__all__ = ["Crash", "DiskChange", "Storage", "crash_at", "faulty_storage", "record"]

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Crash(BaseException):
    """The process is dead here; only `crash_at` catches it."""


@attrs.frozen
class DiskChange:
    """One change of the disk, about to be made.

    ``kind`` is ``"mkdir"``, ``"create"`` (a new file, empty), ``"write"`` (``data`` at the end of
    a file), ``"fsync"`` (of a file's bytes, or of the names in a folder), ``"link"`` (one more
    name, ``target``), ``"rename"`` (to ``target``), ``"unlink"`` or ``"rmdir"``.
    """

    kind: Kind
    path: Path
    target: Path | None = None
    data: bytes = attrs.field(default=b"", repr=lambda data: f"{len(data)} bytes")

    def fits(self, on: Kind | tuple[Kind, ...] | None, path: str) -> bool:
        """Whether it is of a kind, and its path or name, or the new one, fits a shell pattern."""
        kinds = (on,) if isinstance(on, str) else on
        paths = [each for each in (self.path, self.target) if each is not None]
        names = [name for each in paths for name in (each.name, str(each))]
        return (kinds is None or self.kind in kinds) and any(
            fnmatch.fnmatchcase(name, path) for name in names
        )


class _Watch:
    """What stands before the disk; it asks what stood there before it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._outer: files.Watcher | None = None

    def __call__(self, kind: Kind, path: Path, target: Path | None, data: Piece) -> None:
        change = DiskChange(kind, path, target, bytes(data))
        self.meet(change)
        if self._outer is not None:
            self._outer(kind, path, target, data)

    def meet(self, change: DiskChange) -> None:
        raise NotImplementedError

    @contextlib.contextmanager
    def in_front(self) -> Iterator[None]:
        self._outer, files.watcher = files.watcher, self
        try:
            yield
        finally:
            files.watcher = self._outer


class _Recording(_Watch):
    def __init__(self) -> None:
        super().__init__()
        self.changes: list[DiskChange] = []

    def meet(self, change: DiskChange) -> None:
        self.changes.append(change)


@contextlib.contextmanager
def record() -> Iterator[list[DiskChange]]:
    """Collect every change of the disk that is tried, in order, with the bytes that are written.

    They are enough to make the same folder again, up to any of them.
    """
    recording = _Recording()
    with recording.in_front():
        yield recording.changes


class Death(_Watch):
    """Lets nothing through once its moment has come, so that no ``finally`` tidies up.

    ``happened`` tells whether it has, ``change`` the one that was not made, if it was one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.happened = False
        self.change: DiskChange | None = None

    def is_due(self, change: DiskChange) -> bool:
        """Whether the process dies before this change."""
        return False

    def meet(self, change: DiskChange) -> None:
        with self._guard:
            if not self.happened and self.is_due(change):
                self.happened, self.change = True, change
        if self.happened:
            raise Crash(f"before {change}")

    def die(self, where: str) -> NoReturn:
        """Die here and now."""
        self.happened = True
        raise Crash(where)

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Let it end the block, with all that it led to."""
        with self.in_front():
            try:
                yield
            except BaseException as error:
                if not self.happened or not _comes_from_crash(error):
                    raise
                traceback.clear_frames(error.__traceback__)  # the bus is gone with its process
            finally:
                if self.happened:
                    wait_for_writers()  # they run into the dead disk too


class _DeathAtChange(Death):
    def __init__(self, number: int, on: Kind | tuple[Kind, ...] | None, path: str) -> None:
        super().__init__()
        self._left, self._on, self._path = number, on, path

    def is_due(self, change: DiskChange) -> bool:
        self._left -= change.fits(self._on, self._path)
        return not self._left


@contextlib.contextmanager
def crash_at(
    number: int = 1, on: Kind | tuple[Kind, ...] | None = None, *, path: str = "*"
) -> Iterator[Death]:
    """Let the process die before the ``number``-th change of the disk, counted from 1.

    With ``on`` and ``path``, of those of that kind whose path or name fits the pattern. From then
    on no change is made any more, in any thread, so that nothing is tidied up, and a `Crash` is
    raised wherever one is tried. The block ends there: what the crash led to is not raised beyond
    it. What is yielded has ``happened`` and ``change``, the one that was not made.

    The run's lock stays with this process, and the next bus takes it over.

    Raises:
        CallError: ``number`` is no whole number from 1 up.
    """
    if type(number) is not int or number < 1:
        raise CallError(f"number={number!r}: pass a whole number from 1 up")
    _check_target(on, path)
    death = _DeathAtChange(number, on, path)
    with death.awaited():
        yield death


def _check_target(on: object, path: object) -> None:
    """Refuse what could never be met, so that a test would pass for nothing.

    Raises:
        CallError: a kind of change that there is not, or a path that is no text.
    """
    kinds = () if on is None else on if isinstance(on, tuple) else (on,)
    if unknown := [each for each in kinds if each not in get_args(Kind)]:
        raise CallError(f"on={unknown[0]!r}: pass one of {', '.join(get_args(Kind))}")
    if not isinstance(path, str):
        raise CallError(f"path={path!r}: pass a shell pattern, as a str")


def _comes_from_crash(error: BaseException | None) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(map(_comes_from_crash, error.exceptions))
    return error is not None and (
        isinstance(error, Crash)
        or _comes_from_crash(error.__cause__)
        or _comes_from_crash(error.__context__)
    )


class Storage(_Watch):
    """A faulty disk. Its attributes may be changed at any time; ``met`` is what it was hit by.

    ``error`` is raised, after ``delay`` seconds and once ``gate`` is set; ``None`` for none.
    """

    def __init__(
        self,
        error: OSError | None,
        on: Kind | tuple[Kind, ...] | None,
        path: str,
        after: int,
        delay: float,
        gate: threading.Event | None,
    ) -> None:
        super().__init__()
        self.error, self.on, self.path, self.after = error, on, path, after
        self.delay, self.gate = delay, gate
        self.met: list[DiskChange] = []

    def meet(self, change: DiskChange) -> None:
        if not change.fits(self.on, self.path):
            return
        with self._guard:
            self.after -= 1
            if self.after >= 0:
                return
            self.met.append(change)
        if self.delay:
            time.sleep(self.delay)
        if self.gate is not None:
            self.gate.wait()
        if self.error is not None:
            raise OSError(self.error.errno, self.error.strerror, str(change.path))


@contextlib.contextmanager
def faulty_storage(
    error: OSError | None = FULL,
    on: Kind | tuple[Kind, ...] | None = None,
    *,
    path: str = "*",
    after: int = 0,
    delay: float = 0.0,
    gate: threading.Event | None = None,
) -> Iterator[Storage]:
    """Let the disk refuse, or be slow, and yield what can be changed meanwhile.

    It meets changes of the kinds ``on`` (all if ``None``) whose path or name fits the shell
    pattern ``path``; the first ``after`` of them pass. ``error`` is what the operating system
    says: full by default, ``OSError(errno.EIO, …)``, ``OSError(errno.EROFS, …)``. With
    ``error=None`` the disk is only slow: each change takes ``delay`` seconds longer, or waits
    until ``gate`` is set, which it is at the end of the block.

    Raises:
        CallError: an argument is not what is expected.
    """
    _check_target(on, path)
    if error is not None and not isinstance(error, OSError):
        raise CallError(f"error={error!r}: pass OSError(errno.ENOSPC, 'full') or the like, or None")
    if type(after) is not int or after < 0:
        raise CallError(f"after={after!r}: pass a whole number from 0 up")
    if isinstance(delay, bool) or not isinstance(delay, int | float) or delay < 0:
        raise CallError(f"delay={delay!r}: pass seconds")
    storage = Storage(error, on, path, after, delay, gate)
    with storage.in_front():
        try:
            yield storage
        finally:
            if gate is not None:
                gate.set()
