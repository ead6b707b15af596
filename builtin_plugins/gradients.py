"""Keep the gradients that a next step still needs, and know which those are."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch.optim import Optimizer

logger = logging.getLogger("hookbus")


@attrs.frozen(eq=False)
class _Seen:
    """One gradient as its optimizer's last step left it.

    ``kept`` says that the script does not set it to ``None`` between steps, so its value goes on
    mattering; ``stands_in`` that it is made of zeros because its value was not saved.
    """

    # Not an id: a new gradient often gets the address of the old one.
    refer: Callable[[], torch.Tensor | None]
    version: int
    kept: bool
    stands_in: bool = False


@attrs.define(eq=False)
class Gradients:
    """The gradients of one optimizer's parameters.

    A gradient is waiting if it was written since the optimizer's last step. ``void`` says that
    the last step did nothing, because a gradient scaler had found an overflow.
    """

    optimizer: Optimizer
    void: bool = attrs.field(default=False, init=False)
    _stepped: bool = attrs.field(default=False, init=False)
    _seen: dict[torch.Tensor, _Seen] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.optimizer.register_step_post_hook(self._note_step)

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
            elif self._seen[parameter].kept or gradient.layout is not torch.strided:
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
        self._stepped, self._seen = True, {}
        for name, parameter in parameters.items():
            value = saved["waiting"].get(name, saved["kept"].get(name))
            stands_in = False
            if value is not None:
                parameter.grad = value.to(parameter.device)
            elif name not in saved["spent"]:
                parameter.grad = None
            elif parameter.grad is None:  # else it has the value from another optimizer's section
                parameter.grad, stands_in = torch.zeros_like(parameter), True
            if parameter.grad is not None and name not in saved["waiting"]:
                kept = name in saved["kept"]
                self._seen[parameter] = _see(parameter.grad, kept=kept, stands_in=stands_in)

    def _list(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    yield parameter, gradient

    def _is_waiting(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        seen = self._seen.get(parameter)
        return seen is None or seen.refer() is not gradient or seen.version != gradient._version

    def _note_step(self, optimizer: Optimizer, *_: object) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        self.void = found_inf is not None and bool(found_inf)
        if self.void:
            return
        before, self._seen = self._seen, {}
        inexact = 0
        for parameter, gradient in self._list():
            last = before.get(parameter)
            same = last is not None and last.refer() is gradient
            inexact += same and last is not None and last.stands_in
            # After its first step nobody can tell what the script will do.
            self._seen[parameter] = _see(gradient, kept=same or not self._stepped)
        self._stepped = True
        if inexact:
            logger.warning(
                "not bit for bit: the gradients of %d parameters were not set to None after the "
                "resume, and their values of before were not saved; call "
                "optimizer.zero_grad() before each backward() that is not to add up",
                inexact,
            )


def _see(gradient: torch.Tensor, *, kept: bool, stands_in: bool = False) -> _Seen:
    return _Seen(weakref.ref(gradient), gradient._version, kept, stands_in)
