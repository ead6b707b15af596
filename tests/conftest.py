"""Every test starts with one thread, so that bits do not depend on the machine."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gang import Server

MEMORY = Path("/dev/shm")


@pytest.fixture(autouse=True)
def _use_one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one, for tests that sync thousands of times."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY) as path:
        yield Path(path)


@pytest.fixture(scope="session")
def gang() -> Iterator[Server]:
    """A warm process that starts several at once."""
    server = Server()
    yield server
    server.end()
