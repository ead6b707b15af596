"""The commands about plugins: what is installed, in which order and why, and a new one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from installed import Install, write_distribution

import hookbus
from hookbus.cli.app import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process; return its status and what it wrote."""

    def call(*arguments: object) -> tuple[int, str, str]:
        status = main([str(each) for each in arguments])
        return status, *capsys.readouterr()

    return call


def read_lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


KEEPER = """
    class Plugin:
        kind = "ema"
        before = ("rng",)
        @hookbus.hookimpl
        def save_state(self, save):
            save.write(1)
        @hookbus.hookimpl(tryfirst=True)
        def restore_training_state(self, resume): ...
"""


# -- hookbus plugins ---------------------------------------------------------------------------


def test_it_shows_who_is_installed_from_where_in_which_order_and_why(
    install: Install, command: Command
) -> None:
    install("ema-hook", "1.2", {"keep": "ema_hook:Plugin"}, ema_hook=KEEPER)
    version = hookbus.HookBus().plugins[0].version
    status, out, err = command("plugins")
    assert (status, err) == (0, "")
    plugins, order = (read_lines(table) for table in out.split("\n\n"))
    assert plugins[0] == "plugin kind from events"
    assert "ema-hook:keep ema ema-hook 1.2 restore_training_state, save_state" in plugins
    assert f"progress progress hookbus {version} bytes_moved" in plugins
    assert order[0] == "event place plugin why"
    first = order.index("save_state 1 ema-hook:keep registered as number 14")
    assert order[first + 1] == (
        "save_state 2 rng 'ema-hook:keep' says before 'rng', registered as number 10"
    )
    assert "restore_training_state 1 ema-hook:keep tryfirst, registered as number 14" in order


def test_as_json_it_holds_all_that_the_bus_knows(install: Install, command: Command) -> None:
    install("ema-hook", "1.2", {"keep": "ema_hook:Plugin"}, ema_hook=KEEPER)
    status, out, _ = command("plugins", "--json")
    told, bus = json.loads(out), hookbus.HookBus()
    assert status == 0
    assert told["plugins"][-1] == {
        "name": "ema-hook:keep",
        "kind": "ema",
        "distribution": "ema-hook",
        "version": "1.2",
        "origin": "a third party's entry point",
        "events": ["restore_training_state", "save_state"],
        "before": ["rng"],
        "after": [],
    }
    assert [each["name"] for each in told["plugins"]] == [each.name for each in bus.plugins]
    for event, places in told["order"].items():
        expected = [{"name": place.name, "reason": place.reason} for place in bus.order(event)]
        assert places == expected != []
    assert (told["failed"], told["blocked"], told["problems"]) == ([], [], [])


def test_asked_for_events_it_shows_the_order_of_these_alone(command: Command) -> None:
    status, out, _ = command("plugins", "resume_end", "safe_point")
    order = read_lines(out.split("\n\n")[1])
    assert status == 0
    assert [line.split()[1] for line in order[1:]] == ["1", "2", "-"]
    assert order[-1] == "safe_point - - no installed plugin implements it"
    _, out, _ = command("plugins", "safe_point", "--json")
    assert json.loads(out)["order"] == {"safe_point": []}


SIX = """
    calls = []
    class Plugin:
        def __init__(self, name):
            self.name = name
    def make(options):
        class Made(Plugin):
            @hookbus.hookimpl(**options)
            def gradients_waiting(self):
                calls.append(self.name)
        class Around(Plugin):
            @hookbus.hookimpl(**options)
            def gradients_waiting(self):
                calls.append(self.name)
                return (yield)
        return (Around if "wrapper" in options else Made)
    flags = [(), ("tryfirst",), ("trylast",), ("wrapper",), ("wrapper", "tryfirst"),
             ("wrapper", "trylast")]
    for flag, name in zip(flags, "{names}"):
        globals()[name] = make(dict.fromkeys(flag, True))(name)
"""


@pytest.mark.parametrize("names", ["abcdef", "fedcba", "cfaebd"])
def test_what_it_prints_is_the_order_of_the_calls(
    names: str, install: Install, command: Command
) -> None:
    """Source: pytest-dev/pluggy#441"""
    entries = {name: f"six_hook:{name}" for name in names}
    install("six-hook", "1", entries, six_hook=SIX.format(names=names))
    bus = hookbus.HookBus()
    assert bus.failed == ()
    import six_hook

    bus.hook.gradients_waiting()
    _, out, _ = command("plugins", "gradients_waiting", "--json")
    places = [each["name"] for each in json.loads(out)["order"]["gradients_waiting"]]
    printed = [name.removeprefix("six-hook:") for name in places if name.startswith("six-hook")]
    assert printed == six_hook.calls
    assert sorted(printed) == sorted(names)


