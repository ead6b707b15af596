"""Trains with a Lightning Trainer in forked children, kills them, and goes on.

``python lightning_run.py FOLDER SCENE``: one warm process, which itself never trains, forks a child
for each start. It prints, as JSON, a digest of every bit that is left: of the Trainer alone, of the
same under a bridge, of the same killed at several places, and of the Trainer's own resume.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from exact import to_bits
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import hookbus
from builtin_plugins import EveryEpochs, EverySteps, Preemption, SavePolicy
from builtin_plugins.lightning import LightningBridge

SAMPLES, BATCH = 22, 4
CPU = {"accelerator": "cpu", "logger": False, "max_epochs": 3}
QUIET = {"enable_progress_bar": False, "enable_model_summary": False}


class Points(Dataset):
    """float32 [4] a sample, augmented from all three global streams, or by its index."""

    def __init__(self, kind: str = "global") -> None:
        self.kind = kind

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.kind == "index":
            return i + torch.randn(4, generator=torch.Generator().manual_seed(i))
        noise = torch.from_numpy(np.random.rand(4)).float()
        return i + torch.randn(4) + random.random() + noise


class Net(pl.LightningModule):
    """Batch norm and dropout, AdamW and a scheduler that steps with each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net(4, 1)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss = ((self.net(batch) - 1) ** 2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("val_loss", ((self.net(batch) - 1) ** 2).mean() + torch.rand(()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Points(), BATCH, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Points(), 8)


class Plateau(Net):
    """Goes by means over an epoch, of a metric and of a loss; has a loader with workers."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        out = self.net(batch)
        self.error(out[:, 0], torch.ones(len(out)))
        self.log("error", self.error, on_step=False, on_epoch=True)
        return super().training_step(batch, number)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)
        reduce = torch.optim.lr_scheduler.ReduceLROnPlateau
        scheduler = reduce(optimizer, factor=0.5, patience=0, threshold=0.5)
        monitored = {"scheduler": scheduler, "monitor": "loss_epoch"}
        return {"optimizer": optimizer, "lr_scheduler": monitored}

    def train_dataloader(self) -> DataLoader:
        options = {"num_workers": 2, "generator": torch.Generator().manual_seed(5)}
        return DataLoader(Points("index"), BATCH, shuffle=True, **options)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Points("index"), 4, shuffle=True, num_workers=1, persistent_workers=True)


class Manual(Net):
    """Two networks and two optimizers, stepped by hand; a loader with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = make_net(4, 1)
        self.net = make_net(2, 4)

    def training_step(self, batch: torch.Tensor, number: int) -> None:
        ours, theirs = self.optimizers()
        fake = self.net(torch.randn(len(batch), 2))
        self.toggle_optimizer(theirs)
        theirs.zero_grad()
        self.manual_backward((self.critic(fake.detach()) - self.critic(batch)).mean())
        theirs.step()
        self.untoggle_optimizer(theirs)
        self.toggle_optimizer(ours)
        ours.zero_grad()
        self.manual_backward(-self.critic(fake).mean())
        ours.step()
        self.untoggle_optimizer(ours)
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        ours = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        theirs = torch.optim.Adam(self.critic.parameters(), lr=1e-2)
        return [ours, theirs], [torch.optim.lr_scheduler.ExponentialLR(ours, 0.9)]

    def train_dataloader(self) -> DataLoader:
        return StatefulDataLoader(Points("index"), BATCH, shuffle=True, num_workers=1)

    validation_step = None


class Module(pl.LightningDataModule):
    """Counts how often it was asked, and has a state."""

    shown = 0

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Points(), BATCH, shuffle=True, collate_fn=self.collate)

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        self.shown += 1
        return torch.stack(samples) + self.shown / 10

    def state_dict(self) -> dict[str, int]:
        return {"shown": self.shown}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.shown = state["shown"]


class Drawing(pl.Callback):
    """Draws in hooks, and keeps a word in Lightning's checkpoint alone."""

    def __init__(self) -> None:
        self.drawn = torch.zeros(())

    def on_train_batch_end(self, *_: object) -> None:
        self.drawn += torch.rand(())

    on_train_epoch_end = on_train_batch_end

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.current_epoch:  # before the first, the Trainer has made the iterator already
            self.drawn += torch.rand(())

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["drawn"] = self.drawn

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.drawn = checkpoint["drawn"].clone()


class Killer(pl.Callback):
    """Ends the process when so many batches are done, before the last callbacks are called.

    An odd one at the end of a batch, an even one at the end of an epoch; a negative one by SIGTERM.
    """

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if self.at % 2:
            self._end_process(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if not self.at % 2:
            self._end_process(trainer)

    def _end_process(self, trainer: pl.Trainer) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == abs(self.at):
            os.kill(os.getpid(), signal.SIGKILL if self.at > 0 else signal.SIGTERM)


def make_net(inputs: int, outputs: int) -> nn.Module:
    layers = nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, outputs)
    return nn.Sequential(*layers)


SCENES: dict[str, tuple[Callable[[], Net], Callable[[], list[Any]], dict[str, Any]]] = {
    "plain": (Net, list, {}),
    "plateau": (
        Plateau,
        lambda: [EMAWeightAveraging(decay=0.8), EarlyStopping("val_loss", patience=2)],
        {"accumulate_grad_batches": 2, "val_check_interval": 2, "limit_val_batches": 2},
    ),
    "manual": (Manual, list, {}),
    "datamodule": (
        Net,
        lambda: [Drawing()],
        {"max_epochs": -1, "max_steps": 16, "gradient_clip_val": 0.5, "datamodule": Module},
    ),
}


def fit(scene: str, folder: Path, how: str, at: int, out: Path) -> None:
    """Train one scene, and write down every bit that is left."""
    make_module, make_callbacks, options = SCENES[scene]
    fresh = not [*folder.glob("step-*"), *folder.glob("*.ckpt")]
    pl.seed_everything(0 if fresh else at + 100)  # what goes on owes nothing to a seed
    callbacks = [Killer(at), *make_callbacks()]
    data = options.get("datamodule")
    options = {k: v for k, v in options.items() if k != "datamodule"}
    path = None
    if how == "bridge":
        policy = SavePolicy(when=EverySteps(1) | EveryEpochs(), wait=True)
        callbacks.insert(0, LightningBridge(folder, policy, Preemption()))
    elif how == "own":
        path = None if fresh else "last"
        callbacks.append(ModelCheckpoint(folder, every_n_train_steps=2, save_last=True))
    own = {"enable_checkpointing": how == "own"}
    trainer = pl.Trainer(**{**CPU, **QUIET, **own, **options}, callbacks=callbacks)
    module, datamodule = make_module(), data() if data else None
    trainer.fit(module, datamodule=datamodule, ckpt_path=path)
    left = {
        "module": module.state_dict(),
        "optimizers": [each.state_dict() for each in trainer.optimizers],
        "schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
        "metrics": dict(trainer.callback_metrics),
        "stopping": [each.state_dict() for each in callbacks if isinstance(each, EarlyStopping)],
        "drawn": [each.drawn for each in callbacks if isinstance(each, Drawing)],
        "place": [trainer.global_step, trainer.current_epoch, datamodule and datamodule.shown],
        "loggers": trainer.fit_loop.epoch_loop._batches_that_stepped,  # what they count by
        "streams": [torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()],
    }
    hashed = {k: hashlib.sha256(repr(to_bits(v)).encode()).hexdigest()[:8] for k, v in left.items()}
    out.write_text(json.dumps(hashed))


def run_child(*arguments: Any) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            fit(*arguments)
        except SystemExit as error:
            os._exit(error.code)
        except BaseException:
            logging.exception("the child broke")
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def train(scene: str, folder: Path, how: str, kills: tuple[int, ...] = ()) -> dict[str, str]:
    """Train to the end, killed at each place in turn, and return the digest."""
    out = folder / f"{how}-{len(kills)}.txt"
    run = folder / f"{how}-{len(kills)}"
    for at in kills:
        assert run_child(scene, run, how, at, out) == (-signal.SIGKILL if at > 0 else 143), at
    assert run_child(scene, run, how, 0, out) == 0
    return json.loads(out.read_text())


def main(folder: Path, scene: str, kills: tuple[int, ...]) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    importlib.import_module("torch._dynamo")  # by the first step of an optimizer
    found = {
        "alone": train(scene, folder, "alone"),
        "whole": train(scene, folder, "bridge"),
        "killed": train(scene, folder, "bridge", kills),
        "own": train(scene, folder, "own", kills[-2:-1]),
    }
    run = folder / f"bridge-{len(kills)}"
    starts = [each["step"] for each in hookbus.history(run) if each["event"] == "start"]
    assert run_child(scene, run, "bridge", 0, folder / "again.txt") == 0
    found["again"] = json.loads((folder / "again.txt").read_text())
    print(json.dumps({**found, "starts": starts}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], tuple(map(int, sys.argv[3].split(","))))
