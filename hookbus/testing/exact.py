"""Trains, cuts, resumes, and compares bit for bit with a run that was never cut.

In the tests of a training script::

    from hookbus.testing import assert_exact_resume

    def train(run, record):
        torch.manual_seed(0)
        ...                                  # build everything anew
        with hookbus.HookBus() as bus:
            bus.attach(model=model, optimizer=optimizer, loop=loop)
            bus.resume(run)
            for epoch in loop.epochs(2):
                for x in loop.batches(loader):
                    loss = ...
                    record(batch=x, loss=loss)
                    if loop.every(2):
                        bus.save()
            bus.save()

    def test_it_resumes_exactly():
        assert_exact_resume(train)
        assert_exact_resume(train, cuts=[3, (2, 4)], kill=signal.SIGKILL)
        assert_exact_resume([sys.executable, "train.py", "--run", "{run}"])
"""

from __future__ import annotations

import contextlib
import inspect
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from hookbus.errors import CallError
from hookbus.testing.bench import quiet, streams_kept
from hookbus.testing.comparing import Cuts, ExactReport, Expected, join
from hookbus.testing.in_process import InProcess, alone
from hookbus.testing.runs import Children, Cut, Lived

MakeRun: TypeAlias = Callable[..., object] | Sequence[str]


def assert_exact_resume(
    make_run: MakeRun,
    *,
    cuts: Cuts | None = None,
    kill: signal.Signals | int | None = None,
    timeout: float = 300.0,
) -> ExactReport:
    """Hold a run to its word: cut anywhere and resumed, it ends as if it never had been.

    ``make_run(run, record)`` builds everything anew, resumes ``run``, a path, trains, and saves
    now and then. It can tell what it does by ``record(batch=x, loss=loss)``, in the loop's body
    or in the epoch's own code, as often as it likes; what it returns is recorded as well. Or it is
    a script: the words of a command, with ``"{run}"`` in the place of the run directory, that can
    tell what it does by ``record = hookbus.testing.open_record()``.

    Each of ``cuts`` is a run that is cut and then goes on to its end: at the so many-th record of
    its process, counted from 1, or after the so many-th checkpoint where nothing is recorded.
    ``(3, 2)`` is cut at the third record, and once more at the second of the process that goes on.
    Default: some places from the first record to the last, and one that is cut three times.

    A function is called in this process, and a cut ends it by an exception with which nothing
    reaches the disk any more. With ``kill``, such as ``signal.SIGKILL``, each time is a process of
    its own, and so is a script's, whose default is SIGKILL. ``timeout`` is in seconds, for each.

    All that was recorded is compared, all checkpoints of the same step, and the last ones.

    Raises:
        ExactnessError: it does not; it names the first record, section and tensor.
        CallError: an argument is not what is expected, or nothing was resumed.
    """
    with _place() as folder:
        life = _choose_life(make_run, kill, timeout, folder)
        whole = folder / "whole"
        expected = Expected.read(whole, life(whole, None))
        runs = []
        for number, scene in enumerate(expected.list_scenes(cuts)):
            run = folder / f"cut-{number}"
            runs.append(expected.compare(run, scene, _live_through(life, run, scene)))
        if not any(after for each in runs for after in each.resumed_after):
            raise CallError(
                "nothing was resumed: every cut came before the first checkpoint; cut later, or"
                " save earlier"
            )
        return expected.report(runs)


Life: TypeAlias = Callable[[Path, Cut | None], Lived]
"""Lets one process of a run live, to its end or to a cut."""


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    """Yield a folder that goes; log and streams are as they were after it."""
    folder = tempfile.TemporaryDirectory(prefix="hookbus-exact-")
    with folder as path, alone(), quiet(), streams_kept():
        yield Path(path)


def _choose_life(make_run: Any, kill: Any, timeout: float, folder: Path) -> Life:
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or timeout <= 0:
        raise CallError(f"timeout={timeout!r}: pass seconds")
    number = _take_signal(kill)
    if callable(make_run):
        try:
            inspect.signature(make_run).bind(folder, None)
        except TypeError as error:
            raise CallError(f"make_run is called as make_run(run, record): {error}") from error
        if number is None:
            return InProcess(make_run).live
        return Children(make_run, folder, number, timeout).live
    is_command = isinstance(make_run, Sequence) and not isinstance(make_run, str)
    if not is_command or not all(isinstance(each, str) for each in make_run):
        raise CallError(
            f"make_run={make_run!r}: pass a function, or a list of the words of a command, such as"
            ' [sys.executable, "train.py", "--run", "{run}"]'
        )
    if not any("{run}" in each for each in make_run):
        raise CallError('the command has no "{run}", which stands for the run directory')
    return Children(list(make_run), folder, number or signal.SIGKILL, timeout).live


def _take_signal(kill: Any) -> signal.Signals | None:
    if kill is None:
        return None
    if isinstance(kill, int) and not isinstance(kill, bool) and kill in list(signal.Signals):
        return signal.Signals(kill)
    raise CallError(f"kill={kill!r}: pass a signal, such as signal.SIGKILL")


def _live_through(life: Life, run: Path, scene: Sequence[Cut]) -> list[Lived]:
    """Make a run that is cut at each place in turn, and let it end."""
    lived = []
    for cut in scene:
        lived.append(life(run, cut))
        if not lived[-1].was_cut:
            raise CallError(
                f"the run was over before {cut} of its process number {len(lived)}: it recorded"
                f" {len(lived[-1].records)} times; cut earlier"
            )
    try:
        return [*lived, life(run, None)]
    except Exception as error:
        error.add_note(f"while the run that was cut at {join(scene)} went on")
        raise
