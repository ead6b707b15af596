"""What may be registered: the strict checks, and what the bus keeps of a plugin."""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal, TypeAlias

import attrs
import pluggy

from hookbus import hookspecs
from hookbus.errors import RegistrationError

Origin = Literal["registered by hand", "a third party's entry point", "built in"]
Implementations: TypeAlias = Mapping[str, tuple[Callable[..., Any], pluggy.HookimplOpts]]

_NAME = re.compile(r"[A-Za-z0-9_.:-]+")


def _list_events() -> dict[str, tuple[str, ...]]:
    marked = {
        name: function
        for name, function in vars(hookspecs).items()
        if inspect.isfunction(function) and hasattr(function, f"{hookspecs.PROJECT}_spec")
    }
    return {name: tuple(inspect.signature(f).parameters) for name, f in marked.items()}


EVENTS: Mapping[str, tuple[str, ...]] = _list_events()
"""Every event of the specification, with the names of its arguments, in the order of the page."""


@attrs.frozen(eq=False)
class Registered:
    """One plugin on the bus.

    ``name`` is also its section's name; ``distribution`` and ``version`` say who wrote it
    (``None`` for a script's own); ``events`` are those it implements.
    """

    name: str
    plugin: object = attrs.field(repr=False)
    kind: str | None
    distribution: str | None
    version: str | None
    origin: Origin
    number: int
    implementations: Implementations = attrs.field(repr=False)

    @property
    def events(self) -> tuple[str, ...]:
        return tuple(self.implementations)

    @property
    def before(self) -> tuple[str, ...]:
        return _read_words(self.plugin, "before")

    @property
    def after(self) -> tuple[str, ...]:
        return _read_words(self.plugin, "after")

    @property
    def has_section(self) -> bool:
        return "save_state" in self.implementations

    def options(self, event: str) -> pluggy.HookimplOpts:
        return self.implementations[event][1]

    def is_wrapper(self, event: str) -> bool:
        return self.options(event)["wrapper"]

    def __str__(self) -> str:
        return describe(self.name, self.distribution, self.version)


def describe(name: str, distribution: str | None, version: str | None) -> str:
    """Name a plugin for a message: ``plugin 'ema' (ema-hook 1.2)``."""
    origin = f" ({distribution} {version})" if distribution else ""
    return f"plugin {name!r}{origin}"


def check_name(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RegistrationError(
            f"{name!r} cannot be a plugin's name: letters, digits and _ . - : only"
        )
    return name


def check_event(event: str) -> None:
    if event not in EVENTS:
        raise AttributeError(f"there is no event {event!r}{_suggest_event(event)}")


def inspect_plugin(plugin: object) -> Implementations:
    """Return the events that ``plugin`` implements, each with its function and options.

    Raises:
        RegistrationError: ``plugin`` is ``None``, a class, implements nothing, or one of its
            hookimpls could never be called as it is written.
    """
    if plugin is None:
        raise RegistrationError("None cannot be registered as a plugin")
    if inspect.isclass(plugin):
        raise RegistrationError(
            f"{plugin.__qualname__} is a class; register an instance: {plugin.__qualname__}(…)"
        )
    found: dict[str, tuple[Callable[..., Any], pluggy.HookimplOpts]] = {}
    unmarked = []
    for attribute in dir(plugin):
        function = _find_function(plugin, attribute)
        if function is None:
            continue
        options = getattr(function, f"{hookspecs.PROJECT}_impl", None)
        if options is None:
            unmarked += [attribute] if attribute in EVENTS else []
            continue
        event = options.get("specname") or attribute
        where = f"{_name_type(plugin)}.{attribute}"
        if event not in EVENTS:
            if options["optionalhook"]:
                continue
            raise RegistrationError(f"{where}: there is no event {event!r}{_suggest_event(event)}")
        _check_implementation(where, event, function, options)
        if event in found:
            raise RegistrationError(f"{where}: {event!r} is implemented twice")
        found[event] = (getattr(plugin, attribute), options)
    if not found:
        hint = (
            f"; put @hookbus.hookimpl on {', '.join(unmarked)}"
            if unmarked
            else "; mark its methods with @hookbus.hookimpl"
        )
        raise RegistrationError(f"{_name_type(plugin)} implements no event{hint}")
    if unmarked:
        raise RegistrationError(
            f"{_name_type(plugin)}.{unmarked[0]} is named like an event and would never be"
            " called; put @hookbus.hookimpl on it, or name it otherwise"
        )
    return {event: found[event] for event in EVENTS if event in found}


def find_distribution(plugin: object) -> tuple[str | None, str | None]:
    """Return name and version of the distribution that a plugin's code comes from."""
    module = plugin.__name__ if inspect.ismodule(plugin) else type(plugin).__module__
    return _find_distribution_of(module.partition(".")[0])


@functools.cache
def _find_distribution_of(package: str) -> tuple[str | None, str | None]:
    if package == "__main__":
        return None, None
    try:
        return package, importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(package)
        return (names[0], importlib.metadata.version(names[0])) if names else (None, None)


def _find_function(plugin: object, attribute: str) -> Callable[..., Any] | None:
    """Return the plain function behind an attribute, without running a property."""
    try:
        found = inspect.getattr_static(plugin, attribute)
    except AttributeError:  # a name that dir() lists and nobody holds
        return None
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    return found if inspect.isroutine(found) else None


def _check_implementation(
    where: str, event: str, function: Callable[..., Any], options: pluggy.HookimplOpts
) -> None:
    arguments = EVENTS[event]
    if options["hookwrapper"]:
        raise RegistrationError(f"{where} is an old-style hookwrapper; pass wrapper=True instead")
    if options["tryfirst"] and options["trylast"]:
        raise RegistrationError(f"{where} is both tryfirst and trylast; take one away")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise RegistrationError(f"{where} is async, and events are not awaited")
    if inspect.isgeneratorfunction(function) != options["wrapper"]:
        raise RegistrationError(
            f"{where} is marked wrapper=True and does not yield"
            if options["wrapper"]
            else f"{where} yields; mark it @hookbus.hookimpl(wrapper=True)"
        )
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        del parameters[0]
    for parameter in parameters:
        if parameter.default is not parameter.empty:
            raise RegistrationError(
                f"{where}: argument {parameter.name!r} has a default, so it would never be passed;"
                " take the default away"
            )
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise RegistrationError(
                f"{where}: argument {parameter.name!r} must be a plain one, not keyword-only,"
                " *args or **kwargs"
            )
        if parameter.name not in arguments:
            raise RegistrationError(
                f"{where} takes {parameter.name!r}; {event} has {', '.join(arguments) or 'none'}"
            )


def _suggest_event(event: str) -> str:
    near = difflib.get_close_matches(event, EVENTS, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(EVENTS)}"


def _name_type(plugin: object) -> str:
    return plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__qualname__


def _read_words(plugin: object, attribute: str) -> tuple[str, ...]:
    words = getattr(plugin, attribute, ())
    if isinstance(words, str) or not all(isinstance(word, str) for word in words):
        raise RegistrationError(
            f"{_name_type(plugin)}.{attribute} = {words!r}: pass a tuple of kinds or names,"
            f" such as ({words!r},)"
        )
    return tuple(words)
