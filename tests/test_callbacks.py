"""Each callback gets its own state back, wherever it stands in the list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import builtin_plugins.callbacks
import hookbus
from builtin_plugins.callbacks import Callbacks
from hookbus.errors import AttachError, HookbusError, ManyErrors, UnclaimedSectionError


class Best:
    """Remember the best score; it is its own `state_key` if it has a name."""

    def __init__(self, score: float = 0.0, name: str | None = None) -> None:
        self.score = torch.tensor(score)
        if name is not None:
            self.state_key = name

    def state_dict(self) -> dict[str, Any]:
        return {"score": self.score}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.score = state["score"]


class Counter(Best):
    pass


class Sometimes(Best):
    """Has no state before it is used, and cannot load one, as some of Lightning's."""

    def state_dict(self) -> dict[str, Any]:
        return {"score": self.score} if self.score else {}


def save(run: Path, callbacks: object) -> None:
    with hookbus.HookBus() as bus:
        bus.attach(callbacks=callbacks)
        bus.resume(run)
        bus.save(step=1)


def resume(run: Path, callbacks: object, **options: Any) -> hookbus.Report:
    with hookbus.HookBus() as bus:
        bus.attach(callbacks=callbacks)
        return bus.resume(run, **options).report


def read_scores(callbacks: Sequence[Best]) -> list[float]:
    return [callback.score.item() for callback in callbacks]


@pytest.mark.parametrize("container", [list, tuple])
def test_states_follow_their_keys_when_the_order_changes(
    container: type[Any], tmp_path: Path
) -> None:
    """Source: Lightning-AI/pytorch-lightning#16848"""
    save(tmp_path, container([Best(1.0, "a"), Best(2.0, "b"), Counter(3.0)]))
    callbacks = container([Counter(), Best(name="b"), Best(name="a")])
    kept = list(callbacks)
    resume(tmp_path, callbacks)
    assert read_scores(callbacks) == [3.0, 2.0, 1.0]
    assert all(now is before for now, before in zip(callbacks, kept, strict=True))


def test_equal_keys_are_refused_at_attach_and_all_of_them_are_named() -> None:
    """Source: Lightning-AI/pytorch-lightning#16848"""
    callbacks = [Best(), Best(), Counter(name="x"), Best(name="x")]
    with hookbus.HookBus() as bus, pytest.raises(HookbusError) as raised:
        bus.attach(callbacks=callbacks)
    assert isinstance(raised.value, ManyErrors)
    assert all(isinstance(error, AttachError) for error in raised.value.exceptions)
    ending = "; give each a state_key of its own"
    assert f"two callbacks have the key 'Best': Best and Best{ending}" in str(raised.value)
    assert f"two callbacks have the key 'x': Counter and Best{ending}" in str(raised.value)


def test_a_twin_that_joins_the_list_later_is_refused_at_the_save(tmp_path: Path) -> None:
    callbacks = [Best()]
    with hookbus.HookBus() as bus:
        bus.attach(callbacks=callbacks)
        bus.resume(tmp_path)
        callbacks.append(Best())
        with pytest.raises(AttachError, match="two callbacks have the key 'Best': Best and Best"):
            bus.save(step=1)


def test_missing_and_unexpected_callbacks_are_told_at_once_and_nothing_changes(
    tmp_path: Path,
) -> None:
    save(tmp_path, [Best(1.0, "a"), Best(2.0, "b"), Best(3.0, "c")])
    callbacks = [Best(name="b"), Counter()]
    with pytest.raises(ManyErrors) as raised:
        resume(tmp_path, callbacks)
    ending = "; register builtin_plugins.Callbacks(…, strict=False) to go on"
    assert [str(error) for error in raised.value.exceptions] == [
        f"callbacks: the checkpoint has no callback 'Counter'{ending}",
        f"callbacks: the run has no callback 'a'{ending}",
        f"callbacks: the run has no callback 'c'{ending}",
    ]
    assert read_scores(callbacks) == [0.0, 0.0]


