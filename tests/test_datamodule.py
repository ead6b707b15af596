"""A datamodule is set up first, and its state comes back before the model's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import builtin_plugins.datamodule
import hookbus
from hookbus.errors import MismatchError, UnclaimedSectionError

torch.set_num_threads(1)


class Plain:
    """A datamodule without a state."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def train_dataloader(self) -> list[int]:
        return [1, 2, 3]


class Data(Plain):
    """A datamodule as Lightning's: every method, and a state."""

    num_classes = 0
    shown = 0
    extra: Any = None

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.num_classes = 5

    def state_dict(self) -> dict[str, Any]:
        return {"shown": self.shown}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")
        self.shown = state["shown"]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"] = self.extra

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.calls.append("on_load_checkpoint")
        self.extra = checkpoint["extra"]


class Model(torch.nn.Module):
    """A model whose head is built from the data, once it is set up."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.data = data

    def setup(self, stage: str) -> None:
        self.head = torch.nn.Linear(2, self.data.num_classes)


def save(run: Path, data: object) -> None:
    with hookbus.HookBus() as bus:
        bus.attach(data=data)
        bus.resume(run)
        bus.save(step=1)


def make_saved(run: Path) -> None:
    data = Data()
    data.shown, data.extra = 3, {"seen": torch.arange(4)}
    save(run, data)


def check_restored(data: Data) -> None:
    assert data.shown == 3
    assert torch.equal(data.extra["seen"], torch.arange(4))
    restored = ["on_load_checkpoint", "load_state_dict"]
    assert data.calls == ["prepare_data", "setup fit", *restored]


def test_state_comes_back_once_after_the_setup(tmp_path: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#14842"""
    make_saved(tmp_path)
    data = Data()
    with hookbus.HookBus() as bus:
        bus.attach(data=data)
        report = bus.resume(tmp_path).report
    check_restored(data)
    assert report.sections["data"].event == "restore_model"


def test_state_comes_back_when_the_script_goes_step_by_step(tmp_path: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#14842"""
    make_saved(tmp_path)
    data = Data()
    with hookbus.HookBus() as bus, bus.resuming(tmp_path) as resume:
        bus.attach(data=data)
        resume.setup()
        assert data.shown == 0
        resume.restore_model()
        check_restored(data)


def test_state_comes_back_when_each_event_is_fired_by_hand(tmp_path: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#14842"""
    make_saved(tmp_path)
    data = Data()
    with hookbus.HookBus() as bus:
        bus.attach(data=data)
        resume = bus.prepare(tmp_path)
        bus.hook.resume_start(resume=resume)
        bus.hook.on_setup(resume=resume, stage="fit")
        bus.hook.restore_model(resume=resume)
        check_restored(data)
        bus.hook.pre_configure_sharded(resume=resume)
        bus.hook.configure_sharded(resume=resume)
        bus.hook.restore_training_state(resume=resume)
        bus.hook.resume_end(resume=resume)
    check_restored(data)


def test_the_model_is_built_from_data_that_is_set_up(tmp_path: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#5410"""
    heads: list[torch.Tensor] = []
    for _ in range(2):
        data = Data()
        model = Model(data)
        with hookbus.HookBus() as bus:
            bus.attach(model=model, data=data)  # the order here does not matter
            bus.resume(tmp_path)
            if not heads:
                bus.save(step=1)
        heads.append(model.head.weight)
    assert heads[0].shape == (5, 2)
    assert torch.equal(heads[0], heads[1])


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_another_stage_is_passed_on_and_the_state_comes_back_too(
    stage: Any, tmp_path: Path
) -> None:
    make_saved(tmp_path)
    data = Data()
    with hookbus.HookBus() as bus:
        bus.attach(data=data)
        bus.resume(tmp_path, stage=stage)
    assert data.calls[1] == f"setup {stage}"
    assert data.shown == 3


def test_two_methods_are_enough(tmp_path: Path) -> None:
    save(tmp_path, Plain())
    data = Plain()
    with hookbus.HookBus() as bus:
        bus.attach(data=data)
        bus.resume(tmp_path)
    assert data.calls == ["setup fit"]


class Noting(Plain):
    """A datamodule that only leaves a word in the checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["revision"] = "abc"


def test_what_is_only_noted_for_people_is_saved_and_asks_for_nothing(tmp_path: Path) -> None:
    save(tmp_path, Noting())
    [checkpoint] = hookbus.checkpoints(tmp_path)
    assert checkpoint.read("data") == {"checkpoint": {"revision": "abc"}}
    with hookbus.HookBus() as bus:
        bus.attach(data=Noting())
        bus.resume(tmp_path)


def test_a_state_that_appeared_or_vanished_is_a_problem_with_the_way_out(tmp_path: Path) -> None:
    words = {Data: "state_dict and load_state_dict", Plain: "no state_dict"}
    for saved, live in ((Data, Plain), (Plain, Data)):
        run = tmp_path / saved.__name__
        save(run, saved())
        with hookbus.HookBus() as bus:
            bus.attach(data=live())
            with pytest.raises(MismatchError) as raised:
                bus.resume(run)
            assert str(raised.value) == (
                f"data: saved with {words[saved]}, {live.__name__} has {words[live]}; "
                "pass skip=('data',) to start it fresh"
            )
            bus.resume(run, skip=("data",))


def test_a_datamodule_that_is_not_attached_is_missed(tmp_path: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#14842"""
    make_saved(tmp_path)
    with (
        hookbus.HookBus() as bus,
        pytest.raises(
            UnclaimedSectionError, match=r"section 'data', written by plugin 'DataModule'"
        ),
    ):
        bus.resume(tmp_path)


class Lightning(torch.nn.Module):
    """A module with the methods of a datamodule, as a LightningModule."""

    def setup(self, stage: str) -> None: ...

    def train_dataloader(self) -> None: ...


@pytest.mark.parametrize("component", [Data, Lightning(), SimpleNamespace(setup=print), [], 1])
def test_what_is_no_datamodule_is_left_to_others(component: object) -> None:
    assert builtin_plugins.datamodule.plugin_for("x", component) is None
