"""The command line: what it prints, how it ends, and what it never does."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from installed import Command
from keepers import Keeper, make_bus
from rich.cells import cell_len
from test_checkpoint_files import save as write
from test_checkpoint_files import section
from test_fallback import DAMAGES, find, flip
from test_hostile_files import reseal

import hookbus
from hookbus.checkpoint.history import append_record
from hookbus.cli import verify as verify_command
from hookbus.cli.app import main
from hookbus.cli.app import run as run_command

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PLAIN_TERMINAL = {"COLUMNS": "80", "FORCE_COLOR": "1", "TERM": "xterm"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints, of steps 1 and 2."""
    run, keeper = tmp_path / "run", Keeper("restore_training_state")
    with make_bus(a=keeper) as bus:
        bus.resume(run)
        bus.save(step=1)
        bus.save(step=2, metrics={"val_loss": 0.5})
    return run


def start(*arguments: object, code: str = "", **environment: str) -> subprocess.CompletedProcess:
    """Run a command as people do: a process of its own."""
    how = ["-c", code] if code else ["-m", "hookbus"]
    return subprocess.run(
        [sys.executable, *how, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        check=False,
        timeout=120,
    )


def read_rows(text: str) -> list[list[str]]:
    return [re.split(r" +", line.strip()) for line in text.splitlines()]


def check_one_line(text: str, *words: str) -> None:
    assert re.fullmatch(r"hookbus: [^\n]+\n", text), text
    assert all(word in text for word in words), text


# -- verify ------------------------------------------------------------------------------------


def test_verify_shows_a_line_for_each_checkpoint_of_a_run(run: Path, command: Command) -> None:
    status, out, err = command("verify", run)
    header, *rows = read_rows(out)
    assert (status, err) == (0, "")
    assert header == ["checkpoint", "step", "bytes", "seconds", "GB/s", "state"]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        (str(find(run, step)), str(step), "good") for step in (1, 2)
    ]


def test_verify_takes_checkpoints_and_runs_together(run: Path, command: Command) -> None:
    status, out, _ = command("verify", find(run, 2), run, "--json")
    assert status == 0
    assert [each["step"] for each in json.loads(out)] == [2, 1, 2]


@pytest.mark.parametrize(("damage", "text"), DAMAGES.values(), ids=DAMAGES.keys())
def test_verify_names_what_is_damaged_and_goes_on(
    run: Path, command: Command, damage: Callable[[Path], object], text: str
) -> None:
    damage(find(run, 1))
    for path in (run, find(run, 1)):
        status, out, err = command("verify", path)
        assert (status, err) == (1, "")
        assert f"{find(run, 1)}/{text}" in out
        assert re.search(rf"^{find(run, 1)} .* damaged: (a|manifest)\.", out, re.MULTILINE)
        assert (" good\n" in out) is (path == run)


def test_verify_names_file_and_tensor(run: Path, command: Command) -> None:
    flip(find(run, 1) / "a.safetensors")
    status, out, _ = command("verify", find(run, 1))
    assert read_rows(out)[1][-3:] == ["damaged:", "a.safetensors", "(tensor)"]
    status, out, _ = command("verify", find(run, 1), "--json")
    (verdict,) = json.loads(out)
    (damage,) = verdict.pop("damage")
    assert status == 1
    assert (verdict["state"], verdict["bytes"]) == ("damaged", 12)
    assert (damage["file"], damage["tensor"]) == ("a.safetensors", "tensor")
    assert "its hash is" in damage["text"]


def test_every_byte_of_every_file_is_verified(run: Path, command: Command) -> None:
    folder = find(run, 2)
    for path in sorted(folder.iterdir()):
        for position in range(path.stat().st_size):
            flip(path, position)
            assert main(["verify", str(folder)]) == 1, (path.name, position)
            flip(path, position)
    command("verify", folder)
    assert command("verify", folder)[0] == 0


def test_all_that_is_damaged_is_named_and_verify_says_the_same(tmp_path: Path) -> None:
    saved = write(tmp_path, section("s", {"a": torch.ones(2), "b": torch.ones(2)}))
    data = bytearray((saved.path / "s.safetensors").read_bytes())
    data[-1] ^= 1
    data[-9] ^= 1
    (saved.path / "s.safetensors").write_bytes(data)
    damage = saved.list_damage()
    assert [(each.file, each.tensor) for each in damage] == [
        ("s.safetensors", "a"),
        ("s.safetensors", "b"),
    ]
    with pytest.raises(hookbus.errors.CorruptCheckpointError) as caught:
        saved.verify()
    assert str(caught.value) == "; ".join(each.text for each in damage)
    flip(saved.path / "manifest.json", 50)
    assert [each.file for each in saved.list_damage()] == ["manifest.json", *["s.safetensors"] * 2]


