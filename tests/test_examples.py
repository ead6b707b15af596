"""The examples run, and go on bit for bit, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hookbus

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(example: str, folder: Path) -> subprocess.CompletedProcess[str]:
    process = subprocess.run(
        [sys.executable, EXAMPLES / f"{example}.py", folder],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr
    return process


def read_newest(folder: Path) -> dict[str, str]:
    """Return all plain values in the newest checkpoint, and the hashes of all tensors."""
    newest = hookbus.checkpoints(folder)[-1]
    return {
        f"{name}.{part}": repr(newest.metadata(name, part))
        for name, section in newest.sections.items()
        for part in section.parts
    }


@pytest.mark.parametrize("example", ["train", "events_by_hand", "gan", "rl", "lightning_bridge"])
def test_an_example_goes_on_from_any_of_its_checkpoints_bit_for_bit(example, tmp_path) -> None:
    if example == "lightning_bridge":
        pytest.importorskip("lightning", reason="lightning is not installed")
    first = tmp_path / "first"
    assert "a fresh start" in run(example, first).stderr
    steps = [checkpoint.step for checkpoint in hookbus.checkpoints(first)]
    assert len(steps) > 2
    expected = read_newest(first)
    for number in (0, len(steps) // 2):
        # What a crash right after that checkpoint would have left.
        again = tmp_path / str(number)
        again.mkdir()
        kept = hookbus.checkpoints(first)[number].path
        subprocess.run(["cp", "-r", kept, again / kept.name], check=True)
        assert "goes on after step" in run(example, again).stderr
        assert read_newest(again) == expected
    run(example, first)
    assert [checkpoint.step for checkpoint in hookbus.checkpoints(first)] == steps
