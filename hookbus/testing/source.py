"""Where what is checked comes from: a function, an object, or an installed plugin."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import attrs

from hookbus.bus import HookBus
from hookbus.errors import CallError

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
        needed = _list_needed(self.given)
        if needed not in ([], ["bus"]):
            raise CallError(
                f"make needs {', '.join(needed)}, and nothing but bus can be passed: write a"
                " function without arguments, or with bus alone"
            )
        with faults():
            return self.given(bus) if needed else self.given()

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


@contextlib.contextmanager
def faults() -> Iterator[None]:
    """Mark what the caller's own code raises as such."""
    try:
        yield
    except Exception as error:
        raise Fault from error


def _is_plugin(made: object) -> bool:
    """Whether a method of it is marked; a component may have one that is named like an event."""
    for name in dir(made):
        function = inspect.getattr_static(made, name, None)
        if isinstance(function, staticmethod | classmethod):
            function = function.__func__
        if hasattr(function, "hookbus_impl"):
            return True
    return any(event in vars(type(made)) for event in ("save_state", "restore_training_state"))


def _list_needed(function: Any) -> list[str]:
    """Return the names of the arguments that must be passed."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some that are written in C do not tell
        return []
    many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in many]
