"""A gate in place of a loader's index sampler: it skips, proves the order, and draws ahead.

`DataLoader.__iter__` draws its base seed and, with workers, runs ahead of training. So skipping
must happen after ``iter(sampler)`` and before the streams are put back, in the loader's own
iterator; a clone of the loader would lose subclasses and persistent workers.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader

Watch = Callable[[], object]


@attrs.frozen
class Drawn:
    """Proof of the order so far: the running hash, and how many batches and samples are in it."""

    digest: str
    batches: int
    samples: int


class Draws:
    """One epoch's indices, drawn from the sampler's iterator; the loader takes them from here."""

    def __init__(self, base: Iterator[Any], skip: int, ahead: int, watch: Watch | None) -> None:
        self._base = base
        self._skip = skip
        self._known = skip + ahead
        self._watch = watch
        self._hash = xxhash.xxh3_128()
        self._buffer: deque[Any] = deque()
        self._waiting: deque[Drawn] = deque()
        self.handed = self.drawn = Drawn(self._hash.hexdigest(), 0, 0)
        self.moved_a_stream = False

    def __iter__(self) -> Draws:
        return self

    def __next__(self) -> Any:
        self.force()
        return self._buffer.popleft() if self._buffer else self._draw()

    def force(self) -> None:
        """Draw and drop what is done, and draw ahead as far as the saved run had."""
        while self.drawn.batches < self._skip and self._try_draw():
            self._buffer.clear()
            self.hand()
        while self.drawn.batches < self._known and self._try_draw():
            pass

    def hand(self) -> None:
        """Count the next batch as handed out to the script."""
        if self._waiting:
            self.handed = self._waiting.popleft()

    def open(self) -> None:
        """End the watch over what moves while the iterator is made."""
        self.force()
        self._watch = None

    @property
    def ahead(self) -> int:
        return self.drawn.batches - self.handed.batches

    def _try_draw(self) -> bool:
        try:
            self._buffer.append(self._draw())
        except StopIteration:
            self._skip = self._known = 0
            return False
        return True

    def _draw(self) -> Any:
        # The saved run had not drawn this one: its sampler would have drawn it later, from
        # streams that training had moved on by then.
        watch = self._watch if self.drawn.batches >= self._known else None
        before = watch() if watch else None
        indices = next(self._base)
        if watch and watch() != before:
            self.moved_a_stream = True
        self._hash.update(_to_bytes(indices))
        self.drawn = Drawn(
            self._hash.hexdigest(),
            self.drawn.batches + 1,
            self.drawn.samples + (len(indices) if hasattr(indices, "__len__") else 1),
        )
        self._waiting.append(self.drawn)
        return indices


class Gate:
    """Stands in a loader for its index sampler while an iterator is made.

    It does not hold the loader: persistent workers keep the gate, and a cycle would leave them to
    the garbage collector, which breaks their queues before they are told to end.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        # `sampler` drives the loader where batching is off.
        self._key = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._base: Iterable[Any] = getattr(loader, self._key)
        self._skip = self._ahead = 0
        self._watch: Watch | None = None
        self._empty = False
        self.draws: Draws | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._empty:
            return iter(())
        self.draws = Draws(iter(self._base), self._skip, self._ahead, self._watch)
        return self.draws

    def __len__(self) -> int:
        return len(self._base)  # type: ignore[arg-type]

    def iterate(
        self, loader: DataLoader[Any], skip: int = 0, ahead: int = 0, watch: Watch | None = None
    ) -> tuple[Iterator[Any], Draws]:
        """Make the loader's iterator; ``skip`` batches are drawn and never loaded."""
        self._skip, self._ahead, self._watch, self.draws = skip, ahead, watch, None
        with self._put_in(loader):
            iterator = iter(loader)
        self._skip, self._ahead, self._watch = 0, 0, None
        draws: Draws | None = self.draws
        assert draws is not None, "the loader did not ask its index sampler"
        draws.open()
        return iterator, draws

    def start_workers(self, loader: DataLoader[Any]) -> None:
        """Bring persistent workers up without loading a sample."""
        self._empty = True
        try:
            with self._put_in(loader):
                iter(loader)
        finally:
            self._empty = False

    @contextlib.contextmanager
    def _put_in(self, loader: DataLoader[Any]) -> Iterator[None]:
        # DataLoader refuses to have these set, and reads them from its __dict__.
        attributes = loader.__dict__
        attributes[self._key] = self
        running = attributes.get("_iterator")
        if running is not None and running._index_sampler is not self:
            # Persistent workers that were started before the gate was there.
            running._index_sampler = self
        try:
            yield
        finally:
            attributes[self._key] = self._base


def _to_bytes(indices: object) -> bytes:
    """Return bytes that are equal in another process for equal indices."""
    match indices:
        case torch.Tensor():
            return _to_bytes(indices.tolist())
        case np.ndarray() | np.generic():
            return _to_bytes(indices.tolist())
        case list() | tuple():
            if all(type(index) is int for index in indices):
                return repr(tuple(indices)).encode()
            return b"(" + b",".join(map(_to_bytes, indices)) + b")"
        case int() | str() | bytes() | float() | None:
            return repr(indices).encode()
        case _:
            # Its repr may hold an address.
            return type(indices).__qualname__.encode()
