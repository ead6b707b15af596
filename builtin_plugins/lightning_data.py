"""The training data of a Lightning ``Trainer``, handed out by a `Loop`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from builtin_plugins.loop import Loop
from builtin_plugins.streams import put_process_streams, read_process_streams
from hookbus.errors import CallError, LoopError


class Feed:
    """Hands the batches of a loop to a Trainer, which asks for them epoch by epoch.

    A batch is done when the Trainer asks for the next one: callbacks, validation and schedulers
    are over by then, whatever their order. An epoch is done when the next one's first batch is
    asked for, since the Trainer never asks for a batch that is not there.
    """

    def __init__(self, loop: Loop, options: Mapping[str, bool]) -> None:
        self.loop = loop
        self.source: TrainSource | None = None
        self._options = options
        self._epochs: Any = None
        self._held: tuple[Any, Any] | None = None

    def begin(self, loader: Any) -> Iterator[Any]:
        """Begin an epoch, or take one up, and return its batches."""
        assert self.source is not None
        trainer = self.source.trainer
        if self._epochs is None:
            limit = trainer.max_epochs
            self._epochs = iter(self.loop.epochs(limit if limit > 0 else sys.maxsize))
        epoch = next(self._epochs, None)
        if epoch != trainer.current_epoch:
            raise LoopError(
                f"the Trainer begins epoch {trainer.current_epoch}, and the run is in epoch"
                f" {epoch}; let the Trainer count the epochs"
            )
        return iter(self.loop.batches(loader, **self._options))

    def end(self, *, complete: bool) -> None:
        """Count what is done as done; ``complete``: the last epoch too."""
        if self._epochs is None:
            self.loop.take_place()  # nothing was left to do; what comes after the fit may draw
        elif complete:
            self.loop.end_epoch()
        else:
            self.loop.end_body()
        self._epochs = None

    def hold_validation(self, trainer: Any) -> None:
        """Keep the Trainer from validating until the next batch is asked for.

        After a resume it asks whether the batch before was one to validate after. It was, and that
        validation is over.
        """
        self._held = trainer, trainer.limit_val_batches
        trainer.limit_val_batches = 0

    def let_validate(self) -> None:
        if self._held is not None:
            trainer, limit = self._held
            trainer.limit_val_batches, self._held = limit, None

    def release(self) -> None:
        """Leave the Trainer as it was."""
        self.let_validate()
        if self.source is not None:
            self.source.take_out()
            self.source = None
        self._epochs = None


class TrainSource:
    """Stands where a Trainer gets its training data from."""

    def __init__(self, trainer: Any, feed: Feed) -> None:
        self.trainer = trainer
        self._feed = feed
        self._source = trainer.fit_loop._data_source

    @classmethod
    def put_in(cls, trainer: Any, feed: Feed) -> TrainSource:
        source = trainer.fit_loop._data_source = cls(trainer, feed)
        return source

    def take_out(self) -> None:
        self.trainer.fit_loop._data_source = self._source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def dataloader(self) -> Any:
        loader = self._source.dataloader()
        if hasattr(loader, "flattened") or isinstance(loader, list | tuple | dict):
            raise CallError(
                f"the training data is a {type(loader).__name__} of loaders, and the bridge hands"
                " out one; make one iterable of them"
            )
        try:
            len(loader)
        except (TypeError, NotImplementedError) as error:
            raise CallError(
                f"{type(loader).__name__} has no length, so the Trainer fetches a batch ahead and"
                " nobody can tell which are done; give its dataset a __len__"
            ) from error
        return TrainLoader(loader, self._feed)


class TrainLoader:
    """A loader that looks like the script's own; its iterator is made when a batch is asked for.

    The Trainer makes iterators before the run is resumed, and more of them than it uses.
    """

    def __init__(self, loader: Any, feed: Feed) -> None:
        vars(self).update(_loader=loader, _feed=feed)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return _LateIterator(self._loader, self._feed)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the bus saves it. The Trainer warns of a loader that has none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Leave it to the bus."""


class _LateIterator:
    def __init__(self, loader: Any, feed: Feed) -> None:
        self._loader, self._feed = loader, feed
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> _LateIterator:
        return self

    def __next__(self) -> Any:
        self._feed.let_validate()
        if self._batches is None:
            self._batches = self._feed.begin(self._loader)
        return next(self._batches)


def list_validation_loaders(trainer: Any) -> list[DataLoader[Any]]:
    """Let the Trainer make its validation loaders now, and return them."""
    if not trainer.enable_validation:
        return []
    streams = read_process_streams()
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.setup_data()
    trainer.training = True
    if trainer.num_sanity_val_steps:  # it would make them itself, and put the streams back
        put_process_streams(streams)
    leaves = tree_leaves(getattr(trainer.val_dataloaders, "flattened", trainer.val_dataloaders))
    found = {id(each): each for each in leaves if isinstance(each, DataLoader)}
    return list(found.values())
