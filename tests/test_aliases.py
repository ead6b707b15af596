"""A section is found under its former name where that is said, and never by a guess."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from keepers import Keeper, make_bus
from torch import nn

import hookbus
from hookbus.errors import (
    CallError,
    CorruptCheckpointError,
    HookbusError,
    ManyErrors,
    MismatchError,
    MissingSectionError,
)


class Kept(Keeper):
    """A keeper of a kind, which may have had other names."""

    kind = "kept"

    def __init__(self, value: float = 0.0, *aliases: str) -> None:
        super().__init__()
        self.tensor += value
        self.aliases = aliases

    @property
    def value(self) -> float:
        return float(self.tensor[0])


def save(run: Path, **values: float) -> Path:
    with make_bus(**{name: Kept(value) for name, value in values.items()}) as bus:
        bus.resume(run)
        bus.save(step=1)
    return run


def resume(run: Path, plugins: dict[str, Kept], **options: Any) -> hookbus.Report:
    with make_bus(**plugins) as bus:
        return bus.resume(run, **options).report


def refuse(run: Path, plugins: dict[str, Kept], **options: Any) -> list[HookbusError]:
    with pytest.raises(HookbusError) as caught:
        resume(run, plugins, **options)
    assert {each.value for each in plugins.values()} == {0}, "nothing was changed"
    error = caught.value
    return list(error.exceptions) if isinstance(error, ManyErrors) else [error]


# -- what works ---------------------------------------------------------------------------------


def make_parts(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.rand(4, 2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_an_attached_model_is_found_under_its_former_name_and_so_is_what_its_optimizer_knows(
    tmp_path: Path,
) -> None:
    """The same call serves every later restart, when nothing bears the former name any more."""
    saved = make_parts(1)
    with hookbus.HookBus() as bus:
        bus.attach(**saved)
        bus.resume(tmp_path)
        bus.save(step=1)
    for step in (2, 3):
        parts = make_parts(step)
        with hookbus.HookBus() as bus:
            bus.attach(encoder=parts["model"], optimizer=parts["optimizer"])
            report = bus.resume(tmp_path, aliases={"encoder": "model"}).report
            assert report.sections["encoder"].status == "restored"
            assert report.sections["encoder"].bytes == 36
            assert "model" not in report.sections
            told = "encoder: restored from section 'model', its former name"
            assert report.notes == ([told] if step == 2 else [])
            for before, now in zip(
                saved["model"].parameters(), parts["model"].parameters(), strict=True
            ):
                assert torch.equal(before, now)
                state, live = saved["optimizer"].state[before], parts["optimizer"].state[now]
                assert all(torch.equal(state[each], live[each]) for each in state)
            bus.save(step=step)
    assert set(hookbus.checkpoints(tmp_path)[-1].sections) >= {"encoder", "optimizer"}
    assert "model" not in hookbus.checkpoints(tmp_path)[-1].sections


def test_an_alias_that_does_nothing_since_both_are_there_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, plugins = save(tmp_path, a=1.0, b=2.0), {"a": Kept(), "b": Kept()}
    report = resume(run, plugins, aliases={"a": "b", "b": "a"})
    assert (plugins["a"].value, plugins["b"].value) == (1.0, 2.0)
    assert report.notes == [
        "aliases={'a': 'b'} does nothing: 'a' is there too",
        "aliases={'b': 'a'} does nothing: 'b' is there too",
    ]
    assert all(note in caplog.text for note in report.notes)


def test_an_alias_that_another_plugin_bears_is_named_where_the_section_is_missing(
    tmp_path: Path,
) -> None:
    run, plugins = save(tmp_path, b=2.0), {"b": Kept(), "c": Kept()}
    [error] = refuse(run, plugins, aliases={"c": "b"})
    assert str(error).endswith("; its alias 'b' is the section of another plugin on the bus")


def test_a_plugin_knows_its_own_former_names(tmp_path: Path) -> None:
    run, plugin = save(tmp_path, older=4.0), Kept(0.0, "old", "older")
    report = resume(run, {"new": plugin})
    assert plugin.value == 4
    assert report.notes == ["new: restored from section 'older', its former name"]


def test_own_sections_come_before_former_names(tmp_path: Path) -> None:
    """All of one class have the same former names, which must not come between them."""
    run = save(tmp_path, ema=1.0, slow=2.0)
    plugins = {"ema": Kept(0.0, "ema"), "slow": Kept(0.0, "ema")}
    assert resume(run, plugins).notes == []
    assert [each.value for each in plugins.values()] == [1, 2]


def test_a_section_may_be_called_by_either_name_where_it_is_chosen(tmp_path: Path) -> None:
    run, aliases = save(tmp_path / "run", old=3.0), {"new": "old"}
    for word in ("old", "new", "n*"):
        plugins = {"new": Kept()}
        report = resume(run, plugins, aliases=aliases, skip=(word,))
        assert report.sections["new"].status == "skipped"
        assert plugins["new"].value == 0
        resume(run, plugins, aliases=aliases, stage="test", only=(word,))
        assert plugins["new"].value == 3
        plugins = {"new": Kept()}
        warm = {"init_from": run, "init_only": (word,)}
        report = resume(tmp_path / f"warm {word[0]}", plugins, aliases=aliases, **warm)
        assert plugins["new"].value == 3
        assert report.fresh


def test_what_is_read_under_a_former_name_is_verified_first(tmp_path: Path) -> None:
    run = save(tmp_path, old=3.0)
    with (run / "step-00000001" / "old.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    plugins = {"new": Kept(0.0, "old")}
    with pytest.raises(CorruptCheckpointError, match=r"old\.safetensors"):
        resume(run, plugins, stage="test")
    assert plugins["new"].value == 0


def test_an_old_state_under_a_former_name_is_migrated(tmp_path: Path) -> None:
    class Double(Kept):
        @hookbus.migrate("kept", 1, 2)
        def double(self, state: torch.Tensor) -> torch.Tensor:
            return state * 2

    run, plugin = save(tmp_path, old=3.0), Double()
    report = resume(run, {"new": plugin}, aliases={"new": "old"})
    assert plugin.value == 6
    assert report.notes == [
        "new: migrated from version 1 to 2: 1 → 2 by double",
        "new: restored from section 'old', its former name",
    ]


def test_an_alias_of_nobody_is_noted(tmp_path: Path) -> None:
    run = save(tmp_path, old=3.0)
    report = resume(run, {"old": Kept()}, aliases={"nwe": "old"})
    assert report.notes == ["aliases={'nwe': …} names nobody on the bus that saves"]


# -- what is refused ----------------------------------------------------------------------------


def test_a_missing_section_names_the_one_that_nobody_reads_and_the_argument_to_pass(
    tmp_path: Path,
) -> None:
    run, plugins = save(tmp_path, model=3.0, other=1.0), {"encoder": Kept(), "other": Kept()}
    missing, unclaimed = refuse(run, plugins)
    assert isinstance(missing, MissingSectionError)
    assert str(missing) == (
        f"plugin 'encoder' is on the bus and {run / 'step-00000001'} has no section 'encoder'; pass"
        " missing_ok=('encoder',) to start it fresh; nobody reads 'model' of the same kind: if it"
        " is the same under a former name, pass aliases={'encoder': 'model'}"
    )
    assert "a section 'model'" in str(unclaimed)
    resume(run, plugins, aliases={"encoder": "model"})
    assert plugins["encoder"].value == 3


def test_what_cannot_be_meant_is_not_suggested(tmp_path: Path) -> None:
    """Another kind, what is left out, and what somebody else reads."""
    run, plugins = save(tmp_path, a=1.0, b=2.0), {"a": Kept(), "new": Kept()}
    (missing,) = refuse(run, plugins, skip=("b",))
    assert str(missing).endswith("to start it fresh")
    plugins["new"].kind = "another"
    assert str(refuse(run, plugins)[0]).endswith("to start it fresh")
    plugins["new"].kind = "kept"
    run = save(tmp_path / "more", a=1.0, nw=2.0, c=3.0)
    assert "nobody reads 'nw' and 'c' of the same kind" in str(refuse(run, plugins)[0])
    assert str(refuse(run, plugins)[0]).endswith("pass aliases={'new': 'nw'}")


def test_both_names_in_a_checkpoint_are_refused_with_the_way_out(tmp_path: Path) -> None:
    run, plugins = save(tmp_path, new=1.0, old=2.0), {"new": Kept()}
    for options in ({"aliases": {"new": "old"}}, {}):
        plugins["new"].aliases = () if options else ("old",)
        problems = refuse(run, plugins, **options)
        assert isinstance(problems[0], MismatchError)
        assert str(problems[0]) == (
            f"plugin 'new' has the sections 'new' and 'old' in {run / 'step-00000001'}, its own and"
            " a former name, and reads one of them; pass skip= with those that are not meant, such"
            " as skip=('old',)"
        )
        resume(run, plugins, skip=("old",), **options)
        assert plugins["new"].value == 1
        plugins["new"].tensor.zero_()


def test_a_former_name_of_two_is_refused_with_the_way_out(tmp_path: Path) -> None:
    run = save(tmp_path, old=2.0)
    plugins = {"a": Kept(0.0, "old"), "b": Kept(0.0, "old")}
    (problem,) = refuse(run, plugins)
    assert str(problem) == (
        "section 'old' is a former name of both 'a' and 'b'; say whose it is, and which of them is"
        " new: aliases={'a': 'old'}, missing_ok=('b',)"
    )
    resume(run, plugins, aliases={"a": "old"}, missing_ok=("b",))
    assert [each.value for each in plugins.values()] == [2, 0]


def test_a_former_name_that_another_plugin_bears_is_that_ones(tmp_path: Path) -> None:
    run, plugins = save(tmp_path, old=2.0), {"old": Kept(), "new": Kept()}
    (missing,) = refuse(run, plugins, aliases={"new": "old"})
    assert "has no section 'new'" in str(missing)
    resume(run, plugins, aliases={"new": "old"}, missing_ok=("new",))
    assert [each.value for each in plugins.values()] == [2, 0]


@pytest.mark.parametrize("aliases", [("new", "old"), "old", {"new": ("old",)}, {1: "old"}, None])
def test_aliases_are_a_dict_of_names(tmp_path: Path, aliases: Any) -> None:
    with pytest.raises(CallError, match=r'pass a dict of .*\{"encoder": "model"\}'):
        resume(tmp_path, {}, aliases=aliases)
    plugin = copy.copy(Kept())
    plugin.aliases = "old"  # type: ignore[assignment]
    with pytest.raises(TypeError, match="aliases = 'old': pass a tuple"):
        make_bus(new=plugin)
