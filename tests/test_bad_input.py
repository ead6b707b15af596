"""Wrong arguments, wrong moments and refusing disks: an error that says so, and nothing changed."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from exact import digest, seed
from keepers import Keeper, make_bus
from scenes import make_loader
from torch import nn

import hookbus
from builtin_plugins import Loop
from hookbus.errors import (
    BusError,
    CallError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    HookbusError,
    LoopError,
    ManyErrors,
    MismatchError,
    MissingSectionError,
    NameTakenError,
    ResumeError,
    RunLockedError,
    SamplerError,
    SaveError,
    StateError,
    UnattachedError,
    UnclaimedSectionError,
    WriteError,
)

torch.set_num_threads(1)


def read_folder(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# -- arguments ----------------------------------------------------------------------------------

OPTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"onyl": ()},
        "resume() has no argument 'onyl'; there are step, stage, only, skip, missing_ok, aliases,"
        " init_from, init_only, setup, configure_sharded, verify, fallback",
    ),
    ({"skip": "rng"}, "skip='rng': pass a tuple of names, such as ('rng',)"),
    ({"missing_ok": "rng"}, "missing_ok='rng': pass a tuple of names, such as ('rng',)"),
    ({"init_only": "model"}, "init_only='model': pass a tuple of names, such as ('model',)"),
    ({"only": "rng", "stage": "test"}, "only='rng': pass a tuple of names, such as ('rng',)"),
    ({"skip": 5}, "skip=5: pass a tuple of names or shell patterns"),
    ({"skip": None}, "skip=None: pass a tuple of names or shell patterns"),
    ({"skip": (1,)}, "skip=(1,): pass a tuple of names or shell patterns"),
    ({"stage": "train"}, "stage='train': pass one of fit, validate, test, predict"),
    ({"verify": "no"}, "verify='no': pass one of hashes, sizes"),
    ({"step": -1}, "step=-1: pass a whole number of steps, or None"),
    ({"step": True}, "step=True: pass a whole number of steps, or None"),
    ({"step": 1.5}, "step=1.5: pass a whole number of steps, or None"),
    ({"fallback": "no"}, "fallback='no': pass one of True, False"),
    ({"setup": 3}, "setup=3: pass a function that takes the resume"),
    ({"configure_sharded": "x"}, "configure_sharded='x': pass a function that takes the resume"),
    ({"init_from": 3}, "init_from=3: pass a path, as a str or pathlib.Path"),
    ({"only": ("a",)}, 'only= is for the stages "validate", "test", "predict"; pass skip='),
    ({"init_from": "x", "step": 1}, 'init_from= is for stage="fit" without step='),
    ({"init_from": "x", "stage": "test"}, 'init_from= is for stage="fit" without step='),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("way", ["resume", "resuming", "prepare"])
def test_a_wrong_option_is_refused_by_every_way_to_resume(
    way: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    def resume() -> None:
        made = getattr(bus, way)(tmp_path / "run", **options)
        with made if way == "resuming" else contextlib.nullcontext():
            pass

    with make_bus() as bus, pytest.raises(CallError) as caught:
        resume()
    assert str(caught.value) == message
    assert isinstance(caught.value, TypeError)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "there is no loop on the bus that counts; pass save(step=…)"),
        ({"step": -1}, "step=-1: pass a whole number of steps"),
        ({"step": True}, "step=True: pass a whole number of steps"),
        ({"step": "7"}, "step='7': pass a whole number of steps"),
        ({"step": 4}, "step=4 is below the newest checkpoint's, 5"),
        ({"step": 6, "metrics": 1}, "metrics=1: pass a dict of names and numbers"),
        ({"step": 6, "metrics": {1: 1}}, "metrics: 1 is no name; pass a str"),
        ({"step": 6, "metrics": {"x": "1"}}, "metrics['x']: str is no number"),
        ({"step": 6, "metrics": {"x": torch.zeros(3)}}, "metrics['x']: Tensor is no number"),
    ],
)
def test_a_wrong_argument_of_save_writes_nothing(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path)
        bus.save(step=5)
        with pytest.raises(CallError) as caught:
            bus.save(**arguments)
        assert str(caught.value) == message
        assert [each.step for each in hookbus.checkpoints(tmp_path)] == [5]


def test_all_wrong_metrics_are_named_and_numbers_of_every_kind_are_taken(tmp_path: Path) -> None:
    with make_bus() as bus:
        bus.resume(tmp_path)
        with pytest.raises(ManyErrors) as caught:
            bus.save(step=1, metrics={"a": [], "b": {}})
        assert str(caught.value).splitlines() == [
            "metrics cannot be saved:",
            "  - CallError: metrics['a']: list is no number",
            "  - CallError: metrics['b']: dict is no number",
        ]
        checkpoint = bus.save(step=1, metrics={"a": torch.ones(1), "b": True, "c": 2})
    assert checkpoint is not None
    assert checkpoint.metrics == {"a": 1.0, "b": 1.0, "c": 2}


def test_beside_a_loop_the_step_is_the_loop_s(tmp_path: Path) -> None:
    with hookbus.HookBus() as bus:
        bus.attach(loop=Loop())
        bus.resume(tmp_path)
        with pytest.raises(CallError) as caught:
            bus.save(step=1)
        assert str(caught.value) == "step= is for scripts without a loop; the loop counts its own"


# -- sections that do not fit -------------------------------------------------------------------


def build(width: int) -> dict[str, Any]:
    seed(width)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
    other = nn.Linear(width, 1)
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tensor = torch.ones(width)
    return {"model": model, "other": other, "optimizer": optimizer, "tensor": tensor}


def test_all_problems_of_all_plugins_are_raised_together_before_the_first_change(
    tmp_path: Path,
) -> None:
    with hookbus.HookBus() as bus:
        bus.attach(**build(4), gone={})
        bus.resume(tmp_path)
        bus.save(step=1)
    live = build(5)
    with hookbus.HookBus() as bus:
        bus.attach(**live, new={})
        before, folder = digest(live), read_folder(tmp_path)
        # What needs no setup is looked at before it, models and optimizers after it.
        for options, names in (
            ({}, ("'new'", "'gone'", "tensor")),
            (
                {"skip": ("gone", "tensor"), "missing_ok": ("new",)},
                ("model", "other", "optimizer"),
            ),
        ):
            with pytest.raises(ManyErrors) as caught:
                bus.resume(tmp_path, **options)
            problems = caught.value.exceptions
            assert str(caught.value).splitlines() == [
                "3 problems were found, and nothing was changed:",
                *(f"  - {type(problem).__name__}: {problem}" for problem in problems),
            ]
            for name, problem in zip(names, problems, strict=True):
                assert name in str(problem)
            assert digest(live) == before
            assert torch.equal(live["tensor"], torch.ones(5))
            assert {p for p in read_folder(tmp_path).items() if "lock" not in p[0]} == {
                p for p in folder.items() if "lock" not in p[0]
            }
        with pytest.raises(SaveError, match="there is no run to save into"):
            bus.save(step=2)


def test_a_section_of_another_kind_of_thing_is_refused_in_its_own_words(tmp_path: Path) -> None:
    things = {"x": {"a": 1}}, {"x": nn.Linear(2, 2)}
    for i, (saved, live) in enumerate([things, things[::-1]]):
        run = tmp_path / str(i)
        with hookbus.HookBus() as bus:
            bus.attach(**saved)
            bus.resume(run)
            bus.save(step=1)
        with hookbus.HookBus() as bus:
            bus.attach(**live)
            with pytest.raises(MismatchError) as caught:
                bus.resume(run)
            kinds = ["Values, of kind 'state'", "Model, of kind 'model'"][:: -1 if i else 1]
            assert str(caught.value) == (
                f"section 'x' was saved by {kinds[0]}, and the run has {kinds[1]}; attach the same"
                " sort of thing, or pass skip=('x',)"
            )
            bus.resume(run, skip=("x",))


def test_several_errors_are_taken_apart_by_their_kinds() -> None:
    many = ManyErrors("both", [MismatchError("a"), StateError("b")])
    assert isinstance(many, HookbusError)
    mismatches, rest = many.split(MismatchError)
    assert str(mismatches) == "both:\n  - MismatchError: a"
    assert str(rest) == "both:\n  - StateError: b"


def test_a_plugin_that_reads_what_is_not_there_is_told_what_there_is(tmp_path: Path) -> None:
    class ReadsPart(Keeper):
        @hookbus.hookimpl
        def resume_start(self, resume: hookbus.Resume) -> None:
            if not resume.fresh:
                resume.metadata("more")

    class NoSection:
        @hookbus.hookimpl
        def resume_end(self, resume: hookbus.Resume) -> None:
            resume.read()

    with make_bus(a=ReadsPart()) as bus:
        bus.resume(tmp_path)
        bus.save(step=1)
        with pytest.raises(
            MissingSectionError, match=r"section 'a' of .* has no part 'more'; it has"
        ):
            bus.resume(tmp_path)
    with make_bus(a=Keeper(), b=NoSection()) as bus:
        with pytest.raises(ResumeError) as caught:
            bus.resume(tmp_path)
        assert str(caught.value) == "plugin 'b': its section is missing in this resume"
    with make_bus(b=NoSection()) as bus:
        with pytest.raises(ResumeError) as caught:
            bus.resume(tmp_path / "fresh")
        assert str(caught.value) == "plugin 'b': there is no checkpoint to read from"


# -- every kind at once: a typed error with the way out, and all is as it was ---------------------


def build_run(width: int = 4, make: Any = torch.optim.AdamW) -> dict[str, Any]:
    """Make components of a run that is saved after each step."""
    model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 1))
    optimizer = make(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "loader": make_loader("lazy memory"),
        "seen": {"loss": 0.5},
        "loop": Loop(),
    }


def train_run(parts: dict[str, Any], before_save: Callable[[], object], bus: Any) -> None:
    for x in parts["loop"].steps(parts["loop"].step + 2, parts["loader"]):
        parts["optimizer"].zero_grad()
        parts["model"](x / 18).square().sum().backward()
        parts["optimizer"].step()
        parts["scheduler"].step()
        before_save()
        bus.save()


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1 and 2, both in the middle of an epoch."""
    run, parts = tmp_path_factory.mktemp("saved"), build_run()
    with hookbus.HookBus() as bus:
        bus.attach(**parts)
        bus.resume(run)
        train_run(parts, lambda: None, bus)
    assert [each.step for each in hookbus.checkpoints(run)] == [1, 2]
    return run


