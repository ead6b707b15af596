"""How an event reaches the plugins: one proxy per plugin and event, and the relay in front.

pluggy calls what was registered last first, and cannot reorder. So what is registered with it is
a small proxy per plugin and event, in the sorted order. The proxy is also the place where a
plugin's name is noted on an exception, its time is taken, and the context learns who is asking.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

import pluggy

from hookbus import hookspecs
from hookbus.errors import CallError, OrderError
from hookbus.ordering import Place, sort
from hookbus.registration import EVENTS, Registered, explain_unknown_event
from hookbus.resume import Resume
from hookbus.save import Save

if TYPE_CHECKING:
    from hookbus.plugins import Plugins

Answers: TypeAlias = list[tuple[Registered, object]]

# Of the call under way, in this thread: pluggy's list of results does not tell whose they are.
_answers: ContextVar[Answers] = ContextVar("answers")
_NOTHING = object()


class Relay:
    """Fires events by name: ``bus.hook.restore_model(resume=resume)``.

    Arguments are checked in both directions, and the restore events are kept in their order. A
    relay kept from before a later registration is stale, and firing through it is an error.
    """

    def __init__(self, fire: Callable[[str, Mapping[str, object]], Any], plugins: Plugins) -> None:
        self._fire_event = fire
        self._plugins = plugins
        self._changes = plugins.changes

    def __getattr__(self, event: str) -> Callable[..., Any]:
        if event not in EVENTS:
            raise AttributeError(explain_unknown_event(event))
        return functools.partial(self._fire, event)

    def __dir__(self) -> list[str]:
        return list(EVENTS)

    def _fire(self, event: str, /, *args: object, **arguments: object) -> Any:
        if args:
            raise CallError(f"{event} takes its arguments by name: {_show(event)}")
        missing = [name for name in EVENTS[event] if name not in arguments]
        unknown = [name for name in arguments if name not in EVENTS[event]]
        if missing or unknown:
            raise CallError(
                f"{event} was fired"
                + (f" without {', '.join(map(repr, missing))}" if missing else "")
                + (" and" if missing and unknown else "")
                + (f" with unknown {', '.join(map(repr, unknown))}" if unknown else "")
                + f": it is {_show(event)}"
            )
        if self._changes != self._plugins.changes:
            raise OrderError(
                f"{event}: the order is stale, plugins were registered since this relay was taken;"
                " fire it as bus.hook." + event
            )
        return self._fire_event(event, arguments)


class Switchboard:
    """pluggy's plugin manager, kept in our order: sorted per event, lazily, once."""

    def __init__(self) -> None:
        self._manager = _make_manager()
        self._places: dict[str, list[Place]] = {}
        self._connected: dict[str, list[_Proxy]] = {}

    def forget(self, events: Iterable[str]) -> None:
        """Sort these events anew before they are fired again."""
        for event in events:
            self._places.pop(event, None)

    def clear(self) -> None:
        """Let go of every plugin: pluggy's manager refers to itself, and would keep them."""
        for proxies in self._connected.values():
            for proxy in proxies:
                self._manager.unregister(proxy)
        self._connected.clear()
        self._places.clear()

    def order(self, event: str, entries: Iterable[Registered]) -> list[Place]:
        if event not in self._places:
            places = sort(event, [entry for entry in entries if event in entry.events])
            for proxy in self._connected.pop(event, ()):
                self._manager.unregister(proxy)
            # Registered backwards, since pluggy calls the last one first.
            proxies = [_Proxy(place.entry, event) for place in places]
            for proxy in reversed(proxies):
                self._manager.register(proxy)
            self._connected[event] = proxies
            self._places[event] = places
        return self._places[event]

    def ask(self, event: str, arguments: Mapping[str, object]) -> tuple[Any, Answers]:
        """Call the plugins; return the result, and who answered what, which it does not tell."""
        return _ask(self._manager, event, arguments)

    def ask_one(self, entry: Registered, event: str, arguments: Mapping[str, object]) -> Any:
        """Call one plugin alone, such as one that came too late for the list of the event."""
        manager = _make_manager()
        manager.register(_Proxy(entry, event))
        return _ask(manager, event, arguments)[0]


def _make_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _ask(
    manager: pluggy.PluginManager, event: str, arguments: Mapping[str, object]
) -> tuple[Any, Answers]:
    answers: Answers = []
    token = _answers.set(answers)
    try:
        return getattr(manager.hook, event)(**arguments), answers
    finally:
        _answers.reset(token)


class _Proxy:
    """Stands for one plugin in one event."""

    def __init__(self, entry: Registered, event: str) -> None:
        function, options = entry.implementations[event]
        wanted = tuple(inspect.signature(function).parameters)

        def call(*values: object) -> object:
            given = dict(zip(EVENTS[event], values, strict=True))
            if not _takes_part(entry, event, given):
                return None
            with _speaking(entry, event, given):
                answer = function(*(given[name] for name in wanted))
            if answer is not None:
                _answers.get().append((entry, answer))
            return answer

        def call_wrapper(*values: object) -> Generator[None, object, object]:
            given = dict(zip(EVENTS[event], values, strict=True))
            if not _takes_part(entry, event, given):
                return (yield)
            with _speaking(entry, event, given):
                generator = function(*(given[name] for name in wanted))
                if next(generator, _NOTHING) is _NOTHING:
                    raise RuntimeError("a wrapper must yield exactly once, and it did not yield")
            try:
                result = yield
            except BaseException as error:
                with _speaking(entry, event, given):
                    return _finish(generator, generator.throw, error)
            with _speaking(entry, event, given):
                return _finish(generator, generator.send, result)

        proxy = call_wrapper if options["wrapper"] else call
        # pluggy reads the arguments' names from what a function wraps.
        proxy.__wrapped__ = getattr(hookspecs, event)  # type: ignore[attr-defined]
        marked = hookspecs.hookimpl(wrapper=options["wrapper"])(proxy)
        setattr(self, event, marked)


def _finish(
    generator: Generator[Any, Any, Any], go_on: Callable[[Any], object], value: object
) -> object:
    try:
        go_on(value)
    except StopIteration as stop:
        return stop.value
    generator.close()
    raise RuntimeError("a wrapper must yield exactly once, and it yielded again")


def _takes_part(entry: Registered, event: str, given: Mapping[str, object]) -> bool:
    resume = given.get("resume")
    return not isinstance(resume, Resume) or resume.takes_part(entry, event)


@contextlib.contextmanager
def _speaking(entry: Registered, event: str, given: Mapping[str, object]) -> Iterator[None]:
    """Tell the context who is asking, take the time, and name the plugin on what it raises."""
    context = given.get("resume", given.get("save"))
    if not isinstance(context, (Resume, Save)):  # an event that knows no sections
        context = None
    if context is not None:
        context.begin_call(entry)
    start = time.perf_counter()
    try:
        yield
    except BaseException as error:
        # An exception that passes through a wrapper is not the wrapper's; the innermost is named.
        if not any(" broke in " in note for note in _read_notes(error)):
            error.add_note(f"{entry} broke in {event}: {type(error).__name__}: {error}")
        raise
    finally:
        if context is not None:
            context.end_call(entry, event, time.perf_counter() - start)


def _read_notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _show(event: str) -> str:
    return f"{event}({', '.join(f'{name}=…' for name in EVENTS[event])})"
