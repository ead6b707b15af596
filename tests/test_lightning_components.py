"""Lightning's own callbacks, modules and datamodules go on in a loop without a Trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import Parts, check_exact, to_bits

pytest.importorskip(
    "lightning", reason="lightning is not installed: pip install hookbus[lightning]"
)

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from torch.utils.data import DataLoader

import hookbus

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
POINTS = torch.arange(48.0).view(12, 4) / 48


def resume(run: Path, **attached: Any) -> hookbus.Report:
    with hookbus.HookBus() as bus:
        bus.attach(**attached)
        report = bus.resume(run).report
        if report.fresh:
            bus.save(step=1)
        return report


def make_callbacks() -> list[pl.Callback]:
    return [
        ModelCheckpoint(monitor="loss", save_top_k=2),
        ModelCheckpoint(every_n_train_steps=5),
        EarlyStopping("loss", patience=2),
        LearningRateMonitor(),
        Timer(duration="00:01:00:00"),
    ]


def test_callbacks_of_lightning_get_their_states_back(tmp_path: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#4911, #16848"""
    best, every, stopping, monitor, timer = make_callbacks()
    best.best_k_models = {"a.ckpt": torch.tensor(0.5), "b.ckpt": torch.tensor(0.25)}
    best.best_model_path, best.best_model_score = "b.ckpt", torch.tensor(0.25)
    every.last_model_path = "last.ckpt"
    stopping.wait_count, stopping.best_score = 1, torch.tensor(0.25)
    timer._offset = 7.0
    callbacks = [best, every, stopping, monitor, timer]
    expected = [to_bits(each.state_dict()) for each in callbacks]
    resume(tmp_path, callbacks=callbacks)
    again = make_callbacks()
    assert resume(tmp_path, callbacks=again[::-1]).sections["callbacks"].status == "restored"
    assert again[0].best_k_models == best.best_k_models
    assert again[1].last_model_path == "last.ckpt"
    assert [to_bits(each.state_dict()) for each in again[:4]] == expected[:4]
    assert again[4].state_dict()["time_elapsed"]["train"] >= 0


def test_an_average_that_a_callback_holds_comes_back_with_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    for trained in (True, False):
        callback = StochasticWeightAveraging(swa_lrs=0.1)
        callback._average_model = copy.deepcopy(model)
        callback.n_averaged = torch.tensor(0)
        if trained:
            other = torch.nn.Linear(2, 1)
            callback.update_parameters(
                callback._average_model, other, callback.n_averaged, callback._avg_fn
            )
            expected = to_bits(dict(callback._average_model.state_dict()))
        resume(tmp_path, callbacks=[callback])
    assert to_bits(dict(callback._average_model.state_dict())) == expected
    assert callback._init_n_averaged == 1


class Module(pl.LightningDataModule):
    """Builds its data in `setup`, and counts what it has shown."""

    def __init__(self) -> None:
        super().__init__()
        self.shown, self.calls = 0, []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")
        self.points = POINTS

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.points, 4, shuffle=True, collate_fn=self.collate)

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        self.shown += len(samples)
        return torch.stack(samples) + self.shown / 100

    def state_dict(self) -> dict[str, Any]:
        return {"shown": self.shown}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shown = state["shown"]


class Net(pl.LightningModule):
    """Keeps a word in the checkpoint by Lightning's hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.ReLU())
        self.word = 0.0

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        self.word += 0.5
        return (self.net(batch) - 1).square().mean() * (1 + self.word)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["word"] = self.word

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.word = checkpoint["word"]


def test_a_module_and_a_datamodule_of_lightning_train_on_exactly_in_a_plain_loop(
    tmp_path: Path,
) -> None:
    """Source: Lightning-AI/pytorch-lightning#14842"""

    def build() -> Parts:
        data, net = Module(), Net()
        data.setup("fit")
        loader, optimizer = data.train_dataloader(), net.configure_optimizers()

        def body(batch: int, x: torch.Tensor) -> None:
            optimizer.zero_grad()
            net.training_step(x, batch).backward()
            optimizer.step()

        attached = {"datamodule": data, "model": net, "optimizer": optimizer, "data": loader}
        return Parts(attached, loader, body, epochs=2)

    check_exact(build, tmp_path)


def test_a_datamodule_of_lightning_is_set_up_and_then_restored(tmp_path: Path) -> None:
    first, second = Module(), Module()
    first.shown = 8
    resume(tmp_path, datamodule=first)
    assert resume(tmp_path, datamodule=second).sections["datamodule"].kind == "datamodule"
    assert second.calls == ["prepare_data", "setup fit"]
    assert second.shown == 8
