"""A save behind training holds the moment of its call, and never fails in silence."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import list_places, run_bus, run_plain
from keepers import Keeper, make_bus
from scenes import training_scene
from torch import nn

import hookbus
from builtin_plugins import KeepLast, Loop, SavePolicy
from hookbus.background import Background
from hookbus.checkpoint import Staging
from hookbus.errors import CallError, SaveError, WriteError
from hookbus.save import Save
from hookbus.testing import Storage, faulty_storage


@pytest.fixture
def disk() -> Iterator[Storage]:
    """A disk that makes no new file while its gate is closed, or while it has an error."""
    gate = threading.Event()
    gate.set()
    with faulty_storage(error=None, on="create", gate=gate) as storage:
        yield storage


class Listener:
    """Notes where and when a save has ended."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, bool]] = []

    @hookbus.hookimpl
    def save_end(self, checkpoint: hookbus.Checkpoint) -> None:
        assert checkpoint.path.is_dir()
        main = threading.current_thread() is threading.main_thread()
        self.ended.append((checkpoint.step, main))


def list_steps(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in hookbus.checkpoints(run)]


def test_a_save_holds_the_moment_of_its_call(tmp_path: Path, disk: Storage) -> None:
    """Source: pytorch/torchtitan#930; NVIDIA-NeMo/Megatron-Bridge#3267; pytorch/pytorch#196083."""
    keeper, metrics = Keeper(), {"loss": 1.0}
    plain = {"count": 1, "deep": [1, {"x": torch.ones(2)}], "long": bytearray(b"a" * 5000)}
    with make_bus(a=keeper) as bus:
        bus.resume(tmp_path)
        bus.register(Plain(plain), "plain")
        bus.save(step=1)
        keeper.tensor.fill_(7)
        disk.gate.clear()
        assert bus.save(step=2, wait=False, metrics=metrics) is None
        keeper.tensor.fill_(8)
        metrics["loss"] = 2.0
        plain["count"] = 2
        plain["deep"][1]["x"].zero_()
        plain["deep"].append(3)
        plain["long"][0] = 0
        assert list_steps(tmp_path) == [1]  # what is being written is not seen
        disk.gate.set()
    checkpoint = hookbus.checkpoints(tmp_path)[-1]
    assert (checkpoint.step, checkpoint.metrics) == (2, {"loss": 1.0})
    assert checkpoint.read("a").tolist() == [7.0] * 3
    saved = checkpoint.read("plain")
    assert (saved["count"], len(saved["deep"]), saved["long"][0]) == (1, 2, ord("a"))
    assert saved["deep"][1]["x"].tolist() == [1.0, 1.0]


class Plain:
    def __init__(self, state: object) -> None:
        self.state = state

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self.state)


