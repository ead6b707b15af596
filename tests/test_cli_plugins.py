"""The commands about plugins: what is installed, in which order and why, and a new one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from installed import Command, Install, write_distribution

import hookbus


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
    entries = {each.name: each for each in hookbus.HookBus().plugins}
    version, number = entries["rng"].version, entries["ema-hook:keep"].number
    status, out, err = command("plugins")
    assert (status, err) == (0, "")
    plugins, order = (read_lines(table) for table in out.split("\n\n"))
    assert plugins[0] == "plugin kind from events"
    assert "ema-hook:keep ema ema-hook 1.2 restore_training_state, save_state" in plugins
    assert f"progress progress hookbus {version} bus_open, bus_close, bytes_moved" in plugins
    assert order[0] == "event place plugin why"
    first = order.index(f"save_state 1 ema-hook:keep registered as number {number}")
    assert order[first + 1] == (
        f"save_state 2 rng 'ema-hook:keep' says before 'rng', registered as number"
        f" {entries['rng'].number}"
    )
    assert (
        f"restore_training_state 1 ema-hook:keep tryfirst, registered as number {number}" in order
    )


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
    assert [line.split()[1:3] for line in order[1:]] == [
        ["1", "averaged"],
        ["2", "optimizer"],
        ["3", "rng"],
        ["-", "-"],
    ]
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


# -- hookbus new-plugin ------------------------------------------------------------------------


def read_all(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("there", ["nothing", "an empty folder"])
def test_it_writes_a_distribution_and_says_what_to_do_next(
    there: str, tmp_path: Path, command: Command
) -> None:
    folder = tmp_path / "a folder" / "new"
    if there != "nothing":
        folder.mkdir(parents=True)
    status, out, err = command("new-plugin", "Loss_Hook", folder)
    assert (status, err) == (0, "")
    *paths, following = out.splitlines()
    assert following == f"now: cd '{folder}' && pip install -e '.[test]' && python -m pytest"
    files = read_all(folder)
    assert sorted(paths) == sorted(str(folder / name) for name in files)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["name"] == "loss-hook"
    assert project["entry-points"] == {"hookbus": {"loss-hook": "loss_hook"}}
    assert files.keys() == {
        "pyproject.toml",
        "README.md",
        "src/loss_hook/__init__.py",
        "tests/test_loss_hook.py",
    }
    assert not [name for name, text in files.items() if "${" in text]
    assert "class LossHook:" in files["src/loss_hook/__init__.py"]


def test_told_as_json(tmp_path: Path, command: Command) -> None:
    status, out, _ = command("new-plugin", "hookbus-model", tmp_path / "new", "--json")
    told = json.loads(out)
    files = told.pop("files")
    assert status == 0
    assert {Path(each).is_file() for each in files} == {True}
    assert told == {
        "distribution": "hookbus-model",
        "module": "hookbus_model",
        "entry": "model",
        "kind": "my_model",  # "model" would have it called among the models
        "component": "Model",
    }


NAMES = {
    "ema-hookbus": ("ema_hookbus", "ema", "ema", "Ema"),
    "hookbus.EMA--of_weights": (
        "hookbus_ema_of_weights",
        "ema-of-weights",
        "ema_of_weights",
        "EmaOfWeights",
    ),
    "hookbus-3d": ("hookbus_3d", "3d", "3d", "My3d"),
    "hookbus-none": ("hookbus_none", "none", "none", "MyNone"),
}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_name_makes_can_be_registered(name: str, tmp_path: Path, command: Command) -> None:
    status, out, _ = command("new-plugin", name, tmp_path / "new", "--json")
    told = json.loads(out)
    assert status == 0
    assert (told["module"], told["entry"], told["kind"], told["component"]) == NAMES[name]
    made: dict[str, Any] = {"__name__": told["module"]}
    source = (tmp_path / "new" / "src" / told["module"] / "__init__.py").read_text()
    exec(compile(source, told["module"], "exec"), made)
    bus = hookbus.HookBus(load_plugins=False)
    bus.register(made[f"{told['component']}Plugin"](made[told["component"]]()))
    assert bus.plugins[0].kind == told["kind"]


REFUSED_NAMES = {
    "": "cannot be a distribution's name",
    "-ema": "No such option",
    "ema-": "cannot be a distribution's name",
    "my ema": "cannot be a distribution's name",
    "../ema": "cannot be a distribution's name",
    "ema\n": "cannot be a distribution's name",
    "éma": "cannot be a distribution's name",
    'e"ma': "cannot be a distribution's name",
    "3d": "makes '3d', which cannot be a module's name",
    "class": "makes 'class', which cannot be a module's name",
    "json": "makes a module 'json', which comes with Python; take another, such as",
    "hookbus": "makes a module 'hookbus', which comes with hookbus; take another",
    "builtin-plugins": "makes a module 'builtin_plugins', which comes with hookbus",
    "torch.": "cannot be a distribution's name",
    "safetensors-": "cannot be a distribution's name",
    "_pytest": "cannot be a distribution's name",
    "functorch": "makes a module 'functorch', which comes with torch; take another",
    "torch": "makes a module 'torch', which comes with torch; take another",
    "numpy": "makes a module 'numpy', which comes with numpy; take another",
    "tests": "makes a module 'tests', which is the folder of its tests; take another",
    "test": "makes a module 'test', which comes with Python; take another",
    "x" * 60: "cannot be a plugin's name: up to 100 letters",
}


@pytest.mark.parametrize("name", REFUSED_NAMES, ids=repr)
def test_a_name_that_would_break_something_is_refused_and_nothing_is_written(
    name: str, tmp_path: Path, command: Command
) -> None:
    status, out, err = command("new-plugin", name, tmp_path / "new")
    assert (status, out) == (2, "")
    assert re.fullmatch(r"hookbus: [^\n]+\n", err)
    assert REFUSED_NAMES[name] in err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("there", ["a file in it", "a hidden file in it", "a file", "a link"])
def test_nothing_is_overwritten(there: str, tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "new"
    if there == "a file":
        folder.write_text("mine")
    elif there == "a link":
        folder.symlink_to(tmp_path / "nowhere")
    else:
        folder.mkdir()
        (folder / (".git" if "hidden" in there else "README.md")).write_text("mine")
    before = read_all(tmp_path)
    status, out, err = command("new-plugin", "ema-hook", folder)
    assert (status, out) == (2, "")
    assert re.fullmatch(r"hookbus: [^\n]+\n", err)
    assert str(folder) in err
    assert read_all(tmp_path) == before
    assert not (tmp_path / "nowhere").exists()
