"""Bytes that change on the disk are found, whichever they are, and a run goes on from what is good.

A run of three checkpoints of a real training is damaged at random: a bit, a cut, bytes at the end.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch
from exact import Parts, run_bus, seed
from scenes import training_scene

import hookbus
from builtin_plugins import Loop
from hookbus.errors import CorruptCheckpointError

BUILD = training_scene(torch.optim.AdamW, ema=True)
PLACES = [("body", 0, 2), ("tail", 0, 0), ("body", 1, 3)]
NAMES = ["step-00000002", "step-00000004", "step-00000007"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    run = tmp_path_factory.mktemp("saved") / "run"
    run_bus(BUILD, run, saves=PLACES)
    assert sorted(path.name for path in run.glob("step-*")) == NAMES
    return run


def damage(path: Path, chance: random.Random) -> str:
    """DiskChange a file in one way; say how."""
    data = bytearray(path.read_bytes())
    match chance.choice(["flip", "cut", "append"]):
        case "flip":
            at = chance.randrange(8 * len(data))
            data[at // 8] ^= 1 << at % 8
            how = f"bit {at}"
        case "cut":
            size = chance.randrange(len(data))
            del data[size:]
            how = f"cut to {size}"
        case _:
            more = chance.randbytes(chance.randint(1, 16))
            data += more
            how = f"{more!r} more"
    path.unlink()  # it is linked from the saved one
    path.write_bytes(data)
    return f"{path.parent.name}/{path.name}: {how}"


@attrs.frozen
class Trainee:
    """What a resume restores, built once: each resume puts all of it back."""

    parts: Parts

    def resume(self, run: Path) -> hookbus.Resume:
        with hookbus.HookBus() as bus:
            bus.attach(**self.parts.attached, loop=Loop())
            return bus.resume(run)


def is_found(path: Path) -> bool:
    try:
        hookbus.open(path).verify()
    except CorruptCheckpointError:
        return True
    return False


def rot(saved: Path, folder: Path, number: int) -> Iterator[str]:
    """Damage copies of a run, one or several of its checkpoints at once; yield what went wrong."""
    chance = random.Random(number)
    seed(99)
    trainee = Trainee(BUILD())
    digests = {name: restore(trainee, saved, folder, name) for name in NAMES}
    done = 0
    while done < number:
        run = folder / "run"
        shutil.copytree(saved, run, copy_function=os.link)
        bad = chance.sample(NAMES, chance.choice([1, 1, 1, 2, 3]))
        told = "; ".join(
            damage(chance.choice(sorted((run / name).iterdir())), chance) for name in bad
        )
        done += len(bad)
        good = [name for name in NAMES if name not in bad]
        if [name for name in NAMES if is_found(run / name)] != [n for n in NAMES if n in bad]:
            yield f"verify: {told}"
        before = trainee.parts.digest()
        try:
            resume = trainee.resume(run)
        except CorruptCheckpointError as error:
            if good or not str(error).endswith("nothing was moved"):
                yield f"resume: {told}: {error}"
            if trainee.parts.digest() != before or not set(NAMES) <= set(os.listdir(run)):
                yield f"changed: {told}"
        else:
            if not good or resume.checkpoint.path.name != good[-1]:
                yield f"another one: {told}"
            elif trainee.parts.digest() != digests[good[-1]]:
                yield f"other bits: {told}"
            newer = [name for name in bad if good and name > good[-1]]
            aside = {name for name in os.listdir(run) if name.startswith("damaged-")}
            if aside != {f"damaged-{name}" for name in newer}:
                yield f"moved {aside}: {told}"
        shutil.rmtree(run)


def restore(trainee: Trainee, saved: Path, folder: Path, name: str) -> list[object]:
    """Return every bit after a resume from one checkpoint alone."""
    run = folder / f"only-{name}"
    run.mkdir()
    shutil.copytree(saved / name, run / name)
    trainee.resume(run)
    return trainee.parts.digest()


@pytest.mark.parametrize(
    "number", [100, pytest.param(1000, marks=pytest.mark.sweep)], ids="{} damages".format
)
def test_any_damage_is_found_and_the_newest_good_one_is_taken(
    number: int, saved: Path, tmp_path: Path
) -> None:
    """Source: pytorch/torchtitan#4011; facebookresearch/metaseq#158."""
    assert list(rot(saved, tmp_path, number)) == []


def test_a_reader_that_does_not_hash_is_caught(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = hookbus.Checkpoint.verify
    monkeypatch.setattr(
        hookbus.Checkpoint, "verify", lambda self, *rest, **_: verify(self, *rest, hashes=False)
    )
    assert any(text.startswith("verify: ") for text in rot(saved, tmp_path, 60))


def test_a_fallback_to_any_older_one_is_caught(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = hookbus.fallback.choose_older
    monkeypatch.setattr(  # of all that are older, the oldest
        "hookbus.fallback.choose_older",
        lambda path: choose(path if path.name == NAMES[0] else path.with_name(NAMES[1])),
    )
    assert any(text.startswith("another one: ") for text in rot(saved, tmp_path, 60))
