"""What an object holds, attribute by attribute, so that two moments of it can be compared."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import attrs
import numpy
import torch
import xxhash

from hookbus.bus import HookBus
from hookbus.checkpoint import Checkpoint
from hookbus.errors import StateError
from hookbus.resume import Resume
from hookbus.save import Save
from hookbus.testing.pictures import Picture

_PASSING = (Save, Resume, Checkpoint)
"""What the bus hands to an event, and what is over with it."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray)
_SEQUENCES = (list, tuple)
_IN_MODULE = ("_parameters", "_buffers", "_modules")
_DEEPEST = 60
_MANY = 50  # values that are not told apart


@attrs.frozen(eq=False)
class Trace:
    """Each attribute that was reached, by its path, with the bits it had.

    ``held`` are the paths of what should have been let go of after an event, ``streams`` those of
    generators.
    """

    found: dict[str, Picture | str] = attrs.field(factory=dict)
    held: dict[str, str] = attrs.field(factory=dict)
    streams: list[str] = attrs.field(factory=list)
    _kept: list[object] = attrs.field(factory=list)  # so that no address is used again
    _seen: dict[int, str] = attrs.field(factory=dict)

    def walk(self, value: Any, path: str, depth: int = 0) -> None:
        """Note a value, and everything that it holds."""
        if isinstance(value, _PLAIN):
            self.found[path] = f"{type(value).__name__} {value!r}"
            return
        if id(value) in self._seen:
            self.found[path] = f"the same as {self._seen[id(value)]}"
            return
        self._seen[id(value)] = path
        self._kept.append(value)
        if isinstance(value, _PASSING):
            self.held[path] = type(value).__name__
        elif isinstance(value, torch.Tensor | numpy.ndarray):
            self._note_array(value, path)
        elif isinstance(value, _SEQUENCES) and len(value) > _MANY and _are_plain(value):
            digest = xxhash.xxh3_128_hexdigest(repr(value).encode())
            self.found[path] = f"{len(value)} values with the hash {digest}"
        elif (state := _read_stream(value)) is not None:
            self.streams.append(path)
            self._note_state(state, path)
        elif depth < _DEEPEST and (members := _list_members(value, path)) is not None:
            self.found[path] = f"a {type(value).__name__}"
            for place, member in members:
                self.walk(member, place, depth + 1)
        else:
            self.found[path] = _show_opaque(value)

    def _note_array(self, value: Any, path: str) -> None:
        self._note_state(value, path)
        if isinstance(value, torch.Tensor) and value.is_leaf and value.grad is not None:
            self.walk(value.grad, f"{path}.grad")

    def _note_state(self, state: Any, path: str) -> None:
        try:
            self.found[path] = Picture.take(state)
        except StateError:  # a subclass, or on the meta device
            version = getattr(state, "_version", "")
            self.found[path] = f"{_show_opaque(state)} version {version}"


def trace(**roots: object) -> Trace:
    """Note everything that can be reached from some objects, under the names given."""
    made = Trace()
    for name, root in roots.items():
        made.walk(root, name)
    return made


def list_changes(before: Trace, after: Trace, only: str | None = None) -> list[str]:
    """Say of each attribute, or of one, that is not as it was what it was and what it is."""
    changes = []
    for path in {**before.found, **after.found} if only is None else (only,):
        was, now = before.found.get(path), after.found.get(path)
        if isinstance(was, Picture) and isinstance(now, Picture):
            changes += [f"{path}: {text}" for text in was.list_differences(now)]
        elif was != now:
            changes.append(f"{path}: {_show_found(was)} → {_show_found(now)}")
    return changes


def _list_members(value: Any, path: str) -> Iterator[tuple[str, Any]] | None:
    """Return what a value holds with the path of each, or ``None`` if nobody can look inside."""
    if isinstance(value, Mapping):
        items = list(value.items())
        return ((f"{path}[{_show_key(key, n)}]", each) for n, (key, each) in enumerate(items))
    if isinstance(value, AbstractSet):
        return ((f"{path}{{{n}}}", each) for n, each in enumerate(sorted(value, key=repr)))
    if isinstance(value, _SEQUENCES) or type(value).__name__ == "deque":
        return ((f"{path}[{n}]", each) for n, each in enumerate(list(value)))
    if isinstance(value, type | HookBus) or (callable(value) and not hasattr(value, "__dict__")):
        return None
    if _is_foreign(value):
        return None
    return _list_attributes(value, path)


def _are_plain(values: list[Any] | tuple[Any, ...]) -> bool:
    return set(map(type, values)) <= set(_PLAIN)


def _is_foreign(value: Any) -> bool:
    """Whether it is Python's own: a function, a module, a logger, a lock and the like."""
    home = type(value).__module__.partition(".")[0]
    return home in sys.stdlib_module_names and type(value).__name__ not in (
        "SimpleNamespace",
        "Namespace",
    )


def _list_attributes(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    slots = [name for kind in type(value).__mro__ for name in _read_slots(kind)]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    found |= getattr(value, "__dict__", {})
    if isinstance(value, torch.nn.Module):
        for group in _IN_MODULE:
            found |= found.pop(group, {})
    return ((f"{path}.{name}", each) for name, each in found.items())


def _read_slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _read_stream(value: Any) -> Any:
    """Return where a generator stands; ``None`` for anything else."""
    match value:
        case torch.Generator():
            return value.get_state()
        case numpy.random.Generator():
            return value.bit_generator.state
        case numpy.random.RandomState():
            return value.get_state(legacy=False)
        case random.Random() if not isinstance(value, random.SystemRandom):
            return value.getstate()
    return None


def _show_key(key: object, number: int) -> str:
    return f"#{number}" if isinstance(key, torch.Tensor) else repr(key)


def _show_opaque(value: object) -> str:
    if type(value).__eq__ is not object.__eq__ and type(value).__hash__ is not None:
        return f"{type(value).__name__} {value!r}"  # a path, a time: one is as good as another
    return f"{type(value).__name__} at {id(value):#x}"


def _show_found(found: Picture | str | None) -> str:
    if found is None:
        return "not there"
    return str(found)
