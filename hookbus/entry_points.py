"""Plugins that come with installed distributions, each loaded, or failing, alone and by name."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import re
from collections.abc import Iterable, Iterator

import attrs

from hookbus.errors import RegistrationError
from hookbus.registration import describe

GROUP = "hookbus"
OWN_DISTRIBUTION = "hookbus"


@attrs.frozen(eq=False)
class Failed:
    """A plugin that could not be loaded: its name, who wrote it, and why."""

    name: str
    distribution: str
    version: str
    exception: BaseException

    def __str__(self) -> str:
        who = describe(self.name, self.distribution, self.version)
        return f"{who} could not be loaded: {type(self.exception).__name__}: {self.exception}"


@attrs.frozen(eq=False)
class Found:
    """An installed entry point, not loaded yet."""

    name: str
    distribution: str
    version: str
    entry_point: importlib.metadata.EntryPoint = attrs.field(repr=False)

    @property
    def built_in(self) -> bool:
        return self.distribution == OWN_DISTRIBUTION

    def load(self) -> object:
        """Import it; a function or class is called, so that each bus has a plugin of its own."""
        found = self.entry_point.load()
        if found is None:
            raise RegistrationError(f"the entry point {self.name!r} is None")
        if inspect.isclass(found) or inspect.isroutine(found):
            found = found()
            if found is None:
                raise RegistrationError(f"the entry point {self.name!r} returned None")
        return found


def find(group: str = GROUP) -> list[Found]:
    """Return what is installed, the built-in ones first, then by distribution and name.

    Entry points come in the order of ``sys.path``, which is luck, so they are sorted here.
    """
    found = []
    for entry_point in importlib.metadata.entry_points(group=group):
        owner, version = _read_owner(entry_point.dist)
        name = entry_point.name if owner == OWN_DISTRIBUTION else f"{owner}:{entry_point.name}"
        found.append(Found(name, owner, version, entry_point))
    return sorted(found, key=lambda each: (not each.built_in, each.name))


def find_distribution(plugin: object) -> tuple[str | None, str | None]:
    """Return name and version of the distribution that a plugin's code comes from."""
    module = plugin.__name__ if inspect.ismodule(plugin) else type(plugin).__module__
    return _find_owner(module.partition(".")[0])


def normalize(name: str) -> str:
    """Return a distribution's name as it is compared: ``hookbus-ema`` for ``Hookbus_EMA``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def list_known_names(found: Iterable[Found]) -> Iterator[str]:
    """Yield every word that blocks something: plugin and distribution names."""
    for each in found:
        yield each.name
        if not each.built_in:
            yield each.distribution


def _read_owner(distribution: importlib.metadata.Distribution | None) -> tuple[str, str]:
    try:
        return normalize(distribution.name), distribution.version  # type: ignore[union-attr]
    except Exception:  # its metadata are damaged, and nobody else's are
        return "unknown", ""


@functools.cache
def _find_owner(package: str) -> tuple[str | None, str | None]:
    names = importlib.metadata.packages_distributions().get(package)
    return (normalize(names[0]), importlib.metadata.version(names[0])) if names else (None, None)
