"""Installed plugins are loaded, or fail, alone and by name; what is blocked is never touched."""

from __future__ import annotations

import logging
import random
import sys
from pathlib import Path

import pytest
import torch
from installed import Install

import hookbus
from hookbus.errors import (
    AttachError,
    CallError,
    HookbusError,
    ManyErrors,
    MissingSectionError,
    NameTakenError,
)

ANSWERS = """
    class Plugin:
        def __init__(self, word={word!r}):
            self.word = word
        @hookbus.hookimpl
        def gradients_waiting(self):
            return self.word
    made = Plugin("object")
    @hookbus.hookimpl
    def gradients_waiting():
        return "module"
"""


def list_names(bus: hookbus.HookBus) -> list[str]:
    return [each.name for each in bus.plugins if each.origin == "a third party's entry point"]


# -- loading ------------------------------------------------------------------------------------


def test_a_module_an_object_a_class_and_a_function_are_plugins(install: Install) -> None:
    install(
        "Word_Hook",
        "1.2",
        {
            "module": "word_hook",
            "object": "word_hook:made",
            "class": "word_hook:Plugin",
            "function": "word_hook:make",
        },
        word_hook=ANSWERS.format(word="class") + "\n    def make():\n        return Plugin('made')",
    )
    buses = hookbus.HookBus(), hookbus.HookBus()
    names = ["class", "function", "module", "object"]
    for bus in buses:
        assert bus.failed == ()
        assert list_names(bus) == [f"word-hook:{name}" for name in names]
        found = [each for each in bus.plugins if each.distribution == "word-hook"]
        assert [each.version for each in found] == ["1.2"] * 4
        answers = [each for each in bus.hook.gradients_waiting() if isinstance(each, str)]
        assert answers == ["class", "made", "module", "object"]
    for name, shared in zip(names, [False, False, True, True], strict=True):
        a, b = (
            next(each.plugin for each in bus.plugins if each.name == f"word-hook:{name}")
            for bus in buses
        )
        assert (a is b) == shared


def test_the_built_in_plugins_are_named_by_their_entry_alone() -> None:
    bus = hookbus.HookBus()
    assert {"model", "optimizer", "rng", "state"} <= {each.name for each in bus.plugins}
    assert {each.distribution for each in bus.plugins} == {"hookbus"}
    assert hookbus.HookBus(load_plugins=False).plugins == ()


BROKEN = {
    "imports": "no_such_module_anywhere",
    "raises": "broken_hook_raises",
    "exits": "broken_hook_exits",
    "panics": "broken_hook_panics",
    "lacks": "broken_hook:nothing_here",
    "none": "broken_hook:nothing",
    "returns_none": "broken_hook:make_nothing",
    "fails": "broken_hook:fail",
    "signature": "broken_hook:Misspelt",
    "needs": "broken_hook:Needs",
    "two words": "broken_hook:Fine",
}


