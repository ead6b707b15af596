"""Set a datamodule up before everything else, and save its state."""

from __future__ import annotations

from typing import Any

import attrs
import torch

import hookbus
from builtin_plugins.state import give_back, has_state


@attrs.define(eq=False)
class DataModule:
    """Look after an object with ``setup(stage)`` and ``train_dataloader``.

    ``prepare_data()`` is called before ``setup(stage)``. Its ``state_dict`` is saved, and so is
    what its ``on_save_checkpoint(checkpoint)`` puts into the empty dict that it is given.
    """

    component: Any
    kind = "datamodule"

    @hookbus.hookimpl
    def on_setup(self, stage: str) -> None:
        if hasattr(self.component, "prepare_data"):
            self.component.prepare_data()
        self.component.setup(stage)

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        state: dict[str, Any] = {}
        if has_state(self.component):
            state["state"] = self.component.state_dict()
        if hasattr(self.component, "on_save_checkpoint"):
            state["checkpoint"] = {}
            self.component.on_save_checkpoint(state["checkpoint"])
        save.write(state, per_rank=None)

    @hookbus.hookimpl
    def check_state(self, resume: hookbus.Resume) -> None:
        saved, live = "state" in resume.metadata().state, has_state(self.component)
        if saved != live:
            words = {True: "state_dict and load_state_dict", False: "no state_dict"}
            resume.problem(
                f"saved with {words[saved]}, {type(self.component).__name__} has {words[live]}; "
                f"pass skip=({resume.name!r},) to start it fresh"
            )

    @hookbus.hookimpl
    def restore_model(self, resume: hookbus.Resume) -> None:
        saved = resume.read()
        if "checkpoint" in saved and hasattr(self.component, "on_load_checkpoint"):
            self.component.on_load_checkpoint(saved["checkpoint"])
        if "state" in saved:
            give_back(self.component, saved["state"])


@hookbus.hookimpl
def plugin_for(name: str, component: object) -> DataModule | None:
    if isinstance(component, type | torch.nn.Module):
        return None
    methods = ("setup", "train_dataloader")
    has_both = all(callable(getattr(component, method, None)) for method in methods)
    return DataModule(component) if has_both else None
