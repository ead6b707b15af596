"""The transformer of ``char_lm.py``, sharded over several processes with FSDP2.

    torchrun --nproc-per-node 2 -- examples/fsdp2.py --run runs/fsdp2 --steps 200

Kill it wherever you like and start the same command again: the last line is that of a run that was
never stopped. On another number of processes it goes on too, with the bits of that number's sums.
With ``--meta`` no process ever holds the whole model.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import signal
import sys
import warnings

import torch
import torch.distributed as dist
from char_lm import ACCUMULATE, Transformer, Windows, compute_loss, read_library, validate
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

import hookbus
from builtin_plugins import FSDP2, EverySteps, KeepBest, KeepLast, Loop, Preemption, SavePolicy


def build() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


def average(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))


def hash_weights(model: nn.Module) -> str:
    """Hash the gathered weights, one tensor after the other; every process has to call it."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(whole.numpy().tobytes())
    return digest.hexdigest()[:16]


def train(arguments: argparse.Namespace, rank: int) -> str:
    with torch.device("meta" if arguments.meta else "cpu"):
        model = build()
        ema = average(model)
    torch.manual_seed(1 + rank)  # each process drops out other units
    text = read_library(110_000)
    windows = Windows(text[:100_000])
    sampler: DistributedSampler[Tensor] = DistributedSampler(windows, seed=2)
    loader = DataLoader(windows, batch_size=16, sampler=sampler)
    held_out = DataLoader(Windows(text[100_000:]), batch_size=64)

    with hookbus.HookBus() as bus:
        loop = Loop()
        keep = KeepLast(3) | KeepBest("val_loss")
        bus.register(SavePolicy(when=EverySteps(arguments.save_every), keep=keep))
        bus.register(Preemption())
        layers = (nn.TransformerEncoderLayer,)
        bus.register(FSDP2(layers, models=("model",), initial=build))
        bus.register(
            FSDP2(layers, models=("ema",), initial=lambda: average(build())), "sharded_ema"
        )
        bus.attach(model=model, ema=ema, data=loader, loop=loop)
        with bus.resuming(arguments.run) as resume:
            resume.configure_sharded()  # gives the models new parameters: optimizers come after it
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
            warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=20)
            cosine = CosineAnnealingLR(optimizer, T_max=580)
            scheduler = SequentialLR(optimizer, [warm_up, cosine], milestones=[20])
            bus.attach(optimizer=optimizer, scheduler=scheduler)
        for batch in loop.steps(arguments.steps, loader):
            loss = compute_loss(model, batch) / ACCUMULATE
            loss.backward()
            if loop.batch % ACCUMULATE == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                ema.update_parameters(model)
            if loop.every(arguments.save_every):
                loop.metrics["val_loss"] = validate(ema, held_out)
                if rank == 0:
                    print(f"step {loop.step}: held out {loop.metrics['val_loss']:.3f}", flush=True)
            if loop.step == arguments.crash_at:
                os.kill(os.getpid(), signal.SIGKILL)
        bus.save()
    return hash_weights(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="runs/fsdp2", help="the run directory")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--save-every", type=int, default=25, help="steps between saves")
    parser.add_argument("--crash-at", type=int, help="end the processes with SIGKILL at this step")
    parser.add_argument("--meta", action="store_true", help="build the models on the meta device")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weights = train(arguments, rank)
    if rank == 0:
        print("weights", weights)
    gc.collect()  # what is sharded must be gone before the processes part
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        sys.exit(130)
