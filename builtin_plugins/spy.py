"""Whether a loader's workers draw random numbers: one shared byte tells."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from builtin_plugins.streams import digest, find_streams, read_stream


class Spy:
    """Wraps `collate_fn` and `worker_init_fn` while a loader's iterator is made.

    In each worker, streams are compared from one batch to the next (about 50 µs). A torch stream
    that was seeded anew in between is not counted as drawn from: data that seeds by index is the
    same whatever came before it.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._collate: Callable[[Any], Any] = loader.collate_fn
        self._init: Callable[[int], None] | None = loader.worker_init_fn
        self._flag = torch.zeros(1, dtype=torch.uint8, device="cpu").share_memory_()
        self._last: dict[str, str] = {}
        self._seed = 0

    @property
    def drew(self) -> bool:
        """Whether any worker had drawn when it sent the batches that are here."""
        return bool(self._flag[0])

    @contextlib.contextmanager
    def put_in(self, loader: DataLoader[Any]) -> Iterator[None]:
        """Have the iterator that is made meanwhile call this instead of the loader's own."""
        loader.collate_fn, loader.worker_init_fn = self, self.start
        try:
            yield
        finally:
            loader.collate_fn, loader.worker_init_fn = self._collate, self._init

    def start(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        self._last, self._seed = self._read(), torch.initial_seed()

    def __call__(self, batch: Any) -> Any:
        collated = self._collate(batch)
        if not self._flag[0]:
            now, seed = self._read(), torch.initial_seed()
            moved = {name for name, value in now.items() if self._last.get(name, value) != value}
            if moved - ({"torch"} if seed != self._seed else set()):
                self._flag[0] = 1
            self._last, self._seed = now, seed
        return collated

    def _read(self) -> dict[str, str]:
        worker = get_worker_info()
        own = find_streams(self._collate)
        if worker is not None:
            own |= {f"dataset.{name}": each for name, each in find_streams(worker.dataset).items()}
        return {
            "torch": digest(torch.get_rng_state()),
            "python": digest(random.getstate()),
            "numpy": digest(np.random.get_state(legacy=False)),
            **{name: digest(read_stream(generator)) for name, generator in own.items()},
        }
