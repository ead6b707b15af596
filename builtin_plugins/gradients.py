"""Keep the gradients that a next step still needs, and know which those are."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

import attrs
import torch
from torch.optim import Optimizer

from builtin_plugins.sharded import get_version

logger = logging.getLogger("hookbus")


@attrs.define(eq=False)
class Gradients:
    """The gradients of one optimizer's parameters.

    A gradient is waiting if it was written since the optimizer's last step, and kept if the
    script may not clear it before the next one; otherwise it is spent, and only that it exists
    still matters. ``void`` says that the last step did nothing, because a gradient scaler had
    found an overflow; ``in_run`` that this is for a run that goes on.
    """

    optimizer: Optimizer
    void: bool = attrs.field(default=False, init=False)
    in_run: bool = attrs.field(default=False, init=False)
    _watch: weakref.finalize[Any, Gradients] | None = attrs.field(default=None, init=False)
    # By the id of the parameter, as the last step left it. A weak reference, and not the id of
    # the gradient: a new one often gets the address of the old one.
    _seen: dict[int, tuple[Callable[[], torch.Tensor | None], tuple[int, ...]]] = attrs.field(
        factory=dict, init=False
    )
    # Parameters whose gradient was the same tensor in the last two steps, ...
    _same: set[int] = attrs.field(factory=set, init=False)
    # ... was ever set to None or replaced between two steps, ...
    _cleared: set[int] = attrs.field(factory=set, init=False)
    # ... and is made of zeros since the resume, because its value was not saved.
    _zeros: set[int] = attrs.field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        self.watch()

    def watch(self) -> None:
        """Note the optimizer's steps from now on."""
        if self._watch is None or not self._watch.alive:
            handle = self.optimizer.register_step_post_hook(StepHook(weakref.ref(self)))
            self._watch = weakref.finalize(self, handle.remove)

    def release(self) -> None:
        """Take the hook off the optimizer."""
        self.in_run = False
        if self._watch is not None:
            self._watch()

    def note_step(self) -> None:
        found_inf = getattr(self.optimizer, "found_inf", None)
        self.void = found_inf is not None and bool(found_inf)
        if self.void:
            return
        before, self._seen = self._seen, {}
        self._same = set()
        for parameter, gradient in self._list():
            key = id(parameter)
            if key in before and before[key][0]() is gradient:
                self._same.add(key)
            self._seen[key] = weakref.ref(gradient), get_version(gradient)
        self._cleared |= before.keys() - self._same
        inexact, self._zeros = len(self._zeros & self._same), set()
        if inexact:
            logger.warning(
                "not bit for bit: the gradients of %d parameters were not set to None after the "
                "resume, and their values of before were not saved; call "
                "optimizer.zero_grad() before each backward() that is not to add up",
                inexact,
            )

    def any_waiting(self) -> bool:
        return any(self._is_waiting(*each) for each in self._list())

    def collect(self, names: Mapping[int, str]) -> dict[str, dict[str, Any]]:
        """Return the values that go on mattering, and the names of those that are spent."""
        saved: dict[str, dict[str, Any]] = {"waiting": {}, "kept": {}, "spent": {}}
        for parameter, gradient in self._list():
            name = names[id(parameter)]
            if self._is_waiting(parameter, gradient):
                saved["waiting"][name] = gradient
            # Dense zeros could not stand in for a sparse gradient.
            elif self._is_kept(parameter) or gradient.layout is not torch.strided:
                saved["kept"][name] = gradient
            else:
                saved["spent"][name] = None
        return saved

    def restore(
        self, saved: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        """Give each parameter its gradient back, zeros if that was spent, ``None`` if it had none.

        ``saved`` is what `collect` returned, its tensors are used as they are.
        """
        self._seen, self._same, self._cleared, self._zeros = {}, set(), set(), set()
        for name, parameter in parameters.items():
            value = saved["waiting"].get(name, saved["kept"].get(name))
            if value is not None and _fits(parameter.grad, value):
                # In place, since it may be a view of a buffer that holds all gradients.
                parameter.grad.copy_(value)
            elif value is not None:
                parameter.grad = value.to(parameter.device)
            elif name not in saved["spent"]:
                parameter.grad = None
            elif parameter.grad is None:  # else it has the value from another optimizer's section
                parameter.grad = torch.zeros_like(parameter)
                self._zeros.add(id(parameter))
            if name in saved["spent"]:
                self._cleared.add(id(parameter))
            if parameter.grad is not None and name not in saved["waiting"]:
                seen = weakref.ref(parameter.grad), get_version(parameter.grad)
                self._seen[id(parameter)] = seen

    def _list(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    yield parameter, gradient

    def _is_waiting(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        refer, version = self._seen.get(id(parameter), (lambda: None, ()))
        return refer() is not gradient or version != get_version(gradient)

    def _is_kept(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._same or id(parameter) not in self._cleared


@attrs.frozen(eq=False)
class StepHook:
    """Tells of a step; it does not keep alive whom it tells."""

    gradients: Callable[[], Gradients | None]

    def __call__(self, *_: object) -> None:
        if (gradients := self.gradients()) is not None:
            gradients.note_step()


def is_in_run(optimizer: Optimizer) -> bool:
    """Whether an open bus of this process saves this optimizer."""
    hooks = optimizer.__dict__.get("_optimizer_step_post_hooks", {}).values()
    told = [hook.gradients() for hook in hooks if isinstance(hook, StepHook)]
    return any(each is not None and each.in_run for each in told)


def _fits(gradient: torch.Tensor | None, value: torch.Tensor) -> TypeGuard[torch.Tensor]:
    return (
        gradient is not None
        and gradient.layout is value.layout is torch.strided
        and (gradient.shape, gradient.dtype) == (value.shape, value.dtype)
    )
