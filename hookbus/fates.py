"""What becomes of each section of a checkpoint in one resume, and what stands in the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs

from hookbus.checkpoint import Checkpoint, SectionInfo
from hookbus.entry_points import Failed, is_installed
from hookbus.errors import (
    HookbusError,
    MismatchError,
    MissingSectionError,
    ResumeError,
    UnclaimedSectionError,
)
from hookbus.registration import BY_HAND, Registered, describe
from hookbus.report import Status
from hookbus.request import Request, matches


@attrs.frozen(eq=False)
class Fates:
    """A checkpoint, what was asked for, and who is on the bus, as they are now."""

    checkpoint: Checkpoint | None
    fresh: bool
    request: Request
    entries: Sequence[Registered]
    components: Mapping[str, object]
    blocked: frozenset[str]
    failed: Sequence[Failed] = ()

    @property
    def is_warm_start(self) -> bool:
        return self.fresh and self.checkpoint is not None

    def concerns(self, entry: Registered) -> bool:
        """Whether this stage restores what a plugin saves."""
        return self.request.stage == "fit" or "restore_model" in entry.events

    def judge(self, name: str) -> Status:
        """Return what becomes of a section: restored, skipped, missing, fresh or empty."""
        checkpoint = self.checkpoint
        if checkpoint is None:
            return "fresh"
        if self.is_warm_start and not matches(name, self.request.init_only):
            return "fresh"
        if self.request.only is not None and not matches(name, self.request.only):
            return "fresh"
        if matches(name, self.request.skip):
            return "skipped"
        if name not in checkpoint.sections:
            return "missing"
        return "empty" if checkpoint.sections[name].empty else "restored"

    def is_another_kind(self, entry: Registered) -> bool:
        """Whether a section that is to be restored was saved for another kind of thing."""
        if self.checkpoint is None or not entry.has_section or self.judge(entry.name) != "restored":
            return False
        return self.checkpoint.sections[entry.name].kind != (entry.kind or "")

    def is_blocked(self, name: str) -> bool:
        """Whether a section is of a plugin that is blocked, or of what such a one looked after."""
        section = self._get_checkpoint().sections[name]
        looked_after = {each.name for each in self.entries if each.origin == BY_HAND}
        alone = name in self.components and name not in looked_after
        return alone or bool(self.blocked & {name, section.distribution})

    def is_left_out(self, name: str) -> bool:
        return matches(name, self.request.skip) or self.is_blocked(name)

    def list_asked(self) -> Sequence[str]:
        """Return patterns of the sections that were asked for, so that somebody must be there."""
        if self.is_warm_start:
            return self.request.init_only
        return ("*",) if self.request.stage == "fit" else self.request.only or ()

    def list_unmatched(self, argument: str, patterns: Iterable[str]) -> list[str]:
        """Say which patterns of an argument match no section and no plugin."""
        names = {*self._get_checkpoint().sections, *(entry.name for entry in self.entries)}
        if argument != "missing_ok":
            names.update(self.request.missing_ok)
        return [
            f"{argument}=({pattern!r},) matches none of {', '.join(sorted(names))}"
            for pattern in patterns
            if not any(matches(name, (pattern,)) for name in names)
        ]

    def list_problems(self, is_due: Callable[[SectionInfo], bool]) -> Iterator[HookbusError]:
        """Yield what sections and plugins do not find each other.

        ``is_due`` tells of a section whether whoever restores it must be there by now.
        """
        entries = {entry.name: entry for entry in self.entries if entry.has_section}
        for name, entry in entries.items():
            is_missing = self.concerns(entry) and self.judge(name) == "missing"
            if is_missing and not matches(name, self.request.missing_ok):
                yield self._describe_missing(entry)
            if self.concerns(entry) and self.is_another_kind(entry):
                yield self._describe_kinds(entry)
            if entry.kind == "loop":
                yield from self._find_lost_progress(entry)
        for name, section in self._get_checkpoint().sections.items():
            asked = matches(name, self.list_asked()) and not self.is_left_out(name)
            if asked and name not in entries and is_due(section):
                yield self._describe_unclaimed(section)

    def list_wanted(self, *, may_grow: bool) -> list[str]:
        """Return the sections that may be read; ``may_grow``: more plugins may come."""
        here = {entry.name for entry in self.entries}
        everything = may_grow or self.request.stage == "fit"
        return [
            name
            for name in self._get_checkpoint().sections
            if self.judge(name) == "restored" and (everything or name in here)
        ]

    def _describe_kinds(self, entry: Registered) -> HookbusError:
        section = self._get_checkpoint().sections[entry.name]
        return MismatchError(
            f"section {entry.name!r} was saved by {section.plugin}, of kind {section.kind!r}, and"
            f" the run has {type(entry.plugin).__qualname__}, of kind {entry.kind or ''!r}; attach"
            f" the same sort of thing, or pass skip=({entry.name!r},)"
        )

    def _describe_unclaimed(self, section: SectionInfo) -> HookbusError:
        name, distribution = section.name, section.distribution
        failed = [each for each in self.failed if each.distribution == distribution]
        own = [each for each in failed if each.name == name]
        if failed:  # of an attached component nobody knows which of them would have looked after it
            cause = f"; {'; '.join(map(str, own or failed))}"
            hint = "mend it" if own else "mend that and attach it"
        elif distribution and section.distribution_version and not is_installed(distribution):
            cause, hint = f": {distribution} is not installed", "install it"
        else:
            cause, hint = "", "attach it"
        who = describe(section.plugin, distribution, section.distribution_version)
        return UnclaimedSectionError(
            f"the checkpoint has a section {name!r}, written by {who}, and nobody on the bus"
            f" restores it{cause}; {hint}, or pass skip=({name!r},)"
        )

    def _describe_missing(self, entry: Registered) -> HookbusError:
        return MissingSectionError(
            f"{entry} is on the bus and {self._get_checkpoint().path} has no section"
            f" {entry.name!r}; pass missing_ok=({entry.name!r},) to start it fresh"
        )

    def _find_lost_progress(self, entry: Registered) -> Iterator[HookbusError]:
        """Tell of a loop that would begin at step 0 in a run whose newest checkpoint is further."""
        checkpoint = self._get_checkpoint()
        is_this_run = self.request.stage == "fit" and not self.fresh
        if is_this_run and checkpoint.step and self.judge(entry.name) != "restored":
            yield ResumeError(
                f"without section {entry.name!r} the loop would begin at step 0, below the newest"
                f" checkpoint, step {checkpoint.step}, and what it saves would never be taken;"
                " start a run of its own:"
                f" resume(NEW, init_from={str(checkpoint.path)!r}, init_only=(…))"
            )

    def _get_checkpoint(self) -> Checkpoint:
        assert self.checkpoint is not None
        return self.checkpoint
