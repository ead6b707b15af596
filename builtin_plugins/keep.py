"""Which checkpoints of a run are kept: rules that a `SavePolicy` asks after each save."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Literal

import attrs

import hookbus
from builtin_plugins.when import check_count
from hookbus.errors import CallError

logger = logging.getLogger("hookbus")

Checkpoints = Sequence[hookbus.Checkpoint]


class Keep:
    """A rule; ``a | b`` keeps what either of them wants. The newest is kept in any case."""

    def choose(self, checkpoints: Checkpoints) -> Checkpoints:
        """Return those to keep of a run's checkpoints, which are given oldest first."""
        raise NotImplementedError

    def __or__(self, other: Keep) -> Keep:
        if not isinstance(other, Keep):
            return NotImplemented
        return _AnyOf((self, other))


@functools.cache
def _warn(text: str) -> None:
    """Log a warning, once in this process."""
    logger.warning(text)


@attrs.frozen
class KeepLast(Keep):
    """Keep the newest ``count``."""

    count: int = attrs.field()

    @count.validator
    def _check(self, attribute: object, value: object) -> None:
        check_count(f"KeepLast({value!r})", value)

    def choose(self, checkpoints: Checkpoints) -> Checkpoints:
        return checkpoints[-self.count :]


@attrs.frozen
class KeepBest(Keep):
    """Keep the ``count`` with the smallest or largest metric; of equal ones the older.

    A checkpoint without the metric, or with nan, is never among them.
    """

    metric: str = attrs.field()
    count: int = attrs.field(default=1)
    mode: Literal["min", "max"] = attrs.field(default="min", kw_only=True)

    @count.validator
    def _check(self, attribute: object, value: object) -> None:
        check_count(f"KeepBest({self.metric!r}, {value!r})", value)

    @metric.validator
    def _check_metric(self, attribute: object, value: object) -> None:
        if not isinstance(value, str):
            raise CallError(f"pass the name of a metric, not KeepBest({value!r})")

    @mode.validator
    def _check_mode(self, attribute: object, value: object) -> None:
        if value not in ("min", "max"):
            raise CallError(f"pass mode='min' or 'max', not {value!r}")

    def choose(self, checkpoints: Checkpoints) -> Checkpoints:
        nan = float("nan")
        valued = [(each.metrics.get(self.metric, nan), each) for each in checkpoints]
        able = [(value, each) for value, each in valued if value == value]
        names = {name for each in checkpoints for name in each.metrics}
        if names and self.metric not in names:
            _warn(f"KeepBest({self.metric!r}): no checkpoint has it; they have {sorted(names)}")
        sign = 1 if self.mode == "min" else -1
        return [each for _, each in sorted(able, key=lambda pair: sign * pair[0])][: self.count]


@attrs.frozen(kw_only=True)
class KeepEvery(Keep):
    """Keep the first checkpoint at or after each multiple of ``steps``."""

    steps: int = attrs.field()

    @steps.validator
    def _check(self, attribute: object, value: object) -> None:
        check_count(f"KeepEvery(steps={value!r})", value)

    def choose(self, checkpoints: Checkpoints) -> Checkpoints:
        first: dict[int, hookbus.Checkpoint] = {}
        for each in checkpoints:
            first.setdefault(each.step // self.steps, each)
        return [each for multiple, each in first.items() if multiple]


@attrs.frozen
class KeepTagged(Keep):
    """Keep those that were saved with a tag: ``bus.save(tag="paper")``."""

    def choose(self, checkpoints: Checkpoints) -> Checkpoints:
        return [each for each in checkpoints if each.tag is not None]


@attrs.frozen
class _AnyOf(Keep):
    rules: tuple[Keep, ...]

    def choose(self, checkpoints: Checkpoints) -> Checkpoints:
        return [each for rule in self.rules for each in rule.choose(checkpoints)]
