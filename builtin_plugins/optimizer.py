"""Save optimizers by the names of their parameters, and see that none is forgotten.

The gradients that go on mattering are saved with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
import torch
from torch.nn.parameter import is_lazy

import hookbus
from builtin_plugins.module_state import describe_lazy
from builtin_plugins.names import describe_faults, list_some, parameter_names, rename
from builtin_plugins.optimizer_state import (
    OptimizerState,
    describe_shape,
    is_optimizer,
)
from builtin_plugins.sharded import is_dtensor
from builtin_plugins.strangers import Strangers, list_members
from hookbus.errors import UnattachedError


@attrs.define(eq=False)
class Optimizer:
    """Look after an optimizer, or a list of them, and the gradients of their parameters.

    A wrapper is followed to the torch optimizer inside. State goes by the names of parameters,
    so their order in a group may change. Every tensor comes back with its bits, dtype and
    strides. Options such as ``lr`` come from the checkpoint, except ``foreach``, ``fused``,
    ``capturable`` and ``differentiable``; an ``lr`` tensor stays the same object. With
    ``strict=False`` what fits is restored and the report tells the rest. ``rename`` is that of
    `Model`, with the component's name in front: ``{"model.old": "model.new"}``.

    Raises:
        AttachError: there is no torch optimizer inside.
    """

    component: Any
    strict: bool = attrs.field(default=True, kw_only=True)
    rename: Mapping[str, str] = attrs.field(factory=dict, kw_only=True)
    _states: list[OptimizerState] = attrs.field(init=False)
    _names: dict[int, str] = attrs.field(factory=dict, init=False)
    kind = "optimizer"
    after = ("precision",)

    def __attrs_post_init__(self) -> None:
        self._states = [OptimizerState(each) for each in list_members(self.component)]

    @hookbus.hookimpl
    def resume_start(self, resume: hookbus.Resume) -> None:
        self._names = self._find_names(resume.components)
        for state in self._states:
            state.note_given()
            state.gradients.watch()
            state.gradients.in_run = resume.stage == "fit"

    @hookbus.hookimpl
    def check_attached(self, components: Mapping[str, object]) -> None:
        name = next(name for name, each in components.items() if each is self.component)
        self._name_parameters(name, components)

    @hookbus.hookimpl
    def save_start(self, save: hookbus.Save) -> None:
        # Groups may have come since the save was asked for.
        self._name_parameters(save.name, save.components)

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write([state.collect(self._names) for state in self._states])

    @hookbus.hookimpl
    def check_state(self, resume: hookbus.Resume) -> None:
        if not resume.set_up:
            return
        try:
            self._name_parameters(resume.name, resume.components)
        except UnattachedError as error:
            resume.problem(error)
            return
        if resume.event == "restore_training_state":
            parameters = [p for state in self._states for p in state.list_parameters()]
            if lazy := [self._names[id(p)] for p in parameters if is_lazy(p)]:
                resume.problem(describe_lazy(lazy, "bus.resume()"))
                return
        saved = self._read_names(resume, resume.metadata().state)
        if len(saved) != len(self._states):
            resume.problem(
                f"saved with {len(saved)} optimizers, run has {len(self._states)}; "
                f"pass skip=({resume.name!r},) to start fresh"
            )
            return
        for i, (state, tree) in enumerate(zip(self._states, saved, strict=True)):
            which = f"optimizer {i}: " if len(saved) > 1 else ""
            if was := state.describe_other_class(tree):
                resume.problem(f"{which}{was}; pass skip=({resume.name!r},) to start it fresh")
                continue
            # A callback may add groups when it is restored; those are looked at after that.
            may_grow = resume.event != "restore_training_state"
            faults = state.compare(tree, self._names, may_grow=may_grow)
            text = f"{which}{describe_faults(faults)}"
            if faults and state.is_positional(tree):
                resume.problem(f"{text}; pass skip=({resume.name!r},) to start it fresh")
            elif faults and self.strict:
                resume.problem(
                    f"{text}; to restore what fits, bus.register(builtin_plugins.Optimizer("
                    f"optimizer, strict=False), {resume.name!r}), or with rename={{…}}"
                )
            elif faults:
                fitting = len(state.find_fitting(tree, self._names))
                told = f"{fitting} parameters take their state back, others are fresh"
                resume.note(f"{text}; {told}, so not bit for bit", warn=True)

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        read = self._read_names(resume, resume.read(targets=self._make_targets(resume)))
        for state, tree in zip(self._states, read, strict=True):
            for setting, was, now, adapts in state.restore(tree, self._names):
                then: Literal["keep", "adapt"] = "adapt" if adapts else "keep"
                why = "other kernels round differently" if adapts else ""
                resume.change(setting, was, now, then=then, exact=not adapts, why=why)

    @hookbus.hookimpl
    def optimizer_stepped(self, optimizer: object) -> bool | None:
        for state in self._states:
            if any(each is optimizer for each in state.chain):
                return not state.gradients.void
        return None

    @hookbus.hookimpl
    def gradients_waiting(self) -> bool:
        return any(state.gradients.any_waiting() for state in self._states)

    @hookbus.hookimpl
    def bus_close(self) -> None:
        for state in self._states:
            state.gradients.release()

    def _find_names(self, components: Mapping[str, object]) -> dict[int, str]:
        names = parameter_names(components)
        ours = [id(p) for state in self._states for p in state.list_parameters()]
        return {each: names[each] for each in ours if each in names}

    def _name_parameters(self, who: str, components: Mapping[str, object]) -> None:
        """Find the names that the parameters have now.

        Raises:
            UnattachedError: a parameter is part of no attached component.
        """
        names = self._find_names(components)
        ours = [p for state in self._states for p in state.list_parameters()]
        lost = [p for p in ours if id(p) not in names]
        replaced = [self._names[id(p)] for p in lost if id(p) in self._names]
        strange = [describe_shape(p) for p in lost if id(p) not in self._names]
        faults = []
        if replaced:
            faults.append(
                f"no longer part of the model are {list_some(replaced)}; build the optimizer "
                "after layers are replaced or sharded"
            )
        if strange:
            faults.append(
                f"parameters of shape {list_some(strange)} belong to nothing attached; attach the "
                "module that holds them, bus.attach(NAME=module)"
            )
        if faults:
            raise UnattachedError(
                f"{who}: {len(lost)} of {len(ours)} parameters would be trained and never saved: "
                f"{'; '.join(faults)}"
            )
        self._names = names

    def _make_targets(self, resume: hookbus.Resume) -> dict[str, torch.Tensor]:
        """Return where the state of sharded parameters is read to."""
        parameters = [p for state in self._states for p in state.list_parameters()]
        if not any(map(is_dtensor, parameters)):
            return {}
        targets: dict[str, torch.Tensor] = {}
        saved = self._read_names(resume, resume.metadata().state)
        for state, tree in zip(self._states, saved, strict=True):
            targets |= state.make_targets(tree, self._names)
        return targets

    def _read_names(
        self, resume: hookbus.Resume, saved: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        # Names begin with that of the component, which may have been another one.
        names = {**resume.renamed, **self.rename}

        def renamed(mapping: Mapping[str, Any]) -> dict[str, Any]:
            return {rename(name, names): value for name, value in mapping.items()}

        return [
            {
                **tree,
                "groups": [
                    {**group, "parameters": renamed(group["parameters"])}
                    for group in tree["groups"]
                ],
                "state": renamed(tree["state"]),
                "on_cpu": renamed(tree["on_cpu"]),
                "gradients": {
                    what: renamed(gradients) for what, gradients in tree["gradients"].items()
                },
            }
            for tree in saved
        ]


class Optimizers:
    """Looks after optimizers that are attached, and misses those that step and are not.

    Where a loop is on the bus, that sees to it: it knows which steps are the run's.
    """

    def __init__(self) -> None:
        self._strangers: Strangers | None = None

    @hookbus.hookimpl
    def plugin_for(self, name: str, component: object) -> Optimizer | None:
        members = list_members(component)
        return Optimizer(component) if members and all(map(is_optimizer, members)) else None

    @hookbus.hookimpl
    def resume_end(self, resume: hookbus.Resume) -> None:
        self._strangers = None
        if resume.stage == "fit" and not _has_loop(resume.components):
            self._strangers = Strangers()
            self._strangers.listen()

    @hookbus.hookimpl
    def check_attached(self, components: Mapping[str, object]) -> None:
        if self._strangers is not None and not _has_loop(components):
            self._strangers.check(components)

    @hookbus.hookimpl
    def bus_close(self) -> None:
        self._strangers = None


def _has_loop(components: Mapping[str, object]) -> bool:
    return any(getattr(each, "kind", None) == "loop" for each in components.values())