def test_a_checkpoint_that_a_run_deletes_meanwhile_is_no_finding(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = verify_command.open_checkpoint

    def open_and_delete(path: Path) -> hookbus.Checkpoint:
        checkpoint = opened(path)
        if path == find(run, 1):
            shutil.rmtree(path)
        return checkpoint

    monkeypatch.setattr(verify_command, "open_checkpoint", open_and_delete)
    status, out, _ = command("verify", run)
    assert status == 0
    assert [row[-1] for row in read_rows(out)[1:]] == ["meanwhile", "good"]


def test_a_bar_is_drawn_on_a_terminal_for_what_is_big(run: Path, command: Command) -> None:
    code = (
        "import sys; from hookbus.cli import app, verify\n"
        "verify.SHOWN_FROM = int(sys.argv[1]); sys.stderr.isatty = lambda: sys.argv[2] == 'shown'\n"
        "sys.exit(app.main(sys.argv[3:]))"
    )
    cases = [(25, "shown"), (24, "shown"), (24, "not")]
    drawn = [start(*case, "verify", run, code=code, TTY_COMPATIBLE="1") for case in cases]
    assert [b"verifying" in each.stderr for each in drawn] == [False, True, False]
    assert [each.returncode for each in drawn] == [0, 0, 0]


# -- history -----------------------------------------------------------------------------------


def test_history_shows_starts_with_changed_settings_saves_deletions_and_fallbacks(
    tmp_path: Path, command: Command
) -> None:
    append_record(tmp_path, "start", how="fresh", step=0, checkpoint=None, changes=[])
    append_record(
        tmp_path,
        "save",
        checkpoint="step-00000005",
        step=5,
        blocked=0.25,
        seconds=1.5,
        bytes=2_000_000,
        why="every 5 steps",
        metrics={"val_loss": 0.5, "other": "nan"},
    )
    append_record(
        tmp_path,
        "start",
        how="resumed",
        step=5,
        checkpoint="/elsewhere/step-00000005",
        changes=["threads 2 → 1"],
    )
    append_record(tmp_path, "delete", checkpoint="step-00000005", step=5, why="keep 1")
    append_record(tmp_path, "fallback", checkpoint="step-00000006", moved_to="aside", why="rot")
    status, out, err = command("history", tmp_path)
    header, *rows = out.splitlines()
    assert (status, err) == (0, "")
    assert header.split() == [
        "time",
        "(UTC)",
        "event",
        "step",
        "blocked",
        "seconds",
        "bytes",
        "what",
    ]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", row) for row in rows)
    assert [re.split(" +", row, maxsplit=7)[2:] for row in rows] == [
        ["start", "0", "-", "-", "-", "fresh"],
        ["save", "5", "0.25", "1.50", "2.0", "MB every 5 steps; val_loss 0.5, other nan"],
        ["start", "5", "-", "-", "-", "resumed from step-00000005; changed: threads 2 → 1"],
        ["delete", "5", "-", "-", "-", "keep 1"],
        ["fallback", "-", "-", "-", "-", "step-00000006 moved to aside; rot"],
    ]


def test_history_as_json_is_the_records(run: Path, command: Command) -> None:
    status, out, _ = command("history", run, "--json")
    assert status == 0
    assert json.loads(out) == hookbus.history(run) != []


@pytest.mark.parametrize(
    "line",
    [
        '{"event": 3}',
        '{"event": "save", "time": 7, "bytes": "many", "blocked": [1], "step": {}, "metrics": 2}',
        '{"event": "start", "changes": 4, "checkpoint": ["x"], "how": null}',
        '{"event": "start", "step": ' + "9" * 4000 + "}",
        '{"event": "save", "seconds": NaN, "bytes": 1e999}',
    ],
)
def test_history_shows_whatever_a_line_says(run: Path, command: Command, line: str) -> None:
    (run / "run.jsonl").write_text(line)
    assert command("history", run)[::2] == (0, "")
    status, out, _ = command("history", run, "--json")
    assert status == 0
    assert len(json.loads(out, parse_constant=pytest.fail)) == 1


def test_a_line_that_is_nested_too_deeply_is_left_out_or_is_one_line_of_error(
    run: Path, command: Command
) -> None:
    for depth, status in ((100_000, 0), (700, 1)):
        (run / "run.jsonl").write_text('{"event": ' + "[" * depth + "]" * depth + "}")
        found, out, err = command("history", run, "--json")
        assert found == status
        if status:
            check_one_line(err, "nested too deeply")
        else:
            assert json.loads(out) == []


def test_a_history_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.jsonl")
    ended = start("history", tmp_path)
    assert ended.returncode == 2
    check_one_line(ended.stderr.decode(), "not a regular file")


def test_a_run_without_a_history_says_so(tmp_path: Path, command: Command) -> None:
    assert command("history", tmp_path) == (0, f"{tmp_path} has no history\n", "")
    assert command("history", tmp_path, "--json") == (0, "[]\n", "")


# -- inspect -----------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = {
        "layers.0.weight": torch.ones(4, 3),
        "layers.0.bias": torch.ones(4, dtype=torch.bfloat16),
        "layers.1.weight": torch.ones(1, dtype=torch.complex128),
        "head": torch.zeros(()),
    }
    return write(
        tmp_path,
        section("model", model, buffers={"mask": torch.zeros(2, dtype=torch.bool)}),
        section("nothing"),
        step=7,
        metrics={"val_loss": 0.5, "worse": float("nan")},
        progress={"epoch": 3, "seen": {1, 2}},
        settings={"threads": 2, "size": torch.Size([2]), "big": 3**60_000},
        versions={"python": "3.11"},
        why="asked",
        tag="paper",
        notes=["left by break"],
    ).path


