"""What the pages say is so: compared with the code, and run."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import builtin_plugins
from hookbus import errors
from hookbus.cli.app import app
from hookbus.ordering import KIND_ORDER
from hookbus.registration import EVENTS
from hookbus.sequence import RESUME_EVENTS

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = {page.name: page.read_text() for page in PAGES}


def list_blocks(text: str, language: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for word, block in blocks if word == language]


def list_implementers(event: str) -> set[str]:
    classes = [getattr(builtin_plugins, name) for name in builtin_plugins.__all__]
    return {
        each.__name__ for each in classes if hasattr(getattr(each, event, None), "hookbus_impl")
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """From top to bottom, as somebody would type it into one file."""
    code = "\n".join(list_blocks(TEXTS[page.name], "python"))
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_other_blocks_are_well_formed(page: Path) -> None:
    for block in list_blocks(TEXTS[page.name], "toml"):
        tomllib.loads(block)
    languages = set(re.findall(r"^```(\w+)$", TEXTS[page.name], re.MULTILINE))
    assert languages <= {"python", "toml", "console", "sh"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", TEXTS[page.name]):
        assert (page.parent / target).exists(), target


def test_every_page_is_in_the_list_of_pages() -> None:
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)\)", TEXTS["README.md"]))
    assert linked == set(TEXTS) - {"README.md"}


def test_each_event_has_a_heading_with_its_arguments_in_the_order_of_the_specification() -> None:
    headings = re.findall(r"^### (\w+)\(([\w, ]*)\)$", TEXTS["events.md"], re.MULTILINE)
    assert [(event, tuple(filter(None, a.split(", ")))) for event, a in headings] == list(
        EVENTS.items()
    )


@pytest.mark.parametrize("event", EVENTS)
def test_who_implements_an_event_is_as_the_page_says(event: str) -> None:
    chapter = TEXTS["events.md"].partition(f"\n### {event}(")[2].partition("\n##")[0]
    [line] = re.findall(r"^Implemented by: (.*)\.$", chapter, re.MULTILINE)
    if event == "plugin_for":
        assert line == "an entry point for each kind"
        return
    assert set(re.findall(r"`(\w+)`", line)) == list_implementers(event)
    assert (line == "nobody") == (not list_implementers(event))


def test_the_picture_of_a_resume_has_its_events_in_order() -> None:
    [picture] = list_blocks(TEXTS["resume.md"], "")
    left = re.findall(rf"^({'|'.join(RESUME_EVENTS)})\b", picture, re.MULTILINE)
    assert tuple(left) == RESUME_EVENTS
    right = re.findall(r"^ ?(?:│|\w+) +(\w+)$", picture, re.MULTILINE)
    behind = ["pre_configure_sharded", "configure_sharded", "restore_model"]
    assert [each for each in right if each in EVENTS] == behind


def test_the_order_of_kinds_is_as_the_page_says() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \|$", TEXTS["ordering.md"], re.MULTILINE)
    said = {event: tuple(kinds.replace("all others", "*").split(", ")) for event, kinds in rows}
    assert said == KIND_ORDER


def test_each_error_is_explained_once_and_none_that_is_not_there() -> None:
    classes = [name for name, each in vars(errors).items() if inspect.isclass(each)]
    public = {name for name in classes if getattr(errors, name).__module__ == errors.__name__}
    explained = re.findall(r"^\| `(\w+)` \|", TEXTS["errors.md"], re.MULTILINE)
    assert len(explained) == len(set(explained))
    assert set(explained) == public - {"HookbusError"}


def test_each_command_has_a_heading() -> None:
    names = (each.name or each.callback.__name__ for each in app.registered_commands)
    commands = {name.replace("_", "-") for name in names}
    headings = re.findall(r"^## hookbus ([\w-]+)", TEXTS["command-line.md"], re.MULTILINE)
    assert set(headings) == commands
    assert len(headings) == len(commands)