def test_each_that_fails_fails_alone_and_by_name(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    """Source: pytest-dev/pluggy#8, pytest-dev/pytest#1479, pytest-dev/pluggy#731"""
    install("a-hook", "1", {"a": "a_hook"}, a_hook=ANSWERS.format(word=""))
    install(
        "broken-hook",
        "2.0",
        BROKEN,
        broken_hook_raises="raise ImportError('on purpose')",
        broken_hook_exits="import sys; sys.exit(2)",
        broken_hook_panics="""
            class Panic(BaseException): ...
            raise Panic("as those of Rust")
        """,
        broken_hook="""
            nothing = None
            def make_nothing(): ...
            def fail():
                raise KeyError("x")
            class Misspelt:
                @hookbus.hookimpl
                def restor_model(self): ...
            class Needs:
                def __init__(self, size): ...
            class Fine:
                @hookbus.hookimpl
                def restore_model(self): ...
        """,
    )
    install("c-hook", "3", {"c": "c_hook"}, c_hook=ANSWERS.format(word=""))
    with caplog.at_level(logging.WARNING, "hookbus"):
        bus = hookbus.HookBus()
    assert list_names(bus) == ["a-hook:a", "c-hook:c"]
    failed = {each.name.removeprefix("broken-hook:"): each for each in bus.failed}
    assert failed.keys() == BROKEN.keys()
    assert {(each.distribution, each.version) for each in bus.failed} == {("broken-hook", "2.0")}
    texts = {
        name: f"{type(each.exception).__name__}: {each.exception}" for name, each in failed.items()
    }
    assert texts == {
        "imports": "ModuleNotFoundError: No module named 'no_such_module_anywhere'",
        "raises": "ImportError: on purpose",
        "exits": "SystemExit: 2",
        "panics": "Panic: as those of Rust",
        "lacks": "AttributeError: module 'broken_hook' has no attribute 'nothing_here'",
        "none": "RegistrationError: the entry point 'broken-hook:none' is None",
        "returns_none": "RegistrationError: the entry point 'broken-hook:returns_none' returned"
        " None",
        "fails": "KeyError: 'x'",
        "signature": "RegistrationError: Misspelt.restor_model is marked as a hookimpl, and there"
        " is no event 'restor_model'; did you mean 'restore_model'?",
        "needs": "TypeError: Needs.__init__() missing 1 required positional argument: 'size'",
        "two words": "RegistrationError: 'broken-hook:two words' cannot be a plugin's name:"
        " up to 100 letters, digits, _ . - : only, and the first no . - or :",
    }
    assert sorted(caplog.messages) == sorted(
        f"plugin 'broken-hook:{name}' (broken-hook 2.0) could not be loaded: {text}"
        for name, text in texts.items()
    )


def test_who_could_not_be_loaded_is_named_where_nobody_can_look_after_a_component(
    install: Install,
) -> None:
    install("sad-hook", "1", {"a": "sad_hook"}, sad_hook="raise ImportError('on purpose')")
    with pytest.raises(AttachError, match="; sad-hook:a could not be loaded; give it state_dict"):
        hookbus.HookBus().attach(x=object())


MADE = """
    class Thing: ...
    class Plugin:
        @hookbus.hookimpl
        def save_state(self, save):
            save.write(1)
        @hookbus.hookimpl
        def restore_training_state(self, resume):
            resume.read()
    @hookbus.hookimpl
    def plugin_for(name, component):
        return Plugin() if isinstance(component, Thing) else None
"""


@pytest.mark.parametrize(
    ("now", "why"),
    [
        ("gone", ": made-hook is not installed; install it"),
        (
            "broken",
            "; plugin 'made-hook:own' (made-hook 3) could not be loaded: ImportError: x; mend it",
        ),
        (
            "half broken",
            "; plugin 'made-hook:made' (made-hook 3) could not be loaded: ImportError: x; mend that"
            " and attach it",
        ),
        ("whole", "; attach it"),
    ],
)
def test_a_section_that_nobody_claims_says_what_became_of_its_plugin(
    now: str, why: str, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source: Lightning-AI/pytorch-lightning#2631"""
    entries = {"made": "made_hook", "own": "made_hook:Plugin"}
    folder = install("made-hook", "2", entries, made_hook=MADE)
    import made_hook

    with hookbus.HookBus() as bus:
        bus.attach(mine=made_hook.Thing())
        bus.resume(tmp_path / "run")
        bus.save(step=1)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(folder)])
    del sys.modules["made_hook"]
    lines = {
        "broken": {"made": "made_hook", "own": "made_broken"},
        "half broken": {"made": "made_broken", "own": "made_hook:Plugin"},
        "whole": entries,
    }
    if now in lines:
        broken = "raise ImportError('x')"
        install("made-hook", "3", lines[now], made_hook=MADE, made_broken=broken)
    with hookbus.HookBus() as bus, pytest.raises(HookbusError) as caught:
        bus.resume(tmp_path / "run", missing_ok=("*",))
    name = "made-hook:own" if now == "broken" else "mine"
    text = (
        f"the checkpoint has a section {name!r}, written by plugin 'Plugin' (made-hook 2), and"
        f" nobody on the bus restores it{why}, or pass skip=({name!r},)"
    )
    assert text in str(caught.value)
    with hookbus.HookBus() as bus:
        assert bus.resume(tmp_path / "run", skip=("mine", "made-hook:own")).step == 1


def test_the_second_of_two_entries_of_one_name_fails_by_name(install: Install) -> None:
    folder = install("twice-hook", "1", {"a": "twice_hook"}, twice_hook=ANSWERS.format(word=""))
    entry_points = next(folder.glob("*.dist-info")) / "entry_points.txt"
    entry_points.write_text(entry_points.read_text() + "a = twice_hook:made\n")
    bus = hookbus.HookBus()
    assert list_names(bus) == ["twice-hook:a"]
    (failed,) = bus.failed
    assert failed.name == "twice-hook:a"
    assert isinstance(failed.exception, NameTakenError)
    assert str(failed.exception) == (
        "two plugins are named 'twice-hook:a': twice_hook (twice-hook) and Plugin (twice-hook);"
        " pass another name to one of them"
    )


def test_one_distribution_seen_by_two_paths_is_loaded_once(install: Install) -> None:
    """Source: pytest-dev/pytest#13983"""
    for version in ("1", "2"):
        install("path-hook", version, {"a": "path_hook"}, path_hook=ANSWERS.format(word=version))
    bus = hookbus.HookBus()
    assert bus.failed == ()
    assert [(each.name, each.version) for each in bus.plugins if ":" in each.name] == [
        ("path-hook:a", "2")
    ]


