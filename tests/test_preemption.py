"""A signal ends the run at a safe point, saved, with a status that tells."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import digest, seed
from keepers import make_bus
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookbus
from builtin_plugins import EverySteps, KeepLast, Loop, Preemption, SavePolicy
from hookbus.errors import CallError
from hookbus.testing import faulty_storage

WATCHED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


@pytest.fixture(autouse=True)
def former() -> Iterator[list[Any]]:
    """Every test leaves the handlers as they were."""
    before = [signal.getsignal(number) for number in WATCHED]
    yield before
    assert [signal.getsignal(number) for number in WATCHED] == before


def train(
    run: Path,
    *plugins: object,
    kill: tuple[int, signal.Signals] | None = None,
    epochs: int = 3,
    seed_number: int = 0,
) -> list[Any]:
    """Train with dropout; send a signal in the body of a step, before it steps."""
    seed(seed_number)
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.arange(16.0).view(8, 2)), batch_size=2, shuffle=True)
    loop = Loop()
    with hookbus.HookBus() as bus:
        for plugin in plugins:
            bus.register(plugin)
        bus.attach(model=model, optimizer=optimizer, data=loader, loop=loop)
        bus.resume(run)
        for _ in loop.epochs(epochs):
            for (x,) in loop.batches(loader):
                if kill is not None and loop.step == kill[0]:
                    os.kill(os.getpid(), kill[1])
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
    return digest({"model": model, "optimizer": optimizer})


@pytest.mark.parametrize(
    ("number", "options", "status"),
    [
        (signal.SIGTERM, {}, 143),
        (signal.SIGUSR1, {}, 138),
        (signal.SIGUSR2, {"signals": (signal.SIGUSR2,)}, 140),
        (signal.SIGINT, {"on_interrupt": True}, 130),
    ],
)
@pytest.mark.parametrize("behind", [True, False])
def test_a_signal_saves_once_at_the_next_safe_point_and_ends_with_its_status(
    number: signal.Signals, options: dict[str, Any], status: int, behind: bool, tmp_path: Path
) -> None:
    """Source: Lightning-AI/pytorch-lightning#21406."""
    expected = train(tmp_path / "whole")
    policy = [SavePolicy(when=EverySteps(2))] if behind else []
    with pytest.raises(SystemExit) as ended:
        train(tmp_path / "run", *policy, Preemption(**options), kill=(5, number))
    assert ended.value.code == status
    saved = hookbus.checkpoints(tmp_path / "run")
    assert [each.step for each in saved] == ([2, 4, 6] if behind else [6])
    assert number.name in saved[-1].why
    assert train(tmp_path / "run", Preemption(), seed_number=9) == expected


