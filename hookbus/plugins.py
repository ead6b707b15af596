"""What is on a bus: plugins and components, and who looks after whom."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hookbus import entry_points
from hookbus.entry_points import Failed
from hookbus.errors import AttachError, CallError, NameTakenError, RegistrationError
from hookbus.logs import logger
from hookbus.ordering import ORIGINS, Place
from hookbus.registration import (
    Implementations,
    Origin,
    Registered,
    check_event,
    check_name,
    find_distribution,
    inspect_plugin,
)
from hookbus.relay import Switchboard

DISABLE_VARIABLE = "HOOKBUS_DISABLE_PLUGINS"
BY_HAND, THIRD_PARTY, BUILT_IN = ORIGINS


class Plugins:
    """The plugins and components of one bus.

    ``check_in_time`` is called with each new plugin and may refuse it. ``changes`` counts
    registrations, so that a relay can tell that it is stale.
    """

    def __init__(
        self,
        *,
        load_plugins: bool,
        block: Iterable[str],
        check_in_time: Callable[[Registered], None],
    ) -> None:
        self.entries: list[Registered] = []
        self.components: dict[str, object] = {}
        self.failed: list[Failed] = []
        self.changes = 0
        self._switchboard = Switchboard()
        self._check_in_time = check_in_time
        self.blocked = self._read_block(block, load_plugins)
        if load_plugins:
            self._load_plugins()

    def register(self, plugin: object, name: str | None = None) -> str:
        for entry in self.entries:
            if entry.plugin is plugin and name in (None, entry.name):
                return entry.name
        implementations = inspect_plugin(plugin)
        name = check_name(
            name or getattr(plugin, "kind", None) or type(plugin).__qualname__.rpartition(".")[2]
        )
        if self._is_blocked(name):
            logger.info("plugin %r is blocked, so it is not registered", name)
            return name
        self._add(plugin, name, BY_HAND, *find_distribution(plugin), implementations)
        component = getattr(plugin, "component", None)
        if component is not None:
            self.components[name] = component
        return name

    def unregister(self, name: str) -> None:
        found = [entry for entry in self.entries if entry.name == name]
        owners = [entry for entry in found if _owns_name(entry)]
        component = self.components.pop(name, None)
        if component is None and not found:
            raise CallError(f"no plugin is named {name!r}")
        for entry in owners or (found if component is None else []):
            self.entries.remove(entry)
            self._forget(entry)

    def attach(self, components: Mapping[str, object]) -> None:
        found = {}
        for name, component in components.items():
            check_name(name)
            if name in self.components:
                if self.components[name] is component:
                    continue
                raise NameTakenError(
                    f"two components are named {name!r}: a {_name_type(self.components[name])}"
                    f" and a {_name_type(component)}; attach one of them under another name"
                )
            for other, existing in {**self.components, **components}.items():
                if other != name and existing is component:
                    raise AttachError(f"{other!r} and {name!r} are the same object; attach it once")
            found[name] = self._find_plugin(name, component)
        for name, (plugin, maker) in found.items():
            if plugin is not None and maker is not None:
                self._add(
                    plugin, name, BY_HAND, maker.distribution, maker.version, inspect_plugin(plugin)
                )
            self.components[name] = components[name]

    def order(self, event: str) -> list[Place]:
        check_event(event)
        return self._switchboard.order(event, self.entries)

    def call(self, event: str, arguments: Mapping[str, object]) -> Any:
        """Call every plugin that implements ``event``, in order."""
        self.order(event)
        return self._switchboard.call(event, arguments)

    def call_one(self, entry: Registered, event: str, arguments: Mapping[str, object]) -> object:
        """Call one plugin that came too late to be in the list that pluggy goes through."""
        return self._switchboard.call_one(entry, event, arguments)

    def _read_block(self, block: Iterable[str], load_plugins: bool) -> frozenset[str]:
        if isinstance(block, str):
            raise CallError(f"block={block!r}: pass a tuple of names, such as ({block!r},)")
        words = {word.strip() for word in os.environ.get(DISABLE_VARIABLE, "").split(",")}
        found = entry_points.find() if load_plugins else []
        known = set(entry_points.list_known_names(found))
        for origin, names in ((DISABLE_VARIABLE, words - {""}), ("block", set(block))):
            unknown = sorted(names - known)
            if load_plugins and unknown:
                raise CallError(
                    f"{origin} names {', '.join(map(repr, unknown))}, which is not installed;"
                    f" there are {', '.join(sorted(known))}"
                )
        return frozenset({*block, *words} - {""})

    def _is_blocked(self, name: str, distribution: str | None = None) -> bool:
        return name in self.blocked or distribution in self.blocked

    def _load_plugins(self) -> None:
        for found in entry_points.find():
            if self._is_blocked(found.name, found.distribution):
                continue
            try:
                plugin = found.load()
                origin = BUILT_IN if found.built_in else THIRD_PARTY
                self._add(
                    plugin,
                    check_name(found.name),
                    origin,
                    found.distribution,
                    found.version,
                    inspect_plugin(plugin),
                )
            except Exception as error:
                failed = Failed(found.name, found.distribution, found.version, error)
                self.failed.append(failed)
                logger.warning(
                    "plugin %r of %s %s could not be loaded: %s: %s",
                    found.name,
                    found.distribution,
                    found.version,
                    type(error).__name__,
                    error,
                )

    def _add(
        self,
        plugin: object,
        name: str,
        origin: Origin,
        distribution: str | None,
        version: str | None,
        implementations: Implementations,
    ) -> None:
        entry = Registered(
            name=name,
            plugin=plugin,
            kind=getattr(plugin, "kind", None),
            distribution=distribution,
            version=version,
            origin=origin,
            number=self.changes + 1,
            implementations=implementations,
        )
        for other in self.entries:
            # Entry points without a section, such as the one that makes plugins for models, leave
            # their name to a component.
            contend = _owns_name(other) and _owns_name(entry)
            if other.name == name and (contend or other.origin == origin):
                raise NameTakenError(
                    f"two plugins are named {name!r}: {_name_type(other.plugin)} and"
                    f" {_name_type(plugin)}; pass another name to register()"
                )
            if contend and other.name.lower() == name.lower():
                raise NameTakenError(
                    f"{other.name!r} and {name!r} differ only in case, which some disks ignore;"
                    " pass another name to register()"
                )
        self._check_in_time(entry)
        _ = entry.before, entry.after  # refuses what is no tuple of words
        self.entries.append(entry)
        self._forget(entry)

    def _forget(self, entry: Registered) -> None:
        self.changes += 1
        self._switchboard.forget(entry.events)

    def _find_plugin(self, name: str, component: object) -> tuple[object | None, Registered | None]:
        if component is None:
            raise AttachError(f"{name}=None: there is nothing to attach; leave it out")
        if not self._is_blocked(name):
            answers = self._ask_for_plugin(name, component)
            for answer, maker in answers:
                return answer, maker
            if not self.blocked:
                asked = ", ".join(place.name for place in self.order("plugin_for"))
                hint = (
                    f"; it is a plugin itself: bus.register(it, {name!r})"
                    if _is_plugin(component)
                    else "; give it state_dict and load_state_dict, or register a plugin for it"
                )
                raise AttachError(
                    f"nobody can look after {name!r}, a {_name_type(component)}; asked were"
                    f" {asked or 'none'}{hint}"
                )
        logger.info("nobody looks after %r: %s is blocked", name, ", ".join(sorted(self.blocked)))
        return None, None

    def _ask_for_plugin(self, name: str, component: object) -> list[tuple[object, Registered]]:
        """Return the first answer with its maker; the others are only looked for to log them."""
        answers: list[tuple[object, Registered]] = []
        for place in self.order("plugin_for"):
            arguments = {"name": name, "component": component}
            answer = self._switchboard.call_one(place.entry, "plugin_for", arguments)
            if answer is not None:
                answers.append((answer, place.entry))
                if not logger.isEnabledFor(logging.DEBUG):
                    break
        for _, maker in answers[1:]:
            logger.debug("%r: %s answered before %s", name, answers[0][1], maker)
        return answers


def _owns_name(entry: Registered) -> bool:
    return entry.origin == BY_HAND or entry.has_section


def _is_plugin(component: object) -> bool:
    try:
        inspect_plugin(component)
    except RegistrationError:
        return False
    return True


def _name_type(thing: object) -> str:
    return getattr(thing, "__name__", None) or type(thing).__qualname__
