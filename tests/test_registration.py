"""Registration is strict: what could never be called, or would vanish, is refused at once."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import hookbus
from builtin_plugins import Loop
from hookbus.errors import (
    AttachError,
    CallError,
    HookbusError,
    ManyErrors,
    NameTakenError,
    RegistrationError,
)


class Counter:
    kind = "counter"

    def __init__(self) -> None:
        self.calls = 0

    @hookbus.hookimpl
    def safe_point(self) -> None:
        self.calls += 1


class Other(Counter):
    pass


class Keeper:
    """Has a section and a state, so it contends for its name."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self.value)

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        self.value = resume.read()


def make_bus() -> hookbus.HookBus:
    return hookbus.HookBus(load_plugins=False)


# -- what is refused ----------------------------------------------------------------------------


class Misspelt:
    @hookbus.hookimpl
    def restor_model(self, resume: Any) -> None: ...


class Default:
    @hookbus.hookimpl
    def restore_model(self, resume: Any, strict: bool = True) -> None: ...


class KnownDefault:
    @hookbus.hookimpl
    def restore_model(self, resume: Any = None) -> None: ...


class KeywordOnly:
    @hookbus.hookimpl
    def restore_model(self, *, resume: Any) -> None: ...


class Star:
    @hookbus.hookimpl
    def restore_model(self, *args: Any) -> None: ...


class DoubleStar:
    @hookbus.hookimpl
    def restore_model(self, **kwargs: Any) -> None: ...


class WrongArgument:
    @hookbus.hookimpl
    def restore_model(self, checkpoint: Any) -> None: ...


class NoArguments:
    @hookbus.hookimpl
    def bus_close(self, bus: Any) -> None: ...


class Yields:
    @hookbus.hookimpl
    def restore_model(self) -> Any:
        yield


class DoesNotYield:
    @hookbus.hookimpl(wrapper=True)
    def restore_model(self) -> None: ...


class OldStyle:
    @hookbus.hookimpl(hookwrapper=True)
    def restore_model(self) -> Any:
        yield


class Async:
    @hookbus.hookimpl
    async def restore_model(self) -> None: ...


class FirstAndLast:
    @hookbus.hookimpl(tryfirst=True, trylast=True)
    def restore_model(self) -> None: ...


class Twice:
    @hookbus.hookimpl
    def restore_model(self) -> None: ...

    @hookbus.hookimpl(specname="restore_model")
    def restore_weights(self) -> None: ...


class Unmarked:
    def restore_model(self, resume: Any) -> None: ...


class Nothing:
    def load(self) -> None: ...


WRONG = [
    (None, "None cannot be registered as a plugin"),
    (Counter, "Counter is a class; register an instance: Counter(…)"),
    (
        Misspelt(),
        "Misspelt.restor_model is marked as a hookimpl, and there is no event 'restor_model';"
        " did you mean 'restore_model'?",
    ),
    (
        Default(),
        "Default.restore_model has an argument 'strict' with a default, which would never be"
        " passed; take the default away",
    ),
    (
        KnownDefault(),
        "KnownDefault.restore_model has an argument 'resume' with a default, which would never be"
        " passed; take the default away",
    ),
    (
        KeywordOnly(),
        "KeywordOnly.restore_model has an argument 'resume' that is keyword-only, *args or"
        " **kwargs; make it a plain one",
    ),
    (
        Star(),
        "Star.restore_model has an argument 'args' that is keyword-only, *args or **kwargs; make"
        " it a plain one",
    ),
    (
        DoubleStar(),
        "DoubleStar.restore_model has an argument 'kwargs' that is keyword-only, *args or"
        " **kwargs; make it a plain one",
    ),
    (
        WrongArgument(),
        "WrongArgument.restore_model takes 'checkpoint', and restore_model has resume",
    ),
    (NoArguments(), "NoArguments.bus_close takes 'bus', and bus_close has no arguments"),
    (Yields(), "Yields.restore_model yields; mark it @hookbus.hookimpl(wrapper=True)"),
    (
        DoesNotYield(),
        "DoesNotYield.restore_model is marked wrapper=True and does not yield; let it yield once",
    ),
    (
        OldStyle(),
        "OldStyle.restore_model is an old-style hookwrapper; pass wrapper=True instead",
    ),
    (
        Async(),
        "Async.restore_model is async, and events are not awaited; make it a plain function",
    ),
    (FirstAndLast(), "FirstAndLast.restore_model is both tryfirst and trylast; take one away"),
    (
        Twice(),
        "Twice.restore_weights implements 'restore_model' a second time; take one of them away",
    ),
    (
        Unmarked(),
        "Unmarked.restore_model is named like an event and would never be called; put"
        " @hookbus.hookimpl on it, or name it otherwise",
    ),
    (Nothing(), "Nothing implements no event; mark its methods with @hookbus.hookimpl"),
    (7, "int implements no event; mark its methods with @hookbus.hookimpl"),
]


