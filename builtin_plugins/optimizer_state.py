"""One optimizer's state by the names of its parameters: collect it, compare it, restore it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.optim import LBFGS

from builtin_plugins.gradients import Gradients
from hookbus.errors import AttachError, StateError

# These say how to compute, not what, and belong to the machine that the run is on.
_OF_THE_RUN = ("foreach", "fused", "capturable", "differentiable")
_NOT_OPTIONS = ("params", "param_names")
# Schedulers change these all the time, and keep what they were given under another name.
_SCHEDULED = {"lr": "initial_lr", "momentum": "max_momentum", "betas": "max_momentum"}


@attrs.define(eq=False)
class OptimizerState:
    """One optimizer, from its outermost wrapper to torch's own inside, as a tree by names.

    ``names`` are those of the parameters by ``id``.

    Raises:
        AttachError: no torch optimizer is inside.
    """

    outermost: Any
    chain: list[Any] = attrs.field(init=False)
    gradients: Gradients = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.chain = [self.outermost]
        while (inside := find_inside(self.chain[-1])) is not None:
            self.chain.append(inside)
        if not hasattr(self.optimizer, "_optimizer_step_post_hooks"):
            raise AttachError(
                f"{type(self.optimizer).__name__} did not call torch's Optimizer.__init__ and "
                "holds no optimizer of the same parameters, so nobody can tell when it steps; "
                "attach the optimizers in it as a list"
            )
        self.gradients = Gradients(self.optimizer)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        innermost: torch.optim.Optimizer = self.chain[-1]
        return innermost

    def list_parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def collect(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Return the tree, with the live tensors in it."""
        packed = self.optimizer.state_dict()
        if not {"state", "param_groups"} <= packed.keys():
            raise StateError(
                f"{type(self.optimizer).__name__}.state_dict() has {', '.join(packed)} and not "
                "'state' and 'param_groups'; register a plugin that knows it"
            )
        groups = [*zip(self.optimizer.param_groups, packed["param_groups"], strict=True)]
        by_position = {
            position: names[id(parameter)]
            for group, saved in groups
            for parameter, position in zip(group["params"], saved["params"], strict=True)
        }
        state = {by_position[k]: v for k, v in packed["state"].items() if k in by_position}
        on_cpu = {
            name: keys
            for parameter in self.list_parameters()
            if (keys := _list_kept_on_cpu(parameter, state.get(name := names[id(parameter)], {})))
        }
        return {
            "classes": [_name_class(each) for each in self.chain],
            "wrappers": [_collect_wrapper(each, packed) for each in self.chain[:-1]],
            "groups": [
                {
                    "parameters": {names[id(p)]: list(p.shape) for p in group["params"]},
                    "options": {k: v for k, v in saved.items() if k not in _NOT_OPTIONS},
                }
                for group, saved in groups
            ],
            "state": state,
            "on_cpu": on_cpu,
            "more_state": {k: v for k, v in packed["state"].items() if k not in by_position},
            "more": {k: v for k, v in packed.items() if k not in ("state", "param_groups")},
            "gradients": self.gradients.collect(names),
        }

    def describe_other_class(self, saved: Mapping[str, Any]) -> str | None:
        """Say which classes differ; in which module a class is defined does not matter."""
        was, now = saved["classes"], [_name_class(each) for each in self.chain]
        if [each.rpartition(".")[2] for each in was] == [each.rpartition(".")[2] for each in now]:
            return None
        return f"saved by {' around '.join(was)}, run has {' around '.join(now)}"

    def is_positional(self, saved: Mapping[str, Any]) -> bool:
        """Whether some state goes by the position of the parameters, so that all must be there."""
        return isinstance(self.optimizer, LBFGS) or any(w is not None for w in saved["wrappers"])

    def compare(
        self, saved: Mapping[str, Any], names: Mapping[int, str], *, may_grow: bool = False
    ) -> list[str]:
        """List what does not fit; with ``may_grow`` the run may still lack the last groups."""
        groups = self.optimizer.param_groups
        were = [group["parameters"] for group in saved["groups"]]
        if may_grow:
            were = were[: len(groups)]
        now = {
            names[id(p)]: (i, list(p.shape))
            for i, each in enumerate(groups)
            for p in each["params"]
        }
        before = {name: (i, shape) for i, each in enumerate(were) for name, shape in each.items()}
        faults = []
        for name in {**before, **now}:
            if name not in now:
                faults.append(f"{name} is only in the checkpoint")
            elif name not in before:
                faults.append(f"{name} is only in the run")
            elif before[name][1] != now[name][1]:
                faults.append(f"{name} saved {before[name][1]}, run has {now[name][1]}")
            elif before[name][0] != now[name][0]:
                faults.append(
                    f"{name} saved in group {before[name][0]}, run has it in {now[name][0]}"
                )
        if not faults and self.is_positional(saved) and [*before] != [*now]:
            faults.append(
                f"{type(self.outermost).__name__} keeps one state over all parameters, saved in "
                f"the order {', '.join(before)}, run has {', '.join(now)}"
            )
        return faults

    def find_fitting(
        self, saved: Mapping[str, Any], names: Mapping[int, str]
    ) -> dict[str, torch.Tensor]:
        """Return the parameters, by name, that the checkpoint knows with the same shape."""
        shapes = {n: shape for group in saved["groups"] for n, shape in group["parameters"].items()}
        ours = {names[id(p)]: p for p in self.list_parameters()}
        return {name: p for name, p in ours.items() if shapes.get(name) == list(p.shape)}

    def restore(self, saved: Mapping[str, Any], names: Mapping[int, str]) -> list[str]:
        """Put everything that fits back, and list the options that differed.

        The tensors of ``saved`` are used, not copied. Groups, their ``lr`` tensors and the dict
        of states stay the same objects.
        """
        optimizer = self.optimizer
        fitting = self.find_fitting(saved, names)
        originals = [dict(group) for group in optimizer.param_groups]
        options = [_choose_options(saved["groups"], group, names) for group in originals]
        changes = _list_changes(originals, options)

        for wrapper, state in zip(self.chain, saved["wrappers"], strict=False):
            if state is not None:
                wrapper.load_state_dict(state)
        states, groups = optimizer.state, optimizer.param_groups
        positions = {names[id(p)]: i for i, p in enumerate(self.list_parameters())}
        state = {name: value for name, value in saved["state"].items() if name in fitting}
        optimizer.load_state_dict(
            {
                **saved["more"],
                "state": {positions[n]: v for n, v in state.items()} | saved["more_state"],
                "param_groups": [
                    {
                        **{k: v for k, v in group.items() if k not in _NOT_OPTIONS},
                        **{k: v for k, v in chosen.items() if k not in _OF_THE_RUN},
                        "params": [positions[names[id(p)]] for p in group["params"]],
                    }
                    for group, chosen in zip(originals, options, strict=True)
                ],
            }
        )
        loaded = dict(optimizer.state)
        for name, value in state.items():
            # torch has cast it; where it put it is right, but for what was kept on the CPU.
            placed, kept = loaded[fitting[name]], saved["on_cpu"].get(name, ())
            loaded[fitting[name]] = {
                key: _place(each, None if key in kept else placed[key])
                for key, each in value.items()
            }
        states.clear()
        states.update(loaded)
        for group, original, after in zip(groups, originals, optimizer.param_groups, strict=True):
            for key in after.keys() - set(_NOT_OPTIONS):
                set_option(group, key, after[key], original.get(key))
        optimizer.state, optimizer.param_groups = states, groups
        self.gradients.restore(saved["gradients"], fitting)
        return changes


