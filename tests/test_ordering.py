"""The order within an event is data: declared, printed with its reasons, and kept."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hookbus
from hookbus.errors import CallError, OrderError
from hookbus.ordering import KIND_ORDER

FLAGS = ("wrapper", "tryfirst", "plain", "trylast")
KINDS = (None, "datamodule", "model", "callbacks", "optimizer", "ema")


@attrs.define(eq=False, slots=False)
class Plan:
    """A plugin to make: its flag, kind, and what it is to come before and after."""

    name: str
    flag: str = "plain"
    kind: str | None = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def make_plugin(plan: Plan, calls: list[str]) -> object:
    def note(self: object) -> None:
        calls.append(plan.name)

    def note_around(self: object) -> Any:
        calls.append(plan.name)
        return (yield)

    function = note_around if plan.flag == "wrapper" else note
    flags = {} if plan.flag == "plain" else {plan.flag: True}
    marked = hookbus.hookimpl(**flags)(function)
    body = {"kind": plan.kind, "before": plan.before, "after": plan.after}
    return type(plan.name, (), {**body, "safe_point": marked, "on_setup": marked})()


def make_bus(plans: list[Plan], calls: list[str] | None = None) -> hookbus.HookBus:
    bus = hookbus.HookBus(load_plugins=False)
    for plan in plans:
        bus.register(make_plugin(plan, [] if calls is None else calls), plan.name)
    return bus


def print_order(bus: hookbus.HookBus, event: str = "safe_point") -> list[str]:
    return [place.name for place in bus.order(event)]


@st.composite
def plans(draw: st.DrawFn, *, constrained: bool = True) -> list[Plan]:
    """Plugins in the order of registration, whose before and after go round in no circle."""
    made = [
        Plan(f"p{i}", draw(st.sampled_from(FLAGS)), draw(st.sampled_from(KINDS)))
        for i in range(draw(st.integers(0, 7)))
    ]
    for first, second in itertools.combinations(made, 2):  # the hidden order is that of creation
        if constrained and draw(st.integers(0, 3)) == 0:
            if draw(st.booleans()):
                first.before += (second.name,)
            else:
                second.after += (first.name,)
    return list(draw(st.permutations(made)))


# -- laws ---------------------------------------------------------------------------------------


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(plans())
def test_the_printed_order_is_the_called_order_and_keeps_what_was_declared(
    tmp_path: Path, made: list[Plan]
) -> None:
    """Source: pytest-dev/pluggy#441, pytest-dev/pluggy#705"""
    calls: list[str] = []
    with make_bus(made, calls) as bus:
        bus.hook.safe_point(loop=None)
        assert calls == print_order(bus)
        calls.clear()
        bus.resume(tmp_path)
        assert calls == print_order(bus, "on_setup")
        for event in ("safe_point", "on_setup"):
            place = {name: i for i, name in enumerate(print_order(bus, event))}
            for plan in made:
                others = {each.name: each for each in made}
                for other in plan.before:
                    if (plan.flag == "wrapper") == (others[other].flag == "wrapper"):
                        assert place[plan.name] < place[other]
                for other in plan.after:
                    if (plan.flag == "wrapper") == (others[other].flag == "wrapper"):
                        assert place[other] < place[plan.name]


@settings(deadline=None)
@given(plans(constrained=False))
def test_where_nothing_is_declared_flags_decide_then_kinds_then_registration(
    made: list[Plan],
) -> None:
    """Source: pytest-dev/pluggy#441"""
    bus = make_bus(made)
    assert print_order(bus) == [
        plan.name for plan in sorted(made, key=lambda plan: FLAGS.index(plan.flag))
    ]
    rank = {"datamodule": 0, "model": 1, "callbacks": 2}
    assert print_order(bus, "on_setup") == [
        plan.name
        for plan in sorted(made, key=lambda p: (FLAGS.index(p.flag), rank.get(p.kind or "", 3)))
    ]


@settings(deadline=None)
@given(st.data())
def test_the_order_of_registration_does_not_matter_where_the_declared_order_decides(
    data: st.DataObject,
) -> None:
    """Source: pytest-dev/pluggy#705"""
    names = data.draw(st.permutations("abcdef"))
    flags = data.draw(st.lists(st.sampled_from(FLAGS[1:]), min_size=6, max_size=6))
    chain = [
        Plan(name, flag, after=names[i - 1 : i] if i else ())
        for i, (name, flag) in enumerate(zip(names, flags, strict=True))
    ]
    for plan in chain:
        plan.after = tuple(plan.after)
    assert print_order(make_bus(data.draw(st.permutations(chain)))) == list(names)


# -- examples -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations("ABC")))
def test_a_circle_names_its_members(order: tuple[str, ...]) -> None:
    """Source: pytest-dev/pluggy#705"""
    after = {"A": ("B",), "B": ("C",), "C": ()}
    bus = make_bus([Plan(name, after=after[name]) for name in order])
    assert print_order(bus) == ["C", "B", "A"]
    circle = make_bus([Plan(name, after=after[name] or ("A",)) for name in order])
    circle.register(make_plugin(Plan("D", after=("A",)), []), "D")  # behind it, and not in it
    with pytest.raises(OrderError) as caught:
        circle.hook.safe_point(loop=None)
    text = str(caught.value)
    ways = ["C before B before A before C", "B before A before C before B"]
    ways.append("A before C before B before A")
    assert text in [
        f"the order of safe_point goes round in a circle: {way}; take one before= or after= away"
        for way in ways
    ]