@pytest.mark.parametrize(("plugin", "message"), WRONG, ids=lambda value: type(value).__name__)
def test_what_could_never_be_called_is_refused_with_the_line_to_change(
    plugin: object, message: str
) -> None:
    """Source: pytest-dev/pluggy#48, pytest-dev/pluggy#522, pytest-dev/pluggy#731,
    pytest-dev/pluggy#244
    """
    bus = make_bus()
    with pytest.raises(RegistrationError) as caught:
        bus.register(plugin, "plugin")
    assert str(caught.value) == message
    assert isinstance(caught.value, TypeError)
    assert bus.plugins == ()


def test_an_event_far_from_every_name_is_answered_with_all_of_them() -> None:
    class Far:
        @hookbus.hookimpl
        def zzz(self) -> None: ...

    with pytest.raises(RegistrationError, match="there is no event 'zzz'; there are bus_open,"):
        make_bus().register(Far())


def test_an_optional_event_that_does_not_exist_is_let_through() -> None:
    """Source: pytest-dev/pluggy#48"""

    class Optional:
        @hookbus.hookimpl(optionalhook=True)
        def restor_model(self, resume: Any) -> None: ...

    bus = make_bus()
    bus.register(Optional(), "optional")
    assert bus.plugins[0].events == ()


def test_all_faults_of_a_plugin_are_named_at_once() -> None:
    class Faulty:
        @hookbus.hookimpl
        def restor_model(self) -> None: ...

        @hookbus.hookimpl
        def save_state(self, state: Any) -> None: ...

        def resume_end(self) -> None: ...

    with pytest.raises(ManyErrors) as caught:
        make_bus().register(Faulty())
    assert [type(error) for error in caught.value.exceptions] == [RegistrationError] * 3
    for words in ("'restor_model'", "takes 'state'", "named like an event"):
        assert words in str(caught.value)


def test_a_property_is_not_run_while_a_plugin_is_looked_at() -> None:
    class Lazy(Counter):
        @property
        def expensive(self) -> None:
            raise AssertionError("it was run")

    make_bus().register(Lazy())


@pytest.mark.parametrize("name", ["", "a b", "../a", ".a", "-a", ":a", "é", "a/b", "a" * 101, 5])
def test_a_name_that_cannot_be_a_file_s_is_refused(name: Any) -> None:
    with pytest.raises(RegistrationError) as caught:
        make_bus().register(Counter(), name)
    assert str(caught.value) == (
        f"{name!r} cannot be a plugin's name: up to 100 letters, digits, _ . - : only, and the"
        " first no . - or :"
    )


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("kind", 5, "Counter.kind = 5: pass a word, or leave it out"),
        (
            "before",
            "rng",
            "Counter.before = 'rng': pass a tuple of kinds or names, such as ('model',)",
        ),
        ("after", 5, "Counter.after = 5: pass a tuple of kinds or names, such as ('model',)"),
        (
            "after",
            (1,),
            r"Counter.after = (1,): pass a tuple of kinds or names, such as ('model',)",
        ),
    ],
)
def test_a_kind_is_a_word_and_before_and_after_are_tuples_of_words(
    attribute: str, value: object, message: str
) -> None:
    plugin = Counter()
    setattr(plugin, attribute, value)
    with pytest.raises(RegistrationError) as caught:
        make_bus().register(plugin, "counter")
    assert str(caught.value) == message


# -- what is taken, and under which name ---------------------------------------------------------


def test_a_plugin_is_named_by_hand_by_its_kind_or_by_its_class() -> None:
    class Plain:
        @hookbus.hookimpl
        def safe_point(self) -> None: ...

    bus = make_bus()
    assert bus.register(Counter(), "mine") == "mine"
    assert bus.register(Counter()) == "counter"
    assert bus.register(Plain()) == "Plain"
    assert [(each.name, each.kind) for each in bus.plugins] == [
        ("mine", "counter"),
        ("counter", "counter"),
        ("Plain", None),
    ]


