"""An event reaches its plugins, its arguments are checked, and who broke is named."""

from __future__ import annotations

import gc
import traceback
from pathlib import Path
from typing import Any

import pytest

import hookbus
from hookbus.errors import CallError, OrderError


class Says:
    def __init__(self, calls: list[str], name: str) -> None:
        self.calls, self.name = calls, name

    @hookbus.hookimpl
    def safe_point(self, loop: object) -> None:
        self.calls.append(self.name)


class Breaks:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    @hookbus.hookimpl
    def safe_point(self) -> None:
        raise self.error


class Around:
    """Notes what it sees at its yield, and goes on as it is told."""

    def __init__(self, then: BaseException | None = None, *, handle: bool = False) -> None:
        self.then, self.handle = then, handle
        self.seen: list[BaseException | None] = []

    @hookbus.hookimpl(wrapper=True)
    def safe_point(self) -> Any:
        try:
            result = yield
        except BaseException as error:
            self.seen.append(error)
            if self.then is not None:
                raise self.then from error
            if not self.handle:
                raise
            return ["handled"]
        self.seen.append(None)
        if self.then is not None:
            raise self.then
        return result


def make_bus(**plugins: object) -> hookbus.HookBus:
    bus = hookbus.HookBus(load_plugins=False)
    for name, plugin in plugins.items():
        bus.register(plugin, name)
    return bus


# -- arguments ----------------------------------------------------------------------------------


def test_missing_and_unknown_arguments_are_errors_in_both_directions() -> None:
    """Source: pytest-dev/pluggy#4"""
    bus = make_bus()
    for arguments, message in (
        ({}, "on_setup was fired without 'resume', 'stage': it is on_setup(resume=…, stage=…)"),
        (
            {"resume": 1, "stage": "fit", "states": 2},
            "on_setup was fired with unknown 'states': it is on_setup(resume=…, stage=…)",
        ),
        (
            {"resume": 1, "stages": 2},
            "on_setup was fired without 'stage' and with unknown 'stages': it is"
            " on_setup(resume=…, stage=…)",
        ),
    ):
        with pytest.raises(CallError) as caught:
            bus.hook.on_setup(**arguments)
        assert str(caught.value) == message
        assert isinstance(caught.value, TypeError)
    with pytest.raises(CallError) as caught:
        bus.hook.safe_point(1)
    assert str(caught.value) == "safe_point takes its arguments by name: safe_point(loop=…)"


def test_a_restore_event_takes_nothing_but_a_resume_of_its_bus(tmp_path: Path) -> None:
    bus = make_bus()
    for wrong in (None, 1, "resume"):
        with pytest.raises(CallError) as caught:
            bus.hook.resume_start(resume=wrong)
        assert str(caught.value) == "resume_start: pass resume=, as bus.prepare(run) returned it"


def test_an_event_that_does_not_exist_is_no_attribute_of_the_relay() -> None:
    hook = make_bus().hook
    assert not hasattr(hook, "restor_model")
    assert "restore_model" in dir(hook)
    with pytest.raises(AttributeError, match="no event 'restor_model'; did you mean 'restore_mod"):
        _ = hook.restor_model


def test_a_plugin_takes_the_arguments_it_names_and_no_others() -> None:
    class TakesSome:
        @hookbus.hookimpl
        def plugin_for(self, component: object) -> object:
            return component

    class TakesNone:
        @hookbus.hookimpl
        def put_streams(self) -> object:
            return 1

    bus = make_bus(some=TakesSome(), none=TakesNone())
    assert bus.hook.plugin_for(name="x", component=7) == 7
    assert bus.hook.put_streams(slot="now") == [1]


# -- staleness ----------------------------------------------------------------------------------


