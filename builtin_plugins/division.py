"""How what is left of an epoch is divided among another number of processes.

`DistributedSampler` deals one order out to all processes in turn, so what they have done together
is the beginning of it: the rest is dealt out anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from builtin_plugins import proof
from hookbus.errors import SamplerError

if TYPE_CHECKING:
    from hookbus.ranks import Ranks


@attrs.frozen
class Division:
    """An epoch's order from sample number ``samples`` on, dealt out to ``world_size`` processes.

    Each process had handed out ``batches`` batches by then.
    """

    world_size: int
    samples: int = 0
    batches: int = 0

    @classmethod
    def read(cls, position: Mapping[str, Any]) -> Division:
        """Take what was saved with a position; the first ones were all of a process alone."""
        return cls(**position.get("division", {"world_size": 1}))

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole epoch, as the sampler itself deals it out."""
        return not self.samples and not self.batches

    @staticmethod
    def check(sampler: DistributedSampler[Any] | None, ranks: Ranks) -> None:
        """Refuse a sampler that deals out to others than the processes; all of them call it.

        Raises:
            SamplerError: it does, on some rank; on all ranks.
        """
        mine = (ranks.world_size, ranks.rank)
        deal = mine if sampler is None else (sampler.num_replicas, sampler.rank)
        told = ranks.gather("to whom the samplers deal out", deal)
        strange = [rank for rank, each in enumerate(told) if each != (ranks.world_size, rank)]
        if strange:
            replicas, number = told[strange[0]]
            raise SamplerError(
                f"the rest of this epoch is to be dealt out to {ranks.world_size} processes, and"
                f" the DistributedSampler of rank {strange[0]} has num_replicas={replicas} and"
                f" rank={number}, so what is left for whom cannot be told; change the number of"
                " processes at the end of an epoch, and go on with the former number until then"
            )

    def list_share(self, sampler: DistributedSampler[Any], rank: int) -> list[int]:
        """Return the indices of one process.

        All have the same number: those of the epoch's beginning come once more, or the last ones
        are left out (``drop_last``), as the sampler itself does it.
        """
        if self.is_whole:
            whole = _copy(sampler, self.world_size, rank)
            return list(whole)
        order = list(_copy(sampler, 1, 0))
        left = order[self.samples :]
        over = len(left) % self.world_size
        if over and sampler.drop_last:
            left = left[:-over]
        elif over:
            left += list(itertools.islice(itertools.cycle(order), self.world_size - over))
        return left[rank :: self.world_size]

    def go_on(
        self, loader: DataLoader[Any], sampler: DistributedSampler[Any], batch: int, world_size: int
    ) -> Division:
        """Return how the rest is dealt out after ``batch`` batches of each process."""
        share = len(self.list_share(sampler, 0))
        done = min((batch - self.batches) * (loader.batch_size or 1), share) * self.world_size
        count = len(sampler.dataset)  # type: ignore[arg-type]
        return Division(world_size, min(self.samples + done, count), batch)

    def prove(self, loader: DataLoader[Any], sampler: Any, rank: int, batch: int) -> str:
        """Return the digest of what a process has handed out of this by ``batch``."""
        digest = proof.START
        batches = iter(make_sampler(loader, self.list_share(sampler, rank)))
        for indices in itertools.islice(batches, batch - self.batches):
            digest = proof.extend(digest, indices)
        return digest


def find_sampler(loader: object) -> DistributedSampler[Any] | None:
    """Return the sampler of a loader if its order can be dealt out anew."""
    if not isinstance(loader, DataLoader):
        return None
    sampler: object = loader.sampler
    if loader.batch_sampler is not None:
        if type(loader.batch_sampler) is not BatchSampler:
            return None
        sampler = loader.batch_sampler.sampler
    if not isinstance(sampler, DistributedSampler):
        return None
    return sampler if type(sampler).__iter__ is DistributedSampler.__iter__ else None


def make_sampler(loader: DataLoader[Any], share: Sequence[int]) -> Iterable[Any]:
    """Return what stands for the loader's index sampler while it hands out a share."""
    batches = loader.batch_sampler
    if not isinstance(batches, BatchSampler):
        return share
    return BatchSampler(share, batches.batch_size, batches.drop_last)


def doubt_division(
    loader: DataLoader[Any],
    sampler: DistributedSampler[Any],
    position: Mapping[str, Any],
    ranks: Iterable[int],
) -> Iterator[str]:
    """Say for which of the saved processes the indices that are done are not those of the run."""
    division = Division.read(position)
    strange = [
        rank
        for rank in ranks
        if division.prove(loader, sampler, rank, position["batch"]) != position["digests"][rank]
    ]
    if strange:
        yield (
            f"the indices of the {position['batch']} batches that are done on rank"
            f" {', '.join(map(str, strange))} are not those of the saved run: set_epoch was not"
            " called, or the sampler's seed, the dataset or the batch size changed"
        )


def _copy(sampler: DistributedSampler[Any], world_size: int, rank: int) -> DistributedSampler[Any]:
    copied = DistributedSampler[Any](
        sampler.dataset,
        num_replicas=world_size,
        rank=rank,
        shuffle=sampler.shuffle,
        seed=sampler.seed,
        drop_last=sampler.drop_last and world_size > 1,
    )
    copied.epoch = sampler.epoch
    return copied
