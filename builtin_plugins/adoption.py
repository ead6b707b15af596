"""Look after the loaders that are handed to the loop and that nobody attached."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Mapping, Set
from typing import Any

from builtin_plugins.held import Held, read_attributes
from builtin_plugins.loader import OF_THE_ORDER, Loader, describe
from builtin_plugins.search import find_instances, list_subclasses
from builtin_plugins.streams import find_streams, is_fresh
from hookbus.errors import SamplerError


class Adopted:
    """The loaders of ``loop.batches`` that are not attached, by the number of the call.

    In the middle of an epoch a loader takes its state back. In a later epoch after a resume it
    does so only if it is the one that the script goes on using: one that is built in each epoch
    must start as it is built.
    """

    def __init__(self) -> None:
        self._loaders: dict[int, Loader] = {}
        self._states: dict[int, Mapping[str, Any]] = {}
        self._settings: dict[int, Mapping[str, Any]] = {}
        # What the loaders held that were there before the first epoch after the resume.
        self._before: dict[int, tuple[weakref.ref[Any], Held]] = {}
        self._looked = False
        self._warned: set[str] = set()

    def note_streams(self, slot: str) -> Mapping[str, str]:
        return {
            f"{call}.{name}": value
            for call, loader in self._loaders.items()
            for name, value in loader.note_streams(slot).items()
        }

    def put_streams(self, slot: str) -> None:
        for loader in self._loaders.values():
            loader.put_streams(slot)

    def read_state(self) -> dict[int, Mapping[str, Any]]:
        live = {call: _read_state(each) for call, each in self._loaders.items()}
        return {**self._states, **live}

    def put_state(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Keep what `read_state` returned until the loaders come."""
        self._loaders, self._before, self._states = {}, {}, dict(states)
        self._looked = False
        self._settings = {call: state["settings"] for call, state in states.items()}

    def look_around(self) -> None:
        """Note, once after a resume and before the epoch's own code runs, which loaders exist."""
        if self._looked:
            return
        self._looked = True
        names = {settings["class"] for settings in self._settings.values()}
        kinds = [each for each in list_subclasses([object]) if each.__qualname__ in names]
        for each in find_instances(kinds):
            with contextlib.suppress(TypeError):  # a list of batches has nothing to restore
                self._before[id(each)] = weakref.ref(each), Held.read(each)

    @property
    def loaders(self) -> list[Loader]:
        return list(self._loaders.values())

    def awaits(self, call: int) -> bool:
        """Whether there is a state for the loader of this call."""
        return call in self._states

    def find(self, call: int, source: Iterable[Any], *, taking_up: bool) -> Loader:
        """Return who looks after the loader of this call; ``taking_up``: in the middle of it.

        Raises:
            SamplerError: its streams are others than were saved, or were drawn from too early.
        """
        if call not in self._loaders or self._loaders[call].component is not source:
            loader = self._loaders[call] = Loader(source, self._warned)
            if call in self._settings:
                changes = loader.compare_settings(self._settings[call])
                texts = [f"{n} {was} → {now}" for n, was, now in changes if n in OF_THE_ORDER]
                if texts:
                    loader.warn(f"{describe(source)}: not bit for bit: {', '.join(texts)}")
            if call in self._states:
                self._give_back(loader, self._states.pop(call), taking_up=taking_up)
        return self._loaders[call]

    def _give_back(self, loader: Loader, state: Mapping[str, Any], *, taking_up: bool) -> None:
        reference, before = self._before.get(id(loader.component), (lambda: None, None))
        if taking_up:
            loader.put_state(state)
        elif before is not None and reference() is loader.component:
            saved = Held(**state["slots"]["now"])
            _warn_of_epochs(loader, before, saved)
            moved = _list_moved_on(loader.component, before.digest(), saved.digest())
            loader.put_state(state, keep=moved)


def _read_state(loader: Loader) -> dict[str, Any]:
    """Read what is put back: nobody knows the loader yet when a resume hands out its first epoch.

    So its streams as of then are not saved; those of a run that was cut would be older ones.
    """
    state = loader.read_state()
    return {**state, "slots": {slot: s for slot, s in state["slots"].items() if slot != "head"}}


def _warn_of_epochs(loader: Loader, before: Held, saved: Held) -> None:
    """Warn of an epoch of a sampler that the script may have set before, and did not set now.

    Whether it called ``set_epoch`` with what was there anyhow cannot be told.
    """
    live = read_attributes(loader.component)
    for name, value in saved.attributes.items():
        if name.endswith(".epoch") and live.get(name) == before.attributes.get(name) != value:
            loader.warn(
                f"{describe(loader.component)}: {name} was {value} when saved and is"
                f" {live.get(name)}; if the script does not call set_epoch in each epoch, attach"
                " the loader, so that it comes back: bus.attach(NAME=loader)"
            )


def _list_moved_on(loader: object, before: Mapping[str, str], saved: Mapping[str, str]) -> Set[str]:
    """Name what the epoch's own code has drawn from or seeded, and must stay as it is.

    Raises:
        SamplerError: it has drawn from a stream that was not in place by then.
    """
    live, streams = Held.read(loader).digest(), find_streams(loader)
    moved = {name for name, value in before.items() if live.get(name) != value}
    lost = [
        name
        for name in moved
        if before[name] != saved.get(name) and not (name in streams and is_fresh(streams[name]))
    ]
    if lost:
        raise SamplerError(
            f"{describe(loader)}: {', '.join(lost)} was drawn from before batches() and after the"
            " resume; attach the loader, so that its streams are in place by then:"
            " bus.attach(NAME=loader)"
        )
    return moved
