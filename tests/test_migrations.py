"""State versions: what was saved in an older layout is migrated, or refused before any change."""

from __future__ import annotations

import importlib
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden.make import describe, make_leaves
from keepers import WAYS, Way, make_bus

import hookbus
from hookbus.errors import (
    CallError,
    CorruptCheckpointError,
    ManyErrors,
    MigrationError,
    MismatchError,
    RegistrationError,
)


class Ema1:
    """The first version: one tensor, ``[3]`` float32."""

    kind = "ema"

    def __init__(self, value: float = 0.0) -> None:
        self.shadow = torch.full((3,), value)

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self.shadow)

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        resume.read_into(self.shadow)


class Ema3(Ema1):
    """Two versions later: in float64, in a dict, and with the number of updates."""

    def __init__(self, value: float = 0.0) -> None:
        self.state: dict[str, Any] = {
            "shadow": torch.full((3,), value, dtype=torch.float64),
            "updates": 0,
        }
        self.seen: list[Any] = []

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self.state, version=3)

    @hookbus.migrate("ema", 1, 2)
    def put_into_dict(self, state: torch.Tensor) -> dict[str, Any]:
        self.seen.append(1)
        return {"shadow": state}

    @staticmethod
    @hookbus.migrate("ema", 2, 3)
    def widen(state: dict[str, Any]) -> dict[str, Any]:
        return {"shadow": state["shadow"].double(), "updates": 7}

    @hookbus.hookimpl
    def check_state(self, resume: hookbus.Resume) -> None:
        self.seen.append(resume.metadata())

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        resume.read_into(self.state)


class Reader(Ema3):
    """The same by ``read``."""

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        self.state = resume.read()


class Other:
    """A plugin of no kind beside it, whose tensor is changed by a restore."""

    def __init__(self, value: float = 0.0) -> None:
        self.tensor = torch.full((2,), value)

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self.tensor)

    @hookbus.hookimpl
    def restore_model(self, resume: hookbus.Resume) -> None:
        resume.read_into(self.tensor)


def save(run: Path, **plugins: object) -> Path:
    with make_bus(**plugins) as bus:
        bus.resume(run)
        bus.save(step=1)
    return run


def make_plugin(base: type = Ema3, **members: object) -> Any:
    return type("Ema", (base,), members)()


def read_folder(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_refused(run: Path, *plugins: Any, match: str, **options: Any) -> Exception:
    """Whatever is on the bus beside it keeps its values; the checkpoint its bytes."""
    other, before = Other(), read_folder(run)
    bus = make_bus(other=other, **{each.kind: each for each in plugins})
    with bus, pytest.raises(MigrationError, match=match) as caught:
        bus.resume(run, **options)
    assert other.tensor.tolist() == [0, 0]
    after = read_folder(run)
    assert {p: b for p, b in after.items() if p.parent != run} == {
        p: b for p, b in before.items() if p.parent != run
    }
    return caught.value


# -- what works ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plugin", [Ema3, Reader])
def test_steps_bring_an_old_state_to_the_plugins_version(
    tmp_path: Path, plugin: type, way: Way
) -> None:
    """Source: Lightning-AI/pytorch-lightning#9396"""
    run, ema = save(tmp_path, ema=Ema1(4.0)), plugin()
    shadow, before = ema.state["shadow"], read_folder(tmp_path / "step-00000001")
    with make_bus(ema=ema) as bus:
        report = way(bus, run, "fit").report
        assert ema.state["shadow"].tolist() == [4, 4, 4]
        assert ema.state["shadow"].dtype == torch.float64
        assert ema.state["updates"] == 7
        assert (ema.state["shadow"] is shadow) == (plugin is Ema3)
        told = "ema: migrated from version 1 to 3: 1 → 2 by put_into_dict, 2 → 3 by widen"
        assert report.notes == [told]
        assert f"note: {told}" in str(report)
        assert report.sections["ema"].status == "restored"
        bus.save(step=2)
    assert read_folder(tmp_path / "step-00000001") == before
    saved = hookbus.open(tmp_path / "step-00000002").metadata("ema")
    assert saved.version == 3
    again = plugin()
    with make_bus(ema=again) as bus:
        assert bus.resume(run).report.notes == []
    assert torch.equal(again.state["shadow"], ema.state["shadow"])
    assert 1 not in again.seen, "a step was taken for a state of the plugin's version"


def test_a_check_sees_the_state_as_it_is_after_the_steps(tmp_path: Path) -> None:
    run, ema = save(tmp_path, ema=Ema1(4.0)), Ema3()
    with make_bus(ema=ema) as bus:
        bus.resume(run)
        bus.save(step=2)
    seen = next(each for each in ema.seen if each != 1)
    saved = hookbus.open(tmp_path / "step-00000002").metadata("ema")
    assert seen.version == 3
    assert seen.state == saved.state
    assert seen.tensors == saved.tensors, "down to the hashes"


def test_a_step_may_begin_in_the_middle_and_pass_over_versions(tmp_path: Path) -> None:
    class Ema2(Ema1):
        state_version = 2

        @hookbus.hookimpl
        def save_state(self, save: hookbus.Save) -> None:
            save.write({"shadow": self.shadow}, version=2)

    class Ema3Only(Ema3):
        put_into_dict = None

        @hookbus.migrate("ema", 1, 3)
        def take_at_once(self, state: torch.Tensor) -> dict[str, Any]:
            return {"shadow": state.double(), "updates": 9}

    for number, (old, updates) in enumerate([(Ema1(5.0), 9), (Ema2(5.0), 7)]):
        ema = Ema3Only()
        with make_bus(ema=ema) as bus:
            bus.resume(save(tmp_path / str(number), ema=old))
        assert ema.state["shadow"].tolist() == [5, 5, 5]
        assert ema.state["updates"] == updates


PLUGIN = """
import hookbus
kind = "ema"
class Ema:
    kind = "ema"
    def __init__(self, value): self.value = [value]
    @hookbus.hookimpl
    def save_state(self, save): save.write(self.value, version={version})
    @hookbus.hookimpl
    def restore_model(self, resume): self.value = resume.read()
"""
STEPS = """
@hookbus.migrate("ema", 1, {version})
def times(state): return [state[0] * {version}]
@hookbus.migrate("another", 1, 9)
def spoil(state): raise AssertionError("this is a step of another kind")
"""
MODULE = """
value = [0]
@hookbus.hookimpl
def save_state(save): save.write(value, version={version})
@hookbus.hookimpl
def restore_model(resume): value[:] = resume.read()
"""


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, source: str, **words: object) -> Any:
        (tmp_path / f"{name}.py").write_text(source.format(**words))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return write


