"""State versions: which one a plugin writes, and the steps that lead to it from older ones.

Steps are marked functions, found when their plugin is registered; nothing is kept globally.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import attrs

from hookbus.errors import CallError, HookbusError, RegistrationError, raise_all
from hookbus.registration import Registered, find_function, name_type

_MARK = "hookbus_migrations"

Migration = TypeVar("Migration", bound=Callable[..., Any])


def migrate(
    kind: str, old: int, new: int, *, part: str | None = None
) -> Callable[[Migration], Migration]:
    """Mark a function as the step from one version of a state's layout to a later one.

    It is a method of the plugin, or a function of the plugin's module; ``kind`` is the plugin's
    kind (its name where it has none). It takes the state as it was saved and returns it as the
    later version has it; its tensors are its own, on the CPU, and it may change and return what it
    was given. With ``part`` it is given that part of the section. It may be called twice, before
    anything is restored and when it is: let it depend on the state alone.

    Raises:
        CallError: the versions are no whole numbers from 1 up, or do not go up.
    """
    for each in (old, new):
        if type(each) is not int or each < 1:
            raise CallError(f"migrate({kind!r}, {old!r}, {new!r}): pass whole numbers from 1 up")
    if not isinstance(kind, str) or new <= old:
        raise CallError(
            f"migrate({kind!r}, {old!r}, {new!r}): pass the plugin's kind, the version that was"
            " saved, and a later one"
        )

    def mark(function: Migration) -> Migration:
        marked = getattr(function, "__func__", function)  # of a static method
        if not inspect.isfunction(marked):
            raise CallError(f"migrate({kind!r}, {old}, {new}) marks {function!r}; mark a function")
        setattr(marked, _MARK, (*getattr(marked, _MARK, ()), (kind, part, old, new)))
        return function

    return mark


@attrs.frozen(eq=False)
class Step:
    """One step of a migration: from version ``old`` of a part to ``new``."""

    part: str | None
    old: int
    new: int
    function: Callable[[Any], Any]

    def __str__(self) -> str:
        return f"{self.old} → {self.new} by {self.function.__name__}"


@attrs.frozen(eq=False)
class Versions:
    """What a plugin knows of the versions of its state: ``steps`` by part and version."""

    declared: int | None
    steps: Mapping[str | None, Mapping[int, Step]]

    def get_current(self, part: str | None) -> int:
        """Return the version that the plugin writes: declared, or where its steps end, or 1."""
        steps = self.steps.get(part, {})
        return self.declared or max((step.new for step in steps.values()), default=1)

    def list_known(self, part: str | None) -> list[int]:
        """Return the versions that can be read."""
        return sorted({*self.steps.get(part, {}), self.get_current(part)})

    def find_path(self, part: str | None, saved: int) -> list[Step]:
        """Return the steps from a version that is known to the current one."""
        path: list[Step] = []
        while saved != self.get_current(part):
            path.append(self.steps[part][saved])
            saved = path[-1].new
        return path


def read_versions(plugin: object, word: str) -> Versions:
    """Find the steps of a plugin whose kind is ``word``, and check that they lead to one version.

    Raises:
        RegistrationError: they do not; each fault is named.
    """
    found = [*_find_methods(plugin, word), *_find_beside(plugin, word)]
    steps: dict[str | None, dict[int, Step]] = {}
    problems: list[HookbusError] = []
    for step in found:
        other = steps.setdefault(step.part, {}).setdefault(step.old, step)
        if other is not step:
            problems.append(
                RegistrationError(
                    f"{name_type(plugin)}: two migrations start from version {step.old} of"
                    f" {_name_part(step.part)}: {other} and {step}; take one of them away"
                )
            )
    declared = getattr(plugin, "state_version", None)
    if declared is not None and (type(declared) is not int or declared < 1):
        problems.append(
            RegistrationError(
                f"{name_type(plugin)}.state_version = {declared!r}: pass a whole number from 1 up,"
                " or leave it out"
            )
        )
        declared = None
    versions = Versions(declared, steps)
    for part, by_version in steps.items():
        for step in by_version.values():
            current = versions.get_current(part)
            if step.new != current and step.new not in by_version:
                problems.append(
                    RegistrationError(
                        f"{name_type(plugin)}: the migration {step} of {_name_part(part)} ends"
                        f" there, and the plugin's version is {current}; add @hookbus.migrate("
                        f"{word!r}, {step.new}, …)"
                    )
                )
    raise_all(f"{name_type(plugin)} cannot be registered", problems)
    return versions


def spell_step(entry: Registered, part: str | None, old: int, new: int) -> str:
    """Return the line that marks a function as a step of a plugin."""
    which = "" if part is None else f", part={part!r}"
    return f"@hookbus.migrate({entry.kind or entry.name!r}, {old}, {new}{which})"


def _find_methods(plugin: object, word: str) -> Iterator[Step]:
    """Yield the steps among the attributes of a plugin.

    Raises:
        RegistrationError: a method is a step of another kind, which would never be taken.
    """
    for attribute in dir(plugin):
        function = None if attribute.startswith("__") else find_function(plugin, attribute)
        for kind, part, old, new in getattr(function, _MARK, ()):
            if kind == word:
                yield Step(part, old, new, getattr(plugin, attribute))
            elif not inspect.ismodule(plugin):
                raise RegistrationError(
                    f"{name_type(plugin)}.{attribute} is marked as a migration of {kind!r}, and the"
                    f" plugin is of kind {word!r}; write @hookbus.migrate({word!r}, {old}, {new})"
                )


def _find_beside(plugin: object, word: str) -> Iterator[Step]:
    """Yield the steps among the functions of the modules that a plugin's class comes from."""
    if inspect.ismodule(plugin):
        return
    functions: dict[int, Callable[[Any], Any]] = {}
    for cls in type(plugin).__mro__:
        for each in list(vars(sys.modules.get(cls.__module__, object)).values()):
            if inspect.isfunction(each):
                functions.setdefault(id(each), each)  # one that was imported is found twice
    for function in functions.values():
        for kind, part, old, new in getattr(function, _MARK, ()):
            if kind == word:
                yield Step(part, old, new, function)


def _name_part(part: str | None) -> str:
    return "the state" if part is None else f"part {part!r}"