def test_what_was_asked_for_in_the_same_body_is_in_the_one_save(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        train(
            tmp_path,
            SavePolicy(when=EverySteps(3)),
            Preemption(),
            kill=(2, signal.SIGTERM),
        )
    (saved,) = hookbus.checkpoints(tmp_path)
    assert (saved.step, saved.why) == (3, "every 3 steps, SIGTERM")


def test_handlers_are_there_while_the_run_is_and_the_former_ones_are_put_back(
    former: list[Any], tmp_path: Path
) -> None:
    heard: list[int] = []
    own = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    bus = make_bus(preemption=Preemption(signals=(signal.SIGUSR2,)), loop=Loop())
    os.kill(os.getpid(), signal.SIGUSR2)
    bus.resume(tmp_path, stage="fit")
    bus.resume(tmp_path)  # again
    bus.close()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert heard == [signal.SIGUSR2] * 2
    signal.signal(signal.SIGUSR2, own)


def test_a_second_one_on_a_bus_is_refused(tmp_path: Path) -> None:
    """Each would take the other's handlers for the former ones."""
    with make_bus(first=Preemption()) as bus:
        with pytest.raises(CallError, match=r"a Preemption on this bus already; give it all the"):
            bus.register(Preemption(signals=(signal.SIGUSR2,)), "second")
        assert [each.name for each in bus.plugins] == ["first"]


def test_a_grace_has_to_hold_for_a_save_that_is_under_way_too() -> None:
    preemption = Preemption(grace=5.0)
    one = types.SimpleNamespace(seconds=3.0, blocked=3.0)
    preemption.save_end(one)
    assert not preemption._warned
    preemption.save_end(types.SimpleNamespace(seconds=3.0, blocked=0.1))
    assert preemption._warned


def test_another_stage_leaves_the_handlers_alone(former: list[Any], tmp_path: Path) -> None:
    with make_bus() as bus:
        bus.resume(tmp_path)
        bus.save(step=1)
    with make_bus(preemption=Preemption(), loop=Loop()) as bus:
        bus.resume(tmp_path, stage="test")
        assert [signal.getsignal(number) for number in WATCHED] == former


def test_one_that_comes_after_the_last_safe_point_is_handed_on(tmp_path: Path) -> None:
    heard: list[int] = []
    own = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    preemption = Preemption(signals=(signal.SIGUSR2,))
    with make_bus(preemption=preemption, loop=Loop()) as bus:
        bus.resume(tmp_path)
        assert preemption.caught is None
        os.kill(os.getpid(), signal.SIGUSR2)
        assert preemption.caught == signal.SIGUSR2
        assert heard == []
    assert heard == [signal.SIGUSR2]
    signal.signal(signal.SIGUSR2, own)


def test_a_forked_child_does_not_save(tmp_path: Path) -> None:
    read, write = os.pipe()
    with make_bus(preemption=Preemption(), loop=Loop()) as bus:
        bus.resume(tmp_path)
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)  # which is not for it
            os.write(write, b"ready")
            threading.Event().wait(60)
            os._exit(0)
        assert os.read(read, 5) == b"ready"
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
    assert hookbus.checkpoints(tmp_path) == []


def test_an_error_after_the_signal_is_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def resume() -> None:
        with make_bus(preemption=Preemption(), loop=Loop()) as bus:
            bus.resume(tmp_path)
            os.kill(os.getpid(), signal.SIGTERM)
            raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        resume()
    assert "SIGTERM came and was not heeded, since the run broke" in caplog.messages


def test_a_signal_to_all_processes_of_a_job_leaves_its_workers_alone(tmp_path: Path) -> None:
    script = SCRIPT.replace("for _ in loop.steps(10):", "for _ in loop.steps(10, loader):").replace(
        "loop = Loop()",
        "loader = torch.utils.data.DataLoader(range(8), num_workers=2)\nloop = Loop()",
    )
    script = script.replace("os.kill(os.getpid(), signal.SIGTERM)", "os.killpg(0, signal.SIGUSR1)")
    child = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), "1"]
    result = subprocess.run(
        child, capture_output=True, text=True, check=False, start_new_session=True
    )
    assert result.returncode == 138, result.stderr
    assert [each.step for each in hookbus.checkpoints(tmp_path)] == [4]


def test_outside_the_main_thread_it_is_refused(tmp_path: Path) -> None:
    caught: list[BaseException] = []

    def resume() -> None:
        with make_bus(preemption=Preemption(), loop=Loop()) as bus:
            try:
                bus.resume(tmp_path)
            except CallError as error:
                caught.append(error)

    thread = threading.Thread(target=resume)
    thread.start()
    thread.join()
    assert "signals can only be heeded in the main thread" in str(caught[0])


def test_a_grace_that_is_too_short_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Slow:
        """Makes each way to a safe point take a known time."""

        kind = "slow"

        @hookbus.hookimpl
        def optimizer_stepped(self, optimizer: object) -> None:
            threading.Event().wait(0.05)

    train(tmp_path / "slow", Slow(), SavePolicy(when=EverySteps(1)), Preemption(grace=0.05))
    assert [text for text in caplog.messages if text.startswith("grace=0.05 is too short")]
    caplog.clear()
    train(tmp_path, SavePolicy(when=EverySteps(1)), Preemption(grace=1e-6))
    texts = [text for text in caplog.messages if text.startswith("grace=1e-06 is too short")]
    assert len(texts) == 1
    assert "a save" in texts[0]
    caplog.clear()
    train(tmp_path / "other", SavePolicy(when=EverySteps(1)), Preemption(grace=600))
    assert not [text for text in caplog.messages if "grace" in text]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"signals": 15}, "signals=15: pass a tuple such as (signal.SIGTERM,)"),
        ({"signals": (0,)}, "signals=(0,): pass a tuple such as (signal.SIGTERM,)"),
        ({"signals": (9,)}, "signals=(9,): pass a tuple such as (signal.SIGTERM,)"),
        ({"signals": None}, "signals=None: pass a tuple such as (signal.SIGTERM,)"),
        ({"grace": -1}, "grace=-1: pass seconds, or None"),
        ({"grace": "30s"}, "grace='30s': pass seconds, or None"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CallError) as caught:
        Preemption(**options)
    assert str(caught.value) == message


