"""How a run goes on: what is counted, when a state is whole, and how a resume is taken up."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import hookbus
from builtin_plugins.adoption import Adopted
from builtin_plugins.data_pass import BlindPass, Pass, Repeat
from builtin_plugins.loader import Loader
from builtin_plugins.position import Position
from builtin_plugins.strangers import Strangers
from hookbus.errors import LoopError, UnattachedError

logger = logging.getLogger("hookbus")


class Course:
    """The course of one run, behind a `Loop` and its iterators.

    An outer is what hands out epochs or steps. ``resumed`` is what the loop's section held, until
    something new is counted; ``is_pending`` says that its place is still to be taken up.
    """

    def __init__(self, loop: object) -> None:
        self.at = Position()
        self.bus: hookbus.HookBus | None = None
        self.adopted = Adopted()
        self.data_pass: Pass | BlindPass | None = None
        self.in_body = self.stepped = False
        self.finishing = False
        self.rollbacks = 0
        self.turn = 0
        self.asked_every: set[bool] = set()
        self.strangers = Strangers()
        self.is_pending = False
        self._resumed: Mapping[str, Any] | None = None
        self._loop = weakref.ref(loop)
        self._outer: weakref.ref[object] | None = None
        self._kind, self._limit = "", 0
        self._hook: Any = None
        self._warned_of_every = self._told_of_no_step = self._stepped_outside = False

    # -- what is saved -------------------------------------------------------------------------

    def start(self) -> None:
        """Forget everything: a run begins, or is rolled back."""
        self.rollbacks += 1
        self.at = Position()
        self.adopted.put_state({})
        self.data_pass, self._resumed, self.is_pending = None, None, False
        self.in_body, self._outer = False, None

    def put_state(self, state: Mapping[str, Any]) -> None:
        self.at = Position(**copy.deepcopy(state["position"]))
        self.adopted.put_state(state["loaders"])
        self._resumed, self.is_pending = state, True

    def read_state(self) -> dict[str, Any]:
        data = None
        if self._resumed is not None:
            data = self._resumed["data"]
        elif self.data_pass is not None and self.at.where == "body" and self.at.batch > 0:
            data = self.data_pass.read_position()
        return {"position": self.position, "data": data, "loaders": self.adopted.read_state()}

    @property
    def position(self) -> dict[str, Any]:
        return self.at.to_dict() if self._resumed is None else dict(self._resumed["position"])

    @property
    def is_left(self) -> bool:
        """Whether something was begun and not ended, and is not the resumed place."""
        return self.in_body or (self._resumed is None and self.at.where in ("head", "code"))

    # -- outers --------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._outer is not None and self._outer() is not None

    def begin_outer(self, outer: object, kind: str, limit: int) -> None:
        self._outer = weakref.ref(outer)
        self._kind, self._limit = kind, limit
        # Ended early, and saved before that epoch's own code.
        self.finishing = self.is_finished and self._is_own and self._stands_in_epoch
        self.strangers = Strangers()
        self._see_steps()

    def end_outer(self) -> None:
        """End the outer, and with it the place of a resume if that was saved under it.

        The streams are put back, since what the script does now may draw: a last evaluation.
        """
        self.put_streams()
        if self._is_own:
            self.is_pending = False
        self._outer = None

    def check_outer(self, outer: object, rollbacks: int) -> None:
        self.check_alive(rollbacks)
        if self._outer is None or self._outer() is not outer:
            raise LoopError("one epochs() or steps() inside another: a run has one place")

    def check_alive(self, rollbacks: int) -> None:
        if self.bus is None:
            raise LoopError("the bus was closed; nothing is handed out any more")
        if self.rollbacks != rollbacks:
            raise LoopError("the run was rolled back by bus.resume(); start the loop again")

    def finish(self) -> None:
        if not self.running:
            raise LoopError("finish() belongs inside epochs() or steps()")
        self.finishing = True
        self.at.finished[self._kind] = self._limit

    @property
    def is_finished(self) -> bool:
        """Whether the run was ended early under this limit or a larger one."""
        return self._limit <= self.at.finished.get(self._kind, -1)

    # -- epochs --------------------------------------------------------------------------------

    @property
    def next_epoch(self) -> int:
        """The epoch to hand out: the one that is not done, else the next."""
        if self.at.where == "start":
            return 0
        return self.at.epoch + (0 if self.at.where == "head" or self._stands_in_epoch else 1)

    def begin_epoch(self, epoch: int) -> None:
        hook = self.get_bus().hook
        if self._stands_in_epoch:
            # What stands before the batches runs again, and draws what it drew.
            hook.put_streams(slot="head")
            self.adopted.look_around()
        else:
            self.put_streams()
            self._leave_place()
            hook.note_streams(slot="head")
        self._end_pass()
        self.at.epoch, self.at.call, self.at.batch = epoch, 0, 0
        self.at.where = "head"

    def end_epoch(self) -> None:
        """Count the epoch as done: its own code is over."""
        self.in_body = False
        if self.is_pending:
            assert self._resumed is not None
            position = self._resumed["position"]
            raise LoopError(
                f"the checkpoint stands after batch {position['batch']} of batches() number"
                f" {position['call'] + 1} of epoch {self.at.epoch}, and the script did not get"
                " there"
            )
        self._end_pass()
        self._count(where="tail")
        self.get_bus().reach_safe_point(self._loop())
        if not self.at.step:
            self._tell_of_no_step()

    @property
    def epoch_ended(self) -> bool:
        """Whether the epoch is over, or is known to be so after the last one of so many steps.

        ``steps(n, loader)`` hands out nothing after its last step, and so does not see that its
        epoch has ended with it.
        """
        is_last = self._kind == "steps" and self.at.step >= self._limit
        full = is_last and self.data_pass is not None and self.data_pass.is_over
        return self.at.where == "tail" or full

    # -- batches -------------------------------------------------------------------------------

    def open(self, source: Iterable[Any], repeat: Repeat) -> Iterator[Any] | None:
        """Begin the next `batches()` of this epoch; ``None`` if it was over when saved."""
        if not self.running or self.at.where in ("start", "tail"):
            raise LoopError("batches() belongs inside epochs(); steps(n, loader) takes its own")
        self.turn += 1
        if self.at.where != "head":
            self._end_pass()
            self.at.call += 1
            self.at.batch = 0
            if self.in_body:  # the batch before was left, with or without a save asked for
                self.get_bus().write_asked()
                self.in_body = False
        self.at.where = "body"
        place = self._resumed["position"] if self.is_pending and self._resumed else None
        if place is None or place["call"] < self.at.call:
            return self._begin_pass(source, repeat)
        if place["call"] == self.at.call:
            return self._take_up(source, repeat)
        return None

    def next_batch(self, iterator: Iterator[Any] | None) -> Any:
        """Count the batch before as done, and return the next one."""
        self.end_body()
        if iterator is None or self.data_pass is None:
            self._end_batches()
        self.put_streams()
        self._leave_place()
        if self.finishing:
            self._end_batches()
        try:
            batch, samples = self.data_pass.fetch(iterator)
        except StopIteration:
            self._end_batches()
        self.at.samples += samples
        self.begin_body()
        return batch

    def begin_body(self) -> None:
        self._count(batch=self.at.batch + 1)
        self.in_body, self.stepped = True, False
        self.asked_every.clear()

    def end_body(self) -> None:
        """Count the batch as done, and reach a safe point if the state is whole."""
        if not self.in_body:
            return
        self.in_body = False
        if self.stepped and self.asked_every == {False} and not self._warned_of_every:
            self._warned_of_every = True
            logger.warning(
                "loop.every() was asked before the optimizer's step in this body, so it is never"
                " true; ask after optimizer.step()"
            )
        if self.stepped or not any(self.get_bus().hook.gradients_waiting()):
            self.get_bus().reach_safe_point(self._loop())

    @property
    def may_be_void(self) -> bool:
        """Whether steps may come to nothing, because a gradient scaler finds overflows."""
        return any(entry.kind == "precision" for entry in self.get_bus().plugins)

    # -- streams -------------------------------------------------------------------------------

    def put_streams(self) -> None:
        """Put the streams where they were when the run was saved, if its place is pending.

        So nothing between the resume and its place can shift them.
        """
        if self.is_pending:
            self.get_bus().hook.put_streams(slot="now")
            self.adopted.look_around()

    # -- inside --------------------------------------------------------------------------------

    def get_bus(self) -> hookbus.HookBus:
        assert self.bus is not None
        return self.bus

    @property
    def _stands_in_epoch(self) -> bool:
        """Whether the pending place is in the middle of an epoch."""
        return (
            self.is_pending
            and self._resumed is not None
            and self._resumed["position"]["where"] == "body"
        )

    @property
    def _is_own(self) -> bool:
        """Whether the run was saved under this outer, and not under a later one."""
        return self.at.kind == self._kind and self.at.limit <= self._limit

    def _leave_place(self) -> None:
        self.is_pending, self._resumed = False, None

    def _count(self, **counted: Any) -> None:
        self._leave_place()
        for name, value in {**counted, "kind": self._kind, "limit": self._limit}.items():
            setattr(self.at, name, value)

    def _begin_pass(self, source: Iterable[Any], repeat: Repeat) -> Iterator[Any]:
        self.put_streams()
        self._leave_place()
        if "loader" in self.get_bus().blocked:
            self.data_pass = BlindPass()
            return iter(source)
        loader = self._find_loader(source, taking_up=False)
        self.data_pass = self._make_pass(loader, repeat)
        self.get_bus().hook.note_streams(slot="epoch")
        return self.data_pass.begin()

    def _take_up(self, source: Iterable[Any], repeat: Repeat) -> Iterator[Any]:
        assert self._resumed is not None
        data = self._resumed["data"]
        if data is None or "loader" in self.get_bus().blocked:
            return self._begin_pass(source, repeat)
        self.at.batch = self._resumed["position"]["batch"]
        if self.finishing:
            self.data_pass = BlindPass()
            return iter(())
        loader = self._find_loader(source, taking_up=True)
        self.data_pass = self._make_pass(loader, repeat)
        self.get_bus().hook.put_streams(slot="epoch")
        return self.data_pass.take_up(data)

    def _make_pass(self, loader: Loader, repeat: Repeat) -> Pass:
        return Pass(loader, self._watch, repeat, self.get_bus().ranks)

    def _end_pass(self) -> None:
        if self.data_pass is not None:
            self.data_pass.end()
            self.data_pass = None

    def _end_batches(self) -> NoReturn:
        self._end_pass()
        self.at.where = "code"
        raise StopIteration

    def _find_loader(self, source: Iterable[Any], *, taking_up: bool) -> Loader:
        for entry in self.get_bus().plugins:
            if isinstance(entry.plugin, Loader) and entry.plugin.component is source:
                return entry.plugin
        if self.adopted.awaits(self.at.call):
            # Persistent workers may be started, which draws, and the streams are in place.
            self.get_bus().hook.note_streams(slot="adopt")
            self.adopted.find(self.at.call, source, taking_up=taking_up)
            self.get_bus().hook.put_streams(slot="adopt")
        return self.adopted.find(self.at.call, source, taking_up=taking_up)

    def _watch(self) -> Mapping[str, str]:
        digests = self.get_bus().hook.note_streams(slot="watch")
        return {f"{i}.{name}": d for i, each in enumerate(digests) for name, d in each.items()}

    def _see_steps(self) -> None:
        if self._hook is not None:
            return
        course = weakref.ref(self)

        def note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if (this := course()) is not None:
                this._note_step(optimizer)

        # Global, since an optimizer that nobody attached must be seen too, and a copied one
        # loses the hooks of its own.
        self._hook = register_optimizer_step_post_hook(note_step)
        weakref.finalize(self, self._hook.remove)

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.bus is None or not (self.in_body or self.running):
            return
        counts = self.bus.hook.optimizer_stepped(optimizer=optimizer)
        if counts is None:
            # Attached, and its plugin is blocked: the script knows.
            counts = any(each is optimizer for each in self.bus.components.values())
            if not counts:
                self.strangers.note(optimizer)
        self._stepped_outside |= bool(counts) and not self.in_body
        if counts and self.in_body and not self.stepped:
            self.stepped = True
            self.at.step += 1

    def _tell_of_no_step(self) -> None:
        """Say, once, why an epoch has passed and no step is counted: nothing is saved by steps."""
        if self._told_of_no_step:
            return
        self._told_of_no_step = True
        if self._stepped_outside:
            logger.warning(
                "an optimizer steps outside the bodies of loop.batches(), so no step is counted and"
                " loop.every() is never true; iterate loop.batches(loader)"
            )
        try:
            self.strangers.check(self.get_bus().components)
        except UnattachedError as error:
            logger.warning("no step is counted: %s", error)

    def release(self) -> None:
        """Let go of what belongs to the process."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self.bus = self.data_pass = None
        self.adopted.put_state({})