def test_a_function_beside_the_plugin_is_a_step_of_its_kind_and_of_nobody_elses(
    tmp_path: Path, write_module: Callable[..., Any]
) -> None:
    """Two plugins of one kind and name have steps of their own: nothing is global."""
    one = write_module("ema_one", PLUGIN, version=1)
    two = write_module("ema_two", PLUGIN + STEPS, version=2)
    three = write_module("ema_three", PLUGIN + STEPS, version=3)
    run = save(tmp_path / "run", ema=one.Ema(5))
    plugins = [one.Ema(0), two.Ema(0), three.Ema(0), type("Mine", (three.Ema,), {})(0)]
    buses = [make_bus(ema=plugin) for plugin in plugins]
    for bus in buses:
        bus.resume(run, stage="test")
    assert [plugin.value for plugin in plugins] == [[5], [10], [15], [15]]


def test_a_module_that_is_a_plugin_has_its_steps_among_its_functions(
    tmp_path: Path, write_module: Callable[..., Any]
) -> None:
    one = write_module("ema_one", PLUGIN, version=1)
    module = write_module("ema_module", PLUGIN + MODULE + STEPS, version=4)
    with make_bus(ema=module) as bus:
        bus.resume(save(tmp_path / "run", ema=one.Ema(5)))
    assert module.value == [20]


class Parts(Other):
    """Of no kind, so its steps go by its name; only one of its parts has changed."""

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self.tensor)
        save.write({"n": 1}, part="rest")


class NewParts(Parts):
    rest: Any = None

    @hookbus.migrate("parts", 1, 2, part="rest")
    def rename(self, state: dict[str, int]) -> dict[str, int]:
        return {"count": state["n"]}

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self.tensor)
        save.write(self.rest, part="rest", version=2)

    @hookbus.hookimpl
    def restore_model(self, resume: hookbus.Resume) -> None:
        resume.read_into(self.tensor)
        self.rest = resume.read("rest")


def test_each_part_has_its_own_version(tmp_path: Path) -> None:
    run, plugin = save(tmp_path, parts=Parts(3.0)), NewParts()
    with make_bus(parts=plugin) as bus:
        report = bus.resume(run).report
        bus.save(step=2)
    assert report.notes == ["parts: part 'rest' migrated from version 1 to 2: 1 → 2 by rename"]
    assert plugin.rest == {"count": 1}
    assert plugin.tensor.tolist() == [3, 3]
    with make_bus(parts=NewParts()) as bus:
        assert bus.resume(run).report.notes == []


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.filterwarnings("ignore:Sparse .* is in beta")
@pytest.mark.filterwarnings("ignore:torch.quantize_per")
def test_a_state_that_no_step_changes_is_the_one_that_was_saved(tmp_path: Path) -> None:
    """Every kind of leaf comes through the memory as it comes from the file."""
    state = make_leaves()

    class Same(Reader):
        put_into_dict = widen = check_state = None

        @hookbus.migrate("ema", 1, 2)
        def keep(self, state: Any) -> Any:
            return state

    old = Ema1()
    old.shadow = state
    plugin = Same()
    with make_bus(ema=plugin) as bus:
        bus.resume(save(tmp_path, ema=old))
    assert describe(plugin.state) == describe(state)


