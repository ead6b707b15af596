"""What the restore events are given: one pass through them, and how sections are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from hookbus.checkpoint import Checkpoint, Metadata
from hookbus.choosing import Choice
from hookbus.entry_points import Failed
from hookbus.errors import (
    AttachError,
    CallError,
    HookbusError,
    MismatchError,
    ResumeError,
    raise_all,
)
from hookbus.fates import Fates
from hookbus.logs import logger
from hookbus.ranks import ALONE, Ranks
from hookbus.registration import Registered
from hookbus.report import Change, Report
from hookbus.request import Request, Shard, Stage, matches
from hookbus.sections import SectionReader
from hookbus.sequence import RESTORE_EVENTS, Sequence

if TYPE_CHECKING:
    import torch

# Sections of these kinds are restored by restore_model, so whoever restores them must be there.
_MODEL_KINDS = ("datamodule", "model", "callbacks")


@attrs.define(eq=False)
class Resume:
    """One pass through the restore events, handed to each of them.

    ``stage`` is ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``. ``checkpoint`` is what is
    read from, ``None`` where nothing is; ``step`` counts the steps that are done. ``fresh`` says
    that nothing of this run was there, which holds for a warm start too. ``components`` are the
    live objects on the bus by name. ``report`` tells what became of each section.
    """

    run: Path
    request: Request = attrs.field(repr=False)
    checkpoint: Checkpoint | None
    fresh: bool
    components: Mapping[str, object] = attrs.field(repr=False)
    report: Report = attrs.field(repr=False)
    _entries: Callable[[], AbstractSequence[Registered]] = attrs.field(repr=False, alias="entries")
    _fire: Callable[..., Any] = attrs.field(repr=False, alias="fire")
    _may_grow: bool = attrs.field(repr=False, alias="may_grow")
    _by_script: bool = attrs.field(repr=False, alias="by_script")
    _blocked: frozenset[str] = attrs.field(repr=False, alias="blocked")
    _failed: AbstractSequence[Failed] = attrs.field(repr=False, alias="failed")
    ranks: Ranks = attrs.field(default=ALONE, repr=False)
    damaged: Mapping[Path, HookbusError] = attrs.field(factory=dict, repr=False)
    again: bool = attrs.field(default=False, repr=False)  # this bus was in the run by then
    sequence: Sequence = attrs.field(factory=Sequence, repr=False, init=False)
    _asking: list[Registered] = attrs.field(factory=list, repr=False, init=False)
    _problems: list[HookbusError] = attrs.field(factory=list, repr=False, init=False)
    event: str | None = attrs.field(default=None, repr=False, init=False)
    _read: set[str] = attrs.field(factory=set, repr=False, init=False)
    _readers: dict[Registered, SectionReader] = attrs.field(factory=dict, repr=False, init=False)
    _took: dict[str, tuple[str, float]] = attrs.field(factory=dict, repr=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._choose_rank()
        if self.checkpoint is None:
            self.sequence.skippable = RESTORE_EVENTS
        elif self.stage != "fit":
            self.sequence.skippable = ("restore_training_state",)

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a Resume cannot be pickled or copied")

    @property
    def stage(self) -> Stage:
        return self.request.stage

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None or self.fresh else self.checkpoint.step

    @property
    def rank(self) -> int:
        """Which of the processes of the run this is, from 0."""
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        """How many processes the run has now; ``checkpoint.world_size`` had it when saved."""
        return self.ranks.world_size

    def is_own(self, part: str | None = None) -> bool:
        """Whether each process had its own of the section of the plugin being called."""
        return self._open_section().is_own(part)

    @property
    def is_new_rank(self) -> bool:
        """Whether the checkpoint was saved by fewer processes, and this is one that it knows not.

        It reads what rank 0 had of its own.
        """
        return self.checkpoint is not None and self.ranks.rank >= self.checkpoint.world_size

    @property
    def set_up(self) -> bool:
        """Whether ``on_setup`` is over, so that components have all their layers."""
        return "on_setup" in self.sequence.fired and self.event != "on_setup"

    @property
    def name(self) -> str:
        """The name of the plugin being called, which is its section's."""
        return self._who().name

    # -- for plugins ---------------------------------------------------------------------------

    def read(
        self,
        part: str | None = None,
        *,
        targets: Mapping[str, torch.Tensor] | None = None,
        rank: int | None = None,
    ) -> Any:
        """Load the section of the plugin being called, or one part of it, and hand it over.

        Tensors are fresh, on the CPU, and belong to the caller; nothing else keeps them. Where
        ``targets`` has one under the name in ``metadata(part).tensors``, that one is filled in
        place and handed over instead; it may be sharded, and then only its shard is read. Of what
        each process has of its own it is that of this one, or of ``rank``. A state of an older
        version has been migrated to the plugin's.

        Raises:
            CorruptCheckpointError: the bytes are not those that were saved.
            MigrationError: a step of the migration broke.
        """
        state = self._open_section().read(part, targets=targets, rank=rank)
        self._read.add(self.name)
        return state

    def read_into(self, tree: Any, part: str | None = None, *, partial: bool = False) -> Any:
        """Copy the section of the plugin being called into ``tree``, in place, and return it.

        Bytes go straight from the file into the tensors of ``tree``; plain values are put into
        the dicts and lists that hold them. With ``partial`` only what both have is copied.

        Raises:
            MismatchError: names, shapes or dtypes differ; all of them are listed and nothing was
                changed.
            CorruptCheckpointError: the bytes are not those that were saved.
            MigrationError: a step of the migration broke.
        """
        tree = self._open_section().read_into(tree, part, partial=partial)
        self._read.add(self.name)
        return tree

    def metadata(self, part: str | None = None) -> Metadata:
        """Return names, shapes, dtypes, plain values and version of the section, without data.

        A state of an older version is described as it is after its migration.
        """
        return self._open_section().look(part)

    @property
    def parts(self) -> tuple[str | None, ...]:
        """The parts that the section of the plugin being called has; ``None`` is the nameless."""
        return self._open_section().parts

    @property
    def renamed(self) -> Mapping[str, str]:
        """The names of sections that are read under former ones, with those of this run."""
        return self.fates.renamed if self.checkpoint is not None else {}

    def problem(self, problem: str | HookbusError) -> None:
        """Say that the section does not fit; all problems are raised together."""
        if isinstance(problem, str):
            problem = MismatchError(f"{self.name}: {problem}")
        self._problems.append(problem)

    def change(
        self,
        setting: str,
        saved: object,
        now: object,
        *,
        then: Literal["keep", "adapt", "refuse"],
        exact: bool = True,
        why: str = "",
    ) -> None:
        """Say that a setting is not as it was saved, and what comes of it.

        ``"keep"`` uses the saved value, ``"adapt"`` the run's, ``"refuse"`` is a problem that ends
        the resume before the first change if it is said in ``check_state``. ``exact`` tells whether
        the run goes on bit for bit all the same.
        """
        if then == "refuse":
            self.problem(f"{setting} was {saved} when saved and is {now} in the run: {why}")
        else:
            who = self.name if self._asking else None
            change = Change(who, setting, str(saved), str(now), then, exact, why)
            if change not in self.report.changes:
                self.report.changes.append(change)

    def note(self, text: str, *, warn: bool = False) -> None:
        """Put a line about the plugin being called into the report; with ``warn`` log it too."""
        if self.report.note(text, self.name) and warn:
            logger.warning("%s: %s", self.name, text)

    # -- for scripts ---------------------------------------------------------------------------

    def setup(self) -> None:
        """Fire ``on_setup``."""
        self.advance("on_setup")

    def restore_model(self) -> None:
        """Fire ``restore_model``, unless it has to wait until the model is sharded."""
        if self.checkpoint is None:
            return
        if "on_setup" not in self.sequence.fired:
            self.advance("on_setup")
        if not self.sequence.behind:
            self.advance("restore_model")

    def configure_sharded(self, function: Shard | None = None) -> None:
        """Fire ``pre_configure_sharded`` and ``configure_sharded``, and what waited for them.

        ``function(resume)`` wraps or shards the model; what it returns takes the model's place.
        """
        if function is not None:
            if self.request.configure_sharded is not None:
                raise CallError("configure_sharded was given twice; leave one of them out")
            self.request = attrs.evolve(self.request, configure_sharded=function)
        self.advance("configure_sharded")
        if self.sequence.behind and self.checkpoint is not None:
            self.advance("restore_model")

    def restore_training_state(self) -> None:
        """Fire ``restore_training_state``."""
        if "restore_training_state" not in self.sequence.skippable:
            self.advance("restore_training_state")

    def advance(self, event: str) -> None:
        """Fire everything up to ``event``: what the script left out, then the event itself."""
        while True:
            left = self.sequence.list_left()
            due = next((each for each in left if each not in self.sequence.skippable), event)
            due = due if event in left else event  # out of turn, and the sequence says so
            arguments = {"stage": self.stage} if due == "on_setup" else {}
            self._fire(due, resume=self, **arguments)
            if due == event:
                return

    # -- for the bus ---------------------------------------------------------------------------

    def check_in_time(self, entry: Registered) -> None:
        """Refuse a plugin whose restore event has gone by: its section would never come back."""
        if self.sequence.broken or not entry.has_section:
            return
        for event in RESTORE_EVENTS if self.stage == "fit" else ("restore_model",):
            if event in entry.events and event not in self.sequence.list_left():
                raise AttachError(
                    f"{entry.name!r} came after {event}, so its section would never be restored;"
                    " attach it before"
                )

    def takes_part(self, entry: Registered, event: str) -> bool:
        """Whether ``entry`` is called in an event that restores something."""
        if event in self.sequence.skippable:
            return False
        if event not in (*RESTORE_EVENTS, "check_state"):
            return True
        if self.checkpoint is None or not self.fates.concerns(entry):
            return False
        if entry.has_section and self.fates.judge(entry.name) != "restored":
            return False
        return event != "check_state" or not (
            entry.name in self._read
            or self.fates.is_another_kind(entry)
            or (entry.has_section and not self._find_reader(entry).fits)
        )

    def collect_problems(self, *, last: bool) -> None:
        """Note sections and plugins that do not find each other; ``last``: nobody else comes."""
        self._problems += self.fates.list_problems(
            lambda section: last or (section.kind in _MODEL_KINDS and self.set_up)
        )
        fates = self.fates
        for entry in self._entries():
            if fates.restores(entry) and not fates.is_another_kind(entry):
                reader = self._find_reader(entry)
                self._problems += reader.check()
                for text in reader.describe_migrations():
                    self.report.note(text, entry.name)

    def list_wanted(self) -> list[str]:
        """Return the sections that this resume may read, which are verified first."""
        return self.fates.list_wanted(may_grow=self._may_grow)

    def check_patterns(self) -> None:
        """Refuse `only` and `init_only` that match nothing.

        Raises:
            CallError: each such pattern, and what there is.
        """
        fates = self.fates
        argument = "init_only" if fates.is_warm_start else "only"
        unmatched = fates.list_unmatched(argument, getattr(self.request, argument) or ())
        raise_all("nothing was changed", [CallError(text) for text in unmatched])

    def raise_problems(self, when: str) -> None:
        """Raise what has been collected, if anything, all together."""
        problems, self._problems = self._problems, []
        raise_all(f"{len(problems)} problems {when}", problems)

    def begin_call(self, entry: Registered) -> None:
        """Note whose section is meant from now on."""
        self._asking.append(entry)

    def end_call(self, entry: Registered, event: str, seconds: float) -> None:
        """Note that a plugin was called, and how long it took to take its section."""
        self._asking.pop()
        if entry.name in self._read and entry.name not in self._took:
            self._took[entry.name] = (event, seconds)

    def fall_back(self, choice: Choice) -> None:
        """Read from an older checkpoint, since the one that was chosen is damaged."""
        assert choice.checkpoint is not None
        self.checkpoint = choice.checkpoint
        self._choose_rank()
        self.report.checkpoint, self.report.step = str(choice.checkpoint.path), self.step

    def complete_report(self) -> None:
        """Say what became of each section of the checkpoint and of each plugin that saves."""
        entries = {entry.name: entry for entry in self._entries() if entry.has_section}
        renamed = self.renamed
        former = {name: section for section, name in renamed.items()}
        for name, entry in entries.items():
            status = self.fates.judge(name)
            if status == "restored" and name not in self._read:
                status = "fresh"
                if self.fates.concerns(entry):
                    logger.warning("%s has a section and did not read it", entry)
            self.report.add(
                name, entry.kind or "", type(entry.plugin).__qualname__, entry.distribution, status
            )
            if name in self._took and self.checkpoint is not None:
                event, seconds = self._took[name]
                size = self.checkpoint.sections[former.get(name, name)].bytes
                self.report.set_status(name, status, event=event, seconds=seconds, bytes=size)
                if name in former:
                    self.report.note(
                        f"restored from section {former[name]!r}, its former name", name
                    )
        for name, section in self.checkpoint.sections.items() if self.checkpoint else ():
            if name not in entries and name not in renamed:
                status = "skipped" if self.fates.is_left_out(name) else "unclaimed"
                self.report.add(name, section.kind, section.plugin, section.distribution, status)
                if self.fates.is_blocked(name) and not matches(name, self.request.skip):
                    self.report.note("left alone, since its plugin is blocked", name)
                    logger.warning("section %r is left alone, since its plugin is blocked", name)
        for argument in ("skip", "missing_ok") if self.checkpoint else ():
            for text in self.fates.list_unmatched(argument, getattr(self.request, argument)):
                self.tell(text)
        sections = self.checkpoint.sections if self.checkpoint else {}
        for name, old in self.request.aliases.items():
            if name not in entries:
                self.tell(f"aliases={{{name!r}: …}} names nobody on the bus that saves")
            elif name in sections and old in sections:  # it may be meant to swap them
                self.tell(f"aliases={{{name!r}: {old!r}}} does nothing: {name!r} is there too")

    def tell(self, text: str) -> None:
        """Put a line about the resume as a whole into the report, and log it."""
        self.report.note(text)
        logger.warning(text)

    @property
    def fates(self) -> Fates:
        """What becomes of each section, as things stand now."""
        return Fates(
            self.checkpoint,
            self.fresh,
            self.request,
            self._entries(),
            self.components,
            self._blocked,
            self._failed,
        )

    @property
    def grown_up(self) -> bool:
        """Whether every component that will ever come must be there by now."""
        # A script may build the optimizer once the model is sharded, and weights come before that.
        grows = self._by_script or "configure_sharded" not in self.sequence.fired
        return not (self._may_grow and grows)

    def _choose_rank(self) -> None:
        if self.checkpoint is not None:
            self.checkpoint.rank = 0 if self.is_new_rank else self.ranks.rank

    def _who(self) -> Registered:
        if not self._asking:
            raise CallError("a section is read by a plugin, inside an event")
        return self._asking[-1]

    def _open_section(self) -> SectionReader:
        who = self._who()
        if self.checkpoint is None or (self.sequence.ended and self.event is None):
            raise ResumeError(f"{who}: there is no checkpoint to read from")
        if self.fates.judge(who.name) != "restored":
            raise ResumeError(f"{who}: its section is {self.fates.judge(who.name)} in this resume")
        return self._find_reader(who)

    def _find_reader(self, entry: Registered) -> SectionReader:
        assert self.checkpoint is not None
        name = self.fates.find_section(entry.name)
        reader = self._readers.get(entry)
        if reader is None or (reader.checkpoint, reader.name) != (self.checkpoint, name):
            reader = self._readers[entry] = SectionReader(self.checkpoint, name, entry)
        return reader
