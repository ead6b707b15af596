"""What a loop hands out: epochs, batches, and steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from builtin_plugins.course import Course
from builtin_plugins.data_pass import Repeat
from hookbus.errors import LoopError
from hookbus.logs import say


class Epochs:
    """Hands out epochs; the end of each is noticed when the next one is asked for."""

    def __init__(self, course: Course, n: int) -> None:
        self._course = course
        self._n = n
        self._rollbacks = course.rollbacks
        self._begun = self._over = False

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Epochs:
        return self

    def __next__(self) -> int:
        course = self._course
        if self._over:
            raise StopIteration
        if self._begun:
            course.check_outer(self, self._rollbacks)
            course.end_epoch()
        else:
            course.check_alive(self._rollbacks)
            course.begin_outer(self, "epochs", self._n)
        epoch = course.next_epoch
        ended_early = course.is_finished and not (course.finishing and not self._begun)
        if epoch >= self._n or ended_early:
            if not self._begun:
                say_done(f"{epoch} of {self._n} epochs, {course.at.step} steps", course.is_finished)
            self._over = True
            course.end_outer()
            raise StopIteration
        self._begun = True
        course.begin_epoch(epoch)
        return epoch


class Batches:
    """An iterable with the loader's length; each iteration is one `batches()` of the epoch."""

    def __init__(self, course: Course, loader: Iterable[Any], repeat: Repeat) -> None:
        self._course = course
        self._loader = loader
        self._repeat = repeat

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"{type(self._loader).__qualname__} has no length")
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return _BatchIterator(self._course, self._loader, self._repeat)


class _BatchIterator:
    def __init__(self, course: Course, loader: Iterable[Any], repeat: Repeat) -> None:
        self._course = course
        self._rollbacks = course.rollbacks
        course.check_alive(self._rollbacks)
        self._iterator = course.open(loader, repeat)
        self._turn = course.turn
        self._over = False

    def __iter__(self) -> _BatchIterator:
        return self

    def __next__(self) -> Any:
        course = self._course
        if self._over:
            raise StopIteration
        course.check_alive(self._rollbacks)
        if self._turn != course.turn:
            raise LoopError(
                "one batches() inside another, or side by side in a zip: the loop has one place in"
                " the data; make one iterable of several loaders"
            )
        try:
            return course.next_batch(self._iterator)
        except StopIteration:
            self._over, self._iterator = True, None
            raise


class Steps:
    """Hands out bodies until enough steps are done.

    No generator does it, since that would hold this and be held by it, and the script's leaving
    the loop would go unnoticed.
    """

    def __init__(
        self, course: Course, n: int, loader: Iterable[Any] | None, repeat: Repeat
    ) -> None:
        self._course = course
        self._n = n
        self._loader = loader
        self._repeat = repeat
        self._batches: Iterator[Any] | None = None
        self._steps_before: int | None = None
        self._rollbacks = course.rollbacks
        self._begun = self._over = False

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> Any:
        course = self._course
        if self._over:
            raise StopIteration
        if self._begun:
            course.check_outer(self, self._rollbacks)
            course.end_body()
        else:
            course.check_alive(self._rollbacks)
            course.begin_outer(self, "steps", self._n)
            if self._is_done():
                say_done(f"{course.at.step} of {self._n} steps", course.is_finished)
            self._begun = True
        if self._is_done():
            self._over, self._batches = True, None
            course.end_outer()
            raise StopIteration
        if self._loader is None:
            course.put_streams()
            course.begin_body()
            return course.at.step
        return self._next_batch(self._loader)

    def _is_done(self) -> bool:
        return self._course.at.step >= self._n or self._course.is_finished

    def _next_batch(self, loader: Iterable[Any]) -> Any:
        course = self._course
        while True:
            if self._batches is None:
                self._steps_before = None if course.is_pending else course.at.step
                course.begin_epoch(course.next_epoch)
                self._batches = iter(Batches(course, loader, self._repeat))
            try:
                return next(self._batches)
            except StopIteration:
                self._batches = None
            course.end_epoch()
            if course.at.step == self._steps_before and not course.may_be_void:
                raise LoopError(
                    "a whole epoch passed without a step of an attached optimizer, so"
                    f" steps({self._n}) would never end"
                )


def say_done(what: str, ended_early: bool) -> None:
    why = "was finished early" if ended_early else "is done"
    say(f"this run {why}: {what} are done; pass a larger limit to go on")
