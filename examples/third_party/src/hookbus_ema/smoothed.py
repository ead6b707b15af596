"""Save a smoothed figure, such as a loss: a component of this package's own type."""

from __future__ import annotations

import hookbus


class Smoothed:
    """A figure whose last values count most: ``smoothed.update(loss.item())``.

    It knows nothing of checkpoints; ``bus.attach(loss=smoothed)`` finds its plugin.
    """

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay
        self.value: float | None = None

    def update(self, value: float) -> float:
        old = value if self.value is None else self.value
        self.value = old + (1 - self.decay) * (value - old)
        return self.value


class SmoothedPlugin:
    """Save the value of one `Smoothed`."""

    kind = "smoothed"

    def __init__(self, component: Smoothed) -> None:
        self.component = component

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write({"value": self.component.value})

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        self.component.value = resume.read()["value"]


@hookbus.hookimpl
def plugin_for(name: str, component: object) -> SmoothedPlugin | None:
    return SmoothedPlugin(component) if isinstance(component, Smoothed) else None
