"""`check_plugin`: a good plugin passes, and for each law there is one that breaks it alone."""

from __future__ import annotations

import importlib.metadata
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import hookbus
from hookbus.errors import AttachError, CallError, LawError, RegistrationError
from hookbus.testing import PluginReport, check_plugin
from hookbus.testing.restoring import UNKNOWN
from hookbus.testing.verdict import LAWS

KEYS = [law.key for law in LAWS]


def hookbus_version() -> str:
    return importlib.metadata.version("hookbus")


class Average:
    """Keeps its word: an average of three numbers, how many went into it, and what was seen."""

    kind = "average"
    version = 1

    def __init__(self) -> None:
        self.mean, self.count, self.seen = torch.zeros(3), 0, list[int]()
        self.generator = torch.Generator().manual_seed(3)
        self.cache: Any = None

    def update(self) -> None:
        self.count += 1
        self.mean += (1 - self.mean) / self.count
        self.seen.append(self.count)

    def make_state(self) -> Any:
        return {"mean": self.mean, "count": self.count, "seen": self.seen}

    def take_state(self, state: Any) -> None:
        self.mean, self.count, self.seen = state["mean"], state["count"], state["seen"]

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self.make_state(), version=self.version)

    @hookbus.hookimpl
    def check_state(self, resume: hookbus.Resume) -> None:
        if resume.metadata().state["count"] < 0:
            resume.problem("counted backwards")

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        self.take_state(resume.read())


def check(plugin: type[Any], **options: Any) -> PluginReport:
    return check_plugin(plugin, change=plugin.update, **options)


def test_a_good_plugin_keeps_every_law() -> None:
    report = check(Average)
    outcomes = {each.law.key: each.outcome for each in report.results}
    assert outcomes == {**dict.fromkeys(KEYS, "holds"), "meta": "not checked"}
    assert report.broken == ()


def test_the_report_is_a_table_with_a_line_for_each_law() -> None:
    head, *lines = str(check(Average, skip=("twice",))).splitlines()
    assert head == "plugin 'average', class Average"
    assert [line.split("  ")[1] for line in lines] == KEYS
    assert re.fullmatch("  something +it saves something +holds", lines[KEYS.index("something")])
    assert lines[KEYS.index("twice")].endswith("left out")
    assert lines[KEYS.index("meta")].endswith(
        "not checked: it looks after no module that is built on the meta device"
    )


# -- each law has a plugin that breaks it -------------------------------------------------------


class NoOrder(Average):
    after = ("modle",)


class Circle(Average):
    before = after = ("model",)


class NoStart(Average):
    @hookbus.hookimpl
    def resume_start(self, resume: hookbus.Resume) -> None:
        self.cache = resume.metadata().version


class NoState(Average):
    def make_state(self) -> Any:
        return {}

    def take_state(self, state: Any) -> None:
        pass


class NotStorable(Average):
    def make_state(self) -> Any:
        return {**super().make_state(), "me": self}


class NotRepeatable(Average):
    def make_state(self) -> Any:
        return {**super().make_state(), "time": time.perf_counter_ns()}


class DrawsTorch(Average):
    def make_state(self) -> Any:
        torch.rand(1)
        return super().make_state()


class DrawsPython(Average):
    def make_state(self) -> Any:
        random.random()
        return super().make_state()


class DrawsNumpy(Average):
    def make_state(self) -> Any:
        np.random.rand()
        return super().make_state()


class DrawsItsOwn(Average):
    def make_state(self) -> Any:
        torch.rand(1, generator=self.generator)
        return super().make_state()


class Changes(Average):
    def make_state(self) -> Any:
        state = {**super().make_state(), "mean": self.mean.clone()}
        self.mean[1] += 1
        self.cache = [1]
        return state

    @hookbus.hookimpl
    def save_start(self, save: hookbus.Save) -> None:
        self.mean.copy_(torch.full((3,), 0.5))  # so that it saves the same each time


class SavesAConstant(Average):
    def make_state(self) -> Any:
        return {"mean": torch.zeros(3), "count": 0, "seen": [1]}


class RestoresInACheck(Average):
    @hookbus.hookimpl
    def check_state(self, resume: hookbus.Resume) -> None:
        super().check_state(resume)
        self.take_state(resume.read())


class DrawsInACheck(Average):
    @hookbus.hookimpl
    def check_state(self, resume: hookbus.Resume) -> None:
        super().check_state(resume)
        torch.rand(1)


