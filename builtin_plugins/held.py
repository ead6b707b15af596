"""What a loader holds that its next pass depends on: streams, samplers' states and attributes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Set
from typing import Any

import attrs

from builtin_plugins.streams import (
    digest,
    find_streams,
    list_attributes,
    list_holders,
    put_stream,
    read_stream,
)


@attrs.frozen(eq=False)
class Held:
    """What a loader holds at one moment, by the way to it; copies."""

    streams: Mapping[str, Any]
    samplers: Mapping[str, Any]
    attributes: Mapping[str, Any]

    @classmethod
    def read(cls, loader: object) -> Held:
        samplers = _list_stateful_samplers(loader)
        return cls(
            {name: read_stream(stream) for name, stream in find_streams(loader).items()},
            {way: copy.deepcopy(sampler.state_dict()) for way, sampler in samplers},
            read_attributes(loader),
        )

    def to_dict(self) -> dict[str, Any]:
        return attrs.asdict(self, recurse=False)

    def digest(self) -> Mapping[str, str]:
        """Return the digests of streams and samplers' states, good within this process."""
        held = {**self.streams, **self.samplers}
        return {name: digest(state) for name, state in held.items()}

    def find_difference(self, loader: object) -> str | None:
        """Say which streams and samplers are not both in here and in ``loader``."""
        live = Held.read(loader)
        for what in ("streams", "samplers"):
            saved, now = getattr(self, what), getattr(live, what)
            if set(saved) != set(now):
                return (
                    f"saved {what} were {', '.join(saved) or 'none'}, the run has"
                    f" {', '.join(now) or 'none'}"
                )
        return None

    def put(self, loader: object, keep: Set[str] = frozenset()) -> bool:
        """Put streams and samplers' states back, but for those in ``keep``.

        Only what differs is touched, since some samplers start their next pass at the state they
        are given. Returns whether a sampler was given one.
        """
        saved, live = self.digest(), Held.read(loader).digest()
        moved = {name for name in saved if saved[name] != live[name]} - keep
        streams, samplers = find_streams(loader), dict(_list_stateful_samplers(loader))
        for name in moved & streams.keys():
            put_stream(streams[name], self.streams[name])
        for way in moved & samplers.keys():
            samplers[way].load_state_dict(copy.deepcopy(self.samplers[way]))
        return not moved.isdisjoint(samplers)

    def put_epochs(self, loader: object, but: Set[str]) -> None:
        """Put back the epochs that the script gave to samplers, but for those in ``but``.

        A script need not set one in each epoch, and so the last one set goes on mattering. Not by
        ``set_epoch``, which is the script's to call.
        """
        live = read_attributes(loader)
        for way, sampler in _list_samplers(loader):
            name = f"{way}.epoch"
            if hasattr(sampler, "set_epoch") and name in self.attributes.keys() & live.keys() - but:
                sampler.epoch = self.attributes[name]


def read_attributes(loader: object) -> dict[str, Any]:
    """Return the plain attributes of samplers without a state, in which a memory would show."""
    return {
        f"{way}.{name}": value
        for way, sampler in _list_samplers(loader)
        if not has_own_state(sampler)
        for name, value in list_attributes(sampler).items()
        if type(value) in (int, float, str, bool)
    }


def has_own_state(component: object) -> bool:
    return hasattr(component, "state_dict") and hasattr(component, "load_state_dict")


def _list_samplers(loader: object) -> Iterator[tuple[str, Any]]:
    for way, holder in list_holders(loader):
        if way.rpartition(".")[2] in ("sampler", "batch_sampler"):
            yield way, holder


def _list_stateful_samplers(loader: object) -> Iterator[tuple[str, Any]]:
    if not has_own_state(loader):  # else its samplers' states are in it
        for way, sampler in _list_samplers(loader):
            # torchdata's start at what they are given, once; the loop skips by itself.
            if has_own_state(sampler) and not hasattr(sampler, "next_yielded"):
                yield way, sampler