def test_what_could_not_be_loaded_is_a_finding_with_its_cause(
    install: Install, command: Command
) -> None:
    """Source: pytest-dev/pytest#1479"""
    install("sad-hook", "2.0", {"a": "sad_hook"}, sad_hook="raise ImportError('no \\x1b[2J lib')")
    status, out, err = command("plugins")
    assert (status, err) == (1, "")
    failed = read_lines(out.split("\n\n")[2])
    assert failed == ["failed from why", r"sad-hook:a sad-hook 2.0 ImportError: no \x1b[2J lib"]
    status, out, _ = command("plugins", "--json")
    (failure,) = json.loads(out)["failed"]
    assert status == 1
    assert 'sad_hook.py", line 2' in failure.pop("traceback")
    assert failure == {
        "name": "sad-hook:a",
        "distribution": "sad-hook",
        "version": "2.0",
        "error": "ImportError: no \x1b[2J lib",
    }


def test_a_circle_in_their_order_is_a_finding_and_the_other_events_are_shown(
    install: Install, command: Command
) -> None:
    """Source: pytest-dev/pluggy#705"""
    circle = KEEPER.replace('before = ("rng",)', 'before = ("rng",); after = ("rng",)')
    install("ring-hook", "1", {"a": "ring_hook:Plugin"}, ring_hook=circle)
    status, out, _ = command("plugins", "--json")
    told = json.loads(out)
    assert status == 1
    assert [text.partition(":")[0] for text in told["problems"]] == [
        "the order of restore_training_state goes round in a circle",
        "the order of save_state goes round in a circle",
    ]
    assert "save_state" not in told["order"]
    assert "plugin_for" in told["order"]
    status, out, _ = command("plugins")
    assert status == 1
    assert "problem the order of restore_training_state goes round in a circle: " in read_lines(
        out
    )[-1].replace("  ", " ")


def test_what_is_blocked_is_named_and_not_imported(
    install: Install, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source: kedro-org/kedro#435"""
    install("sad-hook", "2.0", {"a": "sad_hook"}, sad_hook="raise ImportError('on purpose')")
    monkeypatch.setenv("HOOKBUS_DISABLE_PLUGINS", "sad-hook,rng")
    status, out, _ = command("plugins")
    assert status == 0
    assert read_lines(out)[-1] == "blocked rng, sad-hook"
    assert not [line for line in read_lines(out) if line.startswith(("rng", "sad-hook"))]
    assert json.loads(command("plugins", "--json")[1])["blocked"] == ["rng", "sad-hook"]


@pytest.mark.parametrize("where", ["resume_edn", "environment"])
def test_bad_use_is_one_line_and_status_2(
    where: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "environment":
        monkeypatch.setenv("HOOKBUS_DISABLE_PLUGINS", "rgn")
        status, out, err = command("plugins")
        words = "HOOKBUS_DISABLE_PLUGINS names 'rgn', which is not installed"
    else:
        status, out, err = command("plugins", where)
        words = "there is no event 'resume_edn'; did you mean 'resume_end'?"
    assert (status, out) == (2, "")
    assert re.fullmatch(r"hookbus: [^\n]+\n", err)
    assert words in err


def test_what_plugins_print_and_break_is_no_part_of_the_answer(tmp_path: Path) -> None:
    """A process of its own, so that the imports happen under the command."""
    loud = """
        print("imported")
        class Plugin:
            @hookbus.hookimpl
            def bus_open(self):
                print("opened")
            @hookbus.hookimpl
            def bus_close(self):
                print("closed")
                raise OSError("no farewell")
    """
    write_distribution(tmp_path, "loud-hook", "1", {"a": "loud_hook:Plugin"}, loud_hook=loud)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, "-m", "hookbus", "plugins", "--json"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (1, "imported\nopened\nclosed\n")
    assert json.loads(ended.stdout)["problems"] == [
        "plugin 'loud-hook:a' (loud-hook 1) broke in bus_close: OSError: no farewell"
    ]
