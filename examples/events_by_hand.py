"""Every event fired by hand, around set-up code of one's own. `python events_by_hand.py DIR`"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hookbus
from builtin_plugins import Loop


class Points:
    """A datamodule: data is known only after its set-up."""

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(256, 4, generator=generator)
        self.classes = 3
        self.points = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.points, batch_size=32, shuffle=True)


class Classifier(nn.Module):
    """A model whose head waits for the number of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.ReLU())

    def build_head(self, classes: int) -> None:
        self.head = nn.Linear(16, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(inputs))
        return logits


def main(run: str) -> None:
    torch.manual_seed(0)
    points, model, loop = Points(), Classifier(), Loop()
    with hookbus.HookBus() as bus:
        bus.attach(points=points, model=model, loop=loop)
        resume = bus.prepare(run)
        bus.hook.resume_start(resume=resume)
        bus.hook.on_setup(resume=resume, stage="fit")
        model.build_head(points.classes)
        bus.hook.restore_model(resume=resume)  # does nothing in a fresh run
        bus.hook.pre_configure_sharded(resume=resume)
        bus.hook.configure_sharded(resume=resume)
        optimizer = torch.optim.Adam(model.parameters())
        loader = points.train_dataloader()
        bus.attach(optimizer=optimizer, data=loader)
        bus.hook.restore_training_state(resume=resume)
        bus.hook.resume_end(resume=resume)
        print(resume.report)

        for epoch in loop.epochs(4):
            for inputs, targets in loop.batches(loader):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: loss {loss.item():.6f}")
            bus.save()


if __name__ == "__main__":
    main(sys.argv[1])
