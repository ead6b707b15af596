"""One order per event: from wrappers, tryfirst and trylast, kinds, and declared before/after."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from hookbus.errors import OrderError
from hookbus.logs import logger
from hookbus.registration import BUILT_IN, BY_HAND, THIRD_PARTY, Registered

KINDS = (
    "datamodule",
    "model",
    "callbacks",
    "strategy",
    "precision",
    "optimizer",
    "scheduler",
    "loader",
    "loop",
    "rng",
    "state",
)

# Where a kind stands in an event unless before/after say otherwise. "*" is every kind not named.
KIND_ORDER: Mapping[str, tuple[str, ...]] = {
    "on_setup": ("datamodule", "model", "callbacks", "*"),
    "restore_model": ("datamodule", "model", "callbacks", "*"),
    "restore_training_state": ("precision", "optimizer", "scheduler", "*", "loop"),
    "resume_end": ("*", "rng"),
}

# In which plugin_for is asked.
ORIGINS = (BY_HAND, THIRD_PARTY, BUILT_IN)


@attrs.frozen(eq=False)
class Place:
    """One plugin's place in an event, and why it stands there."""

    name: str
    reason: str
    entry: Registered = attrs.field(repr=False)


def sort(event: str, entries: Sequence[Registered]) -> list[Place]:
    """Return the plugins in the order in which ``event`` calls them.

    Declared ``before`` and ``after`` always hold. What they leave open is decided by wrapper,
    tryfirst, plain, trylast; then by kind; then by registration. ``plugin_for`` asks plugins
    registered by hand first (latest first), then entry points by name, then the built-in ones.

    Raises:
        OrderError: the declared order goes round in a circle; its members are named.
    """
    edges = _collect_edges(event, entries)
    waiting = {entry: {first for first, _ in edges[entry]} for entry in entries}
    followers: dict[Registered, list[Registered]] = {entry: [] for entry in entries}
    for entry, firsts in waiting.items():
        for first in firsts:
            followers[first].append(entry)
    free = [(_rank(event, entry), entry.number, entry) for entry in entries if not waiting[entry]]
    heapq.heapify(free)
    places = []
    while free:
        *_, entry = heapq.heappop(free)
        places.append(Place(entry.name, _explain(event, entry, edges[entry]), entry))
        del waiting[entry]
        for follower in followers[entry]:
            waiting[follower].discard(entry)
            if not waiting[follower]:
                heapq.heappush(free, (_rank(event, follower), follower.number, follower))
    if waiting:
        circle = " before ".join(entry.name for entry in _find_circle(waiting))
        raise OrderError(
            f"the order of {event} goes round in a circle: {circle};"
            " take one before= or after= away"
        )
    return places


def warn_of_unknown_words(entries: Iterable[Registered]) -> None:
    """Log one WARNING for each before/after word that is no kind and no plugin's name."""
    for entry, word in list_unknown_words(entries):
        logger.warning(
            "plugin %r is to come before or after %r, which is neither a kind nor a plugin"
            " on this bus",
            entry.name,
            word,
        )


def list_unknown_words(entries: Iterable[Registered]) -> Iterator[tuple[Registered, str]]:
    """Yield each before/after word that is no kind and no plugin's name, with whose it is."""
    entries = list(entries)
    known = {*KINDS, *(e.name for e in entries), *(e.kind for e in entries)}
    for entry in entries:
        for word in (*entry.before, *entry.after):
            if word not in known:
                yield entry, word


def _collect_edges(
    event: str, entries: Sequence[Registered]
) -> dict[Registered, list[tuple[Registered, str]]]:
    """Return, for each plugin, who comes before it and the words that say so."""
    edges: dict[Registered, list[tuple[Registered, str]]] = {entry: [] for entry in entries}
    bearers: dict[str | None, list[Registered]] = {}
    for entry in entries:
        for word in {entry.name, entry.kind}:
            bearers.setdefault(word, []).append(entry)

    def add(first: Registered, second: Registered, words: str) -> None:
        # A wrapper surrounds the plain ones, so nothing orders the two against each other.
        if first is not second and first.is_wrapper(event) == second.is_wrapper(event):
            edges[second].append((first, words))

    for entry in entries:
        for word in entry.after:
            for first in bearers.get(word, ()):
                add(first, entry, f"after {word!r}")
        for word in entry.before:
            for second in bearers.get(word, ()):
                add(entry, second, f"{entry.name!r} says before {word!r}")
    return edges


def _rank(event: str, entry: Registered) -> tuple[object, ...]:
    options = entry.options(event)
    when = 0 if options["wrapper"] else 1 if options["tryfirst"] else 3 if options["trylast"] else 2
    if event == "plugin_for":
        origin = ORIGINS.index(entry.origin)
        latest_first = -entry.number if origin == 0 else 0
        return (when == 3, origin, latest_first, entry.name)
    kinds = KIND_ORDER.get(event, ("*",))
    rank = kinds.index(entry.kind) if entry.kind in kinds else kinds.index("*")
    return (when, rank, entry.number)


def _explain(event: str, entry: Registered, edges: Iterable[tuple[Registered, str]]) -> str:
    options = entry.options(event)
    reasons = [word for word in ("wrapper", "tryfirst", "trylast") if options[word]]
    if event == "plugin_for":
        reasons.append(entry.origin)
    elif entry.kind in KIND_ORDER.get(event, ()):
        reasons.append(f"kind {entry.kind!r}")
    reasons += sorted({words for _, words in edges})
    reasons.append(f"registered as number {entry.number}")
    return ", ".join(reasons)


def _find_circle(waiting: Mapping[Registered, set[Registered]]) -> list[Registered]:
    """Return one circle among what cannot be placed: each stands before the next."""
    path = [next(iter(waiting))]
    while True:
        first = min(waiting[path[-1]] & waiting.keys(), key=lambda entry: entry.number)
        if first in path:
            return [*path[path.index(first) :], first][::-1]
        path.append(first)
