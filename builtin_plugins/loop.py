"""The loop: counts epochs, batches and steps, and goes on after the last batch that was done."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import hookbus
from builtin_plugins.loader import Loader, Repeat
from hookbus.errors import LoopError, UnattachedError
from hookbus.logs import say

logger = logging.getLogger("hookbus")

_START = {
    "where": "start",
    "epoch": -1,
    "call": 0,
    "batch": 0,
    "step": 0,
    "samples": 0,
    "finished": None,
}


class Loop:
    """Counts what is done, and hands out what is not.

    ``epoch`` counts from 0, ``batch`` from 1 within the epoch; ``step`` counts the batches in
    whose body an attached optimizer stepped; ``samples`` those handed out. ``metrics`` is a dict
    that goes with the next save and is emptied then. Limits come from the script, never from the
    checkpoint.
    """

    kind = "loop"

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}
        self.epoch = 0
        self.batch = 0
        self.step = 0
        self.samples = 0
        self._bus: hookbus.HookBus | None = None
        self._where = "start"
        self._call = 0
        self._finished: int | None = None
        self._limit: int | None = None
        self._finishing = False
        self._in_body = self._stepped = False
        self._asked_before = self._asked_after = False
        self._every_warned = False
        self._resumed: Mapping[str, Any] | None = None
        self._put_now = False
        self._generation = 0
        self._turn = 0
        self._outer: weakref.ref[object] | None = None
        self._loader: Loader | None = None
        self._adopted: dict[int, Loader] = {}
        self._adopted_states: dict[int, Any] = {}
        self._strangers: set[str] = set()
        self._hook: Any = None

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a Loop cannot be pickled or copied")

    # -- for scripts ---------------------------------------------------------------------------

    def epochs(self, n: int) -> Iterable[int]:
        """Hand out the numbers of the epochs that are not done, up to ``n`` in all.

        What stands between the batches and the end of the body is the epoch's own code; at its
        end the epoch counts as done.

        Raises:
            LoopError: the loop is on no bus, or the run was not resumed.
        """
        self._check_ready("epochs")
        return self._keep_outer(_Epochs(self, _check_count("epochs", n)))

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
        return _Batches(self, loader, Repeat(replay, inexact_ok))

    def steps(self, n: int, loader: Iterable[Any] | None = None) -> Iterable[Any]:
        """Hand out bodies until ``n`` steps are done: batches of ``loader``, again and again.

        Without a loader it hands out the number of steps done so far.

        Raises:
            LoopError: a whole epoch of ``loader`` passed without a step.
        """
        self._check_ready("steps")
        return self._keep_outer(_Steps(self, _check_count("steps", n), loader))

    def every(self, n: int) -> bool:
        """Whether the step just made in this body is a multiple of ``n``.

        True from that step to the end of its body, however often it is asked.
        """
        if self._in_body:
            if self._stepped:
                self._asked_after = True
            else:
                self._asked_before = True
        return self._in_body and self._stepped and self.step % _check_count("every", n) == 0

    def finish(self) -> None:
        """End the loop early: after this body, and after this epoch's own code.

        Remembered by the checkpoint until ``epochs`` or ``steps`` is given a larger limit.
        """
        self._finishing = True
        self._finished = self._limit

    # -- what the bus asks ---------------------------------------------------------------------

    def bind(self, bus: hookbus.HookBus) -> None:
        """Learn which bus this loop is on."""
        self._bus = bus

    @property
    def running(self) -> bool:
        return self._outer is not None and self._outer() is not None

    @property
    def left(self) -> bool:
        return self._in_body

    @property
    def position(self) -> Mapping[str, Any]:
        if self._resumed is not None:  # its place in the data has not been taken up yet
            return self._resumed["position"]
        # An epoch of which no batch is handed out has not begun.
        head = self._where == "head"
        return {
            "where": "tail" if head else self._where,
            "epoch": self.epoch - head if self._where != "start" else -1,
            "call": self._call,
            "batch": self.batch,
            "step": self.step,
            "samples": self.samples,
            "finished": self._finished,
        }

    # -- events --------------------------------------------------------------------------------

    @hookbus.hookimpl
    def resume_start(self, resume: hookbus.Resume) -> None:
        if resume.stage == "fit":
            self._generation += 1
            self._take_up(_START)
            self._resumed, self._put_now = None, False
            self._loader, self._outer, self._in_body = None, None, False
            self._adopted, self._adopted_states = {}, {}

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        state = resume.read()
        self._take_up(state["position"])
        self._resumed = state
        self._put_now = self._where != "start"
        self._adopted_states = state["loaders"]

    @hookbus.hookimpl
    def check_attached(self, components: Mapping[str, object]) -> None:
        if self._strangers:
            names = ", ".join(sorted(self._strangers))
            raise UnattachedError(
                f"an optimizer steps in the loop's body and is not on the bus, so its state would"
                f" be lost: {names}; add bus.attach(optimizer=…)"
            )

    @hookbus.hookimpl
    def note_streams(self, slot: str) -> Mapping[str, str] | None:
        notes = {}
        for call, loader in self._adopted.items():
            digests = loader.note_streams(slot)
            notes |= {f"{call}.{name}": value for name, value in digests.items()}
        return notes

    @hookbus.hookimpl
    def put_streams(self, slot: str) -> None:
        for loader in self._adopted.values():
            loader.put_streams(slot)

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        data = None
        if self._resumed is not None:
            data = self._resumed["data"]
        elif self._loader is not None and self._where == "body" and self.batch > 0:
            data = self._loader.read_position()
        loaders = {**self._adopted_states}
        loaders |= {call: loader.read_state() for call, loader in self._adopted.items()}
        save.write({"position": self.position, "data": data, "loaders": loaders}, per_rank=True)

    @hookbus.hookimpl
    def release(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._bus = self._loader = None
        self._adopted.clear()

    # -- one body, one epoch -------------------------------------------------------------------

    def _begin_body(self) -> None:
        self.batch += 1
        self._in_body, self._stepped = True, False
        self._asked_before = self._asked_after = False

    def _end_body(self) -> None:
        """Count the batch as done, and reach a safe point if the state is whole."""
        if not self._in_body:
            return
        self._in_body = False
        if self._stepped and self._asked_before and not self._asked_after:
            self._warn_of_every()
        if self._stepped or not any(self._get_bus().hook.gradients_waiting()):
            self._get_bus().reach_safe_point(self)

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch, self._call, self.batch = epoch, 0, 0
        self._where = "head"
        if self._resumed is None or self._resumed["position"]["where"] != "body":
            self._resumed = None
            self._put_streams_once()

    def _find_next_epoch(self) -> int:
        """Return the epoch to hand out first: the saved one if it is not done, else the next."""
        if self._resumed is not None and self._where == "body":
            return self.epoch
        return self.epoch + (0 if self._where == "start" else 1)

    def _end_epoch(self) -> None:
        """Count the epoch as done: its own code is over."""
        self._in_body = False
        if self._resumed is not None:
            position = self._resumed["position"]
            raise LoopError(
                f"the checkpoint stands after batch {position['batch']} of the"
                f" {_count(position['call'] + 1)} batches() of epoch {self.epoch}, and the script"
                " did not get there"
            )
        self._where = "tail"
        self._get_bus().reach_safe_point(self)

    def _open(self, source: Iterable[Any], repeat: Repeat) -> tuple[int, Iterator[Any]]:
        """Make the iterator of the next `batches()` of this epoch; return its turn as well."""
        if self._where == "start":
            raise LoopError("batches() belongs inside epochs() or steps()")
        bus = self._get_bus()
        self._turn += 1
        turn = self._turn
        if self._where == "body":
            self._call += 1
            self.batch = 0
            if self._in_body:  # the batch before was left, with or without a save asked for
                bus.write_asked()
                self._in_body = False
        self._where = "body"
        if "loader" in bus.blocked:
            self._loader, self._resumed = None, None
            self._put_streams_once()
            return turn, iter(source)
        if self._resumed is not None and self._call < self._resumed["position"]["call"]:
            self._loader = None
            return turn, iter(())
        resumed, self._resumed = self._resumed, None
        loader = self._loader = self._find_loader(source)
        loader.start(self._watch, repeat)
        if resumed is None or resumed["data"] is None:
            self._put_streams_once()
            bus.hook.note_streams(slot="epoch")
            return turn, loader.iterate()
        self._put_now = False
        bus.hook.put_streams(slot="epoch")
        iterator = loader.iterate_from(resumed["data"])
        bus.hook.put_streams(slot="now")
        self.batch = resumed["position"]["batch"]
        return turn, iterator

    def _fetch(self, iterator: Iterator[Any]) -> Any:
        if self._loader is None:
            return next(iterator)
        batch = self._loader.fetch(iterator)
        self.samples += self._loader.hand(batch)
        return batch

    # -- inside --------------------------------------------------------------------------------

    def _check_ready(self, method: str) -> None:
        if self._bus is None:
            raise LoopError(
                f"{method}(): this loop is on no open bus; add bus.attach(loop=loop) before"
                " bus.resume()"
            )
        if not self._bus.resumed:
            raise LoopError(f"{method}(): call bus.resume(RUN) first, also for a fresh start")

    def _get_bus(self) -> hookbus.HookBus:
        assert self._bus is not None
        return self._bus

    def _keep_outer(self, outer: Any) -> Any:
        self._outer = weakref.ref(outer)
        self._strangers.clear()
        if self._hook is None:
            loop = weakref.ref(self)

            def note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
                if (this := loop()) is not None:
                    this._note_step(optimizer)

            # Global, since an optimizer that nobody attached must be seen too, and a copied one
            # loses the hooks of its own.
            self._hook = register_optimizer_step_post_hook(note_step)
            weakref.finalize(self, self._hook.remove)
        return outer

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._in_body or self._bus is None:
            return
        counts = self._bus.hook.optimizer_stepped(optimizer=optimizer)
        if counts is None:
            # Attached, and its plugin is blocked: the script knows.
            counts = any(each is optimizer for each in self._bus.components.values())
            if not counts:
                self._strangers.add(type(optimizer).__qualname__)
        if counts and not self._stepped:
            self._stepped = True
            self.step += 1

    def _find_loader(self, source: Iterable[Any]) -> Loader:
        for entry in self._get_bus().plugins:
            if isinstance(entry.plugin, Loader) and entry.plugin.component is source:
                return entry.plugin
        adopted = self._adopted.get(self._call)
        if adopted is None or adopted.component is not source:
            adopted = Loader(source)
            state = self._adopted_states.pop(self._call, None)
            if state is not None:
                # Starting persistent workers draws, and the streams are in place already.
                self._get_bus().hook.note_streams(slot="adopt")
                adopted.put_state(state)
                self._get_bus().hook.put_streams(slot="adopt")
            self._adopted[self._call] = adopted
        return adopted

    def _put_streams_once(self) -> None:
        if self._put_now:
            self._put_now = False
            self._get_bus().hook.put_streams(slot="now")

    def _watch(self) -> Mapping[str, str]:
        digests = self._get_bus().hook.note_streams(slot="watch")
        return {
            f"{i}.{name}": value for i, each in enumerate(digests) for name, value in each.items()
        }

    def _take_up(self, position: Mapping[str, Any]) -> None:
        self._where = position["where"]
        self.epoch, self._call, self.batch = position["epoch"], position["call"], position["batch"]
        self.step, self.samples = position["step"], position["samples"]
        self._finished = position["finished"]
        if self._where == "start":
            self.epoch = 0
        self._finishing = False

    def _is_finished(self, limit: int) -> bool:
        return self._finished is not None and limit <= self._finished

    def _warn_of_every(self) -> None:
        if not self._every_warned:
            self._every_warned = True
            logger.warning(
                "loop.every() was asked before the optimizer's step in this body, so it is never"
                " true; ask after optimizer.step()"
            )


class _Epochs:
    """Hands out epochs; the end of each is noticed when the next one is asked for."""

    def __init__(self, loop: Loop, n: int) -> None:
        self._loop = loop
        self._n = n
        self._generation = loop._generation
        self._begun = self._over = False
        loop._limit = n

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> _Epochs:
        return self

    def __next__(self) -> int:
        loop = self._loop
        _check_generation(loop, self._generation)
        if self._over:
            raise StopIteration
        if self._begun:
            loop._end_epoch()
            next_epoch = loop.epoch + 1
        else:
            next_epoch = loop._find_next_epoch()
            if next_epoch >= self._n or loop._is_finished(self._n):
                self._say_finished(next_epoch)
        if next_epoch >= self._n or loop._finishing or loop._is_finished(self._n):
            self._over = True
            loop._outer = None
            loop._put_streams_once()
            raise StopIteration
        self._begun = True
        loop._begin_epoch(next_epoch)
        return next_epoch

    def _say_finished(self, done: int) -> None:
        why = "was finished early" if self._loop._is_finished(self._n) else "is done"
        _say_done(f"{done} of {self._n} epochs are done, {self._loop.step} steps", why)


class _Batches:
    """An iterable with the loader's length; each iteration is one `batches()` of the epoch."""

    def __init__(self, loop: Loop, loader: Iterable[Any], repeat: Repeat) -> None:
        self._loop = loop
        self._loader = loader
        self._repeat = repeat

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"{type(self._loader).__qualname__} has no length")
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return _BatchIterator(self._loop, self._loader, self._repeat)


