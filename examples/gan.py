"""Two models and two optimizers, one of which steps every other batch. `python gan.py DIR`"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookbus
from builtin_plugins import Loop


def main(run: str) -> None:
    torch.manual_seed(0)
    angles = 6.3 * torch.rand(512)
    circle = TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1))
    loader = DataLoader(circle, batch_size=32, shuffle=True)
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    softplus = nn.functional.softplus

    with hookbus.HookBus() as bus:
        loop = Loop()
        bus.attach(generator=generator, critic=critic, data=loader, loop=loop)
        bus.attach(generator_optimizer=generator_optimizer, critic_optimizer=critic_optimizer)
        bus.resume(run)
        for epoch in loop.epochs(6):
            for (real,) in loop.batches(loader):
                fake = generator(torch.randn(len(real), 4))
                critic_optimizer.zero_grad()
                critic_loss = (
                    softplus(-critic(real)).mean() + softplus(critic(fake.detach())).mean()
                )
                critic_loss.backward()
                critic_optimizer.step()
                if loop.batch % 2 == 0:
                    # Leaves gradients waiting in the critic; they are saved with the run.
                    generator_optimizer.zero_grad()
                    softplus(-critic(fake)).mean().backward()
                    generator_optimizer.step()
                if loop.every(10):
                    bus.save()
            print(f"epoch {epoch}: critic {critic_loss.item():.6f}")
            bus.save()


if __name__ == "__main__":
    main(sys.argv[1])
