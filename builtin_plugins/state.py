"""Save what no other plugin looks after: plain values, a tensor, or any object with a state.

An object needs no base class: ``state_dict`` and ``load_state_dict`` are enough.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import attrs
import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import hookbus
from hookbus.errors import MismatchError

_DICTS = (dict, OrderedDict, Counter, defaultdict)
_LISTS = (list, deque)

# A saved tensor, kept so that its id stays its own, and the tensor that took its place.
_Given = dict[int, tuple[torch.Tensor, torch.Tensor]]

# Each has a plugin that knows better than its `load_state_dict`; nobody half-restores them.
SPOKEN_FOR = (torch.nn.Module, Optimizer, LRScheduler, DataLoader, GradScaler)


@attrs.define(eq=False)
class Values:
    """Save a dict, list or deque of plain values and tensors, and put it back in place.

    The object stays the same, and so do the containers in it and the tensors that fit; what the
    checkpoint does not have is dropped.
    """

    component: Any
    kind = "state"

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self.component, per_rank=None)
        _write_class(save, self.component)

    @hookbus.hookimpl
    def check_state(self, resume: hookbus.Resume) -> None:
        if not _check_class(resume, self.component) or type(self.component) is not deque:
            return
        saved = resume.metadata().state.maxlen
        if saved != self.component.maxlen:
            resume.problem(
                f"the deque was saved with maxlen={saved}, run has maxlen={self.component.maxlen}"
            )

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        saved = resume.metadata().state
        if isinstance(saved, dict):
            dropped = [repr(key) for key in self.component if key not in saved]
            if dropped:
                resume.note(f"{', '.join(dropped)} dropped: not in the checkpoint")
        try:
            resume.read_into(self.component)  # straight into its tensors, without a second copy
        except MismatchError:  # it has grown or shrunk since it was made
            saved = resume.read()
        with torch.no_grad():
            _put_back(self.component, saved, {}, set())


@attrs.define(eq=False)
class TensorState:
    """Save a tensor or parameter, and put it back in place."""

    component: torch.Tensor
    kind = "state"

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self._make_tree(), per_rank=None)
        _write_class(save, self.component)

    @hookbus.hookimpl
    def check_state(self, resume: hookbus.Resume) -> None:
        if not _check_class(resume, self.component):
            return
        saved, live = resume.metadata().state, self._make_tree()
        before = _describe_tensor(saved["tensor"], saved["requires_grad"])
        now = _describe_tensor(live["tensor"], live["requires_grad"])
        if before != now:
            resume.problem(f"saved {before}, run has {now}")

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        resume.read_into(self._make_tree())

    def _make_tree(self) -> dict[str, Any]:
        return {"tensor": self.component, "requires_grad": self.component.requires_grad}


@attrs.define(eq=False, slots=False)
class Stateful:
    """Save the ``state_dict`` of any object, and the name of its class."""

    component: Any
    kind = "state"

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self.component.state_dict(), per_rank=None)
        _write_class(save, self.component)

    @hookbus.hookimpl
    def check_state(self, resume: hookbus.Resume) -> None:
        _check_class(resume, self.component)

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        give_back(self.component, resume.read())


def has_state(component: object) -> bool:
    """Whether an object can give its state and take it back."""
    return not isinstance(component, type) and all(
        callable(getattr(component, method, None)) for method in ("state_dict", "load_state_dict")
    )


def give_back(component: Any, saved: Any) -> None:
    """Hand a saved state over; nothing on both sides is not handed over, which some refuse."""
    if saved or component.state_dict():
        component.load_state_dict(saved)


def _write_class(save: hookbus.Save, component: object) -> None:
    save.write(type(component).__name__, part="class")


def _check_class(resume: hookbus.Resume, component: object) -> bool:
    saved, live = resume.metadata("class").state, type(component).__name__
    if saved != live:
        resume.problem(
            f"saved by a {saved}, run has a {live}; pass skip=({resume.name!r},) to start it fresh"
        )
    return bool(saved == live)


def _describe_tensor(tensor: Any, requires_grad: bool) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} {dtype} requires_grad={requires_grad}"


def _put_back(live: Any, saved: Any, given: _Given, taken: set[int]) -> Any:
    """Return `live` with the contents of `saved` where it can take them, else `saved`.

    A `TensorInfo` in `saved` stands for what is in `live` already. `given` has the tensors that
    took a saved one, so that one tensor under two names stays one; `taken` are the live tensors
    in use, so that two do not become one.
    """
    if isinstance(saved, hookbus.TensorInfo):
        return live
    if isinstance(saved, torch.Tensor):
        if id(saved) not in given:
            fits = id(live) not in taken and _can_take(live, saved)
            given[id(saved)] = saved, live.copy_(saved) if fits else saved
            taken.add(id(given[id(saved)][1]))
        return given[id(saved)][1]
    if type(saved) not in (*_DICTS, *_LISTS, tuple):
        return saved
    ours, theirs = _list_members(live), _list_members(saved)
    members = {key: _put_back(ours.get(key), theirs[key], given, taken) for key in theirs}
    if isinstance(saved, tuple):
        return tuple(members.values())
    if type(live) is not type(saved) or _read_limit(live) != _read_limit(saved):
        live = saved
    live.clear()
    if not isinstance(saved, dict):
        live.extend(members.values())
        return live
    live.update(members)
    if isinstance(saved, defaultdict):
        live.default_factory = saved.default_factory
    if isinstance(saved, OrderedDict) and live is not saved:
        vars(live).clear()
        vars(live).update(vars(saved))  # `_metadata` of a module's state_dict
    return live


def _list_members(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, list | tuple | deque) else {}


def _read_limit(value: Any) -> int | None:
    return value.maxlen if isinstance(value, deque) else None


def _can_take(live: Any, saved: torch.Tensor) -> bool:
    return (
        type(live) is type(saved)
        and live.dtype == saved.dtype
        and live.shape == saved.shape
        and live.requires_grad == saved.requires_grad
    )


@hookbus.hookimpl(trylast=True)
def plugin_for(name: str, component: object) -> Values | TensorState | Stateful | None:
    if type(component) in (*_DICTS, *_LISTS):
        # A list of models or optimizers is not plain values: say so now, not at the first save.
        members: Any = component.values() if isinstance(component, dict) else component
        return None if any(hasattr(m, "state_dict") for m in members) else Values(component)
    if isinstance(component, torch.Tensor):
        return TensorState(component)
    if isinstance(component, SPOKEN_FOR) or hasattr(component, "state_key"):
        return None
    return Stateful(component) if has_state(component) else None
