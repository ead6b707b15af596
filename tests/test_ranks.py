"""Several processes are one run."""

from __future__ import annotations

from pathlib import Path

import pytest
from crew import start


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.sweep)])
def test_a_run_of_several_processes_goes_on_bit_for_bit(world_size: int, tmp_path: Path) -> None:
    crew = start("ddp_run.py", world_size, "check_exact", tmp_path)
    assert crew.status == 0, crew.text
    for told in crew.told:
        plain = told.pop("plain")
        assert told == dict.fromkeys(told, plain)
