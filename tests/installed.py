"""Distributions of others: metadata that this process finds, or wheels in a new environment.

Such an environment sees the libraries of the one that runs the tests, and downloads nothing.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import textwrap
import venv
from collections.abc import Callable
from pathlib import Path

import attrs

ROOT = Path(__file__).parent.parent
LIMIT = 120  # seconds

Install = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]


def write_distribution(
    folder: Path, name: str, version: str, entries: dict[str, str], **sources: str
) -> Path:
    """Write a distribution as it lies in ``site-packages``: metadata and modules."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = "".join(f"{entry} = {target}\n" for entry, target in entries.items())
    (info / "entry_points.txt").write_text(f"[hookbus]\n{lines}")
    (info / "RECORD").write_text("".join(f"{module}.py,,\n" for module in sources))
    for module, source in sources.items():
        text = "import hookbus\n" + textwrap.dedent(source)
        (folder / f"{module}.py").write_text(text)
    return folder


def build_wheel(source: Path, folder: Path) -> Path:
    """Build a wheel from a copy of its source, since a build leaves files there."""
    copy = shutil.copytree(source, folder / f"{source.name}-source", dirs_exist_ok=True)
    _run_pip("wheel", "--no-build-isolation", "-w", folder / source.name, copy)
    (wheel,) = (folder / source.name).glob("*.whl")
    return wheel


def build_hookbus(folder: Path) -> Path:
    source = folder / "hookbus"
    for name in ("hookbus", "builtin_plugins"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return build_wheel(source, folder)


@attrs.frozen
class Environment:
    """A virtual environment of its own."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Environment:
        venv.create(folder, symlinks=True)
        environment = cls(folder)
        paths = "\n".join(site.getsitepackages())
        (environment.packages / "libraries.pth").write_text(paths)
        return environment

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def install(self, *wheels: Path) -> None:
        _run_pip("install", "--ignore-installed", *wheels, python=self.python)

    def uninstall(self, name: str) -> None:
        _run_pip("uninstall", "-y", name, python=self.python)

    def run(self, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run its Python, which sees what is installed and nothing else of ours."""
        return subprocess.run(
            [self.python, *map(str, arguments)],
            env=_make_variables() | {"OMP_NUM_THREADS": "1"} | variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )


def _make_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _run_pip(command: str, *arguments: object, python: Path | None = None) -> None:
    where = [] if python is None else ["--python", str(python)]
    offline = [] if command == "uninstall" else ["--no-deps", "--no-index"]
    ended = subprocess.run(
        [sys.executable, "-m", "pip", *where, command, *offline, *map(str, arguments)],
        env=_make_variables() | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