def test_methods_of_every_kind_and_modules_are_called() -> None:
    calls = []

    class Plugin:
        @hookbus.hookimpl
        def safe_point(this, loop: object, /) -> None:  # noqa: N805 - any first name will do
            calls.append("method")

        @classmethod
        @hookbus.hookimpl
        def resume_start(cls) -> None: ...

        @staticmethod
        @hookbus.hookimpl
        def put_streams(slot: str) -> None:
            calls.append(slot)

    module = ModuleType("package.module")
    module.safe_point = hookbus.hookimpl(lambda loop: calls.append("module"))
    bus = make_bus()
    bus.register(Plugin(), "plugin")
    assert bus.register(module) == "module"
    bus.hook.safe_point(loop=None)
    bus.hook.put_streams(slot="slot")
    assert calls == ["method", "module", "slot"]


def test_the_same_object_twice_is_called_once() -> None:
    """Source: pytest-dev/pytest#13983"""
    bus, plugin = make_bus(), Counter()
    assert bus.register(plugin) == bus.register(plugin) == bus.register(plugin, "counter")
    bus.hook.safe_point(loop=None)
    assert plugin.calls == 1
    with pytest.raises(RegistrationError) as caught:
        bus.register(plugin, "again")
    assert str(caught.value) == (
        "this Counter is on the bus already, as 'counter'; register another instance"
    )


def test_two_plugins_of_one_name_are_a_short_error_that_names_both() -> None:
    """Source: pytest-dev/pytest#13983"""
    bus = hookbus.HookBus()
    bus.register(Counter(), "mine")
    with pytest.raises(NameTakenError) as caught:
        bus.register(Other(), "mine")
    assert str(caught.value) == (
        "two plugins are named 'mine': Counter (registered by hand) and Other (registered by"
        " hand); pass another name to one of them"
    )
    with pytest.raises(NameTakenError) as caught:
        bus.register(Other(), "rng")
    assert str(caught.value) == (
        "two plugins are named 'rng': Rng (hookbus) and Other (registered by hand); pass another"
        " name to one of them"
    )
    assert len(str(caught.value)) < 300


def test_names_that_differ_only_in_case_are_refused() -> None:
    bus = make_bus()
    bus.register(Keeper(), "ema")
    with pytest.raises(NameTakenError) as caught:
        bus.register(Keeper(), "EMA")
    assert str(caught.value) == (
        "'ema' and 'EMA' differ only in case, which some disks ignore; pass another name to one of"
        " them"
    )


def test_an_unregistered_plugin_is_not_called_and_its_name_is_free() -> None:
    bus, plugin = make_bus(), Counter()
    bus.register(plugin)
    bus.unregister("counter")
    bus.hook.safe_point(loop=None)
    assert plugin.calls == 0
    assert bus.plugins == ()
    bus.register(Other(), "counter")
    with pytest.raises(CallError) as caught:
        bus.unregister("ema")
    assert str(caught.value) == "no plugin is named 'ema'; there are counter"


def test_unregistering_a_component_leaves_the_plugin_that_made_its_plugin() -> None:
    bus = hookbus.HookBus()
    bus.attach(model=torch.nn.Linear(2, 2))
    bus.unregister("model")
    assert "model" not in bus.components
    bus.attach(model=torch.nn.Linear(2, 2))
    assert "model" in bus.components


# -- attach -------------------------------------------------------------------------------------


def test_the_same_component_under_the_same_name_is_attached_once() -> None:
    bus, model = hookbus.HookBus(), torch.nn.Linear(2, 2)
    bus.attach(model=model)
    before = bus.plugins
    bus.attach(model=model)
    assert bus.plugins == before
    assert bus.components["model"] is model
    with pytest.raises(TypeError):
        bus.components["model"] = 1


