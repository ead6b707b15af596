"""A run that saves all the time is killed at random moments, and loses nothing.

`killed.py` trains, kills and compares; what it must see is told there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "killed.py"


def kill(folder: Path, kills: int, seed: int, breach: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, folder, str(kills), str(seed), breach],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    "kills", [20, pytest.param(300, marks=pytest.mark.sweep)], ids="{} kills".format
)
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(
    kills: int, folder: Path
) -> None:
    """Source: NVIDIA-NeMo/Speech#7952; petuum/adaptdl#81; KempnerInstitute/KempnerForge#102."""
    result = kill(folder, kills, seed=kills)
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert seen["kills"] == kills
    assert seen["saving"] >= max(1, kills // 15), "the kills hit saves"


BREACHES = {
    "weights": "other bits",  # one of them comes back a little different
    "sweep": ".tmp'",  # what is left over stays
    "rename": "CorruptCheckpointError",  # a checkpoint is written under its final name
}


@pytest.mark.parametrize("breach", [pytest.param(b, marks=pytest.mark.sweep) for b in BREACHES])
def test_a_breach_is_caught(breach: str, folder: Path) -> None:
    result = kill(folder, 20, seed=1, breach=breach)
    assert result.returncode == 1
    assert BREACHES[breach] in result.stderr.splitlines()[-1]
