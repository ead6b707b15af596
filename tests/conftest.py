"""Every test starts with one thread, so that bits do not depend on the machine."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gang import Server
from installed import Command, Install, write_distribution

from hookbus.cli.app import main

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


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process; return its status and what it wrote."""

    def call(*arguments: object) -> tuple[int, str, str]:
        status = main([str(each) for each in arguments])
        return status, *capsys.readouterr()

    return call
