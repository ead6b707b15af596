"""Save what torchmetrics' metrics have gathered: their states, counts and cached results."""

from __future__ import annotations

from typing import Any

import attrs

import hookbus
from builtin_plugins import metric_state
from builtin_plugins.names import describe_faults

# A metric is a module too, of which the plugin of all modules would save nothing.
before = ("model",)


@attrs.define(eq=False)
class Metrics:
    """Look after a metric, a collection, or a tracker of torchmetrics.

    Every state comes back, persistent or not, list or tensor, with the number of updates and what
    was computed. Metrics inside a module that is attached are looked after with it.
    """

    component: Any
    kind = "metrics"

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(metric_state.collect(self._find()), per_rank=None)

    @hookbus.hookimpl
    def check_state(self, resume: hookbus.Resume) -> None:
        if not resume.set_up:
            return
        if faults := metric_state.compare(resume.metadata().state, self._find()):
            resume.problem(
                f"{describe_faults(faults)}; pass skip=({resume.name!r},) to start fresh"
            )

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        saved = resume.read()
        metric_state.grow(saved, self._find())
        metric_state.restore(saved, self._find())

    def _find(self) -> dict[str, Any]:
        return metric_state.pick_metrics(self.component.named_modules())


@hookbus.hookimpl
def plugin_for(name: str, component: object) -> Metrics | None:
    return Metrics(component) if metric_state.is_metric(component) else None
