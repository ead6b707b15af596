"""`assert_exact_resume`: exact runs pass, here and in other processes; others are explained."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import Build, Where, seed
from scenes import data_scene, training_scene
from test_exact_data import IN_PROCESS
from test_exact_workers import LOADERS as WORKERS
from torch.utils import data

import hookbus
from builtin_plugins import Loop, Preemption, Values
from hookbus.errors import CallError, ExactnessError
from hookbus.testing import ExactReport, Recorder, assert_exact_resume, open_record

Points = data.DataLoader[tuple[torch.Tensor, ...]]


def make_points() -> Points:
    seed(0)
    return data.DataLoader(data.TensorDataset(torch.randn(12, 3)), 4, shuffle=True)


class Scene:
    """Three epochs of three batches, saved at every second step; parts of it can be left out."""

    tells = True

    def __init__(self) -> None:
        self.loader = make_points()
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.average, self.loop = torch.zeros(3), Loop()

    @property
    def attached(self) -> dict[str, Any]:
        names = ("model", "optimizer", "average", "loop")
        return {**{name: getattr(self, name) for name in names}, "data": self.loader}

    def open_batches(self) -> Iterator[Any]:
        return iter(self.loop.batches(self.loader))

    def compute_loss(self, x: torch.Tensor) -> torch.Tensor:
        return (self.model(x) - self.average.mean()).square().mean()

    def count_epochs(self, run: Path) -> int:
        return 3

    def register(self, bus: hookbus.HookBus) -> None:
        pass

    def end(self, bus: hookbus.HookBus) -> None:
        bus.save()

    def train(self, run: Path, record: Recorder) -> Any:
        with hookbus.HookBus() as bus:
            bus.attach(**self.attached)
            self.register(bus)
            bus.resume(run)
            for epoch in self.loop.epochs(self.count_epochs(run)):
                for (x,) in self.open_batches():
                    loss = self.compute_loss(x)
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    self.average += x.mean(0) * 0.1
                    record(batch=x, loss=loss)
                    if self.loop.every(2):
                        bus.save()
                record(epoch=epoch)
            self.end(bus)
        return self.model[0].weight if self.tells else None


def train(run: Path, record: Recorder) -> Any:
    return Scene().train(run, record)


# -- runs that are exact ------------------------------------------------------------------------


def test_an_exact_run_passes_and_tells_what_was_compared() -> None:
    report = assert_exact_resume(train)
    assert (report.records, report.checkpoints) == (13, 5)  # nine batches, three epochs, a result
    assert set(report.sections) == {"rng", "model", "optimizer", "average", "loop", "data"}
    first, *lines = str(report).splitlines()
    assert first.startswith("equal, bit for bit: 13 records, 5 checkpoints, and at the end ")
    assert lines == [
        "  cut at record 1; went on after step 0",
        "  cut at record 4; went on after step 2",
        "  cut at record 8; went on after step 6",
        "  cut at record 12; went on after step 8",
        "  cut at record 4, then record 4, then record 4; went on after step 2, 4, 6",
    ]


def check_scene(build: Build, **options: Any) -> ExactReport:
    """Record the weights after each body and each epoch, and save after every second of these."""

    def run_scene(run: Path, record: Recorder) -> None:
        seed(0)
        parts, loop = build(), Loop()
        with hookbus.HookBus() as bus:
            bus.attach(**parts.attached, loop=loop)
            bus.resume(run)

            def save(where: Where) -> None:
                weights = parts.attached["model"].state_dict()
                record(where=list(where), weights=dict(weights))
                if sum(where[1:]) % 2 == 0 or where[0] == "tail":
                    bus.save()

            parts.run(loop, save)

    return assert_exact_resume(run_scene, **options)


ADAM = training_scene(torch.optim.Adam, lambda o: torch.optim.lr_scheduler.StepLR(o, 2), ema=True)
FEW = {
    "head and tail draw": IN_PROCESS["head and tail draw"],
    "scheduler and average": ADAM,
    "scaler": training_scene(torch.optim.AdamW, overflow=(2,)),
    "accumulation": data_scene("shuffle", ("torch",), accumulate=4),
}


@pytest.mark.parametrize("name", FEW)
def test_all_that_hookbus_restores_is_seen_to_be_exact(name: str) -> None:
    assert check_scene(FEW[name], cuts=[(6, 3)]).records


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("name", [*IN_PROCESS, *WORKERS])
def test_every_loader_is_seen_to_be_exact(name: str) -> None:
    check_scene({**IN_PROCESS, **WORKERS}[name])


def ignore(**values: object) -> None:
    pass


def test_without_records_a_run_is_cut_after_its_checkpoints() -> None:
    report = assert_exact_resume(train_silently)
    assert report.records == 0
    assert [str(each) for each in report.runs] == [
        "cut at checkpoint 1; went on after step 2",
        "cut at checkpoint 2; went on after step 4",
        "cut at checkpoint 5; went on after step 9",
        "cut at checkpoint 1, then checkpoint 1; went on after step 2, 4",
    ]


def test_a_run_without_a_loop_names_its_places_itself() -> None:
    assert assert_exact_resume(count).records == 6

    def count_wrongly(run: Path, record: Recorder) -> None:
        def record_more(*, at: str, number: torch.Tensor) -> None:
            record(at=at, number=number + (len(hookbus.checkpoints(run)) == 4 and late))

        late = bool(run.exists())
        count(run, record_more)  # type: ignore[arg-type]

    with pytest.raises(ExactnessError, match=r"record 5 \(step 5\): number is \[2\] float32 \(1.5"):
        assert_exact_resume(count_wrongly)


def test_a_checkpoint_more_is_no_difference() -> None:
    """As a signal may bring it about, in the middle of a step that is saved at its end as well."""

    class SavesMore(Scene):
        def open_batches(self) -> Iterator[Any]:
            for x in super().open_batches():
                yield x
                if resumed and self.loop.step == 3:
                    self.bus.save()

        def register(self, bus: hookbus.HookBus) -> None:
            self.bus = bus

        def train(self, run: Path, record: Recorder) -> Any:
            nonlocal resumed
            resumed = run.exists()
            return super().train(run, record)

    resumed = False
    report = assert_exact_resume(lambda run, record: SavesMore().train(run, record), cuts=[4])
    assert report.runs[0].resumed_after == (2,)


# -- runs that are not --------------------------------------------------------------------------


class ForgetsTheAverage(Scene):
    @property
    def attached(self) -> dict[str, Any]:
        return {name: each for name, each in super().attached.items() if name != "average"}


class ForgetsTheOrder(Scene):
    """Draws it from a generator that nobody attached."""

    def __init__(self) -> None:
        super().__init__()
        self.random, self.batches = random.Random(7), list(self.loader)

    def open_batches(self) -> Iterator[Any]:
        self.random.shuffle(self.batches)
        return iter(self.loop.batches(list(self.batches), inexact_ok=True))


class Nearly:
    """Restores a tensor nearly."""

    kind = "nearly"

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write({"number": self.tensor})

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        resume.read_into({"number": self.tensor})
        self.tensor[1] += 0.5


class RestoresNearly(Scene):
    def register(self, bus: hookbus.HookBus) -> None:
        bus.register(Nearly(torch.zeros(2)))


class EndsEarly(Scene):
    tells = False

    def count_epochs(self, run: Path) -> int:
        return 2 if hookbus.checkpoints(run) else 3


class GoesOnTooLong(Scene):
    tells = False

    def count_epochs(self, run: Path) -> int:
        return 4 if hookbus.checkpoints(run) else 3


class SkipsABatch(Scene):
    def open_batches(self) -> Iterator[Any]:
        for number, x in enumerate(super().open_batches()):
            if number or self.loop.batch < 3:
                yield x


class NotSeeded(Scene):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(time.perf_counter_ns())


class SavesTheEndOnce(Scene):
    def train(self, run: Path, record: Recorder) -> Any:
        self.whole = not run.exists()
        return super().train(run, record)

    def end(self, bus: hookbus.HookBus) -> None:
        if self.whole:
            bus.save()


INEXACT: list[tuple[type[Scene], int, str]] = [
    (
        ForgetsTheAverage,
        6,
        r"^a run that was cut at record 6; went on after step 4 did not go on as one that was never"
        r" cut:\n  record 6 \(epoch 1, batch 2\): loss is \[\] float32 \([\d.]+\), and here \[\] "
        r"float32 \([\d.]+\)\n  step 6, section 'model': tensor '0.weight': \[2, 3\] float32: 6 of "
        r"6 elements differ, first \[0, 0\]: -?[\d.]+ and -?[\d.]+\n",
    ),
    (ForgetsTheOrder, 6, r"\n  record 6 \(epoch 1, batch 2\): batch is \[4, 3\] float32 \(-?\d"),
    (
        RestoresNearly,
        3,
        r"\n  step 4, section 'nearly': tensor 'number': \[2\] float32: 1 of 2 elements differ,"
        r" first \[1\]: 0.0 and 0.5\n",
    ),
    (EndsEarly, 6, r"\n  record 9 \(epoch 2, batch 1\) is missing: the run ended before it\n"),
    (GoesOnTooLong, 6, r"\n  record 13 \(epoch 3, batch 1\) is one too many\n"),
    (
        SkipsABatch,
        3,
        r"\n  record 5 \(epoch 1, batch 1\): batch is .*\n  the last checkpoint is of st",
    ),
    (NotSeeded, 5, r"it was not cut yet, so it is not the same each time: seed it"),
    (SavesTheEndOnce, 5, r"\n  the last checkpoint is of step 9, and here of 8\n"),
]


@pytest.mark.parametrize(("scene", "cut", "message"), INEXACT)
def test_where_two_runs_part_is_named(scene: type[Scene], cut: int, message: str) -> None:
    with pytest.raises(ExactnessError) as caught:
        assert_exact_resume(lambda run, record: scene().train(run, record), cuts=[cut])
    assert re.search(message, str(caught.value)), str(caught.value)
    assert str(caught.value).endswith("is everything attached that the run changes?")
    assert isinstance(caught.value, AssertionError)


# -- processes ----------------------------------------------------------------------------------


def count(run: Path, record: Recorder) -> None:
    """Needs little of torch, so that its processes are quick."""
    state = {"number": torch.zeros(2)}
    with hookbus.HookBus(load_plugins=False) as bus:
        bus.register(Values(state), "state")
        for step in range(bus.resume(run).step + 1, 7):
            state["number"] += 0.1 * step
            record(at=f"step {step}", number=state["number"])
            bus.save(step=step)


def test_a_function_is_killed_in_a_process_of_its_own() -> None:
    report = assert_exact_resume(count, cuts=[4], kill=signal.SIGKILL, timeout=120)
    assert (report.records, report.checkpoints) == (6, 6)
    assert str(report.runs[0]) == "cut at record 4; went on after step 3"


@pytest.mark.sweep
def test_a_training_is_killed_in_a_process_of_its_own() -> None:
    report = assert_exact_resume(train, cuts=[5, (3, 3)], kill=signal.SIGKILL, timeout=120)
    assert (report.records, report.checkpoints) == (13, 5)
    assert str(report.runs[0]) == "cut at record 5; went on after step 2"


def train_and_heed(run: Path, record: Recorder) -> None:
    class Heeding(Scene):
        def register(self, bus: hookbus.HookBus) -> None:
            bus.register(Preemption())

    Heeding().train(run, record)


@pytest.mark.sweep
def test_a_function_that_heeds_a_signal_goes_on_where_it_was_told() -> None:
    report = assert_exact_resume(train_and_heed, cuts=[5], kill=signal.SIGTERM, timeout=120)
    assert str(report.runs[0]) == "cut at record 5; went on after step 4"


@pytest.mark.sweep
def test_a_function_without_records_is_killed_after_its_checkpoints() -> None:
    report = assert_exact_resume(train_silently, cuts=[2], kill=signal.SIGKILL, timeout=120)
    assert str(report.runs[0]) == "cut at checkpoint 2; went on after step 4"


@pytest.mark.sweep
def test_a_breach_is_caught_in_processes_too() -> None:
    with pytest.raises(ExactnessError, match=r"record 6 \(epoch 1, batch 2\): loss is "):
        assert_exact_resume(train_forgetfully, cuts=[6], kill=signal.SIGKILL, timeout=120)


def train_silently(run: Path, record: Recorder) -> None:
    train(run, ignore)


def train_forgetfully(run: Path, record: Recorder) -> Any:
    return ForgetsTheAverage().train(run, record)


SCRIPT = """
import sys
import torch
import hookbus
from hookbus.testing import open_record