@attrs.define
class Bad:
    """What is spoilt, what is done then, and the error with what it says."""

    error: type[HookbusError]
    words: tuple[str, ...]
    parts: Callable[[], dict[str, Any]] = build_run
    leave: tuple[str, ...] = ()  # not attached
    more: Callable[[], dict[str, Any]] = dict  # attached beside them
    spoil: Callable[[Path], object] = lambda run: None
    options: dict[str, Any] = attrs.Factory(dict)
    where: str = ""  # below the run
    then: str = "resume"


def flip_last_bit(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


BAD = {
    "a step that is not there": Bad(
        CheckpointNotFoundError,
        ("has no checkpoint of step 7; the nearest are 1, 2",),
        options={"step": 7},
    ),
    "a checkpoint's path as the run": Bad(
        CallError,
        ("is a checkpoint, not a run directory: pass ", "init_from="),
        where="step-00000002",
    ),
    "a half-written checkpoint": Bad(
        CorruptCheckpointError,
        ("manifest.json is missing, so ", "the newest good one is of step 1; to go on", "move "),
        options={"fallback": False},
        spoil=lambda run: (run / "step-00000002" / "manifest.json").unlink(),
    ),
    "a checkpoint cut short": Bad(
        CorruptCheckpointError,
        ("model.safetensors: has 9 bytes, saved were", "the newest good one is of step 1"),
        options={"fallback": False},
        spoil=lambda run: os.truncate(run / "step-00000002" / "model.safetensors", 9),
    ),
    "a damaged checkpoint": Bad(
        CorruptCheckpointError,
        (
            "rng.safetensors: tensor",
            "its hash is",
            "saved was",
            "the newest good one is of step 1",
        ),
        options={"fallback": False},
        spoil=lambda run: flip_last_bit(run / "step-00000002" / "rng.safetensors"),
    ),
    "a section of nobody": Bad(
        UnclaimedSectionError,
        (
            "section 'seen', written by plugin 'Values' (hookbus ",
            "attach it, or pass skip=('seen',)",
        ),
        leave=("seen",),
    ),
    "a plugin without a section": Bad(
        MissingSectionError,
        ("plugin 'new' (hookbus ", "has no section 'new'; pass missing_ok=('new',)"),
        more=lambda: {"new": {"a": 1}},
    ),
    "another shape": Bad(
        HookbusError,
        ("0.weight saved [4, 4] float32, run has [5, 4] float32", "strict=False"),
        parts=lambda: build_run(5),
    ),
    "another class of optimizer": Bad(
        MismatchError,
        (
            "optimizer: saved by torch.optim.adamw.AdamW, run has torch.optim.sgd.SGD; pass"
            " skip=('optimizer',)",
        ),
        parts=lambda: build_run(make=torch.optim.SGD),
    ),
    "a state that cannot be stored": Bad(
        StateError,
        ("plugin 'more' (hookbus ", "cannot be stored", "['x'][0]", "object"),
        more=lambda: {"more": {"x": [object()]}},
        options={"missing_ok": ("more",)},
        then="save",
    ),
    "a scheduler that nobody attached": Bad(
        UnattachedError,
        ("StepLR changes the lr of an attached optimizer", "bus.attach(scheduler=scheduler)"),
        leave=("scheduler",),
        options={"skip": ("scheduler",)},
        then="save",
    ),
    "an optimizer that nobody attached": Bad(
        UnattachedError,
        ("AdamW", "steps and is not on the bus", "bus.attach("),
        leave=("optimizer", "scheduler"),
        options={"init_from": "", "init_only": ("model",)},
        where="../new",
        then="train",
    ),
    "trained parameters of nothing attached": Bad(
        UnattachedError,
        (
            "optimizer: 2 of 6 parameters would be trained and never saved",
            "bus.attach(NAME=module)",
        ),
        then="grow and save",
    ),
    "a sampler that cannot be repeated": Bad(
        SamplerError,
        ("the indices of the 2 batches that are done are not those", "give the sampler state_dict"),
        then="train",
    ),
    "a loop on no bus": Bad(
        LoopError,
        ("steps(): this loop is on no open bus; add",),
        leave=("loop",),
        then="train without a resume",
    ),
    "two plugins of one name": Bad(
        NameTakenError,
        ("two components are named 'model': Sequential and Linear", "under another name"),
        then="attach twice",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_typed_error_with_the_way_out_and_all_is_as_it_was(
    name: str, saved_run: Path, tmp_path: Path
) -> None:
    bad, run = BAD[name], tmp_path / "run"
    shutil.copytree(saved_run, run)
    bad.spoil(run)
    seed(3)
    parts, more = bad.parts(), bad.more()
    live, second = {**parts, **more}, nn.Linear(2, 2)
    options = {**bad.options, **({"init_from": run} if "init_from" in bad.options else {})}

    def read() -> list[Any]:
        files = [(path, data) for path, data in read_folder(run).items() if "run." not in path]
        # Where the loop has begun, its streams have been put back.
        return [files, digest(live)[: -3 if bad.error is SamplerError else None]]

    with hookbus.HookBus() as bus:
        bus.attach(**{each: live[each] for each in live if each not in bad.leave})
        if bad.then not in ("resume", "train without a resume"):
            bus.resume(run / bad.where, **options)
        if bad.then == "grow and save":
            parts["optimizer"].add_param_group({"params": list(nn.Linear(3, 1).parameters())})
        before = [read()]
        act = {
            "resume": lambda: bus.resume(run / bad.where, **options),
            "save": lambda: bus.save(metrics={"asked": 1}),
            "grow and save": lambda: bus.save(metrics={"asked": 1}),
            "attach twice": lambda: bus.attach(model=second),
        }.get(bad.then, lambda: train_run(parts, lambda: before.append(read()), bus))
        with pytest.raises(bad.error) as caught:
            act()
        assert read() == before[-1]
    for words in bad.words:
        assert words in str(caught.value)


@contextlib.contextmanager
def refusing(folder: Path, mode: int) -> Iterator[None]:
    """Leave only ``mode`` of the rights in ``folder``, to root too, who is somebody else then."""
    user, group, before = os.geteuid(), os.getegid(), folder.stat().st_mode
    folder.chmod(mode)
    if user == 0:
        for above in folder.parents:
            if (open_to := above.stat().st_mode) & 0o011 != 0o011:
                above.chmod(open_to | 0o011)  # whoever it is must get there
        os.setegid(65534)
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        os.setegid(group)
        folder.chmod(before)


@pytest.mark.parametrize(
    "mode", [0o555, 0o444, 0o000], ids=["not written", "not entered", "closed"]
)
def test_a_folder_that_refuses_is_a_write_error_with_its_number_and_nothing_changed(
    mode: int, tmp_path: Path
) -> None:
    run, parts = tmp_path / "run", build_run()
    with hookbus.HookBus() as bus:
        bus.attach(**parts)
        bus.resume(run)
        path = bus.save(metrics={"x": 1}).path
        before = digest(parts), read_folder(run)

        def refuse(act: Callable[[], object]) -> None:
            with refusing(run, mode), pytest.raises(WriteError) as caught:
                act()
            assert caught.value.errno == errno.EACCES
            assert "Permission denied" in str(caught.value)
            assert str(run) in str(caught.value)
            assert (digest(parts), read_folder(run)) == before

        refuse(lambda: bus.save(metrics={"x": 2}))
        bus.save(metrics={"x": 2})  # the lock is still held, and the disk takes it again
        assert [each.metrics["x"] for each in hookbus.checkpoints(run)] == [1, 2]
        before = digest(parts), read_folder(run)
        with make_bus() as other:
            refuse(lambda: other.resume(run / "inside"))
            if mode != 0o555:  # it may be read
                refuse(lambda: other.resume(run, stage="test"))
                refuse(lambda: other.resume(tmp_path / "new", init_from=run))
                refuse(lambda: other.resume(tmp_path / "new", init_from=path))
                refuse(lambda: hookbus.open(path) if mode == 0 else other.resume(run))
        assert not (run / "inside").exists()


# -- states that cannot be stored ---------------------------------------------------------------


class Says:
    def __init__(self, state: object) -> None:
        self.state = state

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self.state)

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        self.state = resume.read()


def test_what_cannot_be_stored_names_plugin_path_and_type_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    """Source: Lightning-AI/pytorch-lightning#20058"""
    good = {"path": Path("a/b"), "wait": datetime.timedelta(seconds=1.5)}
    says = Says(good)
    with make_bus(options=says, other=Says([{1: {"x": object()}}]), fine=Keeper()) as bus:
        bus.resume(tmp_path)
        says.state = {**good, "args": [argparse.Namespace(lr=0.1)]}
        with pytest.raises(ManyErrors) as caught:
            bus.save(step=1)
        assert [type(each) for each in caught.value.exceptions] == [StateError] * 2
        lines = str(caught.value).splitlines()
        assert lines[0] == "nothing was saved:"
        for line, words in zip(
            lines[1:],
            (("plugin 'options'", "args", "Namespace"), ("plugin 'other'", "x", "object")),
            strict=True,
        ):
            assert all(word in line for word in words)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["run.jsonl", "run.lock"]
        says.state = good
        bus.unregister("other")
        bus.save(step=1)
        says.state = None
        bus.resume(tmp_path)
        assert says.state == good


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda save: (save.write(1), save.write(2)), "plugin 'p' wrote its state twice; pass"),
        (
            lambda save: (save.write(1, part="x"), save.write(2, part="x")),
            "plugin 'p' wrote part 'x' twice; pass another part=",
        ),
        (
            lambda save: save.write(1, part="a b"),
            "part='a b': up to 100 letters, digits, _ and - only",
        ),
        (lambda save: save.write(1, version=0), "version=0: pass a whole number from 1 up"),
    ],
)
def test_a_state_written_wrongly_is_refused(
    write: Callable[[hookbus.Save], Any], message: str, tmp_path: Path
) -> None:
    class Writes:
        @hookbus.hookimpl
        def save_state(self, save: hookbus.Save) -> None:
            write(save)

    with make_bus(p=Writes()) as bus:
        bus.resume(tmp_path)
        with pytest.raises(CallError) as caught:
            bus.save(step=1)
        assert str(caught.value).startswith(message)
        assert hookbus.checkpoints(tmp_path) == []


