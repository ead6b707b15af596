"""Optimizers that step and that nobody attached."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from builtin_plugins.gradients import is_in_run
from builtin_plugins.names import list_some, parameter_names
from builtin_plugins.optimizer_state import find_inside, is_optimizer
from builtin_plugins.search import find_living
from hookbus.errors import UnattachedError


class Strangers:
    """Optimizers that stepped, of which some may be looked after by nobody.

    They are held weakly: one that is gone by the time of a save was for the moment only, and a
    resume does not need its state.
    """

    def __init__(self) -> None:
        # By id, since an optimizer may not be hashable.
        self._stepped: weakref.WeakValueDictionary[int, torch.optim.Optimizer] = (
            weakref.WeakValueDictionary()
        )

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        self._stepped[id(optimizer)] = optimizer

    def listen(self) -> None:
        """Note whatever steps in this process, as long as this is alive."""
        stepped = self._stepped

        def note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            stepped[id(optimizer)] = optimizer

        weakref.finalize(self, register_optimizer_step_post_hook(note_step).remove)

    def check(self, components: Mapping[str, object]) -> None:
        """Refuse a save that would lose the state of one of them.

        Raises:
            UnattachedError: one is alive and is on no open bus.
        """
        lost = find_living(lambda: self._find_lost(components))
        if lost:
            names = parameter_names(components)
            what = "; ".join(_describe(each, names) for each in lost)
            del lost  # the traceback would keep it alive, and a notebook keeps that
            raise UnattachedError(
                f"an optimizer steps and is not on the bus, so its state would be lost: {what}; "
                "add bus.attach(optimizer=…), and attach the module that holds its parameters too; "
                "if it was for the moment only, let go of it before the save: del optimizer"
            )

    def _find_lost(self, components: Mapping[str, object]) -> list[torch.optim.Optimizer]:
        attached = {id(optimizer) for optimizer in list_optimizers(components)}
        return [
            each
            for each in self._stepped.values()
            if id(each) not in attached
            and not any(map(is_in_run, list_optimizers({"": each})))  # on another bus
        ]


def list_optimizers(components: Mapping[str, object]) -> list[torch.optim.Optimizer]:
    """List the torch optimizers among ``components``, with those inside wrappers."""
    found = []
    for component in components.values():
        members = list_members(component)
        for member in members if all(map(is_optimizer, members)) else ():
            optimizer = member
            while optimizer is not None:
                if isinstance(optimizer, torch.optim.Optimizer):
                    found.append(optimizer)
                optimizer = find_inside(optimizer)
    return found


def list_members(component: Any) -> list[Any]:
    """Return what a list or tuple holds; anything else is its own only member."""
    return list(component) if isinstance(component, list | tuple) else [component]


def _describe(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> str:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    known = [names[id(p)] for p in parameters if id(p) in names]
    what = list_some(known) if known else "parameters that belong to nothing attached"
    return f"{type(optimizer).__qualname__} of {what}"