record, noted = open_record(), len(sys.argv) > 2
state = {"number": torch.zeros(2)}
with hookbus.HookBus() as bus:
    bus.attach(state=state)
    for step in range(bus.resume(sys.argv[1]).step + 1, 7):
        state["number"] += 0.1 * step
        if noted:
            record(at=f"step {step}", number=state["number"])
        bus.save(step=step, wait=False)
        bus.wait()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_script_is_killed_where_it_records(script: str) -> None:
    command = [sys.executable, script, "{run}", "noted"]
    report = assert_exact_resume(command, cuts=[4], timeout=120)
    # It seeds nothing, and its streams are compared all the same.
    assert (report.records, report.sections) == (6, ("rng", "state"))
    assert str(report.runs[0]) == "cut at record 4; went on after step 3"


@pytest.mark.sweep
def test_the_loop_of_the_readme_is_exact_where_it_is_killed() -> None:
    example = Path(hookbus.__file__).parents[1] / "examples" / "train.py"
    report = assert_exact_resume([sys.executable, str(example), "{run}"], cuts=[2], timeout=120)
    assert "optimizer" in report.sections


@pytest.mark.sweep
def test_a_script_without_records_is_killed_after_its_checkpoints(script: str) -> None:
    report = assert_exact_resume([sys.executable, script, "{run}"], cuts=[1], timeout=120)
    assert report.records == 0
    assert report.runs[0].resumed_after[0] >= 1