class _BatchIterator:
    def __init__(self, loop: Loop, loader: Iterable[Any], repeat: Repeat) -> None:
        self._loop = loop
        self._generation = loop._generation
        self._over = False
        self._turn, self._iterator = loop._open(loader, repeat)

    def __iter__(self) -> _BatchIterator:
        return self

    def __next__(self) -> Any:
        loop = self._loop
        _check_generation(loop, self._generation)
        if self._over:
            raise StopIteration
        if self._turn != loop._turn:
            raise LoopError(
                "one batches() inside another, or side by side in a zip: the loop has one place in"
                " the data; make one iterable of several loaders"
            )
        loop._end_body()
        if loop._finishing:
            self._end()
        try:
            batch = loop._fetch(self._iterator)
        except StopIteration:
            self._end()
        loop._begin_body()
        return batch

    def _end(self) -> None:
        self._over = True
        if self._loop._loader is not None:
            self._loop._loader.end()
        raise StopIteration


class _Steps:
    """Hands out bodies until enough steps are done."""

    def __init__(self, loop: Loop, n: int, loader: Iterable[Any] | None) -> None:
        self._loop = loop
        self._n = n
        self._generation = loop._generation
        self._loader = loader
        self._bodies = self._repeat_loader(loader) if loader is not None else self._count_bodies()
        loop._limit = n
        if self._is_done():
            _say_done(f"{loop.step} of {n} steps are done", "is done")

    def __iter__(self) -> _Steps:
        return self

    def __next__(self) -> Any:
        _check_generation(self._loop, self._generation)
        try:
            return next(self._bodies)
        except StopIteration:
            self._loop._outer = None
            self._loop._put_streams_once()
            raise

    def _is_done(self) -> bool:
        loop = self._loop
        return loop.step >= self._n or loop._finishing or loop._is_finished(self._n)

    def _count_bodies(self) -> Iterator[int]:
        loop = self._loop
        loop._where = "body"
        loop._resumed = None
        while not self._is_done():
            loop._put_streams_once()
            loop._begin_body()
            yield loop.step
            loop._end_body()

    def _repeat_loader(self, loader: Iterable[Any]) -> Iterator[Any]:
        loop = self._loop
        epoch = loop._find_next_epoch()
        while not self._is_done():
            taken_up = loop._resumed is not None
            loop._begin_epoch(epoch)
            before = loop.step
            for batch in loop.batches(loader):
                yield batch
                loop._end_body()
                if self._is_done():
                    return
            if loop.step == before and not taken_up:
                raise LoopError(
                    f"a whole epoch passed without a step of an attached optimizer, so"
                    f" steps({self._n}) would never end"
                )
            loop._end_epoch()
            epoch += 1


@hookbus.hookimpl
def plugin_for(name: str, component: object) -> object | None:
    return component if isinstance(component, Loop) else None


def _check_generation(loop: Loop, generation: int) -> None:
    if loop._generation != generation:
        raise LoopError("the run was rolled back by bus.resume(); start the loop again")


def _check_count(method: str, n: int) -> int:
    if isinstance(n, bool) or not hasattr(n, "__index__") or n.__index__() < (method == "every"):
        raise LoopError(f"{method}({n!r}): pass a whole number")
    return n.__index__()


def _count(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


def _say_done(what: str, why: str) -> None:
    say(f"this run {why}: {what}; pass a larger limit to go on")