def test_save_end_fires_after_the_commit_in_the_thread_that_trains(
    tmp_path: Path, disk: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    """Source: NVIDIA/Megatron-LM#1763."""
    caplog.set_level(logging.INFO, "hookbus")
    listener, loop = Listener(), Loop()
    with make_bus(a=Keeper(), listener=listener) as bus:
        bus.register(loop, "loop")
        bus.resume(tmp_path)
        disk.gate.clear()
        steps = loop.epochs(3)
        next(steps)
        bus.save(wait=False)
        next(steps)  # the end of the epoch's own code is a safe point
        assert any("is being written behind training" in text for text in caplog.messages)
        assert not any("is committed" in text for text in caplog.messages)
        assert listener.ended == []
        disk.gate.set()
        bus._saver.writer._background.wait()
        assert listener.ended == []
        next(steps)
        assert listener.ended == [(0, True)]
        assert any("is committed after" in text for text in caplog.messages)


def test_the_next_save_waits_and_says_how_long(
    tmp_path: Path, disk: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path)
        disk.gate.clear()
        bus.save(step=1, wait=False)
        threading.Timer(0.2, disk.gate.set).start()
        bus.save(step=2, wait=False)
        bus.save(step=3)
    assert list_steps(tmp_path) == [1, 2, 3]
    text = next(text for text in caplog.messages if text.startswith("step 2 waited"))
    assert "since step 1 was still being written: save less often, or onto a faster disk" in text
    saves = [each for each in hookbus.history(tmp_path) if each["event"] == "save"]
    assert saves[1]["blocked"] > 0.15


@pytest.mark.parametrize("where", ["save", "safe point", "close", "resume"])
def test_a_failure_is_raised_where_the_run_next_looks(
    where: str, tmp_path: Path, disk: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    """Source: google/orbax#605."""
    loop = Loop()
    bus = make_bus(a=Keeper())
    bus.register(loop, "loop")
    bus.resume(tmp_path)
    bus.save()
    epochs = loop.epochs(4)
    next(epochs)
    disk.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    bus.save(wait=False)
    next(epochs)
    bus._saver.writer._background.wait()
    raised = {
        "save": bus.save,
        "safe point": lambda: next(epochs),
        "close": bus.close,
        "resume": lambda: bus.resume(tmp_path),
    }
    with pytest.raises(SaveError) as caught:
        raised[where]()
    assert str(caught.value).startswith("the save of step 0 failed behind training: WriteError")
    assert isinstance(caught.value.__cause__, WriteError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert "the save of step 0 failed" in caplog.text
    assert [path.name for path in sorted(tmp_path.glob("*step*"))] == ["step-00000000"]
    disk.error = None
    if where in ("save", "safe point"):
        bus.save()
        next(epochs)
        assert len(list_steps(tmp_path)) == 2  # it is told once, and the run can go on
    bus.close()


@pytest.mark.parametrize("done", [True, False])
def test_after_a_failure_the_same_place_is_saved_again(
    done: bool, tmp_path: Path, disk: Storage
) -> None:
    bus = make_bus(a=Keeper())
    bus.register(Loop(), "loop")
    bus.resume(tmp_path)
    bus.save()
    disk.error = OSError(errno.EIO, "broken")
    disk.gate.clear()
    bus.save(wait=False, metrics={"x": 1})
    if done:
        disk.gate.set()
        bus._saver.writer._background.wait()
    else:
        threading.Timer(0.1, disk.gate.set).start()
    with pytest.raises(SaveError):
        bus.save(metrics={"x": 2})
    disk.error = None
    assert bus.save().path.name == "step-00000000-1"
    bus.close()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt(), ValueError()], ids=repr)
def test_what_is_copied_is_finished_however_the_bus_is_left(
    error: BaseException | None, tmp_path: Path, disk: Storage
) -> None:
    disk.gate.clear()
    threading.Timer(0.1, disk.gate.set).start()
    bus = make_bus(a=Keeper())
    try:
        with bus:
            bus.resume(tmp_path)
            bus.save(step=1, wait=False)
            if error is not None:
                raise error
    except (KeyboardInterrupt, ValueError):
        pass
    assert list_steps(tmp_path) == [1]


def test_a_second_resume_waits_and_rolls_back_to_what_was_copied(
    tmp_path: Path, disk: Storage
) -> None:
    keeper = Keeper()
    with make_bus(a=keeper) as bus:
        bus.resume(tmp_path)
        keeper.tensor.fill_(3)
        disk.gate.clear()
        bus.save(step=1, wait=False)
        keeper.tensor.fill_(4)
        threading.Timer(0.1, disk.gate.set).start()
        assert bus.resume(tmp_path).step == 1
        assert keeper.tensor.tolist() == [3.0] * 3


def test_a_save_that_waits_among_several_makes_all_of_them_wait(tmp_path: Path) -> None:
    loop = Loop()
    with make_bus(a=Keeper()) as bus:
        bus.register(loop, "loop")
        bus.resume(tmp_path)
        epochs = loop.epochs(2)
        next(epochs)
        bus.save(wait=False, metrics={"a": 1}, why="first")
        bus.save(metrics={"b": 2}, tag="good", why="second")
        next(epochs)
        (checkpoint,) = hookbus.checkpoints(tmp_path)
    assert checkpoint.metrics == {"a": 1, "b": 2}
    assert (checkpoint.why, checkpoint.tag) == ("first, second", "good")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"wait": 1}, "wait=1: pass True or False"),
        ({"tag": ""}, "tag='': pass a word or two"),
        ({"why": 3}, "why=3: pass a word or two"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path)
        with pytest.raises(CallError) as caught:
            bus.save(step=1, **arguments)
    assert str(caught.value) == message
    assert list_steps(tmp_path) == []


