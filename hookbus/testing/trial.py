"""One plugin on a bus of its own, in a folder of its own, to be put through something."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from hookbus.bus import HookBus
from hookbus.checkpoint import Checkpoint
from hookbus.errors import CallError
from hookbus.registration import Registered
from hookbus.save import Save
from hookbus.testing.pictures import Pictures, list_differences, read_section, take_section
from hookbus.testing.traces import Trace, list_changes, trace


@attrs.frozen(eq=False)
class View:
    """What a plugin looks after, at one moment."""

    component: Trace | None
    state: Pictures

    def list_changes(self, other: View) -> list[str]:
        """Say what is not as it was."""
        if self.component is not None and other.component is not None:
            return list_changes(self.component, other.component)
        return list_differences(self.state, other.state)


@attrs.define(eq=False)
class Trial:
    """What is checked, on its bus.

    ``made`` is what the caller made; ``run`` its run directory.
    """

    bus: HookBus
    name: str
    made: Any
    run: Path

    @property
    def entry(self) -> Registered:
        for entry in reversed(self.bus.plugins):  # a maker of such plugins may bear the same name
            if entry.name == self.name:
                return entry
        raise CallError(f"{self.name!r} is not looked after: is its plugin blocked?")

    def ask(self, event: str, **arguments: object) -> None:
        """Fire an event for the plugin alone, if it implements it."""
        if event in self.entry.events:
            self.bus._plugins.ask_one(self.entry, event, arguments)

    @property
    def component(self) -> object | None:
        """What the plugin looks after, if that is another object than itself."""
        component = self.bus.components.get(self.name)
        return None if component is self.entry.plugin else component

    def trace(self) -> Trace:
        """Note every attribute of the plugin and of what it looks after."""
        roots = {"plugin": self.entry.plugin}
        if self.component is not None:
            roots = {"component": self.component, **roots}
        return trace(**roots)

    def look(self) -> View:
        """Note what the plugin looks after: its component, or else what it would save."""
        if self.component is not None:
            return View(trace(component=self.component), {})
        return View(None, self.take_picture())

    @contextlib.contextmanager
    def saving(self) -> Iterator[Save]:
        """Be in the middle of a save, of which nothing is written."""
        self.bus.hook.note_streams(slot="now")
        try:
            yield Save(1, {}, self.bus.components)
        finally:
            self.bus.hook.put_streams(slot="now")

    def collect(self, save: Save) -> Pictures:
        """Have the plugin hand over its state, and copy it."""
        self.ask("save_start", save=save)
        self.ask("save_state", save=save)
        return take_section(save.collect_sections([self.entry])[0])

    def take_picture(self) -> Pictures:
        """Copy what it would save now."""
        with self.saving() as save:
            return self.collect(save)

    def list_memory(self) -> list[tuple[int, int, str]]:
        """Return where the tensors lie that it would save now: first byte, last, and the name."""
        with self.saving() as save:
            self.ask("save_start", save=save)
            self.ask("save_state", save=save)
            parts = save.collect_sections([self.entry])[0].parts
            tensors = [(n, t) for part in parts.values() for n, t in part.flat.tensors.items()]
        storages = [(name, each.untyped_storage()) for name, each in tensors if each.numel()]
        return [(s.data_ptr(), s.data_ptr() + s.nbytes(), name) for name, s in storages]

    def commit(self) -> Checkpoint:
        """Write a checkpoint, really."""
        before = self.bus._get_saver().writer.newest_step
        step = None if self.bus.loop is not None else before + 1
        checkpoint = self.bus.save(step=step)
        if checkpoint is None:
            raise CallError("change() left the loop inside of an epoch; let it end")
        return checkpoint

    def read(self, checkpoint: Checkpoint) -> Pictures:
        """Read what it saved."""
        return read_section(checkpoint, self.name)


def copy_run(run: Path, to: Path) -> None:
    """Copy what lies in a run directory into another."""
    shutil.copytree(run, to, ignore=shutil.ignore_patterns("run.lock"), dirs_exist_ok=True)
