"""A small transformer learns to write Python from the source of Python's own standard library.

Stop it with Ctrl-C or ``kill -9`` wherever you like and start the same command again: the last
line is that of a run that was never stopped. It is saved behind training; ``kill`` saves once more
and ends it with status 143.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import hookbus
from builtin_plugins import EverySteps, KeepBest, KeepLast, Loop, Preemption, SavePolicy

CONTEXT = 64  # characters
ACCUMULATE = 2  # batches a step


class Windows(Dataset[Tensor]):
    """Windows of ``CONTEXT + 1`` characters; an item is int64 [CONTEXT + 1]."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * CONTEXT : index * CONTEXT + CONTEXT + 1]


class Transformer(nn.Module):
    """Maps int64 [batch, time] to logits [batch, time, 128] over ASCII."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(128, width)
        self.places = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)

    def forward(self, text: Tensor) -> Tensor:
        time = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time)
        hidden = self.characters(text) + self.places(torch.arange(time))
        logits: Tensor = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return logits


def read_library(characters: int) -> Tensor:
    """Return the first characters of the standard library's source, int64 [characters]."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("[a-d]*.py")))
    return torch.tensor([byte for byte in text if byte < 128][:characters])


def compute_loss(model: nn.Module, windows: Tensor) -> Tensor:
    logits = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader[Tensor]) -> float:
    model.eval()
    losses = [compute_loss(model, windows) for windows in loader]
    model.train()
    return torch.stack(losses).mean().item()


@torch.no_grad()
def write_sample(model: nn.Module, characters: int = 60) -> str:
    model.eval()
    text = torch.tensor([list(b"    def ")])
    for _ in range(characters):
        odds = model(text[:, -CONTEXT:])[:, -1].softmax(-1)
        text = torch.cat([text, torch.multinomial(odds, 1)], dim=1)
    model.train()
    return "".join(map(chr, text[0].tolist()))


def hash_weights(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="runs/char_lm", help="the run directory")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--save-every", type=int, default=25, help="steps between saves")
    parser.add_argument("--crash-at", type=int, help="end the process with SIGKILL at this step")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    text = read_library(110_000)
    train = DataLoader(Windows(text[:100_000]), batch_size=32, shuffle=True)
    held_out = DataLoader(Windows(text[100_000:]), batch_size=64)
    model = Transformer()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=20)
    cosine = CosineAnnealingLR(optimizer, T_max=580)
    scheduler = SequentialLR(optimizer, [warm_up, cosine], milestones=[20])

    with hookbus.HookBus() as bus:
        loop = Loop()
        keep = KeepLast(3) | KeepBest("val_loss")
        bus.register(SavePolicy(when=EverySteps(arguments.save_every), keep=keep))
        bus.register(Preemption())
        bus.attach(model=model, ema=ema, optimizer=optimizer, scheduler=scheduler)
        bus.attach(data=train, loop=loop)
        bus.resume(arguments.run)
        for windows in loop.steps(arguments.steps, train):
            loss = compute_loss(model, windows) / ACCUMULATE
            loss.backward()
            if loop.batch % ACCUMULATE == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                ema.update_parameters(model)
            if loop.every(arguments.save_every):
                validation = validate(ema, held_out)
                print(f"step {loop.step}: loss {loss.item() * ACCUMULATE:.3f}, held out ", end="")
                print(f"{validation:.3f} | {write_sample(ema)!r}", flush=True)
                loop.metrics["val_loss"] = validation
            if loop.step == arguments.crash_at:
                os.kill(os.getpid(), signal.SIGKILL)
        bus.save()
    print("weights", hash_weights(model))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        sys.exit(130)
