"""The laws that every plugin has to keep to, and how each is tried.

``check_plugin`` in a plugin's own tests::

    from hookbus.testing import check_plugin

    def test_it_keeps_the_laws():
        report = check_plugin(
            lambda: EmaPlugin(torch.zeros(3)), change=lambda plugin: plugin.shadow.add_(1)
        )
        print(report)
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from hookbus.errors import CallError, LawError
from hookbus.ordering import list_unknown_words
from hookbus.registration import EVENTS, name_type
from hookbus.testing.bench import Bench, bench
from hookbus.testing.court import Court
from hookbus.testing.restoring import Restoring
from hookbus.testing.saving import Saving
from hookbus.testing.source import Source
from hookbus.testing.trial import Trial
from hookbus.testing.verdict import LAWS, PluginReport


def check_plugin(
    make: Any,
    *,
    change: Callable[[Any], object] | None = None,
    other: Callable[..., Any] | None = None,
    name: str | None = None,
    may_change: Collection[str] = (),
    skip: Collection[str] = (),
) -> PluginReport:
    """Put a plugin through the laws that every plugin has to keep to; return what came of each.

    ``make`` makes what is checked, anew and equal each time: a plugin, or a component that an
    installed plugin looks after. If it takes ``bus`` it is given that, and can first attach there
    what the plugin needs beside it::

        def make(bus):
            model = torch.nn.Linear(2, 1)
            bus.attach(model=model)
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    ``make`` may also be a plugin or component itself, or the name of an installed plugin, such as
    ``"ema-hookbus:ema"``. Where there is only one, laws that need a second are not checked.

    ``change(made)`` brings what was made into another state, by the same each time; or ``other``
    makes one that is in another state. ``name`` is that of the section. ``may_change`` are shell
    patterns of attributes that a save may change, such as ``"plugin._cache"``; ``skip`` are keys
    of laws to leave out.

    Checkpoints are really written, into a folder that goes. Random streams of the process are put
    back at the end. No test framework is needed.

    Raises:
        LawError: laws are broken; each is named, with what was seen and what to change.
        CallError: an argument is not what is expected.
    """
    keys = [law.key for law in LAWS]
    may_change, skip = _take_words("may_change", may_change), _take_words("skip", skip)
    if unknown := [key for key in skip if key not in keys]:
        raise CallError(
            f"skip=({unknown[0]!r},): there is no such law; there are {', '.join(keys)}"
        )
    if change is not None and other is not None:
        raise CallError("change= and other= both make another state; pass one of them")
    source = Source(make, name)
    if other is not None and not source.is_function:
        raise CallError("other= needs a function as make; pass change= instead")
    with bench(source, change, other and Source(other, name)) as place:
        try:
            return _judge(place, may_change, skip)
        finally:
            place.close()


def _take_words(argument: str, words: Collection[str]) -> tuple[str, ...]:
    if isinstance(words, str) or not all(isinstance(word, str) for word in words):
        raise CallError(f"{argument}={words!r}: pass a tuple of words")
    return tuple(words)


def _judge(place: Bench, may_change: tuple[str, ...], skip: tuple[str, ...]) -> PluginReport:
    court, first = Court(skip), place.make()
    entry, who = first.entry, _describe(first)
    has_other = place.change is not None or place.other is not None
    if entry.has_section and not has_other:
        raise CallError(
            f"{entry} saves a state, so pass change=, a function that brings what was made into"
            " another state, or other=, one that makes another"
        )
    court.try_law("order", _check_order, first)
    if not court.try_law("start", _start, first):
        court.give_up("no run could be started")
    elif not entry.has_section:
        if has_other:
            court.note("something", "broken", "it has no save_state, so it has no section")
        court.give_up("it has no save_state")
    elif saved := Saving(court, place, may_change).check(first):
        Restoring(court, place, may_change, saved).check()
    report = PluginReport(who, tuple(court.results[law.key] for law in LAWS))
    if report.broken:
        raise LawError(report.explain(), report)
    return report


def _describe(trial: Trial) -> str:
    component = trial.component
    text = f"{trial.entry}, class {name_type(trial.entry.plugin)}"
    return text if component is None else f"{text}, for class {name_type(component)}"


def _check_order(trial: Trial) -> list[str]:
    for event in EVENTS:
        trial.bus.order(event)
    return [
        f"it is to come before or after {word!r}, and no kind and no plugin is called so"
        for entry, word in list_unknown_words(trial.bus.plugins)
        if entry is trial.entry
    ]


def _start(trial: Trial) -> None:
    trial.bus.resume(trial.run)
