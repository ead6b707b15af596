"""What was saved in each format since the first is loaded for ever, bit for bit.

`golden/make.py` makes the folder of a format, once. Where a test here fails, people's checkpoints
can no longer be read: mend the reader, never the folder.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from golden.make import HERE, Run, describe, hash_sections, make, make_leaves

import hookbus
from hookbus.checkpoint.kinds import DECODERS
from hookbus.checkpoint.manifest import FORMAT
from hookbus.checkpoint.nodes import LEAVES
from hookbus.checkpoint.tensor_info import STORED
from hookbus.checkpoint.torch_kinds import TORCH_DECODERS

FORMATS = range(1, FORMAT + 1)
LEAVES_OF = {1: make_leaves}

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Sparse .* is in beta"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per"),
]


def find_folder(number: int) -> Path:
    folder = HERE / f"format_{number}"
    assert folder.is_dir(), f"format {number} has no golden checkpoints: run {HERE / 'make.py'}"
    return folder


def open_golden(number: int, run: str) -> hookbus.Checkpoint:
    (checkpoint,) = hookbus.checkpoints(find_folder(number) / run)
    return checkpoint


def test_every_format_has_its_golden_checkpoints_and_no_other() -> None:
    assert sorted(path.name for path in HERE.glob("format_*")) == sorted(
        f"format_{number}" for number in FORMATS
    )
    assert list(LEAVES_OF) == list(FORMATS)


@pytest.mark.parametrize("number", FORMATS)
def test_every_kind_of_leaf_is_read_bit_for_bit(number: int) -> None:
    checkpoint, state = open_golden(number, "leaves"), LEAVES_OF[number]()
    text = json.loads((checkpoint.path / "manifest.json").read_text())
    assert text["format"] == number
    checkpoint.verify()
    assert describe(checkpoint.read("leaves")) == describe(state)
    assert (checkpoint.step, checkpoint.tag) == (3, "golden")
    assert describe(checkpoint.metrics) == describe(
        {"loss": 0.1, "worst": float("inf"), "none": float("nan"), "count": 2**70}
    )


@pytest.mark.parametrize("number", FORMATS)
def test_every_kind_of_leaf_is_read_in_place(number: int) -> None:
    checkpoint, live = open_golden(number, "leaves"), LEAVES_OF[number]()
    expected = describe(live)
    dense = [*live["dtypes"].values(), *live["tensors"]["shared"][:1]]
    names = {name: value for name, value in live.items() if name not in ("sparse", "numpy")}
    with torch.no_grad():
        for tensor in dense:
            tensor.view(torch.uint8).zero_()
    assert describe(live) != expected
    checkpoint.read_into("leaves", names, partial=True)
    assert describe(live) == expected


@pytest.mark.parametrize("number", FORMATS)
def test_a_golden_run_is_restored_and_goes_on(number: int, tmp_path: Path) -> None:
    """Its versions and its machine are others by now, so how it ends is not compared."""
    shutil.copytree(find_folder(number) / "run", tmp_path / "run")
    (checkpoint,) = hookbus.checkpoints(tmp_path / "run")
    expected = json.loads((find_folder(number) / "expected.json").read_text())
    assert hash_sections(checkpoint) == expected
    run = Run(seed=2)
    with hookbus.HookBus() as bus:
        run.attach(bus)
        report = bus.resume(tmp_path / "run").report
        assert {each.status for each in report.sections.values()} == {"restored"}
        assert (run.loop.step, run.loop.epoch, run.loop.batch) == (9, 1, 3)
        assert run.average["updates"] == 9
        compare_with_checkpoint(run, checkpoint)
        steps: list[int] = []
        run.train(lambda: steps.append(run.loop.step))
    assert steps == list(range(10, 19))


def compare_with_checkpoint(run: Run, checkpoint: hookbus.Checkpoint) -> None:
    """Hold what is alive to the bits of the file, read by themselves."""
    saved = checkpoint.read("model")
    assert describe(dict(run.model.state_dict())) == describe(saved)
    assert describe(run.average) == describe(checkpoint.read("average"))
    state = checkpoint.read("optimizer")[0]["state"]
    live = {
        f"model.{name}": dict(run.optimizer.state[parameter])
        for name, parameter in run.model.named_parameters()
    }
    assert describe(live) == describe(state)
    assert run.scheduler.last_epoch == 1
    streams = checkpoint.read("rng")["now"]
    assert describe(torch.get_rng_state()) == describe(streams["torch"])
    noise = checkpoint.read("noise")["now"]
    assert describe(run.noise.get_state()) == describe(next(iter(noise.values())))


def test_the_leaves_hold_everything_that_is_stored() -> None:
    """Whoever stores another kind of value puts it into the golden checkpoints of its format."""
    text = (open_golden(FORMAT, "leaves").path / "manifest.json").read_text()
    missing = [tag for tag in (*DECODERS, *TORCH_DECODERS, *LEAVES) if f'"{tag}":' not in text]
    assert not missing
    assert not [name for name in STORED if f'"dtype":"{name}"' not in text]


def test_what_is_written_today_is_what_the_golden_checkpoints_hold(tmp_path: Path) -> None:
    """A writer that writes something else writes another format: give it the next number."""
    torch.set_num_threads(1)
    make(tmp_path / "made")
    golden, (made,) = open_golden(FORMAT, "leaves"), hookbus.checkpoints(tmp_path / "made/leaves")
    files = [path.name for path in golden.path.iterdir()]
    assert sorted(files) == sorted(path.name for path in made.path.iterdir())
    for name in files:
        if name != "manifest.json":
            assert (made.path / name).read_bytes() == (golden.path / name).read_bytes(), name
    old, new = (json.loads((each.path / "manifest.json").read_text()) for each in (golden, made))
    for each in (old, new):  # what every save has its own of
        for key in ("run_id", "created", "settings", "versions", "seal"):
            each.pop(key)
        for section in each["sections"].values():
            section.pop("distribution_version")
    assert new == old
    for name, section in open_golden(FORMAT, "run").sections.items():
        assert hookbus.checkpoints(tmp_path / "made/run")[0].sections[name].parts == section.parts
