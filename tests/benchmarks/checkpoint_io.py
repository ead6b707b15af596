"""How fast a checkpoint is written, verified and read, and how much memory that takes.

Run it by hand on Linux: ``python tests/benchmarks/checkpoint_io.py [MiB] [folder]``. Each line is
the best of three, in GB/s, and the peak of resident memory above what was there before. Reading
comes from the page cache; writing includes fsync, so it is the disk's speed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch

from hookbus.checkpoint import Part, Section, flatten, write_checkpoint

MIB = 2**20


def read_status(key: str) -> float:
    """Return a line of this process's status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def measure(name: str, size: int, action: Callable[[], object]) -> None:
    """Print the speed of an action, and the peak of memory while it ran."""
    best, peak = float("inf"), 0.0
    for _ in range(3):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before, started = read_status("VmRSS"), time.perf_counter()
        result = action()
        best = min(best, time.perf_counter() - started)
        peak = max(peak, read_status("VmHWM") - before)
        del result
    print(f"{name:44s} {size / best / 1e9:6.2f} GB/s {best:7.3f} s  peak +{peak:.0f} MiB")


def main(mebibytes: int, folder: Path) -> None:
    torch.set_num_threads(1)
    layers = 16
    (folder / "run").mkdir()
    state = {f"layer{i}.weight": torch.randn(mebibytes * MIB // 4 // layers) for i in range(layers)}
    live = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    size = sum(tensor.nbytes for tensor in state.values())

    def write() -> object:
        section = Section("s", "state", "Plugin", None, None, {None: Part(flatten(state), 1)})
        return write_checkpoint(
            folder / "run",
            run_id="r",
            step=1,
            sections=[section],
            progress={},
            metrics={},
            settings={},
            versions={},
            why="measured",
        )

    def save_peer() -> None:
        safetensors.torch.save_file(state, folder / "peer.safetensors")
        with (folder / "peer.safetensors").open("rb") as file:
            os.fsync(file)

    def load_peer() -> None:
        for name, tensor in safetensors.torch.load_file(folder / "peer.safetensors").items():
            live[name].copy_(tensor)

    checkpoint = write()
    print(f"{size / MIB:.0f} MiB in {layers} tensors, on {folder}")
    measure("write_checkpoint", size, write)
    measure("  safetensors save_file + fsync, no hash", size, save_peer)
    measure("verify", size, checkpoint.verify)
    measure("verify(hashes=False)", size, lambda: checkpoint.verify(hashes=False))
    measure("read_into, hashed", size, lambda: checkpoint.read_into("s", live))
    measure("  safetensors load_file + copy_, no hash", size, load_peer)
    measure("read, hashed", size, lambda: checkpoint.read("s"))
    assert all(torch.equal(live[name], tensor) for name, tensor in state.items())


if __name__ == "__main__":
    mebibytes, place = int(sys.argv[1]) if len(sys.argv) > 1 else 400, sys.argv[2:]
    with tempfile.TemporaryDirectory(dir=place[0] if place else None) as folder:
        main(mebibytes, Path(folder))
