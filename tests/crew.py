"""Starts real processes with torchrun, and gathers what each of them has to say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs

TESTS = Path(__file__).parent


@attrs.frozen
class Crew:
    """What became of the processes of one start: what each told, by rank, and all they printed."""

    status: int
    told: list[Any]
    text: str


def start(script: str, world_size: int, *arguments: object, timeout: float = 120) -> Crew:
    """Run a script of this folder in some processes and wait for all of them to end.

    A process tells something with `tell`; ``None`` stands for one that told nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={world_size}", str(TESTS / script), *map(str, arguments)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CREW_FOLDER": folder,
            "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
        }
        done = subprocess.run(
            command,
            env=environment,
            timeout=timeout,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        files = [Path(folder) / f"{rank}.json" for rank in range(world_size)]
        told = [json.loads(file.read_text()) if file.exists() else None for file in files]
    return Crew(done.returncode, told, done.stdout)


def tell(what: object) -> None:
    """Say something to the test that started this process; the last word counts."""
    file = Path(os.environ["CREW_FOLDER"]) / f"{os.environ['RANK']}.json"
    written = file.with_suffix(".tmp")
    written.write_text(json.dumps(what))
    written.rename(file)