def test_a_circle_in_any_event_is_said_before_a_resume_begins(tmp_path: Path) -> None:
    class Saves:
        def __init__(self, after: str) -> None:
            self.after = (after,)

        @hookbus.hookimpl
        def save_end(self) -> None: ...

    bus = hookbus.HookBus(load_plugins=False)
    bus.register(Saves("b"), "a")
    bus.register(Saves("a"), "b")
    with pytest.raises(OrderError, match="the order of save_end goes round in a circle"):
        bus.resume(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_kind_stands_for_all_its_plugins_and_a_plugin_is_not_before_itself() -> None:
    first = Plan("first", kind="ema", before=("model", "ema"))
    bus = make_bus([Plan("m1", kind="model"), Plan("model"), Plan("m2", kind="model"), first])
    assert print_order(bus) == ["first", "m1", "model", "m2"]


def test_each_kind_has_its_place_in_each_event_of_a_resume() -> None:
    kinds = ["x", "loop", "rng", "scheduler", "optimizer", "precision", "callbacks", "model"]
    kinds.append("datamodule")

    class Everywhere:
        def __init__(self, kind: str) -> None:
            self.kind = kind

        @hookbus.hookimpl
        def on_setup(self) -> None: ...

        @hookbus.hookimpl
        def restore_model(self) -> None: ...

        @hookbus.hookimpl
        def restore_training_state(self) -> None: ...

        @hookbus.hookimpl
        def resume_end(self) -> None: ...

    bus = hookbus.HookBus(load_plugins=False)
    for kind in kinds:
        bus.register(Everywhere(kind))
    rest = ["x", "loop", "rng", "scheduler", "optimizer", "precision"]
    assert print_order(bus, "on_setup") == ["datamodule", "model", "callbacks", *rest]
    assert print_order(bus, "restore_model") == ["datamodule", "model", "callbacks", *rest]
    assert print_order(bus, "restore_training_state") == [
        *("precision", "optimizer", "scheduler"),
        *("x", "rng", "callbacks", "model", "datamodule"),
        "loop",
    ]
    assert print_order(bus, "resume_end")[-1] == "rng"
    assert set(KIND_ORDER) == {
        "on_setup",
        "restore_model",
        "restore_training_state",
        "resume_end",
    }


def test_each_place_has_its_reason() -> None:
    plans = [
        Plan("late", "trylast"),
        Plan("model", kind="model", after=("x",)),
        Plan("x", before=("model",)),
        Plan("around", "wrapper"),
        Plan("early", "tryfirst"),
    ]
    assert {place.name: place.reason for place in make_bus(plans).order("on_setup")} == {
        "around": "wrapper, registered as number 4",
        "early": "tryfirst, registered as number 5",
        "x": "registered as number 3",
        "model": "kind 'model', 'x' says before 'model', after 'x', registered as number 2",
        "late": "trylast, registered as number 1",
    }
    bus = hookbus.HookBus()
    reasons = {place.name: place.reason for place in bus.order("plugin_for")}
    assert reasons["loop"].startswith("built in, registered as number ")
    assert reasons["model"].startswith("built in, 'metrics' says before 'model', registered as")
    assert reasons["state"].startswith("trylast, built in, registered as number ")
    assert bus.order("plugin_for")[-1].name in ("state", "callbacks")
    assert repr(bus.order("note_streams")[0]).startswith("Place(name='rng', reason='registered as")


def test_the_printed_order_is_the_caller_s_to_change() -> None:
    bus = make_bus([Plan("a"), Plan("b")])
    bus.order("safe_point").clear()
    assert print_order(bus) == ["a", "b"]


def test_an_event_that_does_not_exist_has_no_order() -> None:
    with pytest.raises(CallError) as caught:
        make_bus([]).order("restor_model")
    assert str(caught.value) == ("there is no event 'restor_model'; did you mean 'restore_model'?")


def test_a_word_that_nobody_bears_is_warned_of_when_all_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = [
        Plan("a", before=("b", "rng"), after=("ema",)),
        Plan("late", kind="ema"),
        Plan("c", after=("typo",)),
    ]
    calls: list[str] = []
    with make_bus([made[0], made[2]], calls) as bus, bus.resuming(tmp_path):
        bus.register(make_plugin(made[1], calls), "late")  # bears a word that "a" uses
        assert caplog.messages == []
    ending = ", which is neither a kind nor a plugin on this bus"
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [
        f"plugin 'a' is to come before or after 'b'{ending}",
        f"plugin 'c' is to come before or after 'typo'{ending}",
    ]


def test_a_thousand_plugins_are_sorted_once_and_not_at_every_registration() -> None:
    looks: list[int] = []

    class Name(str):
        """A kind that notes each look at it while an order is made."""

        __slots__ = ()

        def __hash__(self) -> int:
            looks.append(1)
            return super().__hash__()

    bus = make_bus([Plan(f"p{i}", kind=Name("k")) for i in range(1000)])
    assert looks == []
    print_order(bus)
    assert 1000 <= len(looks) < 10_000
    looks.clear()
    print_order(bus)
    bus.hook.safe_point(loop=None)
    assert looks == []
