"""The real text run, sharded: killed, started again, and on another number of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "fsdp2.py"


def run(world_size: int, folder: Path, *options: str) -> tuple[int, str]:
    """Start the example and return its status and all that it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # What stands behind `--` is the script's own: torchrun would take `--run` for one of its own.
    command += [f"--nproc-per-node={world_size}", "--", str(EXAMPLE), "--run", str(folder)]
    done = subprocess.run(
        [*command, "--save-every=2", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=280,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.returncode, done.stdout


def finish(world_size: int, folder: Path, *options: str) -> str:
    status, text = run(world_size, folder, *options)
    assert status == 0, text
    last = text.strip().splitlines()[-1]
    assert last.startswith("weights "), text
    return last


@pytest.mark.parametrize(
    ("world_size", "steps", "crash"),
    [(2, 6, 5), pytest.param(4, 30, 17, marks=pytest.mark.sweep)],
)
def test_a_killed_run_ends_as_one_that_never_stopped_built_whole_or_on_meta(
    tmp_path: Path, world_size: int, steps: int, crash: int
) -> None:
    whole = finish(world_size, tmp_path / "whole", f"--steps={steps}")
    status, text = run(
        world_size, tmp_path / "run", f"--steps={steps}", f"--crash-at={crash}", "--meta"
    )
    assert status != 0
    assert f"step {crash - 1 - (crash - 1) % 2}: held out" in text
    assert finish(world_size, tmp_path / "run", f"--steps={steps}", "--meta") == whole
    # It goes on with other numbers of processes, there and back.
    assert finish(1, tmp_path / "run", f"--steps={steps + 2}") != whole
    if world_size > 2:
        assert finish(3, tmp_path / "run", f"--steps={steps + 4}", "--meta") != whole