def test_inspect_shows_what_a_checkpoint_says_of_itself(checkpoint: Path, command: Command) -> None:
    status, out, err = command("inspect", checkpoint)
    facts, sections = out.split("\n\n")
    assert (status, err) == (0, "")
    first, *lines = facts.splitlines()
    told = dict(re.split("  +", line, maxsplit=1) for line in lines)
    assert first == str(checkpoint)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", told.pop("created"))
    assert told == {
        "step": "7",
        "why": "asked",
        "tag": "paper",
        "metrics": "val_loss 0.5, worse nan",
        "progress": "epoch 3, seen {1, 2}",
        "settings": "threads 2, size torch.Size([2]), big a int that is too long to show",
        "versions": "python 3.11",
        "processes": "1",
        "run": "run-1",
        "notes": "left by break",
    }
    assert read_rows(sections) == [
        ["section", "kind", "plugin", "parts", "tensors", "bytes"],
        [*["model", "state", "Plugin", "(some-dist", "1.2)", "-,", "buffers", "5", "78", "bytes"]],
        [*["nothing", "state", "Plugin", "(some-dist", "1.2)", "empty", "0", "0", "bytes"]],
    ]


@pytest.mark.parametrize("how", [["--tensors"], ["model"], ["model", "model"]])
def test_inspect_shows_the_tree_of_names(
    checkpoint: Path, command: Command, how: list[str]
) -> None:
    status, out, _ = command("inspect", checkpoint, *how)
    assert status == 0
    assert out.split("\n\n")[2].splitlines() == [
        "model: 4 tensors",
        "├── layers.",
        "│   ├── 1.weight [1] complex128 16 bytes",
        "│   └── 0.",
        "│       ├── weight [4, 3] float32 48 bytes",
        "│       └── bias [4] bfloat16 8 bytes",
        "└── head [] float32 4 bytes",
        "model.buffers: 1 tensors",
        "└── mask [2] bool 2 bytes",
    ]


def test_inspect_as_json_holds_all_of_it(checkpoint: Path, command: Command) -> None:
    status, out, _ = command("inspect", checkpoint, "--json", "--tensors")
    told = json.loads(out, parse_constant=pytest.fail)
    assert status == 0
    assert told["created"] == hookbus.open(checkpoint).created.isoformat()
    assert (told["step"], told["metrics"]["worse"], told["progress"]["seen"]) == (
        7,
        "nan",
        "{1, 2}",
    )
    assert told["sections"]["model"]["tensors"] == 5
    assert told["sections"]["model"]["files"][1] == {
        "part": "buffers",
        "tensors": {"mask": {"shape": [2], "dtype": "bool", "bytes": 2}},
    }
    _, out, _ = command("inspect", checkpoint, "--json")
    assert "files" not in json.loads(out)["sections"]["model"]


