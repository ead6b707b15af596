"""What is on a bus: plugins and components, and who looks after whom."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from hookbus import entry_points
from hookbus.entry_points import Failed, Found, find_distribution
from hookbus.errors import (
    AttachError,
    CallError,
    HookbusError,
    NameTakenError,
    RegistrationError,
    raise_all,
)
from hookbus.logs import logger
from hookbus.migrations import Versions, read_versions
from hookbus.ordering import Place
from hookbus.registration import (
    BUILT_IN,
    BY_HAND,
    EVENTS,
    THIRD_PARTY,
    Implementations,
    Origin,
    Registered,
    check_name,
    explain_unknown_event,
    inspect_plugin,
    name_type,
    read_kind,
    read_words,
)
from hookbus.relay import Answers, Switchboard
from hookbus.resume import Resume

DISABLE_VARIABLE = "HOOKBUS_DISABLE_PLUGINS"


class Plugins:
    """The plugins and components of one bus.

    ``changes`` counts registrations, so that a relay can tell that it is stale; ``resume`` is the
    one under way or done last, which a plugin may come too late for.
    """

    def __init__(self, bus: object, *, load_plugins: bool, block: Collection[str]) -> None:
        self._bus = weakref.ref(bus)
        self.entries: list[Registered] = []
        self.components: dict[str, object] = {}
        self.failed: list[Failed] = []
        self.changes = 0
        self._switchboard = Switchboard()
        self.resume: Resume | None = None
        found = entry_points.find() if load_plugins else None
        self.blocked = _read_block(block, found)
        for each in found or ():
            self._load(each)

    def register(self, plugin: object, name: str | None = None) -> str:
        for entry in self.entries:
            if entry.plugin is plugin:
                if name in (None, entry.name):
                    return entry.name
                raise RegistrationError(
                    f"this {name_type(plugin)} is on the bus already, as {entry.name!r}; register"
                    " another instance"
                )
        implementations = inspect_plugin(plugin)
        if name is None:
            name = read_kind(plugin) or name_type(plugin).rpartition(".")[2]
        distribution, version = find_distribution(plugin)
        if self._is_blocked(name, distribution):
            logger.info("plugin %r is blocked, so it is not registered", name)
            return name
        self._add(plugin, name, BY_HAND, distribution, version, implementations)
        component = getattr(plugin, "component", None)
        if component is not None:
            self.components[name] = component
        return name

    def unregister(self, name: str) -> None:
        found = [entry for entry in self.entries if entry.name == name]
        owners = [entry for entry in found if _owns_name(entry)]
        component = self.components.pop(name, None)
        if component is None and not found:
            raise CallError(
                f"no plugin is named {name!r}; there are"
                f" {', '.join(entry.name for entry in self.entries) or 'none'}"
            )
        for entry in owners or (found if component is None else []):
            self._remove(entry)

    def attach(self, components: Mapping[str, object]) -> None:
        found: dict[str, tuple[object, Registered | None] | None] = {}
        problems: list[HookbusError] = []
        for name, component in components.items():
            try:
                if not self._is_attached(name, component, {n: components[n] for n in found}):
                    found[name] = self._find_plugin(name, component)
            except (AttachError, RegistrationError) as error:
                problems.append(error)
        raise_all("nothing was attached", problems)
        added = []
        try:
            for name, answer in found.items():
                if answer is not None:
                    plugin, maker = answer
                    origin = (maker.distribution, maker.version) if maker else (None, None)
                    implementations = inspect_plugin(plugin)
                    added.append(self._add(plugin, name, BY_HAND, *origin, implementations))
        except HookbusError:
            for entry in added:
                self._remove(entry)
            raise
        self.components |= {name: components[name] for name in found}

    def order(self, event: str) -> list[Place]:
        if event not in EVENTS:
            raise CallError(explain_unknown_event(event))
        return self._switchboard.order(event, self.entries)

    def call(self, event: str, arguments: Mapping[str, object]) -> Any:
        """Call every plugin that implements ``event``, in order."""
        return self.ask(event, arguments)[0]

    def ask(self, event: str, arguments: Mapping[str, object]) -> tuple[Any, Answers]:
        """Call every plugin that implements ``event``; return who answered what as well."""
        self.order(event)
        return self._switchboard.ask(event, arguments)

    def ask_one(self, entry: Registered, event: str, arguments: Mapping[str, object]) -> Any:
        """Call one plugin alone, such as one that came too late for its event."""
        return self._switchboard.ask_one(entry, event, arguments)

    def clear(self) -> None:
        """Let go of the last resume, and of the cycles through pluggy's manager."""
        self.resume = None
        self._switchboard.clear()

    def _is_blocked(self, name: str, distribution: str | None = None) -> bool:
        return name in self.blocked or distribution in self.blocked

    def _load(self, found: Found) -> None:
        if self._is_blocked(found.name, found.distribution):
            return
        origin: Origin = BUILT_IN if found.built_in else THIRD_PARTY
        who = found.name, origin, found.distribution, found.version
        try:
            plugin = found.load()
            self._add(plugin, *who, inspect_plugin(plugin))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a script exits as it is imported; Rust's panics are such
            failed = Failed(found.name, found.distribution, found.version, error)
            self.failed.append(failed)
            logger.warning("%s", failed)

    def _add(
        self,
        plugin: object,
        name: str,
        origin: Origin,
        distribution: str | None,
        version: str | None,
        implementations: Implementations,
    ) -> Registered:
        kind, saves = read_kind(plugin), "save_state" in implementations
        entry = Registered(
            name=check_name(name),
            plugin=plugin,
            kind=kind,
            distribution=distribution,
            version=version,
            origin=origin,
            number=self.changes + 1,
            before=read_words(plugin, "before"),
            after=read_words(plugin, "after"),
            aliases=read_words(plugin, "aliases"),
            versions=read_versions(plugin, kind or name) if saves else Versions(None, {}),
            implementations=implementations,
        )
        for other in self.entries:
            # Entry points without a section, such as the one that makes plugins for models, leave
            # their name to a component.
            contend = _owns_name(other) and _owns_name(entry)
            if other.name == name and (contend or other.origin == origin):
                raise NameTakenError(
                    f"two plugins are named {name!r}: {_describe_origin(other)} and"
                    f" {_describe_origin(entry)}; pass another name to one of them"
                )
            if contend and other.name.lower() == name.lower():
                raise NameTakenError(
                    f"{other.name!r} and {name!r} differ only in case, which some disks ignore;"
                    " pass another name to one of them"
                )
        if self.resume is not None:
            self.resume.check_in_time(entry)
        self.entries.append(entry)
        self._forget(entry)
        if "bus_open" in entry.events:
            try:
                self.ask_one(entry, "bus_open", {"bus": self._bus()})
            except BaseException:
                self._remove(entry)
                raise
        return entry

    def _remove(self, entry: Registered) -> None:
        if "bus_close" in entry.events:
            self.ask_one(entry, "bus_close", {})
        self.entries.remove(entry)
        self._forget(entry)

    def _forget(self, entry: Registered) -> None:
        self.changes += 1
        self._switchboard.forget(entry.events)

    def _is_attached(self, name: str, component: object, others: Mapping[str, object]) -> bool:
        """Whether a component is on the bus under this name; refuse what contradicts it."""
        check_name(name)
        for other, existing in {**self.components, **others}.items():
            if other == name and existing is not component:
                raise NameTakenError(
                    f"two components are named {name!r}: {name_type(existing)} and"
                    f" {name_type(component)}; attach one of them under another name"
                )
            if other != name and existing is component:
                raise AttachError(f"{other!r} and {name!r} are the same object; attach it once")
        return name in self.components

    def _find_plugin(self, name: str, component: object) -> tuple[object, Registered | None] | None:
        """Return a plugin for a component and who made it, or ``None`` if that is blocked."""
        if component is None:
            raise AttachError(f"{name}=None: there is nothing to attach; leave it out")
        if self._is_blocked(name):
            logger.info("nobody looks after %r, which is blocked", name)
            return None
        arguments = {"name": name, "component": component}
        plugin, answers = self.ask("plugin_for", arguments)
        maker = answers[0][0] if answers else None
        if plugin is not None:
            self._log_others(maker, arguments)
            return plugin, maker
        if self.blocked:
            logger.warning(
                "nobody looks after %r (%s), so it is neither saved nor restored; blocked are %s",
                name,
                name_type(component),
                ", ".join(sorted(self.blocked)),
            )
            return None
        asked = ", ".join(place.name for place in self.order("plugin_for")) or "none"
        failed = ", ".join(each.name for each in self.failed)
        hint = (
            f"it is a plugin itself: bus.register(it, {name!r})"
            if _is_plugin(component)
            else "give it state_dict and load_state_dict, or register a plugin for it"
        )
        raise AttachError(
            f"nobody can look after {name!r} ({name_type(component)}); asked were {asked};"
            + (f" {failed} could not be loaded;" if failed else "")
            + f" {hint}"
        )

    def _log_others(self, maker: Registered | None, arguments: Mapping[str, object]) -> None:
        """Log who would have answered `plugin_for` too, had its turn come."""
        if not logger.isEnabledFor(logging.DEBUG):
            return
        entries = [place.entry for place in self.order("plugin_for")]
        for other in entries[entries.index(maker) + 1 :] if maker in entries else ():
            if self.ask_one(other, "plugin_for", arguments) is not None:
                logger.debug("%r: %s answered before %s", arguments["name"], maker, other)