def test_a_script_that_nobody_tests_records_nothing(tmp_path: Path) -> None:
    assert "HOOKBUS_RECORD" not in os.environ
    record = open_record()
    record(at=1, value=1)
    record(value=object())
    assert os.listdir(tmp_path) == []


# -- how it is called ---------------------------------------------------------------------------


def save_nothing(run: Path, record: Recorder) -> None:
    with hookbus.HookBus(load_plugins=False) as bus:
        bus.resume(run)


def break_down(run: Path, record: Recorder) -> None:
    raise ZeroDivisionError("mine")


def record_a_lambda(run: Path, record: Recorder) -> None:
    record(at=1, value=print)


def record_nothing(run: Path, record: Recorder) -> None:
    record()


CALLS: list[tuple[Any, dict[str, Any], str]] = [
    (save_nothing, {}, "the run saves nothing, so there is nothing to resume from"),
    (ignore, {}, "make_run is called as make_run(run, record): "),
    (lambda run, record: None, {}, "the run made no 'whole'; resume the path that it is given"),
    (3, {}, "make_run=3: pass a function, or a list of the words of a command, "),
    (None, {}, "make_run=None: pass a function, or a list of the words of a command, "),
    (["/nowhere", "{run}"], {}, "the command cannot be started: [Errno 2] No such file"),
    (train, {"cuts": 3}, "cuts=3: pass whole numbers from 1 up"),
    ("train.py", {}, "make_run='train.py': pass a function, or a list of the words of a command, "),
    (["train.py"], {}, 'the command has no "{run}", which stands for the run directory'),
    (train, {"cuts": [0]}, "cuts=[0]: pass whole numbers from 1 up, or tuples of these"),
    (train, {"cuts": []}, "cuts=[]: pass whole numbers from 1 up"),
    (train, {"cuts": [()]}, "cuts=[()]: pass whole numbers from 1 up"),
    (train, {"cuts": [1]}, "nothing was resumed: every cut came before the first checkpoint; "),
    (train, {"cuts": [(3, 40)]}, "the run was over before record 40 of its process number 2: it "),
    (train, {"kill": True}, "kill=True: pass a signal, such as signal.SIGKILL"),
    (train, {"kill": 1000}, "kill=1000: pass a signal, such as signal.SIGKILL"),
    (train, {"timeout": 0}, "timeout=0: pass seconds"),
    (lambda run, record: None, {"kill": 9}, "kill= needs a function that a new process can import"),
    (record_nothing, {}, "record() notes values by name, such as record(batch=x, loss=loss)"),
    (
        record_a_lambda,
        {},
        "record(value=…): 1 value cannot be stored: the state itself (builtin_fun",
    ),
    (
        [sys.executable, "-c", "import sys; sys.exit('{run} is too much')"],
        {},
        "the run ended with status 1; it said:\n",
    ),
    (
        [sys.executable, "-c", "import time; '{run}'; time.sleep(60)"],
        {"timeout": 0.2},
        "the run did not end within timeout=0.2 seconds",
    ),
]


@pytest.mark.parametrize(("make_run", "options", "message"), CALLS)
def test_what_cannot_be_tested_is_refused(
    make_run: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CallError) as caught:
        assert_exact_resume(make_run, **options)
    assert str(caught.value).startswith(message), str(caught.value)


def test_what_the_function_raises_is_raised_and_told_when() -> None:
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        assert_exact_resume(break_down)
    assert not hasattr(caught.value, "__notes__")

    def break_later(run: Path, record: Recorder) -> None:
        (count if not hookbus.checkpoints(run) else break_down)(run, record)

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        assert_exact_resume(break_later, cuts=[3])
    assert caught.value.__notes__ == ["while the run that was cut at record 3 went on"]


def test_streams_and_log_are_left_as_they_were(capfd: Any, caplog: Any) -> None:
    before = torch.get_rng_state(), random.getstate()
    assert_exact_resume(train, cuts=[5])
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert capfd.readouterr() == ("", "")
    assert caplog.text == ""