def test_inspect_of_a_run_shows_its_newest_that_can_be_read(run: Path, command: Command) -> None:
    assert json.loads(command("inspect", run, "--json")[1])["step"] == 2
    flip(find(run, 2) / "manifest.json", 50)
    ended = start("inspect", run, "--json")
    assert json.loads(ended.stdout)["step"] == 1
    check_one_line(ended.stderr.decode(), "step-00000002 is left out")
    flip(find(run, 1) / "manifest.json", 50)
    status, out, err = command("inspect", run)
    assert (status, out) == (1, "")
    check_one_line(err, f"none of the 2 checkpoints of {run} can be read")


def test_names_that_are_hard_to_show_are_shown(tmp_path: Path, command: Command) -> None:
    one = torch.ones(1)
    names = [".", "a", "a.", "a..b", "." * 3000, "x." * 500, "[bold]b[/]", ":smile:", "\x1b[2J\n"]
    saved = write(tmp_path, section("s", {name: one.clone() for name in names}))
    status, out, _ = command("inspect", saved.path, "--tensors")
    assert status == 0
    assert out.count(" [1] float32 4 bytes\n") == len(names)
    assert "[bold]b[/]" in out
    assert ":smile:" in out
    assert r"\x1b[2J\n" in out
    assert out.replace("\n", "").isprintable()
    assert len(json.loads(command("inspect", saved.path, "s", "--json")[1])) > 0


def test_names_that_are_longer_and_longer_are_shown(tmp_path: Path, command: Command) -> None:
    names = [".".join("a" * length) for length in range(1, 1200)]
    saved = write(tmp_path, section("s", {name: torch.ones(1) for name in names}))
    status, out, _ = command("inspect", saved.path, "--tensors")
    assert (status, out.count(" [1] float32 4 bytes\n")) == (0, len(names))


# -- how a command ends ------------------------------------------------------------------------

BAD_USE: dict[str, tuple[list[str], str]] = {
    "no command": ([], "Missing command"),
    "another command": (["destroy"], "No such command"),
    "no path": (["verify"], "PATH"),
    "an unknown option": (["history", "{run}", "--all"], "No such option: --all"),
    "an empty path": (["inspect", ""], "PATH=''"),
    "nothing there": (["verify", "{run}", "{run}/no"], "there is no folder"),
    "no run there": (["history", "{run}/no"], "there is no folder"),
    "a file": (["inspect", "{run}/run.jsonl"], "there is no folder"),
    "neither run nor checkpoint": (["verify", "{run}/.."], "is no checkpoint, and there is none"),
    "no such section": (["inspect", "{run}", "b"], "has no section 'b'; it has a"),
    "a path that is too long": (["verify", "x" * 5000], "File name too long"),
}


@pytest.mark.parametrize(("arguments", "words"), BAD_USE.values(), ids=BAD_USE.keys())
def test_bad_use_is_one_line_and_status_2(
    run: Path, command: Command, arguments: list[str], words: str
) -> None:
    status, out, err = command(*(each.format(run=run) for each in arguments))
    assert (status, out) == (2, "")
    check_one_line(err, words)


@pytest.mark.parametrize("damage", ["flipped", "of another format", "not there"])
def test_a_manifest_that_cannot_be_read_is_a_finding(
    run: Path, command: Command, damage: str
) -> None:
    folder = find(run, 2)
    if damage == "flipped":
        flip(folder / "manifest.json", 50)
    elif damage == "not there":
        (folder / "manifest.json").unlink()
    else:
        reseal(hookbus.open(folder), lambda manifest: manifest.update(format=9))
    status, out, err = command("inspect", folder)
    assert (status, out) == (1, "")
    check_one_line(err, f"{folder}/manifest.json")
    assert command("verify", run)[0] == 1


def test_a_finding_in_a_file_cannot_move_the_cursor(run: Path, command: Command) -> None:
    folder = find(run, 2)
    reseal(hookbus.open(folder), lambda manifest: manifest.update({"\x1b[2J": 1}))
    for arguments in (["inspect", folder], ["verify", folder]):
        status, out, err = command(*arguments)
        assert status == 1
        assert r"\x1b[2J" in out + err
        assert "\x1b" not in out + err