# -- whose the memory is ------------------------------------------------------------------------


def test_a_step_is_given_tensors_of_its_own_and_nothing_of_it_is_kept(tmp_path: Path) -> None:
    kept = torch.ones(3)
    given: list[weakref.ref[torch.Tensor]] = []

    class Spoiling(Reader):
        put_into_dict = widen = None

        @hookbus.migrate("ema", 1, 3)
        def spoil(self, state: torch.Tensor) -> dict[str, Any]:
            state.fill_(9.0)
            given.append(weakref.ref(state))
            return {"old": state, "kept": kept}

        @hookbus.hookimpl
        def on_setup(self) -> None:
            assert [each() for each in given] == [None], "nothing is held between check and read"

    old = Ema1()
    old.shadow = torch.nn.Parameter(torch.full((3,), 4.0))  # filled in place without a fuss
    run, plugin = save(tmp_path, ema=old), Spoiling()
    with make_bus(ema=plugin) as bus:
        bus.resume(run)
    assert plugin.state["old"].tolist() == [9, 9, 9]
    assert [each() for each in given] == [None, None]
    plugin.state["kept"] += 1
    assert kept.tolist() == [1, 1, 1], "what the step gave away is not the run's to change"
    assert hookbus.open(run / "step-00000001").read("ema").tolist() == [4, 4, 4]
    hookbus.open(run / "step-00000001").verify()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damaged", ["other", "ema"])
def test_tensors_are_read_before_the_restore_only_where_a_migration_needs_them(
    tmp_path: Path, damaged: str
) -> None:
    """With ``verify="sizes"``, a flipped bit is found where the tensors are read."""
    run = save(tmp_path, ema=Ema1(4.0), other=Other(4.0))
    flip(run / "step-00000001" / f"{damaged}.safetensors")
    calls: list[str] = []
    other = make_plugin(Other, on_setup=hookbus.hookimpl(lambda self: calls.append("setup")))
    with make_bus(ema=Ema3(), other=other) as bus, pytest.raises(CorruptCheckpointError):
        bus.resume(run, verify="sizes")
    assert bool(calls) == (damaged == "other")


# -- what is refused ----------------------------------------------------------------------------


def test_a_version_that_nobody_knows_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    class Newest(Ema1):
        state_version = 5

        @hookbus.hookimpl
        def save_state(self, save: hookbus.Save) -> None:
            save.write(self.shadow, version=5)

    class Late(Ema3):
        put_into_dict = None

    run = save(tmp_path / "newer", other=Other(3.0), ema=Newest(3.0))
    plugin = Ema3()
    error = assert_refused(run, plugin, match="was saved in version 5")
    assert str(error) == (
        "section 'ema' was saved in version 5, and plugin 'ema' knows version 1 and 2 and 3;"
        " install the version of it that wrote this, or pass skip=('ema',) to start it fresh"
    )
    assert plugin.seen == [], "no step was taken, and no check was made"
    run = save(tmp_path / "older", other=Other(3.0), ema=Ema1(3.0))
    error = assert_refused(run, Late(), match="was saved in version 1")
    assert str(error) == (
        "section 'ema' was saved in version 1, and plugin 'ema' knows version 2 and 3; add"
        " @hookbus.migrate('ema', 1, 2) to it, or pass skip=('ema',) to start it fresh"
    )
    with make_bus(ema=Late(), other=Other()) as bus:
        assert bus.resume(run, skip=("ema",)).report.sections["ema"].status == "skipped"


def test_a_plugin_without_steps_knows_one_version(tmp_path: Path) -> None:
    with make_bus(ema=Ema3(3.0), other=Other(3.0)) as bus:
        bus.resume(tmp_path)
        bus.save(step=1)
    assert_refused(tmp_path, Ema1(), match="saved in version 3, and plugin 'ema' knows version 1;")


