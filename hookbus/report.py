"""What one resume did with each section, and what it has to say about it."""

from __future__ import annotations

from typing import Any, Literal

import attrs
from rich.filesize import decimal

Status = Literal["restored", "fresh", "skipped", "missing", "unclaimed", "empty"]

_HEADINGS = ("section", "kind", "status", "event", "seconds", "bytes", "plugin")


@attrs.define(eq=False)
class SectionReport:
    """Tell what became of one section: `event` is the one in which it was restored."""

    name: str
    kind: str
    plugin: str
    distribution: str | None
    status: Status
    event: str | None = None
    seconds: float = 0.0
    bytes: int = 0


@attrs.frozen
class Change:
    """A setting that is not as it was saved.

    With ``"keep"`` the saved value is used, with ``"adapt"`` the run's. ``exact`` tells whether
    the run goes on bit for bit all the same; ``why`` is the reason for what was decided.
    """

    who: str | None
    setting: str
    saved: str
    now: str
    then: Literal["keep", "adapt"]
    exact: bool
    why: str

    def __str__(self) -> str:
        who = f"{self.who}: " if self.who else ""
        used = "the saved one is used" if self.then == "keep" else "the run's is used"
        lost = "" if self.exact else ", so not bit for bit"
        why = f" ({self.why})" if self.why else ""
        return f"{who}{self.setting}: saved {self.saved}, run has {self.now}; {used}{lost}{why}"


@attrs.define(eq=False)
class Report:
    """Tell what one resume did; ``str()`` is a table of plain text.

    ``fresh`` is true where nothing of this run was there, so for a warm start too, which has a
    ``checkpoint`` all the same. ``events`` are seconds by event. ``sharded_first`` names the
    plugins that answered ``False`` to ``restore_before_configure_sharded``. ``changes`` are the
    settings that differ from the saved ones.
    """

    checkpoint: str | None = None
    step: int | None = None
    stage: str = "fit"
    fresh: bool = True
    sections: dict[str, SectionReport] = attrs.field(factory=dict)
    events: dict[str, float] = attrs.field(factory=dict)
    sharded_first: list[str] = attrs.field(factory=list)
    changes: list[Change] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)

    def add(
        self, name: str, kind: str, plugin: str, distribution: str | None, status: Status
    ) -> None:
        """Add a section, in place of the one of that name if there is one."""
        self.sections[name] = SectionReport(name, kind, plugin, distribution, status)

    def set_status(
        self,
        name: str,
        status: Status,
        *,
        event: str | None = None,
        seconds: float = 0.0,
        bytes: int = 0,
    ) -> None:
        """Say what became of a section, in which event, and add the seconds and bytes it took.

        Raises:
            KeyError: no section of that name was added.
        """
        section = self.sections[name]
        section.status = status
        section.event = event or section.event
        section.seconds += seconds
        section.bytes += bytes

    def note(self, text: str, name: str | None = None) -> bool:
        """Note something, under the name of a section if it concerns one; the same note once.

        Returns whether it is new.
        """
        line = text if name is None else f"{name}: {text}"
        is_new = line not in self.notes
        if is_new:
            self.notes.append(line)
        return is_new

    def time(self, event: str, seconds: float) -> None:
        """Add the seconds that an event took."""
        self.events[event] = self.events.get(event, 0.0) + seconds

    def to_dict(self) -> dict[str, Any]:
        """Give everything as dicts, lists and plain values, ready for JSON."""
        return attrs.asdict(self)

    def __str__(self) -> str:
        lines = [self._describe_start()]
        if self.sections:
            lines += _align_rows([_HEADINGS, *map(_describe_section, self.sections.values())])
        if self.events:
            each = ", ".join(f"{event} {seconds:.3f}" for event, seconds in self.events.items())
            lines.append(f"{sum(self.events.values()):.3f} seconds: {each}")
        if self.sharded_first:
            names = ", ".join(self.sharded_first)
            lines.append(f"restore_model came after configure_sharded, as asked by {names}")
        lines += [f"changed: {change}" for change in self.changes]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _describe_start(self) -> str:
        if self.checkpoint is None:
            return f"fresh start, stage {self.stage}"
        how = "warm start from" if self.fresh else "resumed from"
        return f"{how} {self.checkpoint}, step {self.step}, stage {self.stage}"


def _describe_section(section: SectionReport) -> tuple[str, ...]:
    origin = f" ({section.distribution})" if section.distribution else ""
    restored = section.status == "restored"
    return (
        section.name,
        section.kind,
        section.status,
        section.event or "",
        f"{section.seconds:.3f}" if restored else "",
        decimal(section.bytes) if restored else "",
        section.plugin + origin,
    )


def _align_rows(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