def test_help_and_version_are_no_bad_use(command: Command) -> None:
    status, out, err = command("--help")
    assert (status, err) == (0, "")
    names = re.findall(r"^  ([a-z-]+)  ", out.partition("Commands:")[2], re.MULTILINE)
    assert names == ["history", "inspect", "new-plugin", "plugins", "verify"]
    assert command("--version") == (0, "hookbus 0.1.0\n", "")
    for name in names:
        assert "--json" in command(name, "--help")[1]


# -- real processes ----------------------------------------------------------------------------

RUN_AND_TELL = (
    "import sys; from hookbus.cli.app import main; status = main(sys.argv[1:])\n"
    "print(sorted({'torch', 'builtin_plugins', 'hookbus.bus'} & {*sys.modules}), file=sys.stderr)\n"
    "sys.exit(status)"
)
COMMANDS = [
    ["verify", "{run}"],
    ["history", "{run}"],
    ["inspect", "{run}", "--tensors"],
    ["inspect", "{run}", "--tensors", "--json"],
    ["--version"],
    ["--help"],
    ["new-plugin", "ema-hook", "{run}/new"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_no_command_imports_torch(run: Path, arguments: list[str]) -> None:
    flip(find(run, 1) / "a.safetensors")
    ended = start(*(each.format(run=run) for each in arguments), code=RUN_AND_TELL)
    assert ended.stderr == b"[]\n"
    assert ended.returncode == (arguments[0] == "verify")


def test_what_tells_of_an_import_of_torch_can_tell(checkpoint: Path) -> None:
    """Negative control: a setting that is a type of torch's own is put together by torch."""
    ended = start("inspect", checkpoint, code=RUN_AND_TELL)
    assert ended.stderr == b"['torch']\n"


@pytest.mark.parametrize("name", ["hookbus", "hookbus.checkpoint"])
def test_looking_at_a_checkpoint_from_python_imports_no_torch(run: Path, name: str) -> None:
    code = f"""
import sys, {name}, hookbus
checkpoint = hookbus.open({str(find(run, 2))!r})
checkpoint.verify()
checkpoint.metadata("a")
str(checkpoint.tensors("a")["tensor"])
hookbus.best({str(run)!r}, "val_loss"), hookbus.history({str(run)!r}), dir({name})
assert "torch" not in sys.modules
info = checkpoint.metadata("a").tensors["tensor"]
import torch
assert info.dtype is torch.float32 and type(info.shape) is torch.Size and info.shape == (3,)
assert torch.equal(checkpoint.read("a"), torch.zeros(3))
"""
    ended = start(code=code)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_what_is_imported_later_is_there_as_if_it_had_been_all_along() -> None:
    code = """
import sys, hookbus
assert set(hookbus.__all__) <= set(dir(hookbus))
assert set(hookbus.checkpoint.__all__) <= set(dir(hookbus.checkpoint))
for module in (hookbus, hookbus.checkpoint):
    assert not hasattr(module, "nothing")
    try: module.nothing
    except AttributeError as error: print(error)
assert "torch" not in sys.modules
from hookbus import *
from hookbus.checkpoint import Part, flatten, history
import hookbus.checkpoint.history
assert HookBus is hookbus.HookBus is hookbus.bus.HookBus
assert all(callable(getattr(hookbus, name)) or name == "errors" for name in hookbus.__all__)
assert history is hookbus.history is hookbus.checkpoint.history
assert Part is hookbus.checkpoint.writer.Part and flatten is hookbus.checkpoint.tree.flatten
"""
    ended = start(code=code)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.decode().splitlines() == [
        f"module {name!r} has no attribute 'nothing'" for name in ("hookbus", "hookbus.checkpoint")
    ]


def test_the_command_is_installed_by_its_name() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    entry = importlib.metadata.EntryPoint("hookbus", project["project"]["scripts"]["hookbus"], "")
    assert entry.load() is run_command
    assert "hookbus.cli" in project["tool"]["setuptools"]["packages"]


def test_what_is_piped_into_head_ends_without_a_word(run: Path) -> None:
    """The history is longer than a pipe holds, so that it is written after ``head`` has gone."""
    for number in range(2000):
        line = json.dumps({"event": "save", "step": number, "why": "x" * 100})
        with (run / "run.jsonl").open("a") as file:
            file.write(line + "\n")
    for option in ("", " --json"):
        line = f'"$0" -m hookbus history "$1"{option} | head -1; exit ${{PIPESTATUS[0]}}'
        ended = subprocess.run(
            ["bash", "-c", line, sys.executable, run], capture_output=True, check=False
        )
        assert ended.stdout.count(b"\n") == 1
        assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("arguments", COMMANDS[:4], ids=" ".join)
def test_any_terminal_can_show_it(run: Path, arguments: list[str]) -> None:
    append_record(run, "start", how="resumed", step=2, changes=["threads 2 → 1"] * 9)
    folder = run.rename(run.with_name("läuft"))
    given = [each.format(run=folder) for each in arguments]
    plain = start(*given, PYTHONIOENCODING="ascii")
    assert (plain.returncode, plain.stderr) == (0, b"")
    assert plain.stdout.isascii()
    narrow = start(*given, NO_COLOR="1", PYTHONUTF8="1", **PLAIN_TERMINAL)
    assert narrow.returncode == 0
    text = re.sub(r"\x1b\[\d*m", "", narrow.stdout.decode())
    assert not re.search(r"\x1b\[(?:\d+;)*(?:3|4|9)\d", narrow.stdout.decode()), "no colour"
    if "--json" not in arguments:
        table = text[text.find("\n\n") + 1 :]
        assert max(map(cell_len, table.splitlines())) <= 80


def test_a_disk_that_is_full_is_one_line(run: Path) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "hookbus", "history", run],
            env={**os.environ, "PYTHONUNBUFFERED": ""},  # nothing is written before the end
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 2
    check_one_line(ended.stderr, "No space left on device")


class Payload:
    """A pickle of it makes a file as it is loaded."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.target),))


@pytest.mark.parametrize("replaced", ["manifest.json", "a.safetensors", "run.jsonl", "more.py"])
def test_nothing_in_a_run_is_ever_run(run: Path, tmp_path: Path, replaced: str) -> None:
    marker = tmp_path / "was run"
    payload = pickle.dumps(Payload(marker))
    folders = [run] if replaced == "run.jsonl" else [find(run, 1), find(run, 2), run]
    for folder in folders:
        (folder / replaced).write_bytes(payload)
    for name in ("hookbus.py", "torch.py", "json.py"):
        (run / name).write_text(f"import os; os.mkdir({str(marker)!r})")
    for arguments in COMMANDS[:4]:
        ended = start(*(each.format(run=run) for each in arguments))
        assert ended.returncode in (0, 1)
        assert b"Traceback" not in ended.stderr
    assert not marker.exists()
    pickle.loads(payload)
    assert marker.exists(), "negative control"


def test_a_big_checkpoint_is_inspected_in_a_moment_and_in_little_memory(tmp_path: Path) -> None:
    """One generous bound each; 256 MiB of tensors would not fit into the memory."""
    state = {"w": torch.zeros(2**26), **{f"layers.{n}.bias": torch.zeros(1) for n in range(1000)}}
    saved = write(tmp_path, section("model", state))
    code = (
        "import sys, time; started = time.perf_counter(); from hookbus.cli.app import main\n"
        "status = main(['inspect', sys.argv[1], '--tensors'])\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(peak.split()[1], time.perf_counter() - started, file=sys.stderr)"
    )
    ended = start(saved.path, code=code)
    memory, seconds = map(float, ended.stderr.split())
    assert (ended.returncode, ended.stdout.count(b" float32 ")) == (0, 1001)
    assert memory < 200 * 1024
    assert seconds < 30


# -- what the README shows ---------------------------------------------------------------------


def test_the_readme_shows_what_the_commands_print(run: Path, command: Command) -> None:
    block = next(b for b in re.findall(r"```console\n(.*?)```", README, re.DOTALL) if "verify" in b)
    shown = re.findall(r"^\$ hookbus (\w+).*\n((?:(?!\$).*\n)*)", block, re.MULTILINE)
    assert [name for name, _ in shown] == ["verify", "history", "inspect"]
    for name, text in shown:
        _, out, _ = command(name, run)
        printed = {" ".join(row) for row in read_rows(out)}
        lines = read_rows(text)
        if name == "inspect":
            heads = {line.split()[0] for line in out.split("\n\n")[0].splitlines()[1:]}
            assert {row[0] for row in lines[1:] if row[0] in heads} == heads
            assert "section kind plugin parts tensors bytes" in {" ".join(row) for row in lines}
        else:
            assert " ".join(lines[0]) in printed
