"""Which checkpoints of a run are kept: rules that a `SavePolicy` asks after each save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

import hookbus
from builtin_plugins.rules import check_count, spell, warn_once
from hookbus.errors import CallError

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


@attrs.frozen
class KeepLast(Keep):
    """Keep the newest ``count``."""

    count: int = attrs.field(validator=check_count)

    def choose(self, checkpoints: Checkpoints) -> Checkpoints:
        return checkpoints[-self.count :]


@attrs.frozen
class KeepBest(Keep):
    """Keep the ``count`` with the smallest or largest metric; of equal ones the older.

    A checkpoint without the metric, or with nan, is never among them.
    """

    metric: str = attrs.field()
    count: int = attrs.field(default=1, validator=check_count)
    mode: Literal["min", "max"] = attrs.field(default="min", kw_only=True)

    @metric.validator
    def _check_metric(self, attribute: object, value: object) -> None:
        if not isinstance(value, str):
            raise CallError(f"pass the name of a metric, not {spell(self)}")

    @mode.validator
    def _check_mode(self, attribute: object, value: object) -> None:
        if value not in ("min", "max"):
            raise CallError(f"pass mode='min' or 'max', not {value!r}")

    def choose(self, checkpoints: Checkpoints) -> Checkpoints:
        names = {name for each in checkpoints for name in each.metrics}
        if names and self.metric not in names:
            warn_once(f"KeepBest({self.metric!r}): no checkpoint has it; they have {sorted(names)}")
        return hookbus.sort_by_metric(checkpoints, self.metric, self.mode)[: self.count]


@attrs.frozen(kw_only=True)
class KeepEvery(Keep):
    """Keep the first checkpoint at or after each multiple of ``steps``."""

    steps: int = attrs.field(validator=check_count)

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
