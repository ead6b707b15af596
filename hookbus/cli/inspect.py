"""``hookbus inspect``: what a checkpoint says of itself, without its data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from hookbus.checkpoint import (
    Checkpoint,
    TensorInfo,
    checkpoints,
    open_checkpoint,
)
from hookbus.checkpoint.names import part_name
from hookbus.cli.output import (
    AsJson,
    Branches,
    escape,
    print_facts,
    print_json,
    print_table,
    print_tree,
    show,
    show_bytes,
    show_time,
)
from hookbus.cli.paths import is_checkpoint, list_checkpoints
from hookbus.errors import CorruptCheckpointError, MissingSectionError

DEEPEST = 20  # levels of names that are shown below each other

_COLUMNS = {
    "section": False,
    "kind": False,
    "plugin": False,
    "parts": False,
    "tensors": True,
    "bytes": True,
}

_FACTS = (
    *("step", "serial", "created", "run_id", "why", "tag", "notes", "world_size"),
    *("metrics", "progress", "settings", "versions"),
)


def inspect(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="A checkpoint, or a run directory: its newest.", show_default=False
        ),
    ],
    sections: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION...]", help="Show the tensors of these."),
    ] = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Show the tensors of every section.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Show what a checkpoint holds. Its data is not read: that is for verify."""
    checkpoint = _open(path)
    shown = list(dict.fromkeys(sections or (checkpoint.sections if tensors else ())))
    if unknown := [name for name in shown if name not in checkpoint.sections]:
        there = ", ".join(checkpoint.sections) or "none"
        raise MissingSectionError(
            f"{checkpoint.path} has no section {', '.join(map(repr, unknown))}; it has {there}"
        )
    if as_json:
        print_json(_to_json(checkpoint, shown))
        return 0
    print(escape(checkpoint.path))
    print_facts(_list_facts(checkpoint))
    if checkpoint.sections:
        print()
        print_table(_COLUMNS, [_make_row(checkpoint, name) for name in checkpoint.sections])
    for name in shown:
        print()
        for part, infos in _list_tensors(checkpoint, name).items():
            print_tree(f"{part_name(name, part)}: {len(infos)} tensors", _make_branches(infos))
    return 0


def _open(path: str) -> Checkpoint:
    """Open a checkpoint, or the newest of a run that can be read."""
    folder = Path(path)
    found = list_checkpoints(path)
    if is_checkpoint(folder):
        return open_checkpoint(folder)
    able = checkpoints(folder)
    if not able:
        raise CorruptCheckpointError(f"none of the {len(found)} checkpoints of {path} can be read")
    return able[-1]


_Tensors = dict[str | None, dict[str, TensorInfo]]  # by part


def _list_tensors(checkpoint: Checkpoint, section: str) -> _Tensors:
    parts = checkpoint.sections[section].parts
    return {part: checkpoint.tensors(section, part) for part in parts}


def _list_facts(checkpoint: Checkpoint) -> dict[str, str]:
    serial = f" (number {checkpoint.serial + 1} of it)" if checkpoint.serial else ""
    return {
        "step": f"{checkpoint.step}{serial}",
        "created": f"{show_time(checkpoint.created)} UTC",
        "why": checkpoint.why,
        "tag": show(checkpoint.tag),
        "metrics": show(checkpoint.metrics),
        "progress": show(checkpoint.progress),
        "settings": show(checkpoint.settings),
        "versions": show(checkpoint.versions),
        "processes": show(checkpoint.world_size),
        "run": checkpoint.run_id,
        **({"notes": "; ".join(checkpoint.notes)} if checkpoint.notes else {}),
    }


def _make_row(checkpoint: Checkpoint, name: str) -> list[str]:
    section, tensors = checkpoint.sections[name], _list_tensors(checkpoint, name)
    origin = " ".join(filter(None, [section.distribution, section.distribution_version]))
    return [
        name,
        section.kind,
        f"{section.plugin} ({origin})" if origin else section.plugin,
        "empty" if section.empty else ", ".join(show(part) for part in section.parts),
        str(sum(map(len, tensors.values()))),
        show_bytes(section.bytes),
    ]


def _to_json(checkpoint: Checkpoint, shown: Collection[str]) -> dict[str, object]:
    sections = {}
    for name, section in checkpoint.sections.items():
        tensors = _list_tensors(checkpoint, name)
        sections[name] = {
            **attrs.asdict(section, filter=lambda field, _: field.name != "name"),
            "tensors": sum(map(len, tensors.values())),
            **({"files": list(map(_describe_part, tensors.items()))} if name in shown else {}),
        }
    return {
        "path": str(checkpoint.path),
        **{name: getattr(checkpoint, name) for name in _FACTS},
        "sections": sections,
    }


def _describe_part(part_and_tensors: tuple[str | None, dict[str, TensorInfo]]) -> dict[str, Any]:
    part, infos = part_and_tensors
    tensors = {
        info.name: {"shape": info.sizes, "dtype": info.dtype_name, "bytes": info.bytes}
        for info in infos.values()
    }
    return {"part": part, "tensors": tensors}


# -- the tree of names ---------------------------------------------------------------------------


def _make_branches(infos: Mapping[str, TensorInfo]) -> Branches:
    """Put names under what they begin with, up to a dot."""
    root: Branches = {}
    for info in infos.values():
        branches, steps = root, info.name.split(".", DEEPEST)
        for step in steps[:-1]:
            branches = branches.setdefault(f"{step}.", {})
        branches[f"{steps[-1]} {info} {show_bytes(info.bytes)}"] = {}
    return root
