"""One plugin on a bus of its own, in a folder of its own, to be put through something."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

from hookbus.bus import HookBus
from hookbus.checkpoint import Checkpoint
from hookbus.errors import CallError
from hookbus.logs import logger
from hookbus.registration import Registered
from hookbus.save import Save
from hookbus.testing.pictures import Pictures, read_section, take_section
from hookbus.testing.traces import Trace, trace

NAME = "checked"
"""Of a component that is attached, where the caller gives no name."""


class Fault(Exception):  # noqa: N818 - what the caller's own functions raise, on its way out
    """Carries what ``make`` or ``change`` raised past the laws, which it says nothing about."""


@attrs.frozen(eq=False)
class Source:
    """How to get what is checked: again and again, or the one that there is.

    ``given`` is a function that makes a plugin or component, or one of these itself, or the name
    of an installed plugin.
    """

    given: Any
    name: str | None = None

    @property
    def is_function(self) -> bool:
        return isinstance(self.given, type | functools.partial) or inspect.isroutine(self.given)

    def put_on(self, bus: HookBus) -> tuple[str, Any]:
        """Put it on a bus; return its name there, and what the caller's functions are given."""
        if isinstance(self.given, str):
            return self._find_installed(bus)
        made = self._make(bus) if self.is_function else self.given
        if made is None:
            raise CallError("make() returned None; return the plugin, or the component")
        if _is_plugin(made):
            return bus.register(made, self.name), made
        name = self.name or NAME
        bus.attach(**{name: made})
        return name, made

    def _make(self, bus: HookBus) -> Any:
        with faults():
            takes = inspect.signature(self.given).parameters.values()
            needs_bus = any(each.default is each.empty for each in takes)
            return self.given(bus) if needs_bus else self.given()

    def _find_installed(self, bus: HookBus) -> tuple[str, Any]:
        for entry in bus.plugins:
            if entry.name == self.given:
                return entry.name, entry.plugin
        why = [
            f"; it could not be loaded: {e.exception}" for e in bus.failed if e.name == self.given
        ]
        there = ", ".join(entry.name for entry in bus.plugins)
        raise CallError(
            f"no installed plugin is named {self.given!r}; there are {there}{''.join(why)}"
        )


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

    def trace(self) -> Trace:
        """Note every attribute of the plugin and of what it looks after."""
        component = self.bus.components.get(self.name)
        roots = {"plugin": self.entry.plugin}
        if component is not None and component is not self.entry.plugin:
            roots = {"component": component, **roots}
        return trace(**roots)

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


@attrs.define(eq=False)
class Bench:
    """Where trials are made: a folder that goes, a quiet log, streams that are put back."""

    source: Source
    change: Callable[[Any], object] | None
    other: Source | None
    folder: Path
    _watch: HookBus = attrs.field(factory=HookBus)
    _open: list[Trial] = attrs.field(factory=list)
    _numbers: Iterator[int] = attrs.field(factory=itertools.count)

    @property
    def is_single(self) -> bool:
        """Whether there is only one of what is checked."""
        if isinstance(self.source.given, str):
            plugins = [Source(self.source.given).put_on(bus)[1] for bus in (HookBus(), HookBus())]
            return plugins[0] is plugins[1]
        return not self.source.is_function

    def make(self, source: Source | None = None, *, run: Path | None = None) -> Trial:
        """Make one, on a bus of its own; ``run`` is copied for it."""
        if self.is_single:
            self.close()
        folder = self.folder / f"run-{next(self._numbers)}"
        if run is not None:
            shutil.copytree(run, folder, ignore=shutil.ignore_patterns("run.lock"))
        bus = HookBus()
        try:
            name, made = (source or self.source).put_on(bus)
        except BaseException:
            bus._let_go()
            raise
        self._open.append(Trial(bus, name, made, folder))
        return self._open[-1]

    def make_changed(self) -> Trial:
        """Make one in another state, in a run of its own."""
        trial = self.make(self.other)
        trial.bus.resume(trial.run)
        self.bring_on(trial)
        return trial

    def bring_on(self, trial: Trial) -> None:
        """Bring one into another state, as the caller does it."""
        if self.change is not None:
            with faults():
                self.change(trial.made)

    def read_streams(self) -> dict[str, str]:
        """Return a digest of each random stream of the process."""
        noted = self._watch.hook.note_streams(slot="law")
        return {name: digest for streams in noted for name, digest in streams.items()}

    def close(self) -> None:
        """Close every bus that is open."""
        while self._open:
            self._open.pop().bus._let_go()


@contextlib.contextmanager
def bench(
    source: Source, change: Callable[[Any], object] | None, other: Source | None
) -> Iterator[Bench]:
    """Put a bench up, and take it away."""
    with tempfile.TemporaryDirectory(prefix="hookbus-check-") as folder, quiet():
        made = Bench(source, change, other, Path(folder))
        try:
            with streams_kept():
                yield made
        except Fault as fault:
            assert fault.__cause__ is not None
            raise fault.__cause__ from None
        finally:
            made.close()
            made._watch.close()


@contextlib.contextmanager
def streams_kept() -> Iterator[None]:
    """Put the streams of the process back at the end."""
    with HookBus() as watch:
        watch.hook.note_streams(slot="kept")
        try:
            yield
        finally:
            watch.hook.put_streams(slot="kept")


@contextlib.contextmanager
def faults() -> Iterator[None]:
    """Mark what the caller's own code raises as such."""
    try:
        yield
    except Exception as error:
        raise Fault from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Say nothing of the runs that are made here."""
    stop = _Stop()
    logger.addFilter(stop)
    level = logger.level
    logger.setLevel(logging.INFO)
    silent = logging.NullHandler()
    logger.addHandler(silent)
    try:
        yield
    finally:
        logger.removeHandler(silent)
        logger.setLevel(level)
        logger.removeFilter(stop)


class _Stop(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return False


def _is_plugin(made: object) -> bool:
    """Whether a method of it is marked; a component may have one that is named like an event."""
    for name in dir(made):
        function = inspect.getattr_static(made, name, None)
        if isinstance(function, staticmethod | classmethod):
            function = function.__func__
        if hasattr(function, "hookbus_impl"):
            return True
    return any(event in vars(type(made)) for event in ("save_state", "restore_training_state"))
