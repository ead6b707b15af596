"""The real run, in real processes: killed with SIGKILL, started again, and the same at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hookbus

SCRIPT = Path(__file__).parent.parent / "examples" / "char_lm.py"
STEPS, SAVE_EVERY = 60, 10  # 24 steps an epoch: two epochs and a half


def start(run: Path, *arguments: object) -> subprocess.Popen[str]:
    options = ["--run", run, "--steps", STEPS, "--save-every", SAVE_EVERY, *arguments]
    return subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where the tests run in the background of a shell, Ctrl-C is ignored by all they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        # Two threads each on two cores that are shared spend their time waiting for each other.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(run: Path, *arguments: object) -> str:
    """Run to the end and return the last line."""
    process = start(run, *arguments)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out.splitlines()[-1]


def crash(run: Path, step: int) -> str:
    """Run until the script kills itself in the body of ``step``; return what it said."""
    process = start(run, "--crash-at", step)
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    return err


def list_steps(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in hookbus.checkpoints(run)]


@pytest.fixture(scope="session")
def weights(tmp_path_factory) -> str:
    """The last line of a run that was never stopped."""
    return finish(tmp_path_factory.mktemp("uninterrupted") / "run")


def test_a_run_killed_again_and_again_ends_with_the_same_weights(weights, tmp_path) -> None:
    run = tmp_path / "run"
    crash(run, 5)  # in the first epoch, before anything is saved
    assert list_steps(run) == []
    crash(run, 10)  # just before a save
    assert list_steps(run) == []
    crash(run, 11)  # just after a save, which may still be on its way to the disk
    assert list_steps(run) in ([], [10])
    crash(run, 19)
    assert list_steps(run) == [10]
    assert "goes on after step 10" in crash(run, 13)  # once more in the same epoch
    crash(run, 11)  # right after a resume
    crash(run, 36)  # in a middle epoch
    assert list_steps(run) == [10, 20, 30]
    crash(run, 59)  # in the last epoch
    assert finish(run) == weights
    assert finish(run) == weights  # nothing is left to do
    kept = hookbus.checkpoints(run)
    assert [each.step for each in kept[-3:]] == [40, 50, 60]
    best = hookbus.best(run, "val_loss")
    assert {each.path for each in kept[:-3]} <= {best.path}


def test_a_run_killed_while_it_saves_ends_with_the_same_weights(weights, tmp_path) -> None:
    run, caught = tmp_path / "run", 0
    run.mkdir()
    for _ in range(3):
        process = start(run)
        while process.poll() is None:
            if any(name.startswith(".step-") for name in os.listdir(run)):
                process.kill()
                break
        process.communicate()
        caught += process.returncode == -signal.SIGKILL
    assert caught, "no save was caught in the act"
    assert finish(run) == weights
    assert not [name for name in os.listdir(run) if name.startswith(".step-")]


def wait_for_a_save(run: Path) -> None:
    """Wait until the loop runs, and there is something to go on from."""
    steps = list_steps(run)
    while list_steps(run) == steps:
        time.sleep(0.01)


def test_a_run_that_is_interrupted_goes_on_with_the_same_command(weights, tmp_path) -> None:
    run = tmp_path / "run"
    process = start(run, "--steps", 100_000)
    wait_for_a_save(run)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert errors.endswith("stopped; the same command goes on\n")
    assert "Traceback" not in errors
    process = start(run, "--steps", 100_000)
    wait_for_a_save(run)
    process.terminate()
    _, errors = process.communicate()
    assert process.returncode == 143, errors
    assert "Traceback" not in errors
    saved = hookbus.checkpoints(run)[-1]
    assert "SIGTERM" in saved.why
    assert f"step {saved.step} is saved, and the run ends here" in errors
    assert finish(run) == weights


@pytest.mark.sweep
@pytest.mark.parametrize("step", range(1, STEPS, 7))
def test_a_run_killed_at_any_step_ends_with_the_same_weights(step, weights, tmp_path) -> None:
    crash(tmp_path / "run", step)
    crash(tmp_path / "run", min(step + 3, STEPS))
    assert finish(tmp_path / "run") == weights