def test_a_distribution_without_metadata_fails_no_other(install: Install) -> None:
    folder = install("bare-hook", "1", {"a": "bare_hook"}, bare_hook=ANSWERS.format(word=""))
    (next(folder.glob("*.dist-info")) / "METADATA").unlink()
    bus = hookbus.HookBus()
    assert "rng" in [each.name for each in bus.plugins]
    assert [each.name for each in bus.plugins if ":" in each.name] == ["unknown:a"]


def test_an_error_names_plugin_distribution_and_version(install: Install) -> None:
    """Source: pytest-dev/pluggy#235"""
    install(
        "notes-hook",
        "0.3",
        {"p2": "notes_hook"},
        notes_hook="""
            @hookbus.hookimpl
            def put_streams(slot):
                raise KeyError(slot)
        """,
    )
    with pytest.raises(KeyError) as caught:
        hookbus.HookBus().hook.put_streams(slot="x")
    assert caught.value.__notes__ == [
        "plugin 'notes-hook:p2' (notes-hook 0.3) broke in put_streams: KeyError: 'x'"
    ]


def test_a_plugin_registered_by_hand_knows_its_distribution(install: Install) -> None:
    install("hand-hook", "4", {}, hand_hook=ANSWERS.format(word=""))
    import hand_hook

    bus = hookbus.HookBus(load_plugins=False)
    bus.register(hand_hook.Plugin(), "mine")
    bus.register(hand_hook)
    assert [(e.name, e.distribution, e.version) for e in bus.plugins] == [
        ("mine", "hand-hook", "4"),
        ("hand_hook", "hand-hook", "4"),
    ]


# -- order --------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["xyz", "zyx", "yxz"])
def test_installed_plugins_are_ordered_by_name_and_not_by_sys_path(
    order: str, install: Install
) -> None:
    """Source: pytest-dev/pluggy#705"""
    for letter in order:
        source = ANSWERS.format(word="")
        install(f"{letter}-hook", "1", {"b": f"{letter}_hook"}, **{f"{letter}_hook": source})
    assert list_names(hookbus.HookBus()) == ["x-hook:b", "y-hook:b", "z-hook:b"]


def test_plugins_by_hand_and_from_entry_points_stand_in_one_order(install: Install) -> None:
    """Source: kedro-org/kedro#1939"""
    install("other", "1", {"b": "other_b"}, other_b=ANSWERS.format(word=""))

    class Local:
        before = ("other:b",)

        @hookbus.hookimpl
        def gradients_waiting(self) -> str:
            return "local"

    bus = hookbus.HookBus()
    bus.register(Local(), "local")
    assert bus.hook.gradients_waiting() == ["local", "module"]
    reasons = {place.name: place.reason for place in bus.order("gradients_waiting")}
    assert "'local' says before 'other:b'" in reasons["other:b"]


LOOKS_AFTER = """
    class Plugin:
        def __init__(self, component):
            self.component = component
        @hookbus.hookimpl
        def safe_point(self): ...
    @hookbus.hookimpl
    def plugin_for(name, component):
        return Plugin(component) if {condition} else None
"""


