"""No loader: a bandit, a replay buffer, and several generators. `python rl.py DIR`"""

from __future__ import annotations

import random
import sys

import numpy as np
import torch
from torch import nn

import hookbus
from builtin_plugins import Loop

ARMS, WARM_UP, BATCH = 8, 32, 16


def main(run: str) -> None:
    torch.manual_seed(0)
    payouts = torch.linspace(0, 1, ARMS)
    values = nn.Sequential(nn.Linear(ARMS, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, ARMS))
    optimizer = torch.optim.AdamW(values.parameters(), lr=1e-2)
    explore = random.Random(0)
    noise = np.random.default_rng(0)
    replay = torch.Generator().manual_seed(0)
    buffer: list[tuple[int, float]] = []
    score = {"pulls": 0, "paid": 0.0}

    with hookbus.HookBus() as bus:
        loop = Loop()
        bus.attach(values=values, optimizer=optimizer, buffer=buffer, score=score, loop=loop)
        bus.attach(explore=explore, noise=noise, replay=replay)
        bus.resume(run)
        state = torch.eye(ARMS)
        for _ in loop.steps(200):
            if explore.random() < 0.2 or len(buffer) < WARM_UP:
                arm = explore.randrange(ARMS)
            else:
                arm = int(values(state[:1]).argmax())
            reward = payouts[arm].item() + noise.normal(scale=0.1)
            buffer.append((arm, reward))
            score["pulls"] += 1
            score["paid"] += reward
            if len(buffer) < WARM_UP:
                continue
            picked = torch.randint(len(buffer), (BATCH,), generator=replay).tolist()
            arms, rewards = zip(*(buffer[i] for i in picked), strict=True)
            guess = values(state[:1].expand(BATCH, -1)).gather(1, torch.tensor(arms)[:, None])
            loss = nn.functional.mse_loss(guess[:, 0], torch.tensor(rewards))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if loop.every(20):
                bus.save(metrics={"paid": score["paid"] / score["pulls"]})
        bus.save()
    print(f"{score['pulls']} pulls, paid {score['paid']!r}")


if __name__ == "__main__":
    main(sys.argv[1])