def test_a_relay_from_before_a_later_registration_is_stale() -> None:
    calls: list[str] = []
    bus = make_bus(a=Says(calls, "a"))
    relay = bus.hook
    fire = relay.safe_point
    fire(loop=None)
    bus.register(Says(calls, "b"), "b")
    for stale in (relay.safe_point, fire):
        with pytest.raises(OrderError) as caught:
            stale(loop=None)
        assert str(caught.value) == (
            "safe_point: the order is stale, plugins were registered since this relay was taken;"
            " fire it as bus.hook.safe_point"
        )
    assert calls == ["a"]
    relay = bus.hook
    bus.unregister("a")
    with pytest.raises(OrderError):
        relay.safe_point(loop=None)
    bus.hook.safe_point(loop=None)
    assert calls == ["a", "b"]


def test_a_plugin_registered_while_an_event_goes_round_is_called_from_the_next_one_on() -> None:
    calls: list[str] = []

    class Registers:
        @hookbus.hookimpl(tryfirst=True)
        def safe_point(self) -> None:
            if len(bus.plugins) == 2:
                bus.register(Says(calls, "late"), "late")

    bus = make_bus(registers=Registers(), a=Says(calls, "a"))
    bus.hook.safe_point(loop=None)
    assert calls == ["a"]
    bus.hook.safe_point(loop=None)
    assert calls == ["a", "a", "late"]


# -- who broke ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_whoever_breaks_is_named_and_the_traceback_is_the_original_one(
    error: BaseException,
) -> None:
    """Source: pytest-dev/pluggy#235"""
    bus = make_bus(p1=Says([], "p1"), p2=Breaks(error), p3=Says([], "p3"))
    with pytest.raises(type(error)) as caught:
        bus.hook.safe_point(loop=None)
    assert caught.value is error
    assert error.__notes__ == [f"plugin 'p2' broke in safe_point: {type(error).__name__}: {error}"]
    last = traceback.extract_tb(error.__traceback__)[-1]
    assert (last.name, last.line) == ("safe_point", "raise self.error")


@pytest.mark.parametrize("error", [KeyError("x"), StopIteration(4), GeneratorExit()], ids=repr)
def test_through_wrappers_the_innermost_is_named_and_no_other(error: BaseException) -> None:
    """Source: pytest-dev/pluggy#235"""
    around = [Around(), Around()]
    bus = make_bus(outer=around[0], inner=around[1], p=Breaks(error))
    with pytest.raises(type(error)) as caught:
        bus.hook.safe_point(loop=None)
    assert caught.value is error
    assert error.__notes__ == [f"plugin 'p' broke in safe_point: {type(error).__name__}: {error}"]
    assert [each.seen for each in around] == [[error], [error]]


def test_a_wrapper_that_raises_an_error_of_its_own_is_named_on_it() -> None:
    inner, outer = KeyError("inner"), ValueError("outer")
    bus = make_bus(around=Around(outer), p=Breaks(inner))
    with pytest.raises(ValueError, match="outer") as caught:
        bus.hook.safe_point(loop=None)
    assert caught.value.__notes__ == ["plugin 'around' broke in safe_point: ValueError: outer"]
    assert caught.value.__cause__ is inner
    assert inner.__notes__ == ["plugin 'p' broke in safe_point: KeyError: 'inner'"]


def test_all_teardowns_run_before_the_caller_sees_the_error() -> None:
    """Source: pytest-dev/pluggy#244"""
    error = ValueError("in a teardown")
    outer, breaks, inner = Around(), Around(error), Around()
    bus = make_bus(outer=outer, breaks=breaks, inner=inner, p=Says([], "p"))
    gc.disable()
    try:
        with pytest.raises(ValueError, match="in a teardown") as caught:
            bus.hook.safe_point(loop=None)
        assert (inner.seen, breaks.seen, outer.seen) == ([None], [None], [error])
    finally:
        gc.enable()
    assert caught.value.__notes__ == [
        "plugin 'breaks' broke in safe_point: ValueError: in a teardown"
    ]


def test_an_error_in_a_setup_is_seen_by_the_wrappers_that_had_begun() -> None:
    class BreaksFirst:
        @hookbus.hookimpl(wrapper=True)
        def safe_point(self) -> Any:
            raise ValueError("in a setup")
            yield

    outer, inner, calls = Around(), Around(), []
    bus = make_bus(outer=outer, breaks=BreaksFirst(), inner=inner, p=Says(calls, "p"))
    with pytest.raises(ValueError, match="in a setup") as caught:
        bus.hook.safe_point(loop=None)
    assert (outer.seen, inner.seen, calls) == ([caught.value], [], [])
    assert caught.value.__notes__ == ["plugin 'breaks' broke in safe_point: ValueError: in a setup"]