def test_by_hand_is_asked_first_then_third_parties_by_name_then_the_built_in_ones(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    """Source: getindata/kedro-kubeflow#72"""
    for letter in "ba":
        install(
            f"{letter}-hook",
            "1",
            {letter: f"{letter}_for"},
            **{f"{letter}_for": LOOKS_AFTER.format(condition="name == 'ema'")},
        )

    class Local:
        @hookbus.hookimpl
        def plugin_for(self, name: str) -> None: ...

    bus = hookbus.HookBus()
    bus.register(Local(), "first")
    bus.register(Local(), "second")
    order = [place.name for place in bus.order("plugin_for")]
    assert order[:4] == ["second", "first", "a-hook:a", "b-hook:b"]
    assert set(order[-2:]) == {"callbacks", "state"}
    with caplog.at_level(logging.DEBUG, "hookbus"):
        bus.attach(ema={})  # the names of entry points are taken by nobody
    made = next(each for each in bus.plugins if each.name == "ema")
    assert (made.distribution, made.version) == ("a-hook", "1")
    first = "'ema': plugin 'a-hook:a' (a-hook 1) answered before plugin "
    assert [m for m in caplog.messages if "answered" in m] == [
        f"{first}'b-hook:b' (b-hook 1)",
        f"{first}'state' (hookbus {made_by_hookbus(bus)})",
    ]


def made_by_hookbus(bus: hookbus.HookBus) -> str:
    return next(each.version or "" for each in bus.plugins if each.name == "state")


# -- blocking -----------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["blocked-hook:a", "blocked-hook"])
@pytest.mark.parametrize("way", ["argument", "environment"])
def test_what_is_blocked_is_never_imported(
    word: str, way: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source: kedro-org/kedro#435"""
    install("blocked-hook", "1", {"a": "blocked_hook"}, blocked_hook=ANSWERS.format(word=""))
    if way == "environment":
        monkeypatch.setenv("HOOKBUS_DISABLE_PLUGINS", f" rng,, {word} ")
    bus = hookbus.HookBus(block=(word, "rng") if way == "argument" else ())
    assert bus.blocked == {word, "rng"}
    assert "blocked_hook" not in sys.modules
    assert not {"blocked-hook:a", "rng"} & {each.name for each in bus.plugins}
    assert bus.failed == ()


def test_a_plugin_of_a_blocked_distribution_is_not_registered_by_hand_either(
    install: Install,
) -> None:
    install("late-hook", "1", {"a": "late_hook"}, late_hook=ANSWERS.format(word=""))
    bus = hookbus.HookBus(block=("late-hook",))
    import late_hook

    assert bus.register(late_hook.Plugin(), "mine") == "mine"
    assert "mine" not in [each.name for each in bus.plugins]


def test_blocking_what_is_not_installed_is_an_error_that_lists_what_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Source: kedro-org/kedro#435"""
    with pytest.raises(CallError) as caught:
        hookbus.HookBus(block=("rgn", "rng"))
    start = "block= names 'rgn', which is not installed; there are "
    assert str(caught.value).startswith(start)
    assert "rng" in str(caught.value).removeprefix(start).split(", ")
    monkeypatch.setenv("HOOKBUS_DISABLE_PLUGINS", "rgn")
    with pytest.raises(CallError, match=r"^HOOKBUS_DISABLE_PLUGINS names 'rgn', which is not inst"):
        hookbus.HookBus()
    with pytest.raises(ManyErrors) as many:
        hookbus.HookBus(block=("modle",))
    assert "HOOKBUS_DISABLE_PLUGINS names 'rgn'" in str(many.value)
    assert "block= names 'modle'" in str(many.value)
    with pytest.raises(CallError) as caught:
        hookbus.HookBus(block="rng")
    assert str(caught.value) == "block='rng': pass a tuple of names, such as ('rng',)"
    for block in (3, (1,)):
        with pytest.raises(CallError) as caught:
            hookbus.HookBus(block=block)
        assert str(caught.value) == f"block={block!r}: pass a tuple of names"
    hookbus.HookBus(load_plugins=False)  # there, the environment blocks nothing


def run_script(run: Path, **options: object) -> tuple[list[str], float, list[str]]:
    """Attach, resume and save, as a script does; return sections, a draw, and notes."""
    random.seed(1)
    with hookbus.HookBus() as bus:
        model = torch.nn.Linear(2, 2)
        bus.attach(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), values={})
        report = bus.resume(run, **options).report
        draw = random.random()
        checkpoint = bus.save(step=(report.step or 0) + 1)
        assert checkpoint is not None
        return sorted(checkpoint.sections), draw, report.notes


def test_the_same_script_runs_with_a_plugin_blocked_and_without_what_it_looks_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Source: kedro-org/kedro#435"""
    random.seed(1)
    fresh = random.random()
    sections, _, _ = run_script(tmp_path)
    assert sections == ["model", "optimizer", "rng", "values"]
    assert run_script(tmp_path)[1] != fresh  # negative control: the stream comes back
    monkeypatch.setenv("HOOKBUS_DISABLE_PLUGINS", "rng,optimizer")
    sections, draw, notes = run_script(tmp_path)
    assert sections == ["model", "values"]
    assert draw == fresh
    for name in ("rng", "optimizer"):
        assert f"{name}: left alone, since its plugin is blocked" in notes
        assert f"section {name!r} is left alone, since its plugin is blocked" in caplog.messages
    monkeypatch.delenv("HOOKBUS_DISABLE_PLUGINS")
    with pytest.raises(ManyErrors) as caught:
        run_script(tmp_path)
    assert [type(each) for each in caught.value.exceptions] == [MissingSectionError] * 2
    assert "pass missing_ok=('rng',) to start it fresh" in str(caught.value)
    assert run_script(tmp_path, missing_ok=("rng", "optimizer"))[0] == [
        "model",
        "optimizer",
        "rng",
        "values",
    ]


def test_what_nobody_looks_after_while_something_is_blocked_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = hookbus.HookBus(block=("optimizer", "rng"))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with caplog.at_level(logging.INFO, "hookbus"):
        bus.attach(optimizer=optimizer)
        bus.attach(opt=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (logging.INFO, "nobody looks after 'optimizer', which is blocked"),
        (
            logging.WARNING,
            "nobody looks after 'opt' (SGD), so it is neither saved nor restored; blocked are"
            " optimizer, rng",
        ),
    ]
    assert bus.components["optimizer"] is optimizer
