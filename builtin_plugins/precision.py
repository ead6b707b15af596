"""Save the scale, growth tracker and factors of a ``GradScaler``."""

from __future__ import annotations

import attrs
from torch.amp.grad_scaler import GradScaler

import hookbus
from hookbus.errors import SaveError

_FACTORS = ("growth_factor", "backoff_factor", "growth_interval")


@attrs.define(eq=False)
class Precision:
    """Save a gradient scaler's state; a disabled one has none.

    Mixed precision may be switched on or off between two runs: the saved state is dropped, or
    the scaler starts with its own, and the report says which.
    """

    component: GradScaler
    kind = "precision"

    @hookbus.hookimpl
    def save_start(self, save: hookbus.Save) -> None:
        # Overflows seen by step() wait in the scaler for update() and are in no state_dict.
        if getattr(self.component, "_per_optimizer_states", None):
            raise SaveError(
                "an optimizer was unscaled or stepped by the gradient scaler after its last "
                "update(); call scaler.update() in the same batch"
            )

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self.component.state_dict())

    @hookbus.hookimpl
    def check_state(self, resume: hookbus.Resume) -> None:
        saved, live = resume.metadata().state, self.component.state_dict()
        if saved and live and saved.keys() != live.keys():
            resume.problem(
                f"the gradient scaler was saved with {sorted(saved)}, "
                f"{type(self.component).__name__} has {sorted(live)}"
            )

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        saved, live = resume.read(), self.component.state_dict()
        if not live:
            if saved:
                resume.note(
                    f"the gradient scaler is disabled in this run; its saved state "
                    f"(scale {saved['scale']}) is dropped"
                )
            return
        if not saved:
            resume.note(
                "the gradient scaler was disabled when it was saved; "
                f"this run's starts with its own scale {live['scale']}"
            )
            return
        for factor in _FACTORS:
            if saved[factor] != live[factor]:
                resume.note(
                    f"{factor} is {saved[factor]} as in the checkpoint, "
                    f"not {live[factor]} as in the script"
                )
        self.component.load_state_dict(saved)


@hookbus.hookimpl
def plugin_for(name: str, component: object) -> Precision | None:
    return Precision(component) if isinstance(component, GradScaler) else None
