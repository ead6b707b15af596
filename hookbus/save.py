"""What the saving events are given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from hookbus.checkpoint import Part, Section, check_part, flatten
from hookbus.errors import CallError, HookbusError, StateError, raise_all
from hookbus.migrations import spell_step
from hookbus.registration import Registered


@attrs.define(eq=False)
class Save:
    """One save on its way.

    ``step`` and ``metrics`` are those of the checkpoint that is being made; ``components`` are
    the live objects on the bus by name.
    """

    step: int
    metrics: Mapping[str, float]
    components: Mapping[str, object] = attrs.field(repr=False)
    _asking: list[Registered] = attrs.field(factory=list, repr=False, init=False)
    _parts: dict[Registered, dict[str | None, Part]] = attrs.field(
        factory=dict, repr=False, init=False
    )
    _problems: list[HookbusError] = attrs.field(factory=list, repr=False, init=False)

    @property
    def name(self) -> str:
        """The name of the section that the plugin being called writes."""
        return self._who().name

    def write(
        self, state: object, *, part: str | None = None, version: int = 1, per_rank: bool = False
    ) -> None:
        """Hand over live state for the section of the plugin that is being called.

        ``state`` is a tree of plain values, tensors and arrays; it is shared with the run until
        the event is over and is on its way to the disk before training goes on. ``part`` names a
        part with a file of its own; ``version`` is that of the state's layout: 1, or where the
        plugin's migrations (`hookbus.migrate`) lead. ``per_rank`` says that each process has its
        own; in a single process it makes no difference.

        Raises:
            CallError: outside a saving event, or a part written twice or with a wrong name.
        """
        who = self._who()
        parts = self._parts.setdefault(who, {})
        if part is not None:
            check_part(part)
        if part in parts:
            what = "its state" if part is None else f"part {part!r}"
            raise CallError(f"{who} wrote {what} twice; pass another part=")
        if type(version) is not int or version < 1:
            raise CallError(f"version={version!r}: pass a whole number from 1 up")
        known = who.versions.get_current(part)
        if version != known:  # it could be saved, and would be refused at the next resume
            more = (
                f", or give the plugin the step to it, {spell_step(who, part, known, version)}, or"
                f" state_version = {version} if nothing older is to be read"
            )
            raise CallError(
                f"{who} wrote version {version} of its state and reads version {known}; pass"
                f" version={known}{more if version > known else ''}"
            )
        try:
            parts[part] = Part(flatten(state), version)
        except StateError as error:
            parts[part] = Part(flatten(None), version)
            self._problems.append(StateError(f"{who} cannot be saved: {error}"))

    # -- for the bus ---------------------------------------------------------------------------

    def begin_call(self, entry: Registered) -> None:
        """Note whose section is meant from now on."""
        self._asking.append(entry)

    def end_call(self, entry: Registered, event: str, seconds: float) -> None:
        """Note that a plugin was called."""
        self._asking.pop()

    def collect_sections(self, entries: Iterable[Registered]) -> list[Section]:
        """Return a section for each plugin that saves; one that wrote nothing is named empty.

        Raises:
            StateError: what cannot be stored, of all plugins at once.
        """
        raise_all("nothing was saved", self._problems)
        return [
            Section(
                name=entry.name,
                kind=entry.kind or "",
                plugin=type(entry.plugin).__qualname__,
                distribution=entry.distribution,
                distribution_version=entry.version,
                parts=self._parts.get(entry, {}),
            )
            for entry in entries
            if entry.has_section
        ]

    def _who(self) -> Registered:
        if not self._asking:
            raise CallError("a save is written by a plugin, inside an event")
        return self._asking[-1]
