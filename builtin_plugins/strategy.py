"""Let an object wrap or shard the models, and say whether weights come before or after that."""

from __future__ import annotations

import inspect
from typing import Any

import attrs
import torch

import hookbus
from builtin_plugins.state import Stateful, has_state
from hookbus.errors import AttachError

_ANSWERS = (
    "configure_sharded",
    "restore_before_configure_sharded",
    "restore_checkpoint_after_setup",  # Lightning's word, with the opposite sense
)


@attrs.define(eq=False, slots=False)
class Strategy:
    """Answer for an object that has ``configure_sharded(model)`` or says when weights come back.

    ``configure_sharded`` is called for each attached model and returns its wrapper, or ``None``
    if it wrapped it in place.
    """

    component: Any
    kind = "strategy"

    @hookbus.hookimpl
    def restore_before_configure_sharded(self, resume: hookbus.Resume) -> bool | None:
        before = getattr(self.component, "restore_before_configure_sharded", None)
        if before is None:
            after = getattr(self.component, "restore_checkpoint_after_setup", None)
            return None if after is None else not after
        return bool(before() if callable(before) else before)

    @hookbus.hookimpl
    def configure_sharded(self, resume: hookbus.Resume) -> dict[str, object] | None:
        if not hasattr(self.component, "configure_sharded"):
            return None
        models = {
            name: component
            for name, component in resume.components.items()
            if isinstance(component, torch.nn.Module)
        }
        if not models:
            raise AttachError(
                f"{type(self.component).__name__} has no model to shard; pass model= to attach()"
            )
        answers = {name: self.component.configure_sharded(model) for name, model in models.items()}
        return {name: wrapper for name, wrapper in answers.items() if wrapper is not None} or None


class StatefulStrategy(Stateful, Strategy):
    """Answer like `Strategy`, and save the state of one that has any."""

    kind = "strategy"


@hookbus.hookimpl
def plugin_for(name: str, component: object) -> Strategy | None:
    if isinstance(component, type | torch.nn.Module):
        return None
    if all(inspect.getattr_static(component, answer, None) is None for answer in _ANSWERS):
        return None
    return StatefulStrategy(component) if has_state(component) else Strategy(component)