def test_without_strict_what_both_have_is_restored_and_the_rest_noted(tmp_path: Path) -> None:
    save(tmp_path, [Best(1.0, "a"), Best(2.0, "b")])
    callbacks = [Best(name="b"), Counter()]
    with hookbus.HookBus() as bus:
        bus.register(Callbacks(callbacks, strict=False), "callbacks")
        report = bus.resume(tmp_path).report
    assert read_scores(callbacks) == [2.0, 0.0]
    assert report.notes == [
        "callbacks: the checkpoint has no callback 'Counter'",
        "callbacks: the run has no callback 'a'",
    ]


def test_another_class_under_the_same_key_is_named_with_both(tmp_path: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#11665"""
    save(tmp_path, [Best(1.0, "a")])
    callbacks = [Counter(name="a")]
    with pytest.raises(HookbusError, match="callbacks: 'a' was saved by a Best, run has a Counter"):
        resume(tmp_path, callbacks)
    resume(tmp_path, callbacks, skip=("callbacks",))
    assert read_scores(callbacks) == [0.0]


def test_callbacks_that_are_gone_need_a_word_and_stay_in_the_checkpoint(tmp_path: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#2631"""
    save(tmp_path, [Best(1.0)])
    with hookbus.HookBus() as bus:
        with pytest.raises(UnclaimedSectionError, match=r"'callbacks'.*skip=\('callbacks',\)"):
            bus.resume(tmp_path)
        report = bus.resume(tmp_path, skip=("callbacks",)).report
        assert report.sections["callbacks"].status == "skipped"
        bus.save(step=2)
    old, new = hookbus.checkpoints(tmp_path)
    assert old.read("callbacks")["Best"]["score"].item() == 1.0
    assert "callbacks" not in new.sections


def test_one_callback_with_a_state_key_may_stand_alone(tmp_path: Path) -> None:
    save(tmp_path, Best(1.0, "a"))
    callback = Best(name="a")
    report = resume(tmp_path, callback)
    assert callback.score.item() == 1.0
    assert report.sections["callbacks"].kind == "callbacks"


def test_a_callback_without_a_state_yet_is_not_handed_an_empty_one(tmp_path: Path) -> None:
    save(tmp_path, [Sometimes()])
    callbacks = [Sometimes()]
    resume(tmp_path, callbacks)
    assert read_scores(callbacks) == [0.0]


class Resetting:
    """A plugin whose setup resets what its restore brings back."""

    kind = "counting"
    count = 0
    fresh: bool | None = None

    @hookbus.hookimpl
    def on_setup(self, resume: hookbus.Resume) -> None:
        self.count = 0
        self.fresh = resume.fresh

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self.count)

    @hookbus.hookimpl
    def restore_model(self, resume: hookbus.Resume) -> None:
        self.count = resume.read()


def test_a_reset_in_setup_comes_before_the_state_comes_back(tmp_path: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#1463"""
    for expected in (0, 5):
        plugin = Resetting()
        with hookbus.HookBus() as bus:
            bus.register(plugin, "counter")
            bus.resume(tmp_path)
            assert plugin.count == expected
            assert plugin.fresh == (expected == 0)
            plugin.count = 5
            if expected == 0:
                bus.save(step=1)


class Loader(Best):
    def __iter__(self) -> Iterator[int]:
        return iter(())


MODULE = torch.nn.Linear(1, 1)


@pytest.mark.parametrize(
    "component",
    [
        *([], [1.0], [Best(), 1.0], [Best], Best, Best(), MODULE),
        *([MODULE], [torch.optim.SGD(MODULE.parameters())], [torch.amp.GradScaler("cpu")]),
        *([torch.utils.data.DataLoader([1])], [Loader()], Loader(name="a")),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_list_of_callbacks_is_left_to_others(component: object) -> None:
    assert builtin_plugins.callbacks.plugin_for("x", component) is None


class Lookahead:
    """A wrapper that has the two methods and no base class."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


def test_a_list_of_wrapped_optimizers_goes_to_who_knows_optimizers() -> None:
    with hookbus.HookBus() as bus:
        bus.attach(model=MODULE, optimizers=[Lookahead(torch.optim.Adam(MODULE.parameters()))])
        assert [each.kind for each in bus.plugins if each.name == "optimizers"] == ["optimizer"]
