"""What has not changed since the last checkpoint is not written again: the two share its file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import to_bits
from keepers import make_bus
from torch import nn

import builtin_plugins
import hookbus
from hookbus.checkpoint import files
from hookbus.errors import CorruptCheckpointError


class Pair:
    """Saves a big part and a small one."""

    def __init__(self) -> None:
        self.big, self.small = {"w": torch.rand(40_000)}, {"w": torch.rand(20_000)}

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self.big, part="big")
        save.write(self.small, part="small")


class Keeper:
    def __init__(self) -> None:
        self.tensor = torch.zeros(20_000)

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self.tensor)

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        resume.read_into(self.tensor)


def number(path: Path) -> int:
    return path.stat().st_ino


@pytest.mark.parametrize("wait", [True, False])
def test_only_what_has_changed_is_written(wait: bool, tmp_path: Path) -> None:
    pair = Pair()
    with make_bus(pair=pair) as bus:
        bus.resume(tmp_path)
        bus.save(step=1, wait=wait)
        pair.small["w"] += 1
        bus.save(step=2, wait=wait)
        pair.big["w"][-1] += 1
        bus.save(step=3, wait=wait)
    first, second, third = (each.path for each in hookbus.checkpoints(tmp_path))
    assert number(first / "pair.big.safetensors") == number(second / "pair.big.safetensors")
    assert number(first / "pair.small.safetensors") != number(second / "pair.small.safetensors")
    assert number(second / "pair.big.safetensors") != number(third / "pair.big.safetensors")
    assert number(second / "pair.small.safetensors") == number(third / "pair.small.safetensors")
    for path in (first, second, third):
        hookbus.open(path).verify()
    assert to_bits(hookbus.open(third).read("pair", "big")) == to_bits(pair.big)
    assert to_bits(hookbus.open(third).read("pair", "small")) == to_bits(pair.small)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(w=state["w"].double()),
        lambda state: state.update(w=state["w"].view(200, 200)),
        lambda state: state.update(v=state["w"].clone()),
        lambda state: state.update(w=state["w"].view(torch.int32)),
        lambda state: state.update(v=state.pop("w")),
        lambda state: state["w"].view(torch.int32)[20_000:20_001].bitwise_xor_(1),
    ],
)
def test_a_tensor_of_another_kind_or_a_single_bit_is_a_change(change: Any, tmp_path: Path) -> None:
    pair = Pair()
    with make_bus(pair=pair) as bus:
        bus.resume(tmp_path)
        first = bus.save(step=1)
        change(pair.big)
        second = bus.save(step=2)
    assert number(first.path / "pair.big.safetensors") != number(
        second.path / "pair.big.safetensors"
    )
    second.verify()
    assert to_bits(second.read("pair", "big")) == to_bits(pair.big)


def test_plain_values_may_change_where_the_tensors_stay(tmp_path: Path) -> None:
    pair = Pair()
    pair.big["count"] = 1
    with make_bus(pair=pair) as bus:
        bus.resume(tmp_path)
        bus.save(step=1)
        pair.big["count"] = 2
        bus.save(step=2)
    counts = [each.read("pair", "big")["count"] for each in hookbus.checkpoints(tmp_path)]
    assert counts == [1, 2]


def test_a_resumed_run_shares_with_what_it_was_resumed_from(tmp_path: Path) -> None:
    keeper = Keeper()
    with make_bus(a=keeper) as bus:
        bus.resume(tmp_path)
        first = bus.save(step=1)
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path)
        second = bus.save(step=2)
    assert number(first.path / "a.safetensors") == number(second.path / "a.safetensors")


def test_a_small_file_stands_alone(tmp_path: Path) -> None:
    keeper = Keeper()
    keeper.tensor = torch.zeros(10_000)
    with make_bus(a=keeper) as bus:
        bus.resume(tmp_path)
        saved = [bus.save(step=1), bus.save(step=2)]
    assert len({number(each.path / "a.safetensors") for each in saved}) == 2


@pytest.mark.parametrize("gone", [0, 1])
def test_deleting_one_leaves_the_other_whole(gone: int, tmp_path: Path) -> None:
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path)
        saved = [bus.save(step=1), bus.save(step=2)]
    shutil.rmtree(saved[gone].path)
    saved[1 - gone].verify()
    assert saved[1 - gone].read("a").count_nonzero() == 0


def test_damage_of_a_shared_file_is_damage_of_all_and_said_so(tmp_path: Path) -> None:
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path)
        saved = [bus.save(step=1), bus.save(step=2)]
    file = saved[0].path / "a.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    with file.open("r+b") as opened:
        opened.write(data)
    for each in saved:
        with pytest.raises(CorruptCheckpointError) as caught:
            each.verify()
        assert "(2 checkpoints share this file, and all of them are damaged)" in str(caught.value)


@pytest.mark.parametrize("trouble", ["no links", "gone", "cut short", "no manifest"])
def test_where_nothing_can_be_shared_it_is_written(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path)
        first = bus.save(step=1)
        if trouble == "no links":
            monkeypatch.setattr(files, "link_file", lambda path, target: False)
        elif trouble == "gone":
            shutil.rmtree(first.path)
        elif trouble == "cut short":
            os.truncate(first.path / "a.safetensors", 9)
        else:
            (first.path / "manifest.json").unlink()
            first.close()
        second = bus.save(step=2)
    second.verify()
    assert (second.path / "a.safetensors").stat().st_nlink == 1


# -- frozen parameters --------------------------------------------------------------------------


def make_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 3))
    model[0].requires_grad_(False)
    return model


def test_what_is_left_out_cannot_be_kept_apart() -> None:
    with pytest.raises(hookbus.errors.CallError) as caught:
        builtin_plugins.Model(make_model(), trainable_only=True, frozen_apart=True)
    assert str(caught.value) == (
        "frozen_apart keeps what trainable_only leaves out; pass one of them"
    )


def test_a_frozen_backbone_is_stored_once(tmp_path: Path) -> None:
    model = make_model()
    plugin = builtin_plugins.Model(model, frozen_apart=True)
    with hookbus.HookBus() as bus:
        bus.register(plugin, "model")
        bus.resume(tmp_path)
        first = bus.save(step=1)
        with torch.no_grad():
            model[1].weight.add_(1)
        second = bus.save(step=2)
    backbone = [each.path / "model.frozen.safetensors" for each in (first, second)]
    assert number(backbone[0]) == number(backbone[1])
    assert backbone[0].stat().st_size > 9 * (second.path / "model.safetensors").stat().st_size
    assert list(second.read("model")) == ["1.weight", "1.bias"]
    records = [each for each in hookbus.history(tmp_path) if each["event"] == "save"]
    assert records[0]["written"] == records[0]["bytes"] == records[1]["bytes"]
    assert records[1]["written"] < records[1]["bytes"] / 9


def resume_model(model: nn.Module, run: Path, *, apart: bool) -> hookbus.HookBus:
    bus = hookbus.HookBus()
    bus.register(builtin_plugins.Model(model, frozen_apart=apart), "model")
    bus.resume(run)
    return bus


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_both_ways_to_store_it_read_each_other(before: bool, after: bool, tmp_path: Path) -> None:
    saved, live = make_model(), make_model()
    with resume_model(saved, tmp_path, apart=before) as bus:
        bus.save(step=1)
    resume_model(live, tmp_path, apart=after).close()
    assert to_bits(live.state_dict()) == to_bits(saved.state_dict())


def test_a_frozen_layer_of_another_shape_is_named(tmp_path: Path) -> None:
    saved, live = make_model(), make_model()
    live[0] = nn.Linear(200, 201).requires_grad_(False)
    with resume_model(saved, tmp_path, apart=True) as bus:
        bus.save(step=1)
    with pytest.raises(hookbus.errors.MismatchError, match=r"0\.weight saved \[200, 200\]"):
        resume_model(live, tmp_path, apart=True)


def test_damage_is_not_handed_on_while_the_right_bytes_are_here(tmp_path: Path) -> None:
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path)
        first = bus.save(step=1)
        file = first.path / "a.safetensors"
        with file.open("r+b") as opened:
            opened.seek(-1, os.SEEK_END)
            opened.write(b"\1")
        second = bus.save(step=2)
    second.verify()
    with pytest.raises(CorruptCheckpointError):
        first.verify()