SCRIPT = """
import os, signal, sys, torch
import hookbus
from builtin_plugins import Loop, Preemption

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loop = Loop()
with hookbus.HookBus() as bus:
    bus.register(Preemption())
    bus.attach(model=model, optimizer=optimizer, loop=loop)
    bus.resume(sys.argv[1])
    for _ in loop.steps(10):
        model(torch.ones(2)).backward()
        if loop.step == 3:
            for _ in range(int(sys.argv[2])):
                os.kill(os.getpid(), signal.SIGTERM)
                signal.getsignal(signal.SIGTERM)  # a moment to be heard in
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("signals", "status", "steps"), [(1, 143, [4]), (2, -15, [])])
def test_a_second_signal_ends_a_process_at_once(
    signals: int, status: int, steps: list[int], tmp_path: Path
) -> None:
    child = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), str(signals)]
    result = subprocess.run(child, capture_output=True, text=True, check=False)
    assert result.returncode == status, result.stderr
    assert "hookbus: SIGTERM: saving at the next safe point" in result.stderr
    assert "Traceback" not in result.stderr
    assert [each.step for each in hookbus.checkpoints(tmp_path)] == steps


def test_it_says_what_it_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "hookbus")
    with pytest.raises(SystemExit):
        train(tmp_path, Preemption(), kill=(5, signal.SIGTERM))
    assert "SIGTERM: step 6 is saved, and the run ends here" in caplog.messages


# -- other people's handlers --------------------------------------------------------------------


def test_without_a_loop_no_signal_is_taken(
    former: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_bus(preemption=Preemption()) as bus:
        bus.resume(tmp_path)
        assert [signal.getsignal(number) for number in WATCHED] == former
    assert "there is no loop on the bus" in caplog.text


@pytest.mark.parametrize("way", ["attach", "register"])
def test_a_loop_is_one_however_it_came_on_the_bus(way: str, tmp_path: Path) -> None:
    loop = Loop()
    with hookbus.HookBus() as bus:
        bus.attach(loop=loop) if way == "attach" else bus.register(loop)
        bus.register(Preemption(signals=(signal.SIGUSR2,)), "other")
        assert bus.loop is bus.components["loop"] is loop
        bus.unregister("other")
        assert bus.loop is loop
        bus.unregister("loop")
        assert bus.loop is None
        bus.resume(tmp_path)


def test_a_signal_before_a_rollback_is_heeded_after_it(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = Loop()

    def run() -> None:
        with hookbus.HookBus() as bus:
            bus.register(Preemption())
            bus.attach(model=model, optimizer=optimizer, loop=loop)
            bus.resume(tmp_path)
            bus.save()
            os.kill(os.getpid(), signal.SIGTERM)
            bus.resume(tmp_path)
            for _ in loop.steps(3):
                model(torch.ones(2)).backward()
                optimizer.step()

    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 143
    assert [each.step for each in hookbus.checkpoints(tmp_path)] == [0, 1]


@pytest.mark.parametrize("leave", ["another stage", "unregister", "close"])
def test_handlers_go_with_their_reason(leave: str, former: list[Any], tmp_path: Path) -> None:
    with make_bus(preemption=Preemption(), loop=Loop()) as bus:
        bus.resume(tmp_path)
        bus.save()
        assert signal.getsignal(signal.SIGTERM) != former[0]
        if leave == "another stage":
            bus.resume(tmp_path, stage="test", missing_ok=("loop",))
        elif leave == "unregister":
            bus.unregister("preemption")
        else:
            bus.close()
        assert [signal.getsignal(number) for number in WATCHED] == former


def test_one_that_is_registered_late_heeds_signals_too(tmp_path: Path) -> None:
    with make_bus(loop=Loop()) as bus:
        bus.resume(tmp_path)
        preemption = Preemption(signals=(signal.SIGUSR2,))
        bus.register(preemption)
        own = signal.getsignal(signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert preemption.caught == signal.SIGUSR2
        assert own == preemption._heed
        preemption.caught = None


def test_a_handler_that_calls_the_one_before_is_handed_on_after_the_end(tmp_path: Path) -> None:
    heard: list[int] = []
    original = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    with make_bus(preemption=Preemption(signals=(signal.SIGUSR2,)), loop=Loop()) as bus:
        bus.resume(tmp_path)
        ours = signal.getsignal(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, lambda number, frame: ours(number, frame))
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert heard == [signal.SIGUSR2] * 2
    signal.signal(signal.SIGUSR2, original)


def test_an_older_failure_does_not_keep_a_signal_from_saving(tmp_path: Path) -> None:
    class Failing:
        kind = "failing"

        @hookbus.hookimpl(tryfirst=True)
        def safe_point(self, loop: Any) -> None:
            if loop.step == 3:
                with faulty_storage(OSError(errno.EIO, "x"), on="create"):
                    bus.save(wait=False)
                    bus.write_asked()
                    bus._saver.writer.wait_out()
                os.kill(os.getpid(), signal.SIGTERM)

    bus = None

    def run() -> None:
        nonlocal bus
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = Loop()
        with hookbus.HookBus() as bus:
            bus.register(Failing())
            bus.register(Preemption())
            bus.attach(model=model, optimizer=optimizer, loop=loop)
            bus.resume(tmp_path)
            for _ in loop.steps(9):
                model(torch.ones(2)).backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 143
    assert [each.step for each in hookbus.checkpoints(tmp_path)] == [3]


# -- at any moment ------------------------------------------------------------------------------


class Ready:
    """Writes to a pipe as soon as the run can be stopped."""

    kind = "ready"

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    @hookbus.hookimpl(trylast=True)
    def resume_end(self, resume: hookbus.Resume) -> None:
        os.write(self._pipe, b"!")


def train_in_child(run: Path, epochs: int, wait_for: float | None) -> int:
    """Train in a forked process, stop it after some seconds, and return its exit status."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            plugins = [Ready(write), Preemption(), SavePolicy(when=EverySteps(3), keep=KeepLast(2))]
            number = os.getpid() if hookbus.checkpoints(run) else 0
            bits = train(run, *plugins, epochs=epochs, seed_number=number)
            (run / "bits").write_text(repr(bits))
            status = 0
        except SystemExit as end:
            status = int(str(end.code))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    os.read(read, 1)
    os.close(read)
    if wait_for is not None:
        threading.Event().wait(wait_for)
        os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def check_signals(run: Path, count: int) -> None:
    epochs, moments, ends = 3 * count, random.Random(1), 0
    # Before the first fork, so that what torch imports at its first use is there for all.
    expected = repr(train(run.with_name("whole"), epochs=epochs))
    while True:
        before = hookbus.checkpoints(run)
        status = train_in_child(run, epochs, moments.uniform(0, 0.05) if ends < count else None)
        if status == 0:
            break
        assert status == 143
        ends += 1
        after = hookbus.checkpoints(run)[-1]
        assert "SIGTERM" in after.why
        assert not before or after.step >= before[-1].step
    assert ends == count
    assert (run / "bits").read_text() == expected


def test_signals_at_random_moments_each_end_saved_and_go_on_exactly(tmp_path: Path) -> None:
    check_signals(tmp_path / "run", 8)


@pytest.mark.sweep
def test_a_hundred_signals_at_random_moments_each_end_saved(tmp_path: Path) -> None:
    check_signals(tmp_path / "run", 100)
