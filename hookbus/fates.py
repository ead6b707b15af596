"""What becomes of each section of a checkpoint in one resume, and what stands in the way."""

from __future__ import annotations

import difflib
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

    def find_section(self, name: str) -> str:
        """Return the name of the section that plugin ``name`` reads, which may be a former one."""
        if self.checkpoint is None or name in self.checkpoint.sections:
            return name
        entries = (entry for entry in self._list_savers() if entry.name == name)
        former = (each for entry in entries for each in self._list_former(entry))
        return next(former, name)

    @property
    def renamed(self) -> dict[str, str]:
        """The names of sections that are read under former ones, with those of this run."""
        found = {self.find_section(entry.name): entry.name for entry in self._list_savers()}
        return {section: name for section, name in found.items() if section != name}

    def judge(self, name: str) -> Status:
        """Return what becomes of a section: restored, skipped, missing, fresh or empty.

        Whoever asks for a section or leaves it out may call it by either of its names.
        """
        checkpoint = self.checkpoint
        if checkpoint is None:
            return "fresh"
        section = self.find_section(name)
        names = {name, section}
        if self.is_warm_start and not _match_any(names, self.request.init_only):
            return "fresh"
        if self.request.only is not None and not _match_any(names, self.request.only):
            return "fresh"
        if _match_any(names, self.request.skip):
            return "skipped"
        if section not in checkpoint.sections:
            return "missing"
        return "empty" if checkpoint.sections[section].empty else "restored"

    def restores(self, entry: Registered) -> bool:
        """Whether a plugin is to take its section back."""
        is_due = self.checkpoint is not None and entry.has_section and self.concerns(entry)
        return is_due and self.judge(entry.name) == "restored"

    def is_another_kind(self, entry: Registered) -> bool:
        """Whether a section that is to be restored was saved for another kind of thing."""
        if self.checkpoint is None or not entry.has_section or self.judge(entry.name) != "restored":
            return False
        section = self.checkpoint.sections[self.find_section(entry.name)]
        return section.kind != (entry.kind or "")

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
        claimed: dict[str, Registered] = {}
        for entry in self._list_savers():
            name, section_name = entry.name, self.find_section(entry.name)
            is_missing = self.concerns(entry) and self.judge(name) == "missing"
            if is_missing and not matches(name, self.request.missing_ok):
                yield self._describe_missing(entry)
            if self.concerns(entry) and self.is_another_kind(entry):
                yield self._describe_kinds(entry)
            if entry.kind == "loop":
                yield from self._find_lost_progress(entry)
            if section_name in claimed:
                yield self._describe_two_claims(section_name, claimed[section_name], entry)
            claimed[section_name] = entry
            yield from self._find_two_names(entry, is_due)
        for name, section in self._get_checkpoint().sections.items():
            asked = matches(name, self.list_asked()) and not self.is_left_out(name)
            if asked and name not in claimed and is_due(section):
                yield self._describe_unclaimed(section)

    def list_wanted(self, *, may_grow: bool) -> list[str]:
        """Return the sections that may be read; ``may_grow``: more plugins may come."""
        readers = {self.find_section(entry.name): entry.name for entry in self.entries}
        everything = may_grow or self.request.stage == "fit"
        return [
            name
            for name in self._get_checkpoint().sections
            if self.judge(readers.get(name, name)) == "restored" and (everything or name in readers)
        ]

    def _list_savers(self) -> list[Registered]:
        return [entry for entry in self.entries if entry.has_section]

    def _list_former(self, entry: Registered) -> list[str]:
        """Return the sections under former names of a plugin that nobody bears now.

        One that the script has given to a plugin is nobody else's.
        """
        given = self.request.aliases
        former = [given[entry.name]] if entry.name in given else []
        former += [each for each in entry.aliases if each not in given.values()]
        if not former:
            return []
        taken = {each.name for each in self._list_savers()}
        sections = self._get_checkpoint().sections
        return [each for each in former if each in sections and each not in taken]

    def _describe_kinds(self, entry: Registered) -> HookbusError:
        section = self._get_checkpoint().sections[self.find_section(entry.name)]
        return MismatchError(
            f"section {section.name!r} was saved by {section.plugin}, of kind {section.kind!r}, and"
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
            + self._suggest_alias(entry)
        )

    def _suggest_alias(self, entry: Registered) -> str:
        """Name the section that a plugin may have written under a former name."""
        given = self.request.aliases.get(entry.name)
        if given is not None and any(each.name == given for each in self._list_savers()):
            return f"; its alias {given!r} is the section of another plugin on the bus"
        claimed = {self.find_section(each.name) for each in self._list_savers()}
        likely = [
            section.name
            for section in self._get_checkpoint().sections.values()
            if section.kind == (entry.kind or "")
            and not (section.empty or section.name in claimed or self.is_left_out(section.name))
        ]
        if not likely:
            return ""
        near = difflib.get_close_matches(entry.name, likely, n=1, cutoff=0.0)[0]
        aliases = {**self.request.aliases, entry.name: near}
        listed = " and ".join(map(repr, likely))
        return (
            f"; nobody reads {listed} of the same kind: if it is the same under a former name, pass"
            f" aliases={aliases}"
        )

    def _describe_two_claims(
        self, section: str, first: Registered, second: Registered
    ) -> HookbusError:
        return MismatchError(
            f"section {section!r} is a former name of both {first.name!r} and {second.name!r}; say"
            f" whose it is, and which of them is new: aliases={{{first.name!r}: {section!r}}},"
            f" missing_ok=({second.name!r},)"
        )

    def _find_two_names(
        self, entry: Registered, is_due: Callable[[SectionInfo], bool]
    ) -> Iterator[HookbusError]:
        """Tell of sections under several names of one plugin: which of them is its own?"""
        sections = self._get_checkpoint().sections
        found = [entry.name] if entry.name in sections else []
        found += self._list_former(entry)
        skipped = [each for each in found if matches(each, self.request.skip)]
        if len(found) - len(skipped) > 1 and is_due(sections[found[-1]]):
            yield MismatchError(
                f"{entry} has the sections {' and '.join(map(repr, found))} in"
                f" {self._get_checkpoint().path}, its own and a former name, and reads one of them;"
                f" pass skip= with those that are not meant, such as skip=({found[-1]!r},)"
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


def _match_any(names: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(matches(name, patterns) for name in names)
