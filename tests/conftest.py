"""Every test starts with one thread, so that bits do not depend on the machine."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from installed import Install, write_distribution

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


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution in a folder of its own, at the front of ``sys.path``."""
    modules = set(sys.modules)

    def install(name: str, version: str, entries: dict[str, str], **sources: str) -> Path:
        folder = tmp_path / f"site-{len(list(tmp_path.iterdir()))}"
        write_distribution(folder, name, version, entries, **sources)
        monkeypatch.syspath_prepend(str(folder))
        return folder

    yield install
    for module in set(sys.modules) - modules:
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[module]