class Draws(Keeper):
    """Draws random numbers in every saving event, and may break in one of them."""

    def __init__(self, breaks: str | None = None) -> None:
        super().__init__()
        self.breaks = breaks

    def draw(self, event: str) -> None:
        random.random(), torch.rand(1)
        if event == self.breaks:
            raise KeyError(event)

    @hookbus.hookimpl
    def save_start(self) -> None:
        self.draw("save_start")

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        self.draw("save_state")

    @hookbus.hookimpl
    def save_end(self) -> None:
        self.draw("save_end")


@pytest.mark.parametrize("breaks", [None, "save_start", "save_state", "save_end"])
def test_a_plugin_that_draws_while_it_saves_or_breaks_there_leaves_the_streams_alone(
    breaks: str | None, tmp_path: Path
) -> None:
    with hookbus.HookBus() as bus:
        bus.register(Draws(breaks), "draws")
        bus.resume(tmp_path)
        seed(7)
        try:
            bus.save(step=1)
        except KeyError:
            assert breaks is not None
        after = digest({})
        seed(7)
        assert digest({}) == after
    assert len(hookbus.checkpoints(tmp_path)) == (breaks in (None, "save_end"))
    assert not list(tmp_path.glob(".step*"))


# -- disks --------------------------------------------------------------------------------------


