"""Save an exponential moving average of the weights of each attached model."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

import hookbus

Weights = dict[str, dict[str, torch.Tensor]]  # by the name of the model, then of the tensor


class Ema:
    """Average the weights after each step of the loop, from those that the run began with.

    It comes on every bus by its entry point, so a script need not know of it. ``average`` holds
    the state dict of each model by name.
    """

    kind = "ema"

    def __init__(self, decay: float = 0.99) -> None:
        self.decay = decay
        self.average: Weights | None = None
        self._step = 0

    @hookbus.hookimpl
    def bus_open(self, bus: hookbus.HookBus) -> None:
        self._bus = weakref.ref(bus)

    @hookbus.hookimpl
    def safe_point(self, loop: Any) -> None:
        if self.average is None or loop.step == self._step:
            return
        self._step = loop.step
        for model, weights in self._list_weights().items():
            for name, weight in weights.items():
                average = self.average[model][name]
                if average.is_floating_point():
                    average.lerp_(weight, 1 - self.decay)
                else:  # a count, which has no average
                    average.copy_(weight)

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self.average)

    @hookbus.hookimpl
    def resume_start(self) -> None:
        self.average = None

    @hookbus.hookimpl
    def check_state(self, resume: hookbus.Resume) -> None:
        if resume.set_up:  # before that a model may still get layers
            saved, live = _describe(resume.metadata().state), _describe(self._list_weights())
            for name in sorted(saved.keys() | live.keys()):
                before, now = saved.get(name, "nothing"), live.get(name, "nothing")
                if before != now:
                    resume.problem(f"{name} was saved as {before}, run has {now}")

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        self.average = resume.read_into(self._copy_weights())

    @hookbus.hookimpl
    def resume_end(self, resume: hookbus.Resume) -> None:
        if resume.stage == "fit":
            bus = self._bus()
            self._step = bus.loop.step if bus is not None and bus.loop is not None else 0
            if self.average is None:
                self.average = self._copy_weights()

    def _list_weights(self) -> Weights:
        bus = self._bus()
        components = bus.components if bus is not None else {}
        return {
            name: component.state_dict()
            for name, component in components.items()
            if isinstance(component, torch.nn.Module)
        }

    def _copy_weights(self) -> Weights:
        return {
            model: {name: weight.clone() for name, weight in weights.items()}
            for model, weights in self._list_weights().items()
        }


def _describe(models: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return shape and dtype of each tensor, live or of a checkpoint, by its whole name."""
    return {
        f"{model}.{name}": f"{list(tensor.shape)} {tensor.dtype}"
        for model, weights in models.items()
        for name, tensor in weights.items()
    }
