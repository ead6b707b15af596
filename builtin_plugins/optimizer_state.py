"""One optimizer's state by the names of its parameters: collect it, compare it, restore it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS

from builtin_plugins.gradients import Gradients
from builtin_plugins.sharded import make_targets
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
    # What the script gave; optimizers count in their options too.
    given: list[dict[str, Any]] = attrs.field(factory=list, init=False)

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

    def note_given(self) -> None:
        """Take the options that there are now for those that the script gave, the first time."""
        self.given = self.given or [
            {key: copy.copy(value) for key, value in group.items() if key not in _NOT_OPTIONS}
            for group in self.optimizer.param_groups
        ]

    def _is_given(self, i: int, key: str, was: Mapping[str, Any]) -> bool:
        """Whether the script gave the same, and the optimizer has changed it by itself."""
        now = self.given[i] if i < len(self.given) else {}
        return key in was and key in now and is_same(was[key], now[key])

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
                    "given": self.given[i] if i < len(self.given) else {},
                }
                for i, (group, saved) in enumerate(groups)
            ],
            "state": state,
            "on_cpu": on_cpu,
            "more_state": {k: v for k, v in packed["state"].items() if k not in by_position},
            "more": {k: v for k, v in packed.items() if k not in ("state", "param_groups")},
            "gradients": self.gradients.collect(names),
            # A scheduler asks for it, and torch sets it at the first step in a process.
            "called": [bool(getattr(each, "_opt_called", False)) for each in self.chain],
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
            names[id(p)]: (i, _get_shape(p))
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
            elif now[name][1] not in (before[name][1], None):
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
        return {n: p for n, p in ours.items() if n in shapes and _get_shape(p) in (shapes[n], None)}

    def make_targets(
        self, saved: Mapping[str, Any], names: Mapping[int, str]
    ) -> dict[str, torch.Tensor]:
        """Return where the state of sharded parameters is read to; see `sharded.make_targets`."""
        targets: dict[str, torch.Tensor] = {}
        for name, parameter in self.find_fitting(saved, names).items():
            gradients = [each.get(name) for each in saved["gradients"].values()]
            targets |= make_targets([saved["state"].get(name), *gradients], parameter)
        return targets

    def restore(
        self, saved: Mapping[str, Any], names: Mapping[int, str]
    ) -> list[tuple[str, Any, Any, bool]]:
        """Put everything that fits back, and list the options that differed.

        Each with the saved and the live value, and whether the latter is used.

        The tensors of ``saved`` are used, not copied. Groups, their ``lr`` tensors and the dict
        of states stay the same objects.
        """
        optimizer = self.optimizer
        fitting = self.find_fitting(saved, names)
        originals = [dict(group) for group in optimizer.param_groups]
        chosen_groups = [_choose_group(saved["groups"], group, names) for group in originals]
        options = [group["options"] for group in chosen_groups]
        changes = [
            (f"{key} of group {i}", was, now, key in _OF_THE_RUN)
            for i, key, was, now in _list_changes(originals, options)
            if not self._is_given(i, key, chosen_groups[i].get("given", {}))
        ]
        self.given = [dict(group.get("given", {})) for group in chosen_groups]

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
            # torch has cast the tensors. Where it put them is right, but for those kept on the CPU.
            parameter, kept = fitting[name], saved["on_cpu"].get(name, ())
            placed = {**loaded.get(parameter, {}), **dict.fromkeys(kept, torch.empty(0))}
            loaded[parameter] = {
                key: _move(each, getattr(placed.get(key), "device", parameter.device))
                for key, each in value.items()
            }
        states.clear()
        states.update(loaded)
        for group, original, after in zip(groups, originals, optimizer.param_groups, strict=True):
            for key, option in after.items():
                if key not in _NOT_OPTIONS:
                    set_option(group, key, option, original.get(key))
        optimizer.state, optimizer.param_groups = states, groups
        self.gradients.restore(saved["gradients"], fitting)
        # From the inside out, since a wrapper may show what the optimizer inside has.
        for each, called in zip(self.chain[::-1], saved["called"][::-1], strict=True):
            if called != getattr(each, "_opt_called", False):
                each._opt_called = called
        return changes


def is_optimizer(component: Any) -> bool:
    """Whether a component is a torch optimizer or holds one for its own parameters."""
    if isinstance(component, torch.optim.Optimizer):
        return True
    return not isinstance(component, type) and find_inside(component) is not None


def find_inside(wrapper: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer that a wrapper holds for the same parameters, if it is one."""
    for inside in getattr(wrapper, "__dict__", {}).values():
        is_other = isinstance(inside, torch.optim.Optimizer) and inside is not wrapper
        if is_other and _list_ids(inside) == _list_ids(wrapper):
            return inside  # type: ignore[no-any-return]
    return None


def set_option(group: dict[str, Any], key: str, value: Any, current: Any) -> None:
    """Set an option of a parameter group; a ``current`` tensor takes the value and stays."""
    if isinstance(current, torch.Tensor):
        with torch.no_grad():
            is_tensor = isinstance(value, torch.Tensor)
            group[key] = current.copy_(value) if is_tensor else current.fill_(value)
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


def _choose_group(
    saved: Sequence[Mapping[str, Any]], group: Mapping[str, Any], names: Mapping[int, str]
) -> Mapping[str, Any]:
    """Return the saved group that has most of the parameters of ``group``."""
    ours = {names[id(p)] for p in group["params"]}
    nearest = max(saved, key=lambda each: len(ours & each["parameters"].keys()))
    return nearest if ours & nearest["parameters"].keys() else {"options": {}}


def _list_changes(
    originals: Sequence[Mapping[str, Any]], options: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[int, str, Any, Any]]:
    """Yield group, option, and the saved and the live value, where they differ."""
    for i, (original, chosen) in enumerate(zip(originals, options, strict=True)):
        for key in chosen:
            if key not in original or _SCHEDULED.get(key) in chosen:
                continue
            if not is_same(original[key], chosen[key]):
                yield i, key, chosen[key], original[key]


def is_same(one: Any, other: Any) -> bool:
    """Whether two options are equal and of one type."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    return type(one) is type(other) and bool(one == other)


def _move(value: Any, device: torch.device) -> Any:
    """Return ``value`` with its tensors on ``device``, bits, dtypes and strides unchanged."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) is dict:
        return {key: _move(member, device) for key, member in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_move(member, device) for member in value)
    return value


def describe_shape(parameter: torch.Tensor) -> str:
    shape = _get_shape(parameter)
    return "not known yet" if shape is None else str(shape)


def _get_shape(parameter: torch.Tensor) -> list[int] | None:
    """Return the shape, which a lazy layer's parameter gets when the weights come back."""
    return None if is_lazy(parameter) else list(parameter.shape)
