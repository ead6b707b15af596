"""The loop: counts epochs, batches and steps, and goes on after the last batch that was done."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils.data import DataLoader

import hookbus
from builtin_plugins.course import Course
from builtin_plugins.data_pass import Repeat
from builtin_plugins.forgotten import Forgotten
from builtin_plugins.loader import Loader
from builtin_plugins.new_rank import has_no_streams
from builtin_plugins.outers import Batches, Epochs, Steps
from builtin_plugins.streams import GENERATORS
from hookbus.errors import LoopError

logger = logging.getLogger("hookbus")


class Loop:
    """Counts what is done, and hands out what is not.

    ``metrics`` is a dict that goes with the next save and is emptied then. Limits come from the
    script, never from the checkpoint.
    """

    kind = "loop"

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}
        self._course = Course(self)
        self._forgotten = Forgotten()

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a Loop cannot be pickled or copied")

    # -- for scripts ---------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch in hand, from 0."""
        return self._course.at.epoch

    @property
    def batch(self) -> int:
        """The batch in hand, from 1 in each epoch."""
        return self._course.at.batch

    @property
    def step(self) -> int:
        """How many bodies an attached optimizer has stepped in."""
        return self._course.at.step

    @property
    def epoch_ended(self) -> bool:
        """Whether this is the end of an epoch: of its own code, or of its last step in `steps`."""
        return self._course.epoch_ended

    @property
    def samples(self) -> int:
        """How many samples were handed out: indices, or the first dimension of the tensors."""
        return self._course.at.samples

    def epochs(self, n: int) -> Iterable[int]:
        """Hand out the numbers of the epochs that are not done, up to ``n`` in all.

        What stands between the batches and the end of the body is the epoch's own code; at its
        end the epoch counts as done.

        Raises:
            LoopError: the loop is on no bus, or the run was not resumed.
        """
        self._check_ready("epochs")
        return Epochs(self._course, _check_count("epochs", n, 0))

    def batches(
        self, loader: Iterable[Any], *, replay: bool = False, inexact_ok: bool = False
    ) -> Iterable[Any]:
        """Hand out the batches of ``loader`` that are not done in this epoch.

        It has the loader's length. ``replay`` loads the batches that are done again and drops
        them, which is exact where workers draw random numbers; ``inexact_ok`` goes on where an
        exact resume is impossible. It never calls ``set_epoch``.

        Raises:
            SamplerError: while iterating, before the first batch: the data cannot be repeated.
        """
        self._check_ready("batches")
        return Batches(self._course, loader, Repeat(replay, inexact_ok))

    def steps(
        self,
        n: int,
        loader: Iterable[Any] | None = None,
        *,
        replay: bool = False,
        inexact_ok: bool = False,
    ) -> Iterable[Any]:
        """Hand out bodies until ``n`` steps are done: batches of ``loader``, again and again.

        Without a loader it hands out the number of steps done so far. ``replay`` and
        ``inexact_ok`` are those of `batches`.

        Raises:
            LoopError: a whole epoch of ``loader`` passed without a step.
        """
        self._check_ready("steps")
        repeat = Repeat(replay, inexact_ok)
        return Steps(self._course, _check_count("steps", n, 0), loader, repeat)

    def every(self, n: int) -> bool:
        """Whether the step just made in this body is a multiple of ``n``.

        True from that step to the end of its body, however often it is asked.
        """
        n, course = _check_count("every", n, 1), self._course
        course.asked_every.add(course.stepped)
        return course.in_body and course.stepped and course.at.step % n == 0

    def finish(self) -> None:
        """End the loop early: after this body, and after this epoch's own code.

        Remembered by the checkpoint until ``epochs`` or ``steps`` is given a larger limit.

        Raises:
            LoopError: nothing is being handed out.
        """
        self._course.finish()

    # -- for who drives it from outside --------------------------------------------------------

    def end_body(self) -> None:
        """Count the batch in hand as done, without asking for the next one."""
        self._course.end_body()

    def end_epoch(self) -> None:
        """Count the epoch in hand as done, without asking for the next one."""
        self._course.end_epoch()

    def take_place(self) -> None:
        """Put the streams where the resumed run stands, without handing anything out."""
        self._course.put_streams()

    def let_begin_anew(self, loader: DataLoader[Any]) -> None:
        """Take it that every iterator of ``loader`` is begun anew, also where one was left."""
        self._forgotten.begun_anew.append(loader)

    # -- what the bus asks ---------------------------------------------------------------------

    @property
    def component(self) -> Loop:
        """Itself: it is on the bus by this, attached or registered."""
        return self

    @property
    def running(self) -> bool:
        return self._course.running

    @property
    def left(self) -> bool:
        return self._course.is_left

    @property
    def position(self) -> Mapping[str, Any]:
        return self._course.position

    # -- events --------------------------------------------------------------------------------

    @hookbus.hookimpl
    def bus_open(self, bus: hookbus.HookBus) -> None:
        if self._course.bus not in (None, bus):
            raise LoopError("this loop is on another bus; close that one, or make a new Loop()")
        self._course.bus = bus

    @hookbus.hookimpl
    def resume_start(self, resume: hookbus.Resume) -> None:
        if resume.stage == "fit":
            self._course.start()

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        state = resume.read()
        assert resume.checkpoint is not None
        saved = resume.checkpoint.world_size
        if state["data"] is not None and saved != resume.world_size:
            told = [resume.read(rank=rank)["data"]["digest"] for rank in range(saved)]
            state["data"] |= {"digests": told, "is of another": resume.is_new_rank}
        if has_no_streams(resume):
            state[
                "loaders"
            ] = {}  # what loaders draw from that nobody attached is as they are built
        self._course.put_state(state)

    @hookbus.hookimpl
    def resume_end(self, resume: hookbus.Resume) -> None:
        if resume.stage == "fit":
            self._forgotten.look_around()

    @hookbus.hookimpl
    def check_attached(self, components: Mapping[str, object]) -> None:
        self._course.strangers.check(components)
        if self._forgotten.is_due():
            known: list[object] = [each.component for each in self._list_loaders()]
            known += [each for each in components.values() if isinstance(each, GENERATORS)]
            for text in self._forgotten.find(known, self._course.data_pass):
                logger.warning(text)

    @hookbus.hookimpl
    def save_start(self, save: hookbus.Save) -> None:
        # One may have stepped since the save was asked for.
        self._course.strangers.check(save.components)

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self._course.read_state(), per_rank=None)

    @hookbus.hookimpl(tryfirst=True)
    def note_streams(self, slot: str) -> Mapping[str, str]:
        if slot == "now":
            # A save before the place of the resume is taken up saves that place.
            self._course.put_streams()
        return self._course.adopted.note_streams(slot)

    @hookbus.hookimpl
    def put_streams(self, slot: str) -> None:
        self._course.adopted.put_streams(slot)

    @hookbus.hookimpl
    def bus_close(self) -> None:
        self._course.release()

    # -- inside --------------------------------------------------------------------------------

    def _check_ready(self, method: str) -> None:
        bus = self._course.bus
        if bus is None:
            raise LoopError(
                f"{method}(): this loop is on no open bus; add bus.attach(loop=loop) before"
                " bus.resume()"
            )
        if not bus.resumed:
            raise LoopError(f"{method}(): call bus.resume(RUN) first, also for a fresh start")

    def _list_loaders(self) -> list[Loader]:
        plugins = self._course.get_bus().plugins
        attached = [each.plugin for each in plugins if isinstance(each.plugin, Loader)]
        return attached + self._course.adopted.loaders


@hookbus.hookimpl
def plugin_for(name: str, component: object) -> object | None:
    return component if isinstance(component, Loop) else None


def _check_count(method: str, n: int, least: int) -> int:
    if isinstance(n, bool) or not hasattr(n, "__index__") or n.__index__() < least:
        raise LoopError(f"{method}({n!r}): pass a whole number from {least} up")
    return n.__index__()
