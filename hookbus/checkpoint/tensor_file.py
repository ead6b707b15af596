"""One file of tensors, open for reading: every byte that is used is hashed as it is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import attrs
import xxhash

from hookbus.checkpoint.files import describe_failure, open_file
from hookbus.checkpoint.manifest import FileInfo
from hookbus.checkpoint.tensor_info import PIECE, TensorInfo, make_header
from hookbus.errors import CorruptCheckpointError


@attrs.frozen(eq=False)
class TensorFile:
    """A file whose size and header have been found right.

    It is read with ``pread`` and never mapped: no tensor can change when the file does.
    """

    path: Path
    _descriptor: int
    _offsets: Mapping[str, int]

    def check(self, info: TensorInfo, on_bytes: Callable[[int], None] | None = None) -> None:
        """Read a tensor's bytes and keep none of them.

        Raises:
            CorruptCheckpointError: they are not those that were saved.
        """
        buffer = memoryview(bytearray(min(PIECE, info.bytes)))
        sizes = (min(PIECE, info.bytes - start) for start in range(0, info.bytes, PIECE))
        self.read(info, (buffer[:size] for size in sizes), on_bytes)

    def read(
        self,
        info: TensorInfo,
        pieces: Iterator[memoryview],
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """Fill ``pieces``, which together are as long as the tensor, with its bytes.

        Raises:
            CorruptCheckpointError: they are not those that were saved.
        """
        digest = xxhash.xxh3_128()
        offset = self._offsets[info.name]
        for piece in pieces:
            _read_exactly(self._descriptor, piece, offset, self.path)
            digest.update(piece)
            offset += len(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
        self.compare(info, digest.hexdigest())

    def read_rows(self, info: TensorInfo, row: int, piece: memoryview) -> None:
        """Fill ``piece`` with a tensor's bytes from a row on; whoever asks for all rows hashes."""
        start = row * (info.bytes // info.sizes[0])
        _read_exactly(self._descriptor, piece, self._offsets[info.name] + start, self.path)

    def compare(self, info: TensorInfo, digest: str) -> None:
        """Compare the hash of what was read with that of what was saved.

        Raises:
            CorruptCheckpointError: they differ.
        """
        if digest != info.hash:
            raise CorruptCheckpointError(
                f"{self.path}: tensor {info.name!r} ({info}, {info.bytes} bytes from"
                f" {self._offsets[info.name]}) is damaged: its hash is {digest}, saved"
                f" was {info.hash}{_tell_sharing(os.fstat(self._descriptor))}"
            )


@contextmanager
def open_tensors(
    path: Path, file: FileInfo, infos: Mapping[str, TensorInfo]
) -> Iterator[TensorFile]:
    """Open a file of tensors; its size and its header are checked before anything is read.

    Raises:
        CorruptCheckpointError: they are not those that were saved, or it cannot be read.
    """
    try:
        descriptor = open_file(path)
    except OSError as error:
        raise describe_failure(path, error) from error
    try:
        status = os.fstat(descriptor)
        if status.st_size != file.bytes:
            raise CorruptCheckpointError(
                f"{path}: has {status.st_size} bytes, saved were {file.bytes}"
                f"{_tell_sharing(status)}"
            )
        made = make_header(infos.values())
        header = memoryview(bytearray(len(made)))
        _read_exactly(descriptor, header, 0, path)
        if header != made:  # the bytes: other ones with the same hash can be looked for
            raise CorruptCheckpointError(
                f"{path}: its header ({len(made)} bytes) is damaged: its hash is"
                f" {xxhash.xxh3_128_hexdigest(header)}, saved was {file.header}"
                f"{_tell_sharing(status)}"
            )
        offsets, start = dict[str, int](), len(made)
        for info in infos.values():
            offsets[info.name] = start
            start += info.bytes
        yield TensorFile(path, descriptor, offsets)
    finally:
        os.close(descriptor)


def _tell_sharing(status: os.stat_result) -> str:
    if status.st_nlink < 2:
        return ""
    return f" ({status.st_nlink} checkpoints share this file, and all of them are damaged)"


def _read_exactly(descriptor: int, piece: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(piece):
        try:
            count = os.preadv(descriptor, [piece[done:]], offset + done)
        except OSError as error:
            raise describe_failure(path, error) from error
        if not count:
            raise CorruptCheckpointError(f"{path}: ends at byte {offset + done}")
        done += count