# -- the copy -----------------------------------------------------------------------------------


def stage(staging: Staging, state: object) -> dict[str, torch.Tensor]:
    bus = make_bus(a=Plain(state))
    save = Save(1, {}, {})
    bus.hook.save_state(save=save)
    (section,) = staging.copy(save.collect_sections(bus.plugins))
    return section.parts[None].flat.tensors


def test_the_copy_uses_the_same_memory_again_where_it_fits() -> None:
    staging = Staging()
    state = {"a": torch.rand(100), "b": torch.rand(4, 3, 2, 2), "c": torch.rand(5, 7).T}
    first = stage(staging, state)
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    state["a"].add_(1)
    second = stage(staging, state)
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == places
    assert all(torch.equal(second[name], state[name]) for name in state)
    assert second["c"].stride() == state["c"].stride()
    state["b"] = state["b"].to(memory_format=torch.channels_last)
    state["a"] = torch.rand(101)
    third = stage(staging, state)
    assert third["b"].stride() == state["b"].stride()
    assert torch.equal(third["a"], state["a"])
    assert third["c"].data_ptr() == places["c"]
    del state["a"]
    assert "a" not in stage(staging, state)


def test_every_kind_of_tensor_is_copied_with_its_bits(tmp_path: Path) -> None:
    state = {
        "conj": torch.rand(3, dtype=torch.complex64).conj(),
        "neg": torch.rand(3, dtype=torch.complex64).conj().imag,
        "float8": torch.rand(8).to(torch.float8_e4m3fn),
        "scale": torch.arange(8, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "sparse": torch.eye(3).to_sparse(),
        "gap": torch.rand(6, 4)[:, ::2],
        "empty": torch.empty(0, 3),
        "parameter": nn.Parameter(torch.rand(2)),
    }
    state["tied"] = state["parameter"]
    with make_bus(a=Plain(state)) as bus:
        bus.resume(tmp_path)
        now = bus.save(step=1)
        bus.save(step=2, wait=False)
    behind = hookbus.checkpoints(tmp_path)[-1]
    one, other = now.metadata("a"), behind.metadata("a")
    assert one.tensors == other.tensors  # names, shapes, strides and hashes
    assert repr(one.state) == repr(other.state)


MEMORY = """
import resource, sys
import torch
import hookbus

class Keeper:
    def __init__(self):
        self.tensors = {str(i): torch.full((250_000,), float(i)) for i in range(30)}
    @hookbus.hookimpl
    def save_state(self, save):
        save.write(self.tensors)

peaks = []
with hookbus.HookBus(load_plugins=False) as bus:
    bus.register(Keeper(), "keeper")
    bus.resume(sys.argv[1])
    for step in range(100):
        bus.save(step=step, wait=False)
        if step:
            [path.unlink() for path in bus._saver.writer.last.path.iterdir()]
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
print(peaks[2], peaks[-1])
"""


def test_memory_does_not_grow_over_a_hundred_saves(tmp_path: Path) -> None:
    child = [sys.executable, "-c", MEMORY, str(tmp_path)]
    result = subprocess.run(child, capture_output=True, text=True, check=True)
    early, late = map(int, result.stdout.split())
    assert late - early < 10  # MiB; the state has 30


def test_nothing_of_older_saves_is_kept_alive(tmp_path: Path) -> None:
    """Of two hundred saves whose older ones are deleted behind training."""
    with make_bus(a=Keeper(), policy=SavePolicy(keep=KeepLast(2))) as bus:
        bus.resume(tmp_path)
        for step in range(200):
            bus.save(step=step, wait=False)
        bus.wait()
        gc.collect()
        kinds = [type(each) for each in gc.get_objects()]
        assert kinds.count(Background) <= 2
        assert kinds.count(hookbus.Checkpoint) <= 4


# -- scripts ------------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
import hookbus
from hookbus.testing import faulty_storage

class Keeper:
    tensor = torch.ones(3)
    @hookbus.hookimpl
    def save_state(self, save):
        save.write(self.tensor)

bus = hookbus.HookBus(load_plugins=False)
bus.register(Keeper(), "keeper")
bus.resume(sys.argv[1])
bus.save(step=1)
if sys.argv[2] == "full":
    full = faulty_storage(on="create")
    full.__enter__()
bus.save(step=2, wait=False)
if sys.argv[3] == "close":
    bus.close()
print("ended")
"""


@pytest.mark.parametrize("end", ["close", "exit"])
@pytest.mark.parametrize("disk", ["full", "free"])
def test_a_script_that_closes_ends_well_only_if_its_last_save_did(
    end: str, disk: str, tmp_path: Path
) -> None:
    child = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), disk, end]
    result = subprocess.run(child, capture_output=True, text=True, check=False)
    assert list_steps(tmp_path) == ([1] if disk == "full" else [1, 2])
    if disk == "full":
        assert "the save of step 2 failed: WriteError: [Errno 28] cannot create" in result.stderr
    # Only `close` can still raise: at the end of the interpreter an error can but be logged.
    assert (result.returncode != 0) == (disk == "full" and end == "close")


# -- the laws -----------------------------------------------------------------------------------


def test_a_run_that_saves_behind_training_all_the_time_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    build = training_scene(torch.optim.AdamW, ema=True, accumulate=2)
    expected = run_plain(build)
    places = list_places(build)
    assert run_bus(build, tmp_path / "run", saves=places, wait=False) == expected
    saved = hookbus.checkpoints(tmp_path / "run")
    assert len(saved) > 5
    for checkpoint in saved[::3]:
        run = tmp_path / f"from-{checkpoint.path.name}"
        run.mkdir()
        os.rename(checkpoint.path, run / checkpoint.path.name)
        assert run_bus(build, run, seed_number=99) == expected


# -- interrupts, and two buses ------------------------------------------------------------------


def interrupt_after(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


@pytest.mark.parametrize("where", ["save", "close"])
def test_an_interrupt_while_waiting_leaves_no_checkpoint_of_two_moments(
    where: str, tmp_path: Path
) -> None:
    x, y = Keeper(), Keeper("restore_training_state")
    gate = threading.Event()
    bus = make_bus(x=x, y=y)
    bus.resume(tmp_path)
    with faulty_storage(error=None, on="create", path="*y.safetensors", gate=gate):
        x.tensor.fill_(1)
        y.tensor.fill_(1)
        bus.save(step=1, wait=False)
        interrupt_after(0.2)
        if where == "close":  # which waits once more, and is interrupted once more
            interrupt_after(0.4)
        with pytest.raises(KeyboardInterrupt):
            bus.save(step=2, wait=False) if where == "save" else bus.close()
        threading.Timer(0.3, gate.set).start()
        if where == "close":  # the run directory is let go once nothing is written any more
            again = make_bus(x=Keeper(), y=Keeper("restore_training_state"))
            assert again.resume(tmp_path).step == 1
            again.close()
        else:
            x.tensor.fill_(4)
            y.tensor.fill_(4)
            bus.save(step=4, wait=False)
            bus.close()
    for checkpoint in hookbus.checkpoints(tmp_path):
        checkpoint.verify()
        for name in "xy":
            assert checkpoint.read(name).tolist() == [float(checkpoint.step)] * 3


def test_a_newer_bus_waits_for_what_an_older_one_of_its_process_is_writing(tmp_path: Path) -> None:
    keeper, gate = Keeper(), threading.Event()
    older = make_bus(a=keeper)
    older.resume(tmp_path)
    keeper.tensor.fill_(5)
    with faulty_storage(error=None, on="rename", gate=gate):
        older.save(step=5, wait=False)
        threading.Timer(0.2, gate.set).start()
        newer = make_bus(a=Keeper())
        assert newer.resume(tmp_path).step == 5
    newer.close()
    older.close()


def test_a_save_does_not_commit_into_a_folder_that_took_the_run_s_place(tmp_path: Path) -> None:
    run, gate = tmp_path / "run", threading.Event()
    bus = make_bus(a=Keeper())
    bus.resume(run)
    with faulty_storage(error=None, on="fsync", path="*.tmp", gate=gate):
        bus.save(step=1, wait=False)
        run.rename(tmp_path / "moved")
        run.mkdir()
        gate.set()
        with pytest.raises(SaveError, match=r"was removed or replaced|No such file"):
            bus.wait()
    assert hookbus.checkpoints(run) == []
    bus.close()


class Nested:
    """Saves in an event of a save."""

    def __init__(self, event: str) -> None:
        self.bus: hookbus.HookBus | None = None

        def save_again() -> None:
            assert self.bus is not None
            self.bus.save(step=9, wait=False)

        setattr(self, event, hookbus.hookimpl(save_again))


@pytest.mark.parametrize("event", ["save_start", "save_end"])
@pytest.mark.parametrize("wait", [True, False])
def test_a_save_inside_a_save_is_refused(event: str, wait: bool, tmp_path: Path) -> None:
    nested = Nested(event)
    bus = make_bus(a=Keeper(), nested=nested)
    nested.bus = bus
    bus.resume(tmp_path)

    def save() -> None:
        bus.save(step=1, wait=wait)
        bus.wait()

    with pytest.raises(SaveError, match="was called in an event of a save"):
        save()
    bus.close()
    assert 9 not in list_steps(tmp_path)


def test_a_copy_made_in_inference_mode_is_used_again_outside_of_it(tmp_path: Path) -> None:
    keeper = Keeper()
    with make_bus(a=keeper) as bus:
        bus.resume(tmp_path)
        with torch.inference_mode():
            bus.save(step=1, wait=False)
        keeper.tensor.fill_(2)
        bus.save(step=2, wait=False)
    assert hookbus.checkpoints(tmp_path)[-1].read("a").tolist() == [2.0] * 3


@pytest.mark.parametrize("wait", [True, False])
def test_a_metric_that_no_reader_of_json_holds_costs_no_save(wait: bool, tmp_path: Path) -> None:
    with make_bus(a=Keeper()) as bus:
        bus.resume(tmp_path)
        bus.save(step=1, wait=wait, metrics={"a": 10**5000, "b": float("nan")})
    (record,) = [each for each in hookbus.history(tmp_path) if each["event"] == "save"]
    assert record["metrics"] == {"a": "a number of 16610 bits", "b": "nan"}


def test_two_tags_of_one_place_are_refused(tmp_path: Path) -> None:
    loop = Loop()
    with make_bus(a=Keeper(), loop=loop) as bus:
        bus.resume(tmp_path)
        for _ in loop.epochs(1):
            bus.save(tag="one")
            bus.save(tag="one", why="a, b")
            with pytest.raises(CallError, match="this place is being saved with tag='one'"):
                bus.save(tag="two")
    (saved,) = hookbus.checkpoints(tmp_path)
    assert (saved.tag, saved.why) == ("one", "asked, a, b")
