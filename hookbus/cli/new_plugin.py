"""``hookbus new-plugin``: a small distribution to begin with, whose tests pass as written."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import keyword
import re
import shlex
import sys
from string import Template
from typing import Annotated

import typer

from hookbus.checkpoint import NAME_RULE, is_name, take_path
from hookbus.cli.output import AsJson, escape, print_json
from hookbus.entry_points import GROUP, normalize
from hookbus.errors import CallError
from hookbus.ordering import KINDS

# Where each template goes; the names of files may have places to fill as well.
_FILES = {
    "pyproject.toml.template": "pyproject.toml",
    "README.md.template": "README.md",
    "plugin.py.template": "src/${module}/__init__.py",
    "test_plugin.py.template": "tests/test_${module}.py",
}

_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?", re.ASCII | re.IGNORECASE)
_RESERVED = {
    "hookbus": "comes with hookbus",
    "builtin_plugins": "comes with hookbus",
    "test": "comes with Python",
    "tests": "is the folder of its tests",
}


def new_plugin(
    name: Annotated[
        str, typer.Argument(help="Of the distribution: hookbus-ema.", show_default=False)
    ],
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="A new or an empty folder.", show_default=False)
    ],
    as_json: AsJson = False,
) -> int:
    """Write a small plugin to begin with.

    It is a distribution of its own, with an entry point and with tests that pass as written.
    Nothing is overwritten: DIR must not hold a file yet.
    """
    words = _choose_words(name)
    target = take_path("DIR", folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CallError(f"{folder} is there already, and not an empty folder; pass a new one")
    texts = importlib.resources.files("hookbus.cli") / "templates"
    written = []
    for template, place in _FILES.items():
        path = target / Template(place).substitute(words)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (texts / template).read_text(encoding="utf-8")
        with path.open("x", encoding="utf-8") as file:
            file.write(Template(text).substitute(words))
        written.append(str(path))
    if as_json:
        print_json({**words, "files": written})
    else:
        print("\n".join(map(escape, written)))
        print(
            f"now: cd {escape(shlex.quote(folder))} && pip install -e '.[test]' && python -m pytest"
        )
    return 0


def _choose_words(name: str) -> dict[str, str]:
    """Return what is put into the templates.

    Raises:
        CallError: the name cannot be a distribution's, or its module would be in the way.
    """
    if not _NAME.fullmatch(name):
        raise CallError(
            f"{name!r} cannot be a distribution's name: ASCII letters, digits, . _ - only, and a"
            " letter or digit at both ends"
        )
    plain = normalize(name)
    module = plain.replace("-", "_")
    entry = plain.removeprefix("hookbus-").removesuffix("-hookbus")
    if not is_name(f"{plain}:{entry}"):
        raise CallError(
            f"{name!r} makes {plain}:{entry}, which cannot be a plugin's name: {NAME_RULE}"
        )
    shown = "".join(part.capitalize() for part in entry.split("-"))
    if not module.isidentifier() or keyword.iskeyword(module):
        raise CallError(f"{name!r} makes {module!r}, which cannot be a module's name")
    of_python = {module: "comes with Python"} if module in sys.stdlib_module_names else {}
    if whose := (_RESERVED | of_python).get(module):
        raise CallError(
            f"{name!r} makes a module {module!r}, which {whose}; take another, such as"
            f" 'hookbus-my-{plain}'"
        )
    installed = importlib.metadata.packages_distributions()
    owners = set(map(normalize, installed.get(module, ())))
    if owners - ({plain} if _is_plugin(plain) else set()):
        raise CallError(
            f"{name!r} makes a module {module!r}, which comes with {', '.join(owners)}; take"
            " another"
        )
    if not shown.isidentifier() or keyword.iskeyword(shown):
        shown = f"My{shown}"
    return {
        "distribution": plain,
        "module": module,
        "entry": entry,
        "kind": entry.replace("-", "_") if entry not in KINDS else f"my_{entry}",
        "component": shown,
    }


def _is_plugin(distribution: str) -> bool:
    """Whether an installed distribution is one of plugins, which may be written anew."""
    points = importlib.metadata.entry_points(group=GROUP)
    return any(each.dist and normalize(each.dist.name) == distribution for each in points)
