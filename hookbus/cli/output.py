"""What the commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

Branches = dict[str, "Branches"]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_NEVER_WRAPPED = 10_000  # columns where nobody looks: a program wants one line an entry


def escape(text: object) -> str:
    """Return text in which nothing moves a cursor: a file may hold any characters."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in str(text)
    )


def print_table(columns: Mapping[str, bool], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under the names of their columns; ``True`` is a column of numbers."""
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for name, numbers in columns.items():
        table.add_column(
            name,
            justify="right" if numbers else "left",
            no_wrap=numbers,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(escape(value)) for value in row))
    _print(table)


def print_facts(facts: Mapping[str, object]) -> None:
    """Print values, each behind its name."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(escape(value)))
    _print(table)


def print_tree(name: str, branches: Branches) -> None:
    """Print names below each other; what has but one branch is joined to it."""
    tree = Tree(Text(escape(name)))
    _grow(tree, branches)
    _print(tree)


def _print(what: Table | Tree) -> None:
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _NEVER_WRAPPED
    with console.capture() as captured:
        console.print(what)
    for line in captured.get().rstrip("\n").split("\n"):
        print(line.rstrip())


def _grow(tree: Tree, branches: Branches) -> None:
    for name, below in branches.items():
        while len(below) == 1:
            step, below = next(iter(below.items()))
            name += step
        _grow(tree.add(Text(escape(name))), below)


def print_json(value: object) -> None:
    print(json.dumps(make_plain(value), indent=2, allow_nan=False))


def make_plain(value: Any) -> Any:
    """Return a value as JSON can hold it: what JSON has not becomes text."""
    if isinstance(value, Mapping):
        return {_to_text(key): make_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [make_plain(each) for each in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int) and value.bit_length() <= 64:
        return value
    return _to_text(value)


def show_bytes(size: object) -> str:
    return decimal(size) if type(size) is int else show(size)


def show(value: object) -> str:
    """Return a plain value as a few characters."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return (
            ", ".join(f"{_to_text(key)} {_show_inside(each)}" for key, each in value.items()) or "-"
        )
    if isinstance(value, list | tuple):
        return ", ".join(map(_show_inside, value)) or "-"
    return _to_text(value)


def _show_inside(value: object) -> str:
    return _to_text(value) if isinstance(value, Mapping | list | tuple) else show(value)


def _to_text(value: object) -> str:
    try:
        return str(value)
    except ValueError:  # Python writes no whole number of more than 4300 digits
        return f"a {type(value).__name__} that is too long to show"


def show_time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M:%S")
