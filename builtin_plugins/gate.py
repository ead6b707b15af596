"""A gate in place of a loader's index sampler: it skips, proves the order, and draws ahead.

`DataLoader.__iter__` draws its base seed and, with workers, runs ahead of training. So skipping
must happen after ``iter(sampler)`` and before the streams are put back, in the loader's own
iterator; a clone of the loader would lose subclasses and persistent workers.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import attrs
from torch.utils.data import BatchSampler, DataLoader

from builtin_plugins import proof

Watch: TypeAlias = Callable[[], object]
_Make: TypeAlias = Callable[[Iterable[Any]], Iterator[Any]]


@attrs.frozen
class Drawn:
    """How many batches and samples were drawn, and the proof of their order."""

    batches: int = 0
    samples: int = 0
    digest: str = proof.START


class Draws:
    """One epoch's indices, drawn from the sampler's iterator; the loader takes them from here.

    ``watch`` sees whether the sampler moves a stream while the iterator is made, beyond what the
    saved run had drawn by then; ``late_watch``, whether it does so after the first batch.
    """

    def __init__(
        self,
        base: Iterator[Any],
        batched: bool,
        skip: int,
        ahead: int,
        watch: Watch | None,
        late_watch: Watch | None,
    ) -> None:
        self._base = base
        self._batched = batched
        self._skip = skip
        self._known = skip + ahead
        self._watch = watch
        self._buffer: deque[Any] = deque()
        self._waiting: deque[Drawn] = deque()
        self.handed = self.drawn = Drawn()
        self._late_watch = late_watch
        self.moved_a_stream = self.moved_late = False

    def __iter__(self) -> Draws:
        return self

    def __next__(self) -> Any:
        self._force()
        return self._buffer.popleft() if self._buffer else self._draw()

    @property
    def ahead(self) -> int:
        """How many batches are drawn and not handed out."""
        return self.drawn.batches - self.handed.batches

    def hand(self) -> int:
        """Count the next batch as handed out to the script, and return how many samples it has."""
        before = self.handed.samples
        self.handed = self._waiting.popleft()
        return self.handed.samples - before

    def prepare(self) -> None:
        """Draw the next batch now, so that what moves afterwards is moved by the data."""
        if not self._buffer:
            self._try_draw()

    def open(self) -> None:
        """End the watch over what moves while the iterator is made."""
        self._force()
        self._watch = None

    def _force(self) -> None:
        """Draw and drop what is done, and draw ahead as far as the saved run had."""
        while self.drawn.batches < self._skip and self._try_draw():
            self._buffer.clear()
            self.hand()
        while self.drawn.batches < self._known and self._try_draw():
            pass

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
        late_watch = self._late_watch if self.drawn.batches else None
        before = watch and watch(), late_watch and late_watch()
        indices = next(self._base)
        self.moved_a_stream |= watch is not None and watch() != before[0]
        self.moved_late |= late_watch is not None and late_watch() != before[1]
        self.drawn = Drawn(
            self.drawn.batches + 1,
            self.drawn.samples + (len(indices) if self._batched else 1),
            proof.extend(self.drawn.digest, indices),
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
        self._base: Iterable[Any] = ()
        self._make: _Make = iter

    def __iter__(self) -> Iterator[Any]:
        return self._make(self._base)

    def __len__(self) -> int:
        return len(self._base)  # type: ignore[arg-type]

    def iterate(
        self,
        loader: DataLoader[Any],
        *,
        skip: int = 0,
        ahead: int = 0,
        watch: Watch | None = None,
        late_watch: Watch | None = None,
        instead: Iterable[Any] | None = None,
    ) -> tuple[Iterator[Any], Draws]:
        """Make the loader's iterator; ``skip`` batches are drawn and never loaded.

        Indices come from the loader's own sampler, or from what is given ``instead``.
        """
        made: list[Draws] = []

        def make(base: Iterable[Any]) -> Draws:
            base = base if instead is None else instead
            batched = self._key == "batch_sampler" or isinstance(base, BatchSampler)
            made.append(Draws(iter(base), batched, skip, ahead, watch, late_watch))
            return made[0]

        with self._put_in(loader, make):
            iterator = iter(loader)
        made[0].open()
        return iterator, made[0]

    def start_workers(self, loader: DataLoader[Any]) -> None:
        """Bring persistent workers up without loading a sample."""
        with self._put_in(loader, lambda base: iter(())):
            iter(loader)

    @contextlib.contextmanager
    def _put_in(self, loader: DataLoader[Any], make: _Make) -> Iterator[None]:
        # DataLoader refuses to have these set, and reads them from its __dict__.
        attributes = loader.__dict__
        self._base, self._make = attributes[self._key], make
        attributes[self._key] = self
        running = attributes.get("_iterator")
        if running is not None and running._index_sampler is not self:
            # Persistent workers that were started before the gate was there.
            running._index_sampler = self
        try:
            yield
        finally:
            attributes[self._key] = self._base
            self._make = iter
