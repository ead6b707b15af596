"""When a run is saved: rules that a `SavePolicy` asks at each safe point."""

from __future__ import annotations

import attrs

from builtin_plugins.rules import check_count, check_positive, spell, warn_once
from hookbus.errors import CallError


@attrs.frozen
class Moment:
    """A safe point, as a rule sees it.

    ``step_before`` is the step at the safe point before this one. ``epoch`` is ``None`` where there
    are none: in ``loop.steps(n)`` without a loader. ``seconds`` have passed since the state was
    last saved, by this start of the run or another; ``running`` are those of this start. ``saving``
    says that it is still being written. ``blocked`` is how many seconds training stood still for
    the last save, ``writing`` how many it took in all; ``None`` where no save was measured yet.
    """

    step: int
    step_before: int
    epoch: int | None
    epoch_ended: bool
    seconds: float
    running: float
    saving: bool
    blocked: float | None
    writing: float | None


class When:
    """A rule; ``a | b`` saves where either of them wants it."""

    def is_due(self, moment: Moment) -> bool:
        raise NotImplementedError

    def list_due(self, moment: Moment) -> list[str]:
        """Return in words what is due."""
        return [str(self)] if self.is_due(moment) else []

    def __or__(self, other: When) -> When:
        if not isinstance(other, When):
            return NotImplemented
        return _AnyOf((self, other))


@attrs.frozen
class EverySteps(When):
    """Save right after each multiple of ``steps``."""

    steps: int = attrs.field(validator=check_count)

    def is_due(self, moment: Moment) -> bool:
        return moment.step // self.steps > moment.step_before // self.steps

    def __str__(self) -> str:
        return f"every {self.steps} steps"


@attrs.frozen
class EverySeconds(When):
    """Save at the first safe point ``seconds`` after the last save, whoever asked for that.

    The time goes on between two starts, so that a run which never lasts so long is saved too.
    """

    seconds: float = attrs.field(validator=check_positive)

    def is_due(self, moment: Moment) -> bool:
        return moment.seconds >= self.seconds

    def __str__(self) -> str:
        return f"every {self.seconds:g} seconds"


@attrs.frozen
class EveryEpochs(When):
    """Save at the end of the own code of each ``epochs``-th epoch, so after its validation."""

    epochs: int = attrs.field(default=1, validator=check_count)

    def is_due(self, moment: Moment) -> bool:
        if moment.epoch is None:
            warn_once(f"{spell(self)}: loop.steps(n) without a loader has no epochs")
            return False
        return moment.epoch_ended and (moment.epoch + 1) % self.epochs == 0

    def __str__(self) -> str:
        return "every epoch" if self.epochs == 1 else f"every {self.epochs} epochs"


@attrs.frozen
class OverheadTarget(When):
    """Save as often as keeps training still for about ``share`` of its time.

    The first safe point is saved, to measure; from then on the next save comes once the last one
    has cost no more than ``share`` of the time since. It never comes before the last one could
    have been written.
    """

    share: float = attrs.field(validator=check_positive)

    @share.validator
    def _check_share(self, attribute: object, value: object) -> None:
        if self.share >= 1:
            raise CallError(f"pass a share of the time, such as 0.02, not {spell(self)}")

    def is_due(self, moment: Moment) -> bool:
        if moment.blocked is None or moment.writing is None:
            return moment.step > 0 and not moment.saving
        due = moment.running >= max(moment.blocked / self.share, moment.writing)
        return due and not moment.saving  # the last one may take longer than the one before it

    def __str__(self) -> str:
        return f"{self.share:.0%} of the time"


@attrs.frozen
class _AnyOf(When):
    rules: tuple[When, ...]

    def is_due(self, moment: Moment) -> bool:
        return bool(self.list_due(moment))

    def list_due(self, moment: Moment) -> list[str]:
        return [text for rule in self.rules for text in rule.list_due(moment)]

    def __str__(self) -> str:
        return " or ".join(map(str, self.rules))
