"""The order of the restore events, kept for whoever fires them."""

from __future__ import annotations

import attrs

from hookbus.errors import SequenceError

RESUME_EVENTS = (
    "resume_start",
    "on_setup",
    "restore_model",
    "pre_configure_sharded",
    "configure_sharded",
    "restore_training_state",
    "resume_end",
)
RESTORE_EVENTS = ("restore_model", "restore_training_state")


@attrs.define(eq=False)
class Sequence:
    """Where one resume stands.

    ``behind`` puts ``restore_model`` behind ``configure_sharded``; ``skippable`` names the events
    that restore nothing this time, so that they may be left out.
    """

    skippable: tuple[str, ...] = ()
    behind: bool = False
    fired: list[str] = attrs.field(factory=list, init=False)
    left_out: list[str] = attrs.field(factory=list, init=False)
    broken: str | None = attrs.field(default=None, init=False)

    @property
    def order(self) -> tuple[str, ...]:
        if not self.behind:
            return RESUME_EVENTS
        order = [event for event in RESUME_EVENTS if event != "restore_model"]
        order.insert(order.index("configure_sharded") + 1, "restore_model")
        return tuple(order)

    @property
    def ended(self) -> bool:
        return "resume_end" in self.fired

    def begin(self, event: str) -> None:
        """Note that ``event`` is being fired.

        Raises:
            SequenceError: it was fired before, its turn has not come, or the resume is over.
        """
        if self.broken:
            raise SequenceError(
                f"{event}: this resume broke in {self.broken} and cannot go on; start a new one"
            )
        if self.ended:
            raise SequenceError(f"{event} was fired after the resume had ended: {self}")
        if event in self.fired:
            raise SequenceError(f"{event} was fired twice: {self}")
        due = self.list_due(event)
        if event in self.left_out or any(name not in self.skippable for name in due):
            raise SequenceError(f"{event} was fired out of turn: {self}")
        if event == "pre_configure_sharded" and due:
            self.behind = True  # restore_model restores nothing, so either side is its turn
        else:
            self.left_out += due
        self.fired.append(event)

    def list_left(self) -> tuple[str, ...]:
        """Return the events whose turn is still to come."""
        return tuple(e for e in self.order if e not in self.fired and e not in self.left_out)

    def list_due(self, event: str) -> tuple[str, ...]:
        """Return what stands before ``event`` and has not been fired."""
        left = self.list_left()
        return left[: left.index(event)] if event in left else ()

    def __str__(self) -> str:
        marks = dict.fromkeys(self.fired, "fired")
        next_ = next(iter(self.list_left()), None)
        if next_:
            marks[next_] = "next"
        return ", ".join(
            f"{event} ({marks[event]})" if event in marks else event for event in self.order
        )