def _read_block(block: Collection[str], found: Iterable[Found] | None) -> frozenset[str]:
    """Return what is blocked by argument and environment; refuse what is not installed."""
    if isinstance(block, str):
        raise CallError(f"block={block!r}: pass a tuple of names, such as ({block!r},)")
    if not isinstance(block, Collection) or not all(isinstance(name, str) for name in block):
        raise CallError(f"block={block!r}: pass a tuple of names")
    words = {word.strip() for word in os.environ.get(DISABLE_VARIABLE, "").split(",")} - {""}
    named = {DISABLE_VARIABLE: words, "block=": set(block)}
    if found is not None:
        known = set(entry_points.list_known_names(found))
        problems: list[HookbusError] = [
            CallError(
                f"{argument} names {', '.join(map(repr, sorted(names - known)))}, which is not"
                f" installed; there are {', '.join(sorted(known))}"
            )
            for argument, names in named.items()
            if names - known
        ]
        raise_all("unknown plugins cannot be blocked", problems)
    return frozenset().union(*named.values())


def _owns_name(entry: Registered) -> bool:
    return entry.origin == BY_HAND or entry.has_section


def _is_plugin(component: object) -> bool:
    try:
        inspect_plugin(component)
    except HookbusError:
        return False
    return True


def _describe_origin(entry: Registered) -> str:
    return f"{name_type(entry.plugin)} ({entry.distribution or entry.origin})"
