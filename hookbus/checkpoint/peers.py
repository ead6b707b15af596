"""What writing asks of the processes that write one checkpoint together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


class Peers(Protocol):
    """The processes that write together, as one of them sees them."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, place: str, value: _T) -> list[_T]:
        """Return what each gives."""

    def share(self, place: str, value: _T) -> _T:
        """Return what rank 0 gives."""

    def together(self, place: str) -> AbstractContextManager[None]:
        """Raise on all what is raised on one."""

    def exchange(self, work: Callable[[], _T], decide: Callable[[list[_T]], Sequence[_R]]) -> _R:
        """Do ``work`` on every rank and ``decide`` on rank 0, which returns something for each.

        What is raised on one rank is raised on all.
        """
