"""Distributions of third parties, really built and installed: whole, uninstalled, broken."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
from installed import ROOT, Environment, build_hookbus, build_wheel

import hookbus

THIRD_PARTY = ROOT / "examples" / "third_party"
SCRIPT = THIRD_PARTY / "script.py"
FIGURE = ("--figure", "hookbus_ema:Smoothed")
SKIP = ("--skip", "hookbus-ema:ema", "--skip", "figure")

# Two commands, or two tries, in one process: most of the time of each is the import of torch.
LIST = """
import sys
from hookbus.cli.app import main
main(["plugins", "--json"])
print("--")
main(["inspect", sys.argv[1], "--json"])
"""
TWICE = """
import runpy, sys
import hookbus
_, script, run, *skip = sys.argv
sys.argv = [script, run]
try:
    runpy.run_path(script, run_name="__main__")
except hookbus.errors.ManyErrors as error:
    print(error)
    sys.argv += skip
    runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment in which hookbus alone is installed."""
    folder = tmp_path_factory.mktemp("installed")
    environment = Environment.make(folder / "environment")
    environment.install(build_hookbus(folder))
    return environment


@pytest.fixture(scope="module")
def ema_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(THIRD_PARTY, tmp_path_factory.mktemp("ema"))


def train(environment: Environment, run: Path, *options: str) -> subprocess.CompletedProcess[str]:
    ended = environment.run(SCRIPT, run, *options)
    assert ended.returncode == 0, ended.stderr
    return ended


def read_newest(run: Path) -> dict[str, str]:
    """Return all plain values in the newest checkpoint, and the hashes of all tensors."""
    newest = hookbus.checkpoints(run)[-1]
    return {
        f"{name}.{part}": repr(newest.metadata(name, part))
        for name, section in newest.sections.items()
        for part in section.parts
    }


def test_a_package_that_a_script_never_heard_of_is_saved_restored_and_listed_and_missed_when_gone(
    environment: Environment, ema_wheel: Path, tmp_path: Path
) -> None:
    """Source: Lightning-AI/pytorch-lightning#2631"""
    assert "ema" not in SCRIPT.read_text()
    environment.install(ema_wheel)
    run, again, without = tmp_path / "run", tmp_path / "again", tmp_path / "without"
    train(environment, run, *FIGURE)
    first, _, last = hookbus.checkpoints(run)
    average, weights = last.read("hookbus-ema:ema")["model"], last.read("model")
    assert average.keys() == weights.keys()
    assert not any(average[name].equal(weights[name]) for name in weights)
    assert last.read("figure") != first.read("figure")

    # What a crash after the first checkpoint would have left goes on bit for bit.
    shutil.copytree(first.path, again / first.path.name)
    assert "goes on after step 8" in train(environment, again, *FIGURE).stderr
    assert read_newest(again) == read_newest(run)

    listed = environment.run("-c", LIST, run)
    assert listed.returncode == 0, listed.stderr
    told, inspected = map(json.loads, listed.stdout.split("\n--\n"))
    ours = {each["name"]: each for each in told["plugins"] if each["origin"] != "built in"}
    assert {(name, each["distribution"], each["version"]) for name, each in ours.items()} == {
        ("hookbus-ema:ema", "hookbus-ema", "1.0"),
        ("hookbus-ema:smoothed", "hookbus-ema", "1.0"),
    }
    assert "safe_point" in ours["hookbus-ema:ema"]["events"]
    for name in ("hookbus-ema:ema", "figure"):
        section = inspected["sections"][name]
        assert (section["distribution"], section["distribution_version"]) == ("hookbus-ema", "1.0")

    environment.uninstall("hookbus-ema")
    shutil.copytree(first.path, without / first.path.name)
    ended = environment.run("-c", TWICE, SCRIPT, without, *SKIP)
    assert ended.returncode == 0, ended.stderr
    for name, plugin in (("hookbus-ema:ema", "Ema"), ("figure", "SmoothedPlugin")):
        assert (
            f"a section {name!r}, written by plugin {plugin!r} (hookbus-ema 1.0), and nobody on the"
            " bus restores it: hookbus-ema is not installed; install it, or pass"
            f" skip=({name!r},)"
        ) in ended.stdout
    kept, *_, newest = hookbus.checkpoints(without)
    assert kept.sections.keys() - newest.sections.keys() == {"hookbus-ema:ema", "figure"}
    assert newest.read("model").keys() == weights.keys()
    assert all(newest.read("model")[name].equal(weights[name]) for name in weights)


FRAIL = {
    "pyproject.toml": """
        [build-system]
        requires = ["setuptools>=77"]
        build-backend = "setuptools.build_meta"
        [project]
        name = "Hookbus_Frail"
        version = "2.1"
        [project.entry-points.hookbus]
        fine = "hookbus_frail.fine"
        imports = "hookbus_frail.imports:Plugin"
        signature = "hookbus_frail.signature:Plugin"
        nothing = "hookbus_frail.fine:nothing"
        exits = "hookbus_frail.exits"
        [tool.setuptools]
        packages = ["hookbus_frail"]
    """,
    "hookbus_frail/__init__.py": "",
    "hookbus_frail/fine.py": """
        import hookbus
        nothing = None
        @hookbus.hookimpl
        def gradients_waiting():
            return None
    """,
    "hookbus_frail/imports.py": """
        import os
        import hookbus
        if "FRAIL" in os.environ:
            raise ImportError("libfrail.so.3: cannot open shared object file")
        class Plugin:
            @hookbus.hookimpl
            def save_state(self, save):
                save.write(1)
            @hookbus.hookimpl
            def restore_training_state(self, resume):
                resume.read()
    """,
    "hookbus_frail/signature.py": """
        import hookbus
        class Plugin:
            @hookbus.hookimpl
            def restore_model(self, resume, strict=True): ...
    """,
    "hookbus_frail/exits.py": "import sys; sys.exit('usage: frail [-h]')",
}


