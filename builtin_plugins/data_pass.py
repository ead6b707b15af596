"""One pass through a loader: how far it is, the proof of it, and how it is taken up there."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
from rich.console import Console
from rich.progress import track
from torch.utils.data import IterableDataset

from builtin_plugins import proof
from builtin_plugins.division import Division, doubt_division, find_sampler, make_sampler
from builtin_plugins.doubts import (
    doubt_draws,
    doubt_end,
    doubt_memories,
    doubt_order,
    doubt_place,
)
from builtin_plugins.gate import Draws
from builtin_plugins.held import has_own_state, read_attributes
from builtin_plugins.loader import Loader, count_workers, describe, has_persistent_workers
from builtin_plugins.streams import digest, read_process_streams
from hookbus.errors import SamplerError

if TYPE_CHECKING:
    from hookbus.ranks import Ranks

logger = logging.getLogger("hookbus")

Digests: TypeAlias = Mapping[str, str]


@attrs.frozen
class Repeat:
    """How the script lets a loader be taken up in the middle of an epoch.

    ``replay`` loads the batches that are done and drops them; ``inexact_ok`` goes on where an
    exact resume is impossible.
    """

    replay: bool = False
    inexact_ok: bool = False


class Pass:
    """Hands out one epoch of a loader, from its start or from where a saved pass stood.

    A `DataLoader` over a map-style dataset skips by drawing indices, without loading a sample. One
    with a state of its own (`state_dict`) is given it back. Anything else is replayed.
    """

    def __init__(
        self,
        loader: Loader,
        watch: Callable[[], Digests],
        repeat: Repeat,
        ranks: Ranks,
    ) -> None:
        self._loader = loader
        self._ranks, self._division = ranks, Division(ranks.world_size)
        self._source = loader.component
        self._watch = watch
        self._repeat = repeat
        self.draws: Draws | None = None
        self._handed = 0
        self._digest = proof.START
        self._skipped = False
        # Streams that training has moved in this pass, and those of them that the data drew from
        # afterwards, so that a replay without the training would draw other numbers.
        self._moved_by_training: set[str] = set()
        self._entangled: set[str] = set()
        self._last_digests: Digests = {}
        self._attributes = read_attributes(self._source)
        loader.workers_of_pass = has_persistent_workers(loader.component)

    def begin(self) -> Iterator[Any]:
        """Make the iterator of a whole epoch.

        Raises:
            SamplerError: persistent workers have drawn, or a sampler has forgotten.
        """
        saved, self._loader.remembered = self._loader.remembered, {}
        self._refuse(doubt_memories(saved, self._attributes))
        self._check_draws()
        return self._make_iterator()

    def take_up(self, position: Mapping[str, Any]) -> Iterator[Any]:
        """Make the iterator of an epoch of which some batches are done.

        Called with the streams as they were when that epoch's iterator was made.

        Raises:
            SamplerError: the data that was handed out, or the data to come, cannot be repeated.
        """
        self._loader.remembered.clear()
        saved = Division.read(position)
        if saved.world_size != self._division.world_size:
            if (iterator := self._divide_anew(position, saved)) is not None:
                return iterator
        else:
            self._division = saved
            if not saved.is_whole:
                saved.check(find_sampler(self._source), self._ranks)
        self._moved_by_training |= set(position["moved by training"])
        self._entangled |= set(position["entangled"])
        self._check_draws()
        self._refuse(doubt_place(self._loader, self._entangled, replays=self._replays))
        if self._replays:
            iterator = self._replay(position)
        elif self._is_gated:
            skip = position["batch"] - self._division.batches
            iterator = self._make_iterator(skip, position["ahead"])
        else:
            self._source.load_state_dict(position["state"])  # type: ignore[attr-defined]
            iterator = self._make_iterator()
            self._digest = position["digest"]
        self._skipped = not self._replays
        done = {**position, "batch": position["batch"] - self._division.batches}
        if not position.get("is of another"):
            self._refuse(doubt_order(done, self._done, self.draws, describe(self._source)))
        self._handed = position["batch"]
        return iterator

    @property
    def is_over(self) -> bool:
        """Whether as many batches were handed out as the loader says it has, if it does."""
        try:
            return self._handed == len(self._source)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return False

    def fetch(self, iterator: Iterator[Any]) -> tuple[Any, int]:
        """Return the next batch, and how many samples are in it."""
        try:
            batch = self._fetch_watched(iterator) if self._is_watched else next(iterator)
        except StopIteration:
            self._check_end()
            raise
        samples = self._count(batch)
        self._handed += 1
        self._check_draws()
        return batch, samples

    def end(self) -> None:
        """End the pass; its iterator is exhausted or was left."""
        self._loader.workers_of_pass = None
        self._look_for_memories()

    def read_position(self) -> dict[str, Any]:
        """Return where this pass stands and the proof of it, as plain values."""
        self._look_for_memories()
        self._warn_of_place()
        draws = self.draws
        return {
            "batch": self._handed,
            "division": attrs.asdict(self._division),
            "digest": self._done,
            "ahead": draws.ahead if draws else 0,
            "digest ahead": draws.drawn.digest if draws else None,
            "moved by training": sorted(self._moved_by_training),
            "entangled": sorted(self._entangled),
            "described": describe(self._source),
            # A stateful loader that is asked before it is iterated starts its workers and draws.
            "state": copy.deepcopy(self._source.state_dict())  # type: ignore[attr-defined]
            if has_own_state(self._source)
            else None,
        }

    # -- ways to where it stood ----------------------------------------------------------------

    def _make_iterator(self, skip: int = 0, ahead: int = 0) -> Iterator[Any]:
        gate = self._loader.gate
        with self._loader.spying():
            if gate is None or not self._is_gated:
                return iter(self._source)
            iterator, self.draws = gate.iterate(
                self._source,  # type: ignore[arg-type]
                skip=skip,
                ahead=ahead,
                watch=self._watch if skip or ahead else None,
                late_watch=_watch_process if self._loader.no_late_draws else None,
                instead=self._list_share(),
            )
            return iterator

    def _list_share(self) -> Iterable[Any] | None:
        """Return what this process hands out of a rest that was dealt out anew."""
        sampler = find_sampler(self._source)
        if sampler is None or self._division.is_whole:
            return None
        share = self._division.list_share(sampler, self._ranks.rank)
        return make_sampler(self._source, share)  # type: ignore[arg-type]

    def _divide_anew(self, position: Mapping[str, Any], saved: Division) -> Iterator[Any] | None:
        """Deal the rest of the epoch out to the processes that there are now.

        A sampler that does not deal one order out goes on where it was, and so there is nothing to
        deal out (``None``).
        """
        world_size, sampler = self._division.world_size, find_sampler(self._source)
        if not self._is_gated:
            self._refuse(
                [
                    f"{position['batch']} batches of this epoch are done by {saved.world_size}"
                    f" processes, and how the rest of it belongs to {world_size} cannot be told; go"
                    f" on with {saved.world_size} until the epoch is over"
                ]
            )
        if not self._is_gated:
            return None
        saved.check(sampler, self._ranks)  # also with `inexact_ok`: it would be other data
        if sampler is None:
            return None
        theirs = range(self._ranks.rank, saved.world_size, world_size)  # each is proved by somebody
        self._refuse(doubt_division(self._source, sampler, position, theirs))  # type: ignore[arg-type]
        self._division = saved.go_on(
            self._source,  # type: ignore[arg-type]
            sampler,
            position["batch"],
            world_size,
        )
        if self._ranks.is_first:
            logger.warning(
                "%s: %d samples of this epoch are done, on %d processes; the others are dealt out"
                " to %d",
                describe(self._source),
                self._division.samples,
                saved.world_size,
                world_size,
            )
        self._handed = position["batch"]
        return self._make_iterator()

    def _replay(self, position: Mapping[str, Any]) -> Iterator[Any]:
        batches = position["batch"]
        iterator = self._make_iterator(0, batches + position["ahead"])
        logger.warning(
            "%s: the %d batches that are done are loaded again and dropped",
            describe(self._source),
            batches,
        )
        shown = sys.stderr is not None and sys.stderr.isatty()
        console = Console(stderr=True)
        for done in track(range(batches), console=console, transient=True, disable=not shown):
            try:
                self._count(next(iterator))
            except StopIteration:
                raise SamplerError(
                    f"{describe(self._source)}: {batches} batches of this epoch are done, and it"
                    f" has only {done} now"
                ) from None
        return iterator

    # -- what cannot be repeated ---------------------------------------------------------------

    def _check_draws(self) -> None:
        self._refuse(doubt_draws(self._loader, self.draws, skipped=self._skipped))

    def _check_end(self) -> None:
        if self.draws is not None and self._loader.is_reloaded:
            self._loader.is_reloaded = False
            with contextlib.suppress(TypeError):  # it may have no length
                self._refuse(doubt_end(self._handed, len(self._source)))  # type: ignore[arg-type]

    def _look_for_memories(self) -> None:
        for way, value in read_attributes(self._source).items():
            if self._attributes.get(way, value) != value:
                self._loader.memories.add(way)
                self._loader.warn(
                    f"{describe(self._source)}: {way} changes while it is iterated and is not"
                    " saved; give the sampler state_dict and load_state_dict"
                )

    def _warn_of_place(self) -> None:
        """Say at the save, once, what a resume from the middle of this epoch will refuse."""
        reasons = list(doubt_place(self._loader, self._entangled, replays=self._replays))
        if reasons and not self._repeat.inexact_ok:
            self._loader.warn(
                f"{describe(self._source)} is saved in the middle of an epoch, from where it cannot"
                f" go on exactly: {'; '.join(reasons)}"
            )

    def _refuse(self, reasons: Iterable[str]) -> None:
        for why in reasons:
            text = f"{describe(self._source)} cannot go on exactly: {why}"
            if not self._repeat.inexact_ok:
                raise SamplerError(f"{text}; or pass batches(loader, inexact_ok=True)")
            self._loader.warn(f"{text}; going on, as inexact_ok=True says")

    # -- inside --------------------------------------------------------------------------------

    @property
    def _is_gated(self) -> bool:
        dataset = getattr(self._source, "dataset", None)
        return self._loader.gate is not None and not isinstance(dataset, IterableDataset)

    @property
    def _replays(self) -> bool:
        """Whether what is done is loaded again when this is taken up."""
        if not self._is_gated and (not has_own_state(self._source) or self._counts_twice):
            return True
        return self._repeat.replay and count_workers(self._source) > 0

    @property
    def _counts_twice(self) -> bool:
        """Whether the loader itself can only load again what is done, which it then counts twice.

        The next state that it gives would be too far on: `torchdata` 0.11, where neither the
        stream nor its iterator has a state.
        """
        dataset = getattr(self._source, "dataset", None)
        return isinstance(dataset, IterableDataset) and not has_own_state(dataset)

    @property
    def _done(self) -> str:
        """The digest of what was handed out."""
        return self._digest if self.draws is None else self.draws.handed.digest

    @property
    def _is_watched(self) -> bool:
        if count_workers(self._source):
            return False
        return self.draws is None or self._loader.no_draws is not None

    def _count(self, batch: Any) -> int:
        if self.draws is not None:
            return self.draws.hand()
        self._digest = proof.extend(self._digest, batch)
        return _count_samples(batch)

    def _fetch_watched(self, iterator: Iterator[Any]) -> Any:
        """Return the next batch, and see which streams the data moves in this process."""
        if self.draws is not None:
            self.draws.prepare()
        before = self._watch()
        if self._last_digests:
            self._moved_by_training |= _list_moved(self._last_digests, before)
        batch = next(iterator)
        self._last_digests = self._watch()
        moved = _list_moved(before, self._last_digests)
        self._entangled |= moved & self._moved_by_training
        if self.draws is not None and moved:
            self._refuse([f"the data draws random numbers: {self._loader.no_draws}"])
        return batch


class BlindPass:
    """A pass through a loader that nobody looks after, since the plugin is blocked."""

    draws = None
    is_over = False

    def fetch(self, iterator: Iterator[Any]) -> tuple[Any, int]:
        return next(iterator), 0

    def end(self) -> None:
        """Nothing is kept."""

    def read_position(self) -> None:
        return None


def _watch_process() -> str:
    return digest(read_process_streams())


def _list_moved(before: Digests, after: Digests) -> set[str]:
    return {name for name, value in after.items() if before.get(name, value) != value}


def _count_samples(batch: Any) -> int:
    match batch:
        case Mapping():
            return next((n for value in batch.values() if (n := _count_samples(value))), 0)
        case list() | tuple():
            return next((n for value in batch if (n := _count_samples(value))), 0)
        case _ if getattr(batch, "ndim", None) is not None:
            return len(batch) if batch.ndim else 1
        case _:
            return 0
