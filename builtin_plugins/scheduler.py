"""Save learning-rate schedulers, and see that none is forgotten."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from torch.optim.lr_scheduler import LRScheduler

import hookbus
from builtin_plugins.optimizer_state import is_same, set_option
from builtin_plugins.search import find_instances, find_living
from builtin_plugins.strangers import list_members, list_optimizers
from hookbus.errors import UnattachedError

# What schedulers keep in the parameter groups, so that one works with a fresh optimizer too.
_IN_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum")
# Arguments whose attributes change from step to step, or are schedulers themselves.
_NOT_SETTINGS = ("last_epoch", "lr_lambda", "schedulers")
_METHODS = ("step", "get_last_lr", "state_dict", "load_state_dict")


@attrs.define(eq=False)
class Scheduler:
    """Look after a learning-rate scheduler, one that wraps it as ``scheduler``, or a list of them.

    Schedulers inside it (`SequentialLR`, `ChainedScheduler`) go with it. What it was built with,
    such as ``T_max``, comes from the checkpoint, and the report tells what the script had. After
    the restore each group's ``lr`` is the saved one, also where the optimizer starts fresh.
    """

    component: Any
    kind = "scheduler"
    after = ("optimizer",)

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write([_collect(each) for each in list_members(self.component)])

    @hookbus.hookimpl
    def check_state(self, resume: hookbus.Resume) -> None:
        if not resume.set_up:
            return
        saved, schedulers = resume.metadata().state, list_members(self.component)
        skip = f"pass skip=({resume.name!r},) to start fresh"
        if len(saved) != len(schedulers):
            resume.problem(f"saved with {len(saved)} schedulers, run has {len(schedulers)}; {skip}")
            return
        for tree, scheduler in zip(saved, schedulers, strict=True):
            was, now = tree["class"], _describe(scheduler)
            if was != now:
                resume.problem(f"saved by {was}, run has {now}; {skip}")
            were, are = len(tree["groups"]), len(_get_groups(scheduler))
            # A callback may add groups when it is restored; they are counted after that.
            if were < are or (were > are and resume.event == "restore_training_state"):
                resume.problem(f"saved for {were} parameter groups, run has {are}; {skip}")

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        for saved, scheduler in zip(resume.read(), list_members(self.component), strict=True):
            for setting, was, now in _list_changes(_unwrap(scheduler), saved["state"]):
                resume.change(setting, was, now, then="keep")
            scheduler.load_state_dict(saved["state"])
            for group, options in zip(_get_groups(scheduler), saved["groups"], strict=True):
                for key, value in options.items():
                    set_option(group, key, value, group.get(key))


def _collect(scheduler: Any) -> dict[str, Any]:
    groups = _get_groups(scheduler)
    return {
        "class": _describe(scheduler),
        "state": _drop_functions(scheduler.state_dict()),
        "groups": [{key: group[key] for key in _IN_GROUPS if key in group} for group in groups],
    }


def _drop_functions(state: Any) -> Any:
    """Leave out what a scheduler calls, which some releases of torch have in its state."""
    if type(state) is list:
        return [_drop_functions(each) for each in state]
    if type(state) is not dict:
        return state
    kept = {key: value for key, value in state.items() if not inspect.isroutine(value)}
    return {key: _drop_functions(value) for key, value in kept.items()}


def _unwrap(scheduler: Any) -> Any:
    """Return torch's scheduler inside a wrapper, or ``None`` for what is no scheduler."""
    if isinstance(scheduler, LRScheduler):
        return scheduler
    if isinstance(scheduler, type) or not all(hasattr(scheduler, name) for name in _METHODS):
        return None
    return _unwrap(getattr(scheduler, "scheduler", None))


def _is_ours(component: Any) -> bool:
    members = list_members(component)
    return bool(members) and all(_unwrap(each) is not None for each in members)


def _list_inside(scheduler: Any) -> list[LRScheduler]:
    return list(getattr(scheduler, "_schedulers", ()))


def _describe(scheduler: Any) -> str:
    """Return the names of a scheduler's class and of those inside it."""
    scheduler = _unwrap(scheduler)
    inside = ", ".join(map(_describe, _list_inside(scheduler)))
    return type(scheduler).__qualname__ + (f"({inside})" if inside else "")


def _get_groups(scheduler: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = _unwrap(scheduler).optimizer.param_groups
    return groups


def _list_changes(
    scheduler: LRScheduler, saved: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the arguments that a scheduler was built with and that differ, with both values."""
    live = scheduler.state_dict()
    for argument in inspect.signature(type(scheduler)).parameters:
        for key in (argument, f"_{argument}", f"{argument}s"):
            if argument in _NOT_SETTINGS or key not in live or key not in saved:
                continue
            if not is_same(saved[key], live[key]):
                yield f"{type(scheduler).__name__}.{key}", saved[key], live[key]
    for inside, state in zip(_list_inside(scheduler), saved.get("_schedulers", ()), strict=True):
        yield from _list_changes(inside, state)


class Schedulers:
    """Looks after schedulers that are attached, and misses those of attached optimizers."""

    def __init__(self) -> None:
        self._saves = 0

    @hookbus.hookimpl
    def plugin_for(self, name: str, component: object) -> Scheduler | None:
        return Scheduler(component) if _is_ours(component) else None

    @hookbus.hookimpl
    def resume_start(self, resume: hookbus.Resume) -> None:
        self._saves = 0

    @hookbus.hookimpl
    def check_attached(self, components: Mapping[str, object]) -> None:
        """Refuse a save while a scheduler of an attached optimizer is attached to nothing.

        Schedulers leave no trace that would be cheap to look at, so this goes through every object
        of the process, which takes some 40 ms: at the first save, the second, fourth, eighth and
        so on.
        """
        self._saves += 1
        if self._saves.bit_count() == 1:
            _check_schedulers(components)


def _check_schedulers(components: Mapping[str, object]) -> None:
    optimizers = list_optimizers(components)
    attached = {
        id(scheduler)
        for component in components.values()
        if _is_ours(component)
        for member in list_members(component)
        for scheduler in _walk(member)
    }
    ours = {id(optimizer) for optimizer in optimizers}
    forgotten = find_living(lambda: _find_forgotten(ours, attached))
    if forgotten:
        what = ", ".join(map(_describe, forgotten))
        del forgotten  # the traceback would keep it alive, and a notebook keeps that
        raise UnattachedError(
            f"{what} changes the lr of an attached optimizer and "
            "is attached to nothing, so it would start anew after a resume; "
            "bus.attach(scheduler=scheduler)"
        )


def _find_forgotten(optimizers: set[int], attached: set[int]) -> list[LRScheduler]:
    forgotten: list[LRScheduler] = [
        each
        for each in find_instances([LRScheduler])
        if id(each) not in attached and id(getattr(each, "optimizer", None)) in optimizers
    ]
    inside = {id(each) for outer in forgotten for each in _walk(outer) if each is not outer}
    return [each for each in forgotten if id(each) not in inside]


def _walk(scheduler: Any) -> Iterator[LRScheduler]:
    """Yield torch's scheduler and all that are inside it."""
    scheduler = _unwrap(scheduler)
    yield scheduler
    for each in _list_inside(scheduler):
        yield from _walk(each)
