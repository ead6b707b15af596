"""Save schedule-free optimizers: the mode that their wrapper stands in, too.

The others of that library keep their mode in their parameter groups, and are optimizers like any.
"""

from __future__ import annotations

import sys

import hookbus
from builtin_plugins.optimizer import Optimizer

# The plugin of all optimizers would follow the wrapper to what is inside, and leave the mode out.
before = ("optimizer",)

_WRAPPERS = ("ScheduleFreeWrapper", "ScheduleFreeWrapperReference")


class ScheduleFree(Optimizer):
    """Look after schedulefree's wrapper around an optimizer, and keep its ``train_mode``.

    The model's weights are others in each mode; they come back with the model, so nothing is
    moved here.
    """

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        super().save_state(save)
        save.write(self.component.train_mode, part="mode")

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        super().restore_training_state(resume)
        self.component.train_mode = resume.read("mode")


@hookbus.hookimpl
def plugin_for(name: str, component: object) -> ScheduleFree | None:
    module = sys.modules.get("schedulefree")  # without it there can be no such wrapper
    wrappers = tuple(getattr(module, each) for each in _WRAPPERS if hasattr(module, each))
    return ScheduleFree(component) if isinstance(component, wrappers) else None
