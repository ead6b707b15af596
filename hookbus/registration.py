"""What may be registered: the strict checks, and what the bus keeps of a plugin."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import attrs
import pluggy

from hookbus import hookspecs
from hookbus.checkpoint import NAME_RULE, is_name
from hookbus.errors import HookbusError, RegistrationError, raise_all

if TYPE_CHECKING:
    from hookbus.migrations import Versions

Origin = Literal["registered by hand", "a third party's entry point", "built in"]
BY_HAND: Final = "registered by hand"
THIRD_PARTY: Final = "a third party's entry point"
BUILT_IN: Final = "built in"
Implementations: TypeAlias = Mapping[str, tuple[Callable[..., Any], pluggy.HookimplOpts]]


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

    ``name`` is also its section's name, and ``aliases`` are former names of that; ``distribution``
    and ``version`` say who wrote it (``None`` for a script's own); ``versions`` are those of its
    state; ``events`` are those it implements.
    """

    name: str
    plugin: object = attrs.field(repr=False)
    kind: str | None
    distribution: str | None
    version: str | None
    origin: Origin
    number: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    aliases: tuple[str, ...]
    versions: Versions = attrs.field(repr=False)
    implementations: Implementations = attrs.field(repr=False)

    @property
    def events(self) -> tuple[str, ...]:
        return tuple(self.implementations)

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
    """Return a plugin's name, which is also its section's.

    Raises:
        RegistrationError: it could not be the name of a file everywhere.
    """
    if not is_name(name):
        raise RegistrationError(f"{name!r} cannot be a plugin's name: {NAME_RULE}")
    return name


def explain_unknown_event(event: str) -> str:
    near = difflib.get_close_matches(event, EVENTS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(EVENTS)}"
    return f"there is no event {event!r}; {hint}"


def inspect_plugin(plugin: object) -> Implementations:
    """Return the events that ``plugin`` implements, each with its function and options.

    Raises:
        RegistrationError: ``plugin`` is ``None``, a class, implements nothing, or its hookimpls
            could never be called as they are written; each of them is named.
    """
    if plugin is None:
        raise RegistrationError("None cannot be registered as a plugin")
    if inspect.isclass(plugin):
        raise RegistrationError(
            f"{plugin.__qualname__} is a class; register an instance: {plugin.__qualname__}(…)"
        )
    found: dict[str, tuple[Callable[..., Any], pluggy.HookimplOpts]] = {}
    problems: list[HookbusError] = []
    marked = False
    for attribute in dir(plugin):
        function = find_function(plugin, attribute)
        options = getattr(function, f"{hookspecs.PROJECT}_impl", None)
        if function is None or (options is None and attribute not in EVENTS):
            continue
        marked = True
        bound = getattr(plugin, attribute)
        event = attribute if options is None else options["specname"] or attribute
        if options is not None and options["optionalhook"] and event not in EVENTS:
            continue
        fault = _find_fault(event, bound, options, found)
        if fault is not None:
            problems.append(RegistrationError(f"{name_type(plugin)}.{attribute} {fault}"))
        elif options is not None:
            found[event] = (bound, options)
    if not marked:
        problems.append(
            RegistrationError(
                f"{name_type(plugin)} implements no event; mark its methods with @hookbus.hookimpl"
            )
        )
    raise_all(f"{name_type(plugin)} cannot be registered", problems)
    return {event: found[event] for event in EVENTS if event in found}


def read_kind(plugin: object) -> str | None:
    kind = getattr(plugin, "kind", None)
    if kind is not None and not isinstance(kind, str):
        raise RegistrationError(
            f"{name_type(plugin)}.kind = {kind!r}: pass a word, or leave it out"
        )
    return kind


def read_words(plugin: object, attribute: Literal["before", "after", "aliases"]) -> tuple[str, ...]:
    """Return kinds and names: those before or after which a plugin is to come, or its former."""
    words = getattr(plugin, attribute, ())
    if isinstance(words, (tuple, list)) and all(isinstance(word, str) for word in words):
        return tuple(words)
    raise RegistrationError(
        f"{name_type(plugin)}.{attribute} = {words!r}: pass a tuple of kinds or names, such as"
        " ('model',)"
    )


def name_type(thing: object) -> str:
    """Return the name of a module, class or function, else that of a thing's class."""
    return getattr(thing, "__name__", None) or type(thing).__qualname__


def find_function(plugin: object, attribute: str) -> Callable[..., Any] | None:
    """Return the plain function behind an attribute, without running a property."""
    try:
        found = inspect.getattr_static(plugin, attribute)
    except AttributeError:  # a name that dir() lists and nobody holds
        return None
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    return found if inspect.isroutine(found) else None


def _find_fault(
    event: str,
    function: Callable[..., Any],
    options: pluggy.HookimplOpts | None,
    found: Implementations,
) -> str | None:
    """Return why ``function`` could not be called as it is written."""
    if options is None:
        return (
            "is named like an event and would never be called; put @hookbus.hookimpl on it, or"
            " name it otherwise"
        )
    if event not in EVENTS:
        return f"is marked as a hookimpl, and {explain_unknown_event(event)}"
    if event in found:
        return f"implements {event!r} a second time; take one of them away"
    if options["hookwrapper"]:
        return "is an old-style hookwrapper; pass wrapper=True instead"
    if options["tryfirst"] and options["trylast"]:
        return "is both tryfirst and trylast; take one away"
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "is async, and events are not awaited; make it a plain function"
    if options["wrapper"] and not inspect.isgeneratorfunction(function):
        return "is marked wrapper=True and does not yield; let it yield once"
    if inspect.isgeneratorfunction(function) and not options["wrapper"]:
        return "yields; mark it @hookbus.hookimpl(wrapper=True)"
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not parameter.empty:
            return (
                f"has an argument {name!r} with a default, which would never be passed; take the"
                " default away"
            )
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            return (
                f"has an argument {name!r} that is keyword-only, *args or **kwargs; make it a"
                " plain one"
            )
        if name not in EVENTS[event]:
            return f"takes {name!r}, and {event} has {', '.join(EVENTS[event]) or 'no arguments'}"
    return None
