"""Why data cannot be repeated, in words: a pass refuses each of these, or warns of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from builtin_plugins.gate import Draws
from builtin_plugins.loader import Loader, count_workers


def doubt_place(loader: Loader, entangled: Collection[str], *, replays: bool) -> Iterator[str]:
    """Of the middle of an epoch, at the save and again when it is taken up."""
    workers = count_workers(loader.component)
    # A stream is gone through again, by whom ever.
    again = replays or isinstance(getattr(loader.component, "dataset", None), IterableDataset)
    if entangled and again and not workers:
        names = ", ".join(sorted(name.partition(".")[2] for name in entangled))
        yield (
            f"the data and the training draw from the same streams ({names}) in this process; give"
            " the dataset a generator of its own"
        )
    if workers and not getattr(loader.component, "in_order", True):
        yield "in_order=False lets workers overtake each other"
    if workers and loader.has_drawn and loader.workers_of_pass:
        yield "its persistent workers drew random numbers, which nothing can restore"
    elif workers and loader.has_drawn and not replays:
        yield (
            "its workers drew random numbers; pass batches(loader, replay=True) to load the batches"
            " that are done again and drop them"
        )


def doubt_draws(loader: Loader, draws: Draws | None, *, skipped: bool) -> Iterator[str]:
    """Of the batch in hand: that the saved run would have drawn other numbers for it."""
    if draws is not None and draws.moved_late:
        yield (
            "its sampler draws as it goes, and how far it runs ahead depends on"
            f" {loader.no_late_draws}"
        )
    if loader.has_drawn and loader.no_draws is not None:
        yield f"its workers drew random numbers: {loader.no_draws}"
    elif loader.has_drawn and skipped:
        yield (
            "its workers drew random numbers, and others than before would have;"
            " pass batches(loader, replay=True)"
        )


def doubt_order(
    position: Mapping[str, Any], digest: str, draws: Draws | None, described: str
) -> Iterator[str]:
    """Of the batches that are done, and of those that are drawn ahead."""
    if digest != position["digest"]:
        yield (
            f"the {'contents' if draws is None else 'indices'} of the {position['batch']} batches"
            f" that are done are not those of the saved run ({position['described']}; now"
            f" {described}): the sampler or the dataset has a memory of its own (give the sampler"
            " state_dict and load_state_dict), set_epoch was not called, or dataset or batch size"
            " changed"
        )
    if draws is None:
        return
    saved = position["batch"] + position["ahead"]
    if draws.drawn.batches == saved and draws.drawn.digest != position["digest ahead"]:
        yield (
            f"the {position['ahead']} batches that the saved run had drawn ahead are not repeated:"
            " the sampler draws from a stream that something else moves"
        )
    if draws.moved_a_stream:
        yield (
            f"this run draws {draws.ahead} batches ahead, the saved one {position['ahead']}, and"
            " the sampler moves a stream meanwhile; pass the num_workers and prefetch_factor of"
            " the saved run"
        )


def doubt_end(handed: int, length: int) -> Iterator[str]:
    """Of the end of a pass whose sampler was given its state back."""
    if handed < length:
        yield (
            f"it ended after {handed} of {length} batches, since its sampler starts its next pass"
            " at the state it is given; at the end of a pass that must be the start of the next one"
        )


def doubt_memories(saved: Mapping[str, Any], live: Mapping[str, Any]) -> Iterator[str]:
    """Of what samplers remember from pass to pass, where no state tells it."""
    forgotten = [
        f"{way} was {value}, is {live.get(way)}"
        for way, value in saved.items()
        if live.get(way) != value
    ]
    if forgotten:
        yield (
            f"a sampler has forgotten ({', '.join(forgotten)}): call its set_epoch, or give it"
            " state_dict and load_state_dict"
        )
