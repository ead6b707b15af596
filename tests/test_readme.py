"""What the README says is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from test_char_lm import SCRIPT

import builtin_plugins
import hookbus
from builtin_plugins import Loop
from hookbus.errors import UnclaimedSectionError
from hookbus.sequence import RESUME_EVENTS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def read_block(language: str, holding: str) -> str:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return next(block for word, block in blocks if word == language and holding in block)


def read_side(sign: str) -> str:
    """Return one side of the README's comparison: ``+`` with hookbus, ``-`` without."""
    other = {"+": "-", "-": "+"}[sign]
    lines = read_block("diff", "loop").splitlines()
    return "\n".join(line[1:] for line in lines if not line.startswith(other)) + "\n"


def test_the_code_with_hookbus_is_the_example_and_is_short() -> None:
    example = (ROOT / "examples" / "train.py").read_text()
    assert read_side("+") == example
    assert len(example.splitlines()) <= 30


def test_the_two_loops_of_the_readme_end_with_the_same_bits(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", str(tmp_path)])
    plain: dict[str, torch.nn.Module] = {}
    torch.manual_seed(0)
    exec(read_side("-"), plain)
    with_bus: dict[str, torch.nn.Module] = {}
    torch.manual_seed(0)
    exec(read_side("+"), with_bus)
    for name in ("model", "ema"):
        for key, tensor in plain[name].state_dict().items():
            assert torch.equal(tensor, with_bus[name].state_dict()[key]), (name, key)


def test_the_lines_marked_as_added_are_few() -> None:
    lines = read_block("diff", "loop").splitlines()
    assert sum(line.startswith("+") for line in lines) <= 13


def test_the_commands_name_what_is_there() -> None:
    for path in re.findall(r"(?:examples|tests)/[\w/]+\.py|constraints\.txt", README):
        assert (ROOT / path).is_file(), path
    for option in ("--run", "--steps", "--save-every", "--crash-at"):
        assert option in README
        assert option in SCRIPT.read_text()


def test_the_plugin_of_the_readme_is_complete_in_seven_lines(tmp_path) -> None:
    code = read_block("python", "class EmaPlugin")
    assert len(code.splitlines()) == 7
    names: dict[str, type] = {"hookbus": hookbus}
    exec(code, names)
    with hookbus.HookBus() as bus:
        bus.register(names["EmaPlugin"]({"weight": torch.full((3,), 2.0)}))
        bus.resume(tmp_path)
        bus.save(step=1)
    shadow = {"weight": torch.zeros(3)}
    with hookbus.HookBus() as bus:
        bus.register(names["EmaPlugin"](shadow))
        bus.resume(tmp_path)
    assert torch.equal(shadow["weight"], torch.full((3,), 2.0))


def test_the_events_are_those_of_the_bus_in_its_order() -> None:
    assert tuple(re.findall(r"^\| `(\w+)\(resume", README, re.MULTILINE)) == RESUME_EVENTS


def test_the_events_by_hand_are_those_of_the_example() -> None:
    example = (ROOT / "examples" / "events_by_hand.py").read_text()
    for line in read_block("python", "bus.prepare(run)").splitlines():
        assert line in example


def test_the_files_named_are_the_files_written_and_the_error_is_as_printed(tmp_path) -> None:
    def open_bus(with_ema: bool) -> hookbus.HookBus:
        model = torch.nn.Linear(2, 2)
        bus = hookbus.HookBus()
        bus.attach(model=model, optimizer=torch.optim.AdamW(model.parameters()))
        if with_ema:
            bus.attach(ema=torch.optim.swa_utils.AveragedModel(model))
        model(torch.ones(1, 2)).sum().backward()
        bus.components["optimizer"].step()
        return bus

    with open_bus(with_ema=True) as bus:
        bus.resume(tmp_path)
        checkpoint = bus.save(step=50)
    tree = read_block("", "run.lock")
    names = set(re.findall(r"^ +([\w.-]+\.\w+|step-\d+/)", tree, re.MULTILINE))
    assert {"run.lock", "run.jsonl"} <= names & {path.name for path in tmp_path.iterdir()}
    names -= {"run.lock", "run.jsonl"}
    assert names == {f"{checkpoint.path.name}/", *(file.name for file in checkpoint.path.iterdir())}
    with open_bus(with_ema=False) as bus, pytest.raises(UnclaimedSectionError) as caught:
        bus.resume(tmp_path)
    printed = read_block("", "UnclaimedSectionError").strip()
    assert printed == f"UnclaimedSectionError: {caught.value}"


def test_the_policy_of_the_readme_saves_and_keeps(tmp_path) -> None:
    code = read_block("python", "bus.register(SavePolicy(").replace("Steps(500)", "Steps(5)")
    model, loop = torch.nn.Linear(2, 1), Loop()
    optimizer = torch.optim.SGD(model.parameters())
    with hookbus.HookBus() as bus:
        exec(code, {"bus": bus})
        bus.attach(model=model, optimizer=optimizer, loop=loop)
        bus.resume(tmp_path)
        for _ in loop.steps(30):
            model(torch.ones(2)).backward()
            optimizer.step()
            optimizer.zero_grad()
            loop.metrics["val_loss"] = abs(loop.step - 10)
    assert [each.step for each in hookbus.checkpoints(tmp_path)] == [10, 20, 25, 30]


def test_the_rules_that_are_named_are_there() -> None:
    section = README.partition("## Never lose a run")[2].partition("\n## ")[0]
    rules = set(
        re.findall(
            r"\b(?:Every|Keep)[A-Z]\w+|OverheadTarget|Preemption|SavePolicy|\bWhen\b|\bKeep\b|Moment",
            section,
        )
    )
    assert rules == {
        name
        for name in builtin_plugins.__all__
        if getattr(builtin_plugins, name).__module__.rpartition(".")[2]
        in ("when", "keep", "save_policy", "preemption")
    }


def test_every_relative_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
