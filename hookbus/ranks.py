"""The processes of one run as the bus asks them. One process has nobody to ask.

Every method of it returns at once, so that nothing is paid where there are no others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


class Ranks:
    """One process alone: it is rank 0 of 1 and agrees with itself."""

    rank = 0
    world_size = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank does what is done once."""
        return self.rank == 0

    @property
    def is_current(self) -> bool:
        """Whether these are still the processes of the run."""
        return not is_distributed()

    def any(self, place: str, flag: bool) -> bool:
        """Whether any rank says so."""
        return flag

    def largest(self, place: str, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return number

    def gather(self, place: str, value: _T) -> list[_T]:
        """Return what each rank gives, by rank."""
        return [value]

    def share(self, place: str, value: _T) -> _T:
        """Return what rank 0 gives."""
        return value

    def agree(self, place: str, values: Mapping[str, object]) -> None:
        """Compare plain values across the ranks.

        Raises:
            RankError: they differ; on all ranks, and it names ranks and values.
        """

    @contextlib.contextmanager
    def together(self, place: str) -> Iterator[None]:
        """Raise on all ranks what is raised in here on one.

        Raises:
            RankError: another rank broke, with its traceback as a note; or it is gone.
        """
        yield

    def exchange(self, work: Callable[[], _T], decide: Callable[[list[_T]], Sequence[_R]]) -> _R:
        """Do ``work`` on every rank and ``decide`` on rank 0, which returns something for each.

        What is raised on one rank is raised on all.
        """
        return decide([work()])[0]

    def leave_word(self, where: str, error: BaseException) -> None:
        """Leave word of an error for ranks that lose this one."""

    def make_others(self) -> Ranks:
        """Make a group of the same ranks for another thread; all of them call it."""
        return self

    def close(self) -> None:
        """Let the group go: ranks that wait in it learn that this one does not come."""


ALONE = Ranks()


def is_distributed() -> bool:
    """Whether this process is one of several."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