SAVE = """
import sys
import hookbus
for run, block in zip(sys.argv[1:], [(), ("hookbus-frail",)], strict=True):
    with hookbus.HookBus(block=block) as bus:
        bus.attach(values={"a": 1})
        bus.resume(run)
        bus.save(step=1)
"""
RESUME = """
import json, sys
import hookbus
whole, other = sys.argv[1:]
with hookbus.HookBus() as bus:
    bus.attach(values={"a": 2})
    told = {"plugins": [each.name for each in bus.plugins]}
    told["failed"] = {each.name: [each.distribution, each.version] for each in bus.failed}
    told["other"] = bus.resume(other).step
    try:
        bus.resume(whole)
    except hookbus.errors.UnclaimedSectionError as error:
        told["error"] = str(error)
    told["values"] = bus.components["values"]
    told["without"] = bus.resume(whole, skip=("hookbus-frail:imports",)).step
print(json.dumps(told), flush=True)
from hookbus.cli.app import main
sys.exit(main(["plugins"]))
"""
CAUSES = {
    "exits": "SystemExit: usage: frail [-h]",
    "fine": "NameTakenError: two plugins are named 'hookbus-frail:fine': hookbus_frail.fine"
    " (hookbus-frail) and hookbus_frail.fine (hookbus-frail); pass another name to one of them",
    "imports": "ImportError: libfrail.so.3: cannot open shared object file",
    "nothing": "RegistrationError: the entry point 'hookbus-frail:nothing' is None",
    "signature": "RegistrationError: Plugin.restore_model has an argument 'strict' with a default,"
    " which would never be passed; take the default away",
}


def test_broken_entry_points_of_a_real_distribution_stop_no_other_and_no_run_without_their_section(
    environment: Environment, tmp_path: Path
) -> None:
    """Source: pytest-dev/pluggy#8, pytest-dev/pytest#1479, pytest-dev/pluggy#731, pluggy#522"""
    source = tmp_path / "frail"
    for name, text in FRAIL.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(textwrap.dedent(text))
    environment.install(build_wheel(source, tmp_path))
    (entry_points,) = environment.packages.glob("?ookbus_?rail-*.dist-info/entry_points.txt")
    entry_points.write_text(entry_points.read_text() + "fine = hookbus_frail.fine\n")
    whole, other = tmp_path / "whole", tmp_path / "other"
    ended = environment.run("-c", SAVE, whole, other)
    assert ended.returncode == 0, ended.stderr

    ended = environment.run("-c", RESUME, whole, other, FRAIL="1")
    assert ended.returncode == 1, ended.stderr  # what failed is a finding of the command
    first, *table = ended.stdout.splitlines()
    told = json.loads(first)
    assert {"model", "rng", "hookbus-frail:fine"} <= set(told["plugins"])
    names = {f"hookbus-frail:{name}" for name in CAUSES}
    assert told["failed"] == {name: ["hookbus-frail", "2.1"] for name in names}
    for name, cause in CAUSES.items():
        line = f"plugin 'hookbus-frail:{name}' (hookbus-frail 2.1) could not be loaded: {cause}\n"
        assert ended.stderr.count(line) == 1, ended.stderr
    assert (told["other"], told["without"], told["values"]) == (1, 1, {"a": 1})
    assert told["error"] == (
        "the checkpoint has a section 'hookbus-frail:imports', written by plugin 'Plugin'"
        " (hookbus-frail 2.1), and nobody on the bus restores it; plugin 'hookbus-frail:imports'"
        f" (hookbus-frail 2.1) could not be loaded: {CAUSES['imports']}; mend it, or pass"
        " skip=('hookbus-frail:imports',)"
    )

    shown = [" ".join(line.split()) for line in table]
    for name, cause in CAUSES.items():
        assert f"hookbus-frail:{name} hookbus-frail 2.1 {cause}" in shown
    environment.uninstall("Hookbus_Frail")


def test_the_tests_of_a_new_plugin_pass_as_written_and_so_do_those_of_the_example(
    environment: Environment, ema_wheel: Path, tmp_path: Path
) -> None:
    project = tmp_path / "new"
    ended = environment.run("-m", "hookbus", "new-plugin", "Hookbus_Loss.Mean", project)
    assert ended.returncode == 0, ended.stderr
    environment.install(ema_wheel, build_wheel(project, tmp_path / "wheels"))
    # Copies, so that nothing but what is installed can be imported.
    tests = [
        shutil.copytree(each / "tests", tmp_path / f"tests of {each.name}")
        for each in (project, THIRD_PARTY)
    ]
    ended = environment.run("-m", "pytest", "-v", "-W", "error", "--strict-config", *tests)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    passed = re.findall(r"(test_\w+).py::test_\w+ PASSED", ended.stdout)
    assert sorted(passed) == ["test_averages"] * 3 + ["test_hookbus_loss_mean"] * 3
    for name in ("hookbus-ema", "hookbus-loss-mean"):
        environment.uninstall(name)