def test_a_file_in_the_way_is_a_write_error_with_its_number_and_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "run" / "run.lock").mkdir(parents=True)
    for run, number, name in (
        (tmp_path / "file" / "run", errno.ENOTDIR, tmp_path / "file" / "run"),
        (tmp_path / "run", errno.EISDIR, tmp_path / "run" / "run.lock"),
    ):
        with make_bus() as bus, pytest.raises(WriteError) as caught:
            bus.resume(run)
        assert (caught.value.errno, caught.value.filename) == (number, str(name))
        assert isinstance(caught.value, OSError)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no right to mount a tmpfs here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_leaves_the_old_checkpoint_whole_and_nothing_behind(small_disk: Path) -> None:
    class Watches:
        def __init__(self) -> None:
            self.seen: list[tuple[int, bool, bool]] = []

        @hookbus.hookimpl
        def bytes_moved(self, transfer: hookbus.Transfer) -> None:
            assert transfer.done <= transfer.total
            self.seen.append((transfer.done, transfer.ended, transfer.failed))

    run, keeper, watches = small_disk / "run", Keeper(), Watches()
    with make_bus(a=keeper, watches=watches) as bus:
        bus.resume(run)
        bus.save(step=1)
        assert watches.seen == [(0, False, False), (12, False, False), (12, True, False)]
        before = read_folder(run)
        small, keeper.tensor = keeper.tensor, torch.zeros(2**20)
        with pytest.raises(WriteError) as caught:
            bus.save(step=2)
        assert caught.value.errno == errno.ENOSPC
        assert read_folder(run) == before
        assert watches.seen[-1][1:] == (True, True)
        keeper.tensor = small
        bus.save(step=2)  # there is room for a small one
    assert [each.step for each in hookbus.checkpoints(run)] == [1, 2]