def test_a_wrapper_may_handle_an_error() -> None:
    outer = Around()
    bus = make_bus(outer=outer, handles=Around(handle=True), p=Breaks(KeyError("x")))
    assert bus.hook.safe_point(loop=None) == ["handled"]
    assert outer.seen == [None]


@pytest.mark.parametrize(("times", "what"), [(0, "did not yield"), (2, "yielded again")])
def test_a_wrapper_that_does_not_yield_once_is_named(times: int, what: str) -> None:
    class Yields:
        @hookbus.hookimpl(wrapper=True)
        def safe_point(self) -> Any:
            for _ in range(times):
                yield

    bus = make_bus(wrapper=Yields())
    with pytest.raises(RuntimeError) as caught:
        bus.hook.safe_point(loop=None)
    text = f"a wrapper must yield exactly once, and it {what}"
    assert str(caught.value) == text
    assert caught.value.__notes__ == [f"plugin 'wrapper' broke in safe_point: RuntimeError: {text}"]


def test_an_error_from_an_event_within_an_event_names_the_inner_one() -> None:
    class Fires:
        @hookbus.hookimpl
        def safe_point(self) -> None:
            bus.hook.put_streams(slot="now")

    class BreaksInside:
        @hookbus.hookimpl
        def put_streams(self, slot: str) -> None:
            raise KeyError(slot)

    bus = make_bus(fires=Fires(), inside=BreaksInside())
    with pytest.raises(KeyError) as caught:
        bus.hook.safe_point(loop=None)
    assert caught.value.__notes__ == ["plugin 'inside' broke in put_streams: KeyError: 'now'"]


# -- answers ------------------------------------------------------------------------------------


class Answers:
    def __init__(self, answer: object) -> None:
        self.answer = answer

    @hookbus.hookimpl
    def optimizer_stepped(self, optimizer: object) -> object:
        return self.answer

    @hookbus.hookimpl
    def gradients_waiting(self) -> object:
        return self.answer


def test_answers_come_in_order_without_none_and_a_first_result_ends_the_asking() -> None:
    bus = make_bus(a=Answers(None), b=Answers(False), c=Answers(True))
    assert bus.hook.gradients_waiting() == [False, True]
    assert bus.hook.optimizer_stepped(optimizer=None) is False
    assert make_bus(a=Answers(None)).hook.optimizer_stepped(optimizer=None) is None


def test_a_context_knows_who_is_asking_also_after_an_event_within_an_event(tmp_path: Path) -> None:
    class Saves:
        @hookbus.hookimpl
        def save_state(self, save: hookbus.Save) -> None:
            bus.hook.put_streams(slot="other")
            save.write(save.name)

    class Draws:
        @hookbus.hookimpl
        def put_streams(self) -> None: ...

        @hookbus.hookimpl
        def save_state(self, save: hookbus.Save) -> None:
            save.write(save.name)

    bus = make_bus(a=Saves(), b=Draws())
    with bus:
        bus.resume(tmp_path)
        checkpoint = bus.save(step=1)
    assert checkpoint is not None
    assert {name: checkpoint.read(name) for name in checkpoint.sections} == {"a": "a", "b": "b"}


def test_who_asks_from_outside_an_event_is_told(tmp_path: Path) -> None:
    kept = []

    class Keeps:
        @hookbus.hookimpl
        def save_start(self, save: hookbus.Save) -> None:
            kept.append(save)

    with make_bus(keeps=Keeps()) as bus:
        resume = bus.resume(tmp_path)
        bus.save(step=1)
    with pytest.raises(CallError, match=r"^a section is read by a plugin, inside an event$"):
        resume.read()
    with pytest.raises(CallError, match=r"^a save is written by a plugin, inside an event$"):
        kept[0].write(1)