def find_inside(wrapper: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer that a wrapper holds for the same parameters, if it is one."""
    for inside in getattr(wrapper, "__dict__", {}).values():
        if isinstance(inside, torch.optim.Optimizer) and inside is not wrapper:
            if _list_ids(inside) == _list_ids(wrapper):
                return inside
    return None


def set_option(group: dict[str, Any], key: str, value: Any, current: Any) -> None:
    """Set an option of a parameter group; a ``current`` tensor takes the value and stays."""
    if isinstance(current, torch.Tensor):
        with torch.no_grad():
            group[key] = current.copy_(torch.as_tensor(value))
    elif isinstance(value, torch.Tensor) and current is not None:
        group[key] = value.item()
    else:
        group[key] = value


def _list_ids(optimizer: Any) -> list[int]:
    return [id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def _name_class(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _collect_wrapper(wrapper: Any, packed: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state that a wrapper adds to that of the optimizer inside, if it adds any."""
    state: dict[str, Any] = wrapper.state_dict()
    own = state.get("state", {})
    passed_on = state.keys() == packed.keys() and own.keys() == packed["state"].keys()
    if passed_on and all(own[key] is packed["state"][key] for key in own):
        return None
    return state


def _list_kept_on_cpu(parameter: torch.Tensor, state: Mapping[str, Any]) -> list[str]:
    """List what an accelerator's parameter keeps on the CPU; torch knows that of ``step``."""
    return [
        key
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
        and value.device.type == "cpu" != parameter.device.type
        and key != "step"
    ]


def _choose_options(
    saved: Sequence[Mapping[str, Any]], group: Mapping[str, Any], names: Mapping[int, str]
) -> dict[str, Any]:
    """Return the options of the saved group that has most of the parameters of ``group``."""
    ours = {names[id(p)] for p in group["params"]}
    nearest = max(saved, key=lambda each: len(ours & each["parameters"].keys()))
    options: dict[str, Any] = nearest["options"]
    return options if ours & nearest["parameters"].keys() else {}


def _list_changes(
    originals: Sequence[Mapping[str, Any]], options: Sequence[Mapping[str, Any]]
) -> list[str]:
    changes = []
    for i, (original, chosen) in enumerate(zip(originals, options, strict=True)):
        for key in original.keys() & chosen.keys():
            if _SCHEDULED.get(key) in chosen or is_same(original[key], chosen[key]):
                continue
            whose = "run's" if key in _OF_THE_RUN else "saved one"
            changes.append(
                f"{key} of group {i}: saved {chosen[key]}, run has {original[key]}; "
                f"the {whose} is used"
            )
    return changes


def is_same(one: Any, other: Any) -> bool:
    """Whether two options are equal and of one type."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    return type(one) is type(other) and bool(one == other)


def _place(saved: Any, placed: Any) -> Any:
    """Return ``saved`` with its tensors where those of ``placed`` are, bits and strides unchanged."""
    if isinstance(saved, torch.Tensor):
        return saved.to(placed.device) if isinstance(placed, torch.Tensor) else saved
    if type(saved) is dict:
        return {key: _place(value, placed[key]) for key, value in saved.items()}
    if type(saved) in (list, tuple):
        return type(saved)(map(_place, saved, placed))
    return saved
