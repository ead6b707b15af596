"""One plugin's section in a checkpoint, read in the version that the plugin knows."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from hookbus.checkpoint import Checkpoint, InMemory, Metadata
from hookbus.errors import HookbusError, MigrationError, StateError
from hookbus.migrations import Step, spell_step
from hookbus.registration import Registered


@attrs.define(eq=False)
class SectionReader:
    """Reads the section ``name``, which is not always called as its plugin is.

    What was saved in an older version is migrated in memory; the checkpoint stays as it is. The
    steps run when the section is checked, so that one that breaks does so before anything is
    changed, and again when it is read: in between no tensor of it is kept.
    """

    checkpoint: Checkpoint
    name: str
    entry: Registered
    fits: bool | None = attrs.field(default=None, init=False)  # None: it was not checked yet
    _migrated: dict[str | None, Metadata] = attrs.field(factory=dict, init=False)

    @property
    def parts(self) -> tuple[str | None, ...]:
        return self.checkpoint.sections[self.name].parts

    def read(self, part: str | None) -> Any:
        path = self._find_path(part)
        return self._migrate(part, path).read() if path else self.checkpoint.read(self.name, part)

    def read_into(self, tree: Any, part: str | None, *, partial: bool) -> Any:
        path = self._find_path(part)
        if not path:
            return self.checkpoint.read_into(self.name, tree, part, partial=partial)
        who = self.entry.name if part is None else f"{self.entry.name}.{part}"
        return self._migrate(part, path).read_into(tree, who=who, partial=partial)

    def look(self, part: str | None) -> Metadata:
        """Return names, shapes, dtypes and plain values, without data."""
        path = self._find_path(part)
        if not path:
            return self.checkpoint.metadata(self.name, part)
        if part not in self._migrated:
            self._migrated[part] = self._migrate(part, path).describe()
        return self._migrated[part]

    def describe_migrations(self) -> list[str]:
        """Say of each part that is not of the plugin's version which steps it takes."""
        return [
            ("" if part is None else f"part {part!r} ")
            + f"migrated from version {path[0].old} to {path[-1].new}: {', '.join(map(str, path))}"
            for part in (self.parts if self.fits else ())
            if (path := self._find_path(part))
        ]

    def check(self) -> list[HookbusError]:
        """Return what stands in the way of reading it in the plugin's version; once."""
        if self.fits is not None:
            return []
        problems: list[HookbusError] = []
        for part in self.parts:
            try:
                if self._find_path(part):
                    self.look(part)
            except MigrationError as error:
                problems.append(error)
        self.fits = not problems
        return problems

    def _find_path(self, part: str | None) -> list[Step]:
        """Return the steps from the version of a part to the plugin's.

        Raises:
            MigrationError: there are none.
        """
        if part not in self.parts:  # whoever reads it says so
            return []
        versions, saved = self.entry.versions, self.checkpoint.get_version(self.name, part)
        known, current = versions.list_known(part), versions.get_current(part)
        if saved in known:
            return versions.find_path(part, saved)
        if saved > current:
            way_out = "install the version of it that wrote this"
        else:
            way_out = f"add {spell_step(self.entry, part, saved, known[0])} to it"
        raise MigrationError(
            f"{self._describe(part)} was saved in version {saved}, and {self.entry} knows version"
            f" {' and '.join(map(str, known))}; {way_out}, or pass skip=({self.entry.name!r},) to"
            " start it fresh"
        )

    def _migrate(self, part: str | None, path: list[Step]) -> InMemory:
        """Load a part, and take it through the steps.

        Raises:
            MigrationError: a step broke, or returned what is no state.
        """
        state = self.checkpoint.read(self.name, part)
        for step in path:
            where = f"{self._describe(part)}: the migration {step} of {self.entry}"
            try:
                with torch.no_grad():
                    state = step.function(state)
            except Exception as error:
                raise MigrationError(f"{where} broke: {type(error).__name__}: {error}") from error
            if state is None:
                raise MigrationError(f"{where} returned None; return the state")
        try:
            return InMemory(state, path[-1].new)
        except StateError as error:
            raise MigrationError(f"{where} returned what cannot be saved: {error}") from error

    def _describe(self, part: str | None) -> str:
        return f"section {self.name!r}" if part is None else f"part {part!r} of {self.name!r}"
