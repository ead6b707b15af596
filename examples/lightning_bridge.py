"""A Lightning Trainer that goes on bit for bit. `python lightning_bridge.py DIR`

Without the bridge the Trainer would start the epoch's data in another order, and draw other random
numbers: for dropout, and for the noise that the data is augmented with.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from builtin_plugins import EveryEpochs, EverySteps, KeepLast, Preemption, SavePolicy
from builtin_plugins.lightning import LightningBridge

warnings.filterwarnings("ignore", ".*does not have many workers.*")


class Circle(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points in the plane, moved a little each time, and whether they are near the middle."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = torch.tensor([(i % 16) / 8 - 1, (i // 16) / 8 - 1])
        return point + 0.05 * torch.randn(2), (point.square().sum() < 0.5).float()


class Net(pl.LightningModule):
    """A small network with dropout, and a schedule by steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1), nn.Flatten(0)
        )

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        points, inside = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self.net(points), inside)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=80)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def main(run: str) -> None:
    pl.seed_everything(0, verbose=False)
    policy = SavePolicy(when=EverySteps(6) | EveryEpochs(), keep=KeepLast(20))
    trainer = pl.Trainer(
        max_epochs=5,
        accelerator="cpu",
        callbacks=[LightningBridge(run, policy, Preemption())],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(Circle(), batch_size=16, shuffle=True))
    print("loss", trainer.callback_metrics["loss_epoch"].item())


if __name__ == "__main__":
    main(sys.argv[1])