# -- processes ----------------------------------------------------------------------------------


def test_a_run_in_use_by_another_process_is_refused_and_free_when_that_is_dead(
    tmp_path: Path,
) -> None:
    run, own = tmp_path / "run", tmp_path / "own"
    script = (
        "import sys, keepers; bus = keepers.make_bus(a=keepers.Keeper());"
        "bus.resume(sys.argv[1]); bus.save(step=1); print('ready', flush=True); sys.stdin.read()"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", script, str(run)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with make_bus(a=Keeper()) as bus:
            bus.resume(own)
            with pytest.raises(RunLockedError, match=f"is in use by process {child.pid} on ") as e:
                bus.resume(run)
            assert str(e.value).endswith("wait until it has ended, or pass another run directory")
            bus.save(step=1)  # a refused resume leaves the bus where it was
            assert [each.step for each in hookbus.checkpoints(own)] == [1]
            assert bus.resume(run, stage="test").step == 1  # reading asks for no lock
            child.send_signal(signal.SIGKILL)
            child.wait()
            assert bus.resume(run).step == 1


def test_the_newest_bus_of_a_process_takes_a_run_over(tmp_path: Path) -> None:
    old, new = make_bus(a=Keeper()), make_bus(a=Keeper())
    old.resume(tmp_path)
    old.save(step=1)
    new.resume(tmp_path)
    with pytest.raises(SaveError) as caught:
        old.save(step=2)
    said = f"a newer bus of this process took {tmp_path} over; save through that one"
    assert str(caught.value) == said
    old.close()
    new.save(step=2)  # the older one let nothing go that is not its own
    new.close()
    assert [each.step for each in hookbus.checkpoints(tmp_path)] == [1, 2]
    loop = Loop()
    old = hookbus.HookBus(block=("rng",))
    old.attach(loop=loop)
    old.resume(tmp_path / "loop")
    for _ in loop.epochs(1):
        old.save()
        hookbus.HookBus(block=("rng",)).resume(tmp_path / "loop")
        break
    with pytest.raises(SaveError, match="a newer bus of this process"):
        old.close()
    assert hookbus.checkpoints(tmp_path / "loop") == []


def run_forked(call: Callable[[], object]) -> str:
    """Call something in a forked child, and return what it raised."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                call()
                text = "nothing"
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            os.write(writing, text.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    return text


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_save(tmp_path: Path) -> None:
    loop = Loop()
    with hookbus.HookBus() as bus:
        bus.attach(loop=loop)
        bus.resume(tmp_path)
        text = run_forked(bus.save)
        assert text == (
            f"SaveError: this process was forked from {os.getpid()}, which saves; save there only"
        )
        for _ in loop.epochs(1):
            bus.save()
            assert run_forked(bus.close) == "nothing"  # what was asked for is the parent's to write
            assert hookbus.checkpoints(tmp_path) == []
        assert len(hookbus.checkpoints(tmp_path)) == 1
        assert run_forked(lambda: make_bus().resume(tmp_path)).startswith("RunLockedError: ")


# -- moments ------------------------------------------------------------------------------------


def test_a_save_before_a_resume_or_after_the_end_is_refused(tmp_path: Path) -> None:
    bus = make_bus(a=Keeper())
    no_run = "there is no run to save into: call bus.resume(RUN) first, also for a fresh start"
    with pytest.raises(SaveError) as caught:
        bus.save(step=1)
    assert str(caught.value) == no_run
    with bus.resuming(tmp_path), pytest.raises(SaveError) as caught:
        bus.save(step=1)
    assert str(caught.value) == no_run
    bus.save(step=1)
    bus.close()
    bus.close()
    with pytest.raises(SaveError) as caught:
        bus.save(step=2)
    assert str(caught.value) == "this bus was closed; save before close()"
    with pytest.raises(BusError) as closed:
        bus.resume(tmp_path)
    assert str(closed.value) == "this bus was closed; make a new one"


def test_a_save_from_another_thread_is_refused(tmp_path: Path) -> None:
    errors = []

    def call() -> None:
        try:
            bus.save(step=1)
        except SaveError as error:
            errors.append(str(error))

    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path)
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert errors == ["save() was called from another thread than resume(); call it there"]


def test_a_save_while_an_exception_is_handled_is_refused(tmp_path: Path) -> None:
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path)
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            with pytest.raises(SaveError) as caught:
                bus.save(step=1)
        assert str(caught.value) == (
            "save() was called while KeyboardInterrupt is being handled, so the batch in hand may"
            " be half done; the last checkpoint is whole"
        )
        bus.save(step=1)
        try:
            raise KeyError  # a script that starts over in an except clause
        except KeyError:
            bus.resume(tmp_path)
            bus.save(step=2)
    assert [each.step for each in hookbus.checkpoints(tmp_path)] == [1, 2]


@pytest.mark.parametrize(("leaves", "written"), [(SystemExit, 1), (KeyboardInterrupt, 0)])
def test_an_exit_writes_what_was_asked_for_and_an_error_nothing_new(
    leaves: type[BaseException], written: int, tmp_path: Path
) -> None:
    loop, bus = Loop(), hookbus.HookBus()

    def train() -> None:
        with bus:
            bus.attach(loop=loop)
            bus.resume(tmp_path)
            for _ in loop.epochs(2):
                bus.save()
                raise leaves

    with pytest.raises(leaves):
        train()
    assert len(hookbus.checkpoints(tmp_path)) == written
    with pytest.raises(SaveError, match="this bus was closed"):
        bus.save()
    with pytest.raises(LoopError):
        loop.epochs(2)
    make_bus().resume(tmp_path, skip=("*",))  # the run directory was let go


def test_a_resume_that_fails_leaves_no_run_to_save_into(tmp_path: Path) -> None:
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path / "a")
        bus.save(step=1)
        make_run = make_bus(b=Keeper())
        make_run.resume(tmp_path / "b")
        make_run.save(step=1)
        make_run.close()
        with pytest.raises(ManyErrors):
            bus.resume(tmp_path / "b")
        with pytest.raises(SaveError, match="there is no run to save into"):
            bus.save(step=2)
        bus.resume(tmp_path / "a")
        with pytest.raises(CheckpointNotFoundError):
            bus.resume(tmp_path / "b", step=7)
        with pytest.raises(SaveError, match="there is no run to save into"):
            bus.save(step=2)  # it holds the lock of neither
        bus.resume(tmp_path / "a")
        bus.save(step=2)
    assert [len(hookbus.checkpoints(tmp_path / name)) for name in "ab"] == [2, 1]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_plugin_that_breaks_on_release_does_not_keep_the_run(tmp_path: Path) -> None:
    class Breaks:
        @hookbus.hookimpl
        def bus_close(self) -> None:
            raise KeyError("x")

    def resume_elsewhere() -> None:
        make_bus().resume(tmp_path)

    bus = make_bus(a=Breaks())
    bus.resume(tmp_path)
    assert run_forked(resume_elsewhere).startswith("RunLockedError: ")
    with pytest.raises(KeyError):
        bus.close()
    assert run_forked(resume_elsewhere) == "nothing"