class ReadsAnyVersion(Average):
    """Says that it knows a version that it never wrote."""

    version = UNKNOWN + 1

    @hookbus.migrate("average", UNKNOWN, UNKNOWN + 1)
    def bring_on(self, state: Any) -> Any:
        return state


class ForgetsTheCount(Average):
    def take_state(self, state: Any) -> None:
        self.mean, self.seen = state["mean"], state["seen"]


class ForgetsADtype(Average):
    def take_state(self, state: Any) -> None:
        super().take_state({**state, "mean": state["mean"].double()})


class Adds(Average):
    def take_state(self, state: Any) -> None:
        super().take_state({**state, "seen": self.seen + state["seen"]})


class AddsTheSecondTime(Average):
    """Is right where it is fresh, and where it is restored only once."""

    restored = 0

    def take_state(self, state: Any) -> None:
        self.restored += 1
        super().take_state({**state, "count": state["count"] + self.restored // 2})


class GoesOnElsewhere(Average):
    def __init__(self) -> None:
        super().__init__()
        self.rate = 1.0

    def update(self) -> None:
        self.rate /= 2  # decides about the next change, and is not saved
        super().update()
        self.mean += self.rate


class SharesMemory(Average):
    memory: ClassVar[torch.Tensor] = torch.zeros(3)

    def take_state(self, state: Any) -> None:
        super().take_state({**state, "mean": self.memory.copy_(state["mean"])})


class SharesAList(Average):
    history: ClassVar[list[int]] = []

    def take_state(self, state: Any) -> None:
        self.history[:] = state["seen"]
        super().take_state({**state, "seen": self.history})


class KeepsTheSave(Average):
    @hookbus.hookimpl
    def save_start(self, save: hookbus.Save) -> None:
        self.cache = {"save": save}


class KeepsTheResume(Average):
    @hookbus.hookimpl
    def resume_end(self, resume: hookbus.Resume) -> None:
        self.cache = {"resume": resume}


class Shadow:
    """Looks after a module of its own, with no thought of the meta device."""

    kind = "shadow"

    def __init__(self) -> None:
        self.module = torch.nn.Linear(2, 2, bias=False)
        if not self.module.weight.is_meta:
            torch.nn.init.ones_(self.module.weight)

    def update(self) -> None:
        with torch.no_grad():
            self.module.weight.mul_(1.5)

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(dict(self.module.named_parameters()))

    @hookbus.hookimpl
    def restore_model(self, resume: hookbus.Resume) -> None:
        saved = resume.read()
        if not self.module.weight.is_meta:
            with torch.no_grad():
                self.module.weight.copy_(saved["weight"])


class PatientShadow(Shadow):
    @hookbus.hookimpl
    def restore_before_configure_sharded(self) -> bool | None:
        return False if self.module.weight.is_meta else None


BREACHES: list[tuple[type[Any], str, str]] = [
    (NoOrder, "order", "it is to come before or after 'modle', and no kind and no plugin is call"),
    (NoStart, "start", "ResumeError: plugin 'average': there is no checkpoint to read from"),
    (NoState, "something", "save_state wrote {}"),
    (
        NotStorable,
        "storable",
        "plugin 'average' cannot be saved: 1 value cannot be stored: ['me'] ",
    ),
    (NotRepeatable, "repeatable", "['time']: "),
    (DrawsTorch, "no draws", "torch was drawn from"),
    (DrawsPython, "no draws", "python was drawn from"),
    (DrawsNumpy, "no draws", "numpy was drawn from"),
    (DrawsItsOwn, "no draws", "plugin.generator was drawn from"),
    (Changes, "no changes", "plugin.mean: [3] float32: 3 of 3 elements differ, first [0]: "),
    (SavesAConstant, "differs", "what change= leads to is saved with the same bits as what make="),
    (RestoresInACheck, "check", "tensor 'mean': [3] float32: 3 of 3 elements differ"),
    (DrawsInACheck, "check", "torch was drawn from"),
    (ReadsAnyVersion, "version", "a section of version 1000000 was restored without a word"),
    (ForgetsTheCount, "fresh", "['count']: 1 and 0"),
    (ForgetsADtype, "fresh", "tensor 'mean': [3] float32 and [3] float64"),
    (Adds, "in place", "['seen']: [1] and [1, 2, 1]"),
    (AddsTheSecondTime, "twice", "['count']: 1 and 2"),
    (Shadow, "meta", "tensor 'weight': [2, 2] float32: 4 of 4 elements differ, first [0, 0]: "),
    (GoesOnElsewhere, "goes on", "tensor 'mean': [3] float32: 3 of 3 elements differ, first [0]: "),
    (SharesMemory, "memory", "two runs restored from it share the memory of 'mean'"),
    (SharesAList, "memory", "['seen']: "),
    (KeepsTheSave, "no changes", "plugin.cache['save'] still holds the Save of an event that is"),
    (KeepsTheResume, "memory", "plugin.cache['resume'] still holds the Resume of an event that is"),
]


@pytest.mark.parametrize(
    ("plugin", "key", "seen"), BREACHES, ids=lambda each: getattr(each, "__name__", "")
)
def test_a_breach_is_caught_and_named(plugin: type[Any], key: str, seen: str) -> None:
    with pytest.raises(LawError) as caught:
        check(plugin)
    law = LAWS[KEYS.index(key)]
    report = caught.value.report
    broken = {each.law.key: each.seen for each in report.broken}
    assert key in broken, str(caught.value)
    assert any(text.startswith(seen) for text in broken[key]), broken[key]
    for text in (plugin.kind, f"  {law.text}\n    seen:   ", f"    change: {law.hint}", seen):
        assert text in str(caught.value)


def test_the_page_has_a_line_for_each_law() -> None:
    page = (Path(hookbus.__file__).parents[1] / "docs" / "plugins.md").read_text()
    table = page.partition("| law | says |")[2].partition("\n\n")[0]
    assert re.findall("`([a-z ]+)`(?=, `| \\|)", table) == KEYS


def test_every_law_has_a_breach() -> None:
    assert {key for _, key, _ in BREACHES} == set(KEYS)


def test_weights_come_back_after_they_were_built_on_the_meta_device() -> None:
    report = check(PatientShadow)
    assert {each.outcome for each in report.results} == {"holds"}


def test_all_laws_that_are_broken_are_told_at_once() -> None:
    class Bad(KeepsTheResume, DrawsTorch, DrawsInACheck):
        pass

    with pytest.raises(LawError, match="breaks 3 of 16 laws") as caught:
        check(Bad)
    keys = {each.law.key for each in caught.value.report.broken}
    assert keys == {"memory", "no draws", "check"}


def test_where_nothing_comes_back_no_more_is_told() -> None:
    with pytest.raises(LawError, match="breaks 1 of 16 laws") as caught:
        check(ForgetsTheCount)
    left = {each.law.key: each.seen for each in caught.value.report.results}
    assert left["twice"] == left["memory"] == left["version"] == ("it could not be restored",)


def test_a_long_list_is_looked_at_as_one() -> None:
    class Long(Average):
        def __init__(self) -> None:
            super().__init__()
            self.cache = list(range(200_000))

    class LongAndChanged(Long):
        def make_state(self) -> Any:
            self.cache[100_000] += 1
            return super().make_state()

    assert check(Long).broken == ()
    with pytest.raises(LawError, match=r"plugin.cache: 200000 values with the hash \w+ → 200000 "):
        check(LongAndChanged)


def test_an_error_of_pytest_and_of_hookbus_at_once() -> None:
    with pytest.raises(AssertionError):
        check(DrawsTorch)
    with pytest.raises(hookbus.errors.HookbusError):
        check(DrawsTorch)


# -- how it is called ---------------------------------------------------------------------------


def test_a_circle_in_the_order_is_told_before_anything_else() -> None:
    with pytest.raises(LawError, match="model before average before model") as caught:
        check_plugin(make_circle, change=Average.update)
    assert "order" in {each.law.key for each in caught.value.report.broken}


def make_circle(bus: hookbus.HookBus) -> Average:
    bus.attach(model=torch.nn.Linear(1, 1))
    return Circle()


def test_a_word_of_the_order_is_found_beside_it() -> None:
    def make(bus: hookbus.HookBus) -> Average:
        bus.register(PatientShadow(), "modle")
        return NoOrder()

    assert check_plugin(make, change=Average.update).broken == ()


def test_one_plugin_is_enough_for_most_laws() -> None:
    report = check_plugin(Average(), change=Average.update)
    left = {each.law.key: each.seen for each in report.results if each.outcome != "holds"}
    assert left.keys() == {"fresh", "meta", "memory"}
    assert left["fresh"] == ("pass a function that makes it",)
    for plugin in (Adds, ForgetsTheCount, AddsTheSecondTime):
        with pytest.raises(LawError):
            check_plugin(plugin(), change=plugin.update)


def test_another_state_may_be_made_instead_of_reached() -> None:
    def make_other() -> Average:
        made = Average()
        made.update()
        return made

    report = check_plugin(Average, other=make_other)
    left = {each.law.key: each.seen for each in report.results if each.outcome != "holds"}
    assert left.keys() == {"meta", "goes on", "in place"}
    assert left["goes on"] == left["in place"] == ("pass change= instead of other=",)
    with pytest.raises(LawError, match="what other= makes is saved with the same bits as what"):
        check_plugin(Average, other=Average)
    with pytest.raises(LawError, match="\\['count'\\]: 1 and 0"):
        check_plugin(ForgetsTheCount, other=lambda: make_late(ForgetsTheCount))


def make_late(plugin: type[Average]) -> Average:
    made = plugin()
    made.update()
    return made


def test_what_may_change_is_named() -> None:
    class Caches(Average):
        def make_state(self) -> Any:
            self.cache = object()
            return super().make_state()

    assert check(Caches, may_change=("plugin.cache*",)).broken == ()
    with pytest.raises(LawError, match=r"plugin.cache: object at 0x\w+ → object at 0x\w+"):
        check(Caches)


def test_an_installed_plugin_is_checked_by_its_name() -> None:
    def draw(plugin: object) -> None:
        torch.rand(1), random.random(), np.random.rand()

    report = check_plugin("rng", change=draw)
    assert report.plugin == f"plugin 'rng' (hookbus {hookbus_version()}), class Rng"
    with pytest.raises(CallError, match=r"no installed plugin is named 'rgn'; there are .*rng"):
        check_plugin("rgn")


def test_streams_of_the_process_are_put_back() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    for plugin in (Average, DrawsTorch, DrawsPython, DrawsNumpy):
        try:
            check(plugin)
        except LawError:
            assert plugin is not Average
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_it_says_nothing_by_itself(capfd: pytest.CaptureFixture[str], caplog: Any) -> None:
    check(Average)
    assert capfd.readouterr() == ("", "")
    assert caplog.text == ""


def break_down(made: object = None) -> None:
    raise ZeroDivisionError("mine")


def test_what_the_callers_own_functions_raise_is_raised() -> None:
    with pytest.raises(ZeroDivisionError, match="mine"):
        check_plugin(break_down, change=Average.update)
    with pytest.raises(ZeroDivisionError, match="mine"):
        check_plugin(Average, change=break_down)


class NotMarked(Average):
    def save_state(self, save: hookbus.Save) -> None:
        pass


class NoSection:
    kind = "none"

    @hookbus.hookimpl
    def save_end(self, checkpoint: hookbus.Checkpoint) -> None:
        pass


def test_a_plugin_without_a_section_keeps_what_laws_are_left() -> None:
    report = check_plugin(NoSection)
    held = {each.law.key for each in report.results if each.outcome == "holds"}
    assert held == {"order", "start"}
    with pytest.raises(LawError, match="it has no save_state, so it has no section"):
        check_plugin(NoSection, change=print)


class Needy(Average):
    def __init__(self, shadow: Any, decay: float) -> None:
        super().__init__()


CALLS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: check_plugin(Average), CallError, "plugin 'average' saves a state, so pass change=, "),
    (lambda: check_plugin(Average, change=print, other=Average), CallError, "change= and other= "),
    (lambda: check_plugin(Average(), other=Average), CallError, "other= needs a function as make"),
    (lambda: check(Average, skip=("twic",)), CallError, "skip=('twic',): there is no such law; "),
    (lambda: check(Average, skip="twice"), CallError, "skip='twice': pass a tuple of words"),
    (lambda: check(Average, may_change=[1]), CallError, "may_change=[1]: pass a tuple of words"),
    (lambda: check_plugin(Needy), CallError, "make needs shadow, decay, and nothing but bus can b"),
    (lambda: check_plugin(lambda: None), CallError, "make() returned None; return the plugin, or"),
    (lambda: check_plugin(object), AttachError, "nobody can look after 'checked' (object); asked"),
    (lambda: check(NotMarked), RegistrationError, "NotMarked.save_state is named like an event"),
]


@pytest.mark.parametrize(("call", "error", "message"), CALLS)
def test_what_cannot_be_checked_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith(message)


def test_the_laws_need_no_test_framework_and_are_cheap_to_name() -> None:
    code = (
        "import sys, hookbus.testing; assert 'torch' not in sys.modules;"
        "hookbus.testing.check_plugin; sys.exit('pytest' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