def test_a_read_before_the_check_is_refused_too(tmp_path: Path) -> None:
    run = save(tmp_path, other=Other(3.0), ema=Ema3(3.0))
    look = hookbus.hookimpl(lambda self, resume: resume.metadata())
    assert_refused(run, make_plugin(Ema1, resume_start=look), match="knows version 1;")


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    run = save(tmp_path, a=Ema3(3.0), b=Ema1(3.0), c=Other(3.0))
    broken = make_plugin(put_into_dict=hookbus.migrate("ema", 1, 2)(lambda self, state: 1 / 0))
    difference = hookbus.hookimpl(lambda self, resume: resume.problem("does not fit"))
    other = make_plugin(Other, check_state=difference)
    with make_bus(a=Ema1(), b=broken, c=other) as bus, pytest.raises(ManyErrors) as caught:
        bus.resume(run)
    kinds = [type(each) for each in caught.value.exceptions]
    assert kinds == [MigrationError, MigrationError, MismatchError]
    assert other.tensor.tolist() == [0, 0]


BROKEN = [
    (lambda self, state: {}["shadow"], "broke: KeyError: 'shadow'"),
    (lambda self, state: None, "returned None; return the state"),
    (lambda self, state: {"x": object()}, r"returned what cannot be saved: 1 value .*\['x'\]"),
]


@pytest.mark.parametrize(("step", "match"), BROKEN, ids=["raises", "None", "an object"])
def test_a_step_that_breaks_is_named_with_section_and_plugin_before_any_change(
    tmp_path: Path, step: Any, match: str
) -> None:
    run = save(tmp_path, other=Other(3.0), ema=Ema1(3.0))
    step.__name__ = "widen"
    plugin = make_plugin(widen=hookbus.migrate("ema", 2, 3)(step))
    where = "section 'ema': the migration 2 → 3 by widen of plugin 'ema'"
    error = assert_refused(run, plugin, match=f"{where} {match}")
    assert isinstance(error.__cause__, KeyError) == ("KeyError" in match)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"again": hookbus.migrate("ema", 2, 4)(lambda self, state: state)},
        "two migrations start from version 2 of the state: 2 → 4 by <lambda> and 2 → 3 by widen",
    ),
    (
        {"far": hookbus.migrate("ema", 4, 5)(lambda self, state: state)},
        "the migration 2 → 3 by widen of the state ends there, and the plugin's version is 5; add"
        " @hookbus.migrate('ema', 3, …)",
    ),
    (
        {"other": hookbus.migrate("emma", 1, 2)(lambda self, state: state)},
        "Ema.other is marked as a migration of 'emma', and the plugin is of kind 'ema'; write"
        " @hookbus.migrate('ema', 1, 2)",
    ),
    ({"state_version": 2}, "ends there, and the plugin's version is 2"),
    ({"state_version": "2"}, "Ema.state_version = '2': pass a whole number from 1 up"),
    ({"state_version": True}, "Ema.state_version = True: pass a whole number from 1 up"),
]


@pytest.mark.parametrize(("members", "text"), REFUSED)
def test_steps_that_lead_nowhere_are_refused_when_the_plugin_is_registered(
    members: dict[str, Any], text: str
) -> None:
    with pytest.raises(RegistrationError, match=re.escape(text)):
        make_bus(ema=make_plugin(**members))


@pytest.mark.parametrize("versions", [(1, 1), (2, 1), (0, 1), (True, 2), ("1", 2), (1, 2.0)])
def test_a_step_goes_from_a_whole_number_to_a_later_one(versions: tuple[Any, Any]) -> None:
    with pytest.raises(CallError, match=r"migrate\('ema', .*pass"):
        hookbus.migrate("ema", *versions)


def test_only_a_function_can_be_a_step() -> None:
    with pytest.raises(CallError, match="mark a function"):
        hookbus.migrate("ema", 1, 2)(3)  # type: ignore[type-var]
    with pytest.raises(CallError, match="pass the plugin's kind"):
        hookbus.migrate(1, 1, 2)  # type: ignore[arg-type]


def test_a_version_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    def write(version: int) -> Any:
        return hookbus.hookimpl(lambda self, save: save.write(self.state, version=version))

    for plugin, text in (
        (
            make_plugin(save_state=write(4)),
            "plugin 'ema' wrote version 4 of its state and reads version 3; pass version=3, or give"
            " the plugin the step to it, @hookbus.migrate('ema', 3, 4), or state_version = 4 if"
            " nothing older is to be read",
        ),
        (
            make_plugin(save_state=write(1)),
            "plugin 'ema' wrote version 1 of its state and reads version 3; pass version=3",
        ),
    ):
        with make_bus(ema=plugin) as bus:
            bus.resume(tmp_path)
            with pytest.raises(CallError) as caught:
                bus.save(step=1)
        assert str(caught.value) == text
    assert hookbus.checkpoints(tmp_path) == []