def test_nothing_is_attached_unless_all_are_and_all_problems_are_said() -> None:
    bus = hookbus.HookBus()
    bus.attach(model=torch.nn.Linear(2, 2))
    bus.register(Keeper(), "taken")
    plugins, components = bus.plugins, dict(bus.components)
    for wrong in (
        {"a": {}, "model": torch.nn.Linear(2, 2)},
        {"a": {}, "taken": {}},
        {"a": {}, "A": {}},
        {"loop": Loop(), "second": Loop()},
    ):
        with pytest.raises(HookbusError):
            bus.attach(**wrong)
        assert bus.plugins == plugins
        assert dict(bus.components) == components
    with pytest.raises(ManyErrors) as caught:
        bus.attach(a=None, b=object(), model={})
    assert str(caught.value).startswith("nothing was attached:")
    for words in ("a=None", "nobody can look after 'b'", "two components are named 'model'"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ({"model": None}, "model=None: there is nothing to attach; leave it out"),
        (
            {"a": (data := {"x": 1}), "b": data},
            "'a' and 'b' are the same object; attach it once",
        ),
        (
            {"loop": Loop(), "second": Loop()},
            "there is a loop on this bus already, and a run has one",
        ),
    ],
)
def test_what_contradicts_itself_is_not_attached(
    components: dict[str, object], message: str
) -> None:
    with pytest.raises(AttachError) as caught:
        hookbus.HookBus().attach(**components)
    assert str(caught.value) == message
    assert isinstance(caught.value, TypeError)


def test_what_nobody_can_look_after_is_refused_and_says_who_was_asked() -> None:
    bus = hookbus.HookBus()
    with pytest.raises(AttachError) as caught:
        bus.attach(x=object())
    asked = ", ".join(place.name for place in bus.order("plugin_for"))
    assert {"model", "optimizer"} <= set(asked.split(", "))
    assert str(caught.value) == (
        f"nobody can look after 'x' (object); asked were {asked}; give it state_dict and"
        " load_state_dict, or register a plugin for it"
    )
    with pytest.raises(AttachError, match=r"asked were none; it is a plugin itself: bus\.register"):
        make_bus().attach(x=Counter())
    with pytest.raises(AttachError, match=r"nobody can look after 'x' \(Linear\)"):
        bus.attach(x=torch.nn.Linear)


def test_two_components_of_one_name_are_refused() -> None:
    bus = hookbus.HookBus()
    bus.attach(model=torch.nn.Linear(2, 2))
    with pytest.raises(NameTakenError) as caught:
        bus.attach(model={})
    assert str(caught.value) == (
        "two components are named 'model': Linear and dict; attach one of them under another name"
    )


class MakesKeepers:
    """Looks after lists, which the built-in plugins do too."""

    def __init__(self) -> None:
        self.made: list[Keeper] = []

    @hookbus.hookimpl
    def plugin_for(self, name: str, component: object) -> Keeper | None:
        if not isinstance(component, list):
            return None
        self.made.append(Keeper())
        return self.made[-1]


def test_what_is_registered_by_hand_is_asked_first_and_who_is_shadowed_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Source: getindata/kedro-kubeflow#72"""
    first, second = MakesKeepers(), MakesKeepers()
    bus = hookbus.HookBus()
    bus.register(first, "first")
    bus.register(second, "second")
    with caplog.at_level(logging.DEBUG, "hookbus"):
        bus.attach(x=[1])
    assert [each.plugin for each in bus.plugins if each.name == "x"] == second.made
    assert "'x': plugin 'second' answered before plugin 'first'" in caplog.messages
    state = next(each for each in bus.plugins if each.name == "state")
    assert f"'x': plugin 'second' answered before {state}" in caplog.messages


def test_a_wrapper_around_plugin_for_sees_the_answer_and_may_replace_it() -> None:
    class Replaces:
        @hookbus.hookimpl(wrapper=True)
        def plugin_for(self) -> Any:
            self.answer = yield
            return self.answer and Keeper(7)

    bus, wrapper, maker = make_bus(), Replaces(), MakesKeepers()
    bus.register(maker, "maker")
    bus.register(wrapper, "wrapper")
    bus.attach(x=[1])
    assert [wrapper.answer] == maker.made
    assert next(each.plugin for each in bus.plugins if each.name == "x").value == 7


# -- what is never copied -----------------------------------------------------------------------


def test_a_bus_a_loop_and_a_resume_are_neither_pickled_nor_copied(tmp_path: Path) -> None:
    with hookbus.HookBus() as bus:
        for thing in (bus, Loop(), bus.resume(tmp_path)):
            for copy_it in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(
                    TypeError, match=f"a {type(thing).__name__} cannot be pickled or copied"
                ):
                    copy_it(thing)
