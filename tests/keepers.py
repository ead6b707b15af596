"""Plugins that keep a tensor or spy, buses for them, and every way to resume.

A bus here loads no installed plugin, so its checkpoints hold what is registered and no more.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hookbus
from hookbus.registration import EVENTS
from hookbus.sequence import RESUME_EVENTS

IN_FRONT = RESUME_EVENTS
BEHIND = (
    "resume_start",
    "on_setup",
    "pre_configure_sharded",
    "configure_sharded",
    "restore_model",
    "restore_training_state",
    "resume_end",
)


def make_spy(calls: list[str]) -> object:
    """Return a plugin without a section that notes every event but ``bytes_moved``."""

    def note(event: str) -> Callable[..., None]:
        def implementation(self: object) -> None:
            calls.append(event)

        return hookbus.hookimpl(implementation)

    return type("Spy", (), {e: note(e) for e in EVENTS if e not in ("bytes_moved", "save_state")})()


class Keeper:
    """Restores a tensor in one of the events, and knows on which side of the sharding it can."""

    def __init__(self, event: str = "restore_model", *, in_front: bool | None = None) -> None:
        self.tensor, self.in_front, self.restored = torch.zeros(3), in_front, 0

        def restore(resume: hookbus.Resume) -> None:
            self.restored += 1
            resume.read_into(self.tensor)

        setattr(self, event, hookbus.hookimpl(restore))

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        save.write(self.tensor)

    @hookbus.hookimpl
    def restore_before_configure_sharded(self) -> bool | None:
        return self.in_front


def make_bus(**plugins: object) -> hookbus.HookBus:
    bus = hookbus.HookBus(load_plugins=False)
    for name, plugin in plugins.items():
        bus.register(plugin, name)
    return bus


def fire(bus: hookbus.HookBus, event: str, resume: hookbus.Resume) -> None:
    arguments = {"stage": resume.stage} if event == "on_setup" else {}
    getattr(bus.hook, event)(resume=resume, **arguments)


def resume_at_once(bus: hookbus.HookBus, run: Path, stage: Any) -> hookbus.Resume:
    return bus.resume(run, stage=stage)


def resume_in_steps(bus: hookbus.HookBus, run: Path, stage: Any) -> hookbus.Resume:
    with bus.resuming(run, stage=stage) as resume:
        resume.setup()
        resume.restore_model()
        resume.configure_sharded()
        resume.restore_training_state()
    return resume


def resume_lazily(bus: hookbus.HookBus, run: Path, stage: Any) -> hookbus.Resume:
    with bus.resuming(run, stage=stage) as resume:
        pass
    return resume


def resume_by_hand(bus: hookbus.HookBus, run: Path, stage: Any) -> hookbus.Resume:
    resume = bus.prepare(run, stage=stage)
    behind = any(getattr(each.plugin, "in_front", None) is False for each in bus.plugins)
    for event in BEHIND if behind else IN_FRONT:
        fire(bus, event, resume)
    return resume


WAYS = (resume_at_once, resume_in_steps, resume_lazily, resume_by_hand)
Way = Callable[[hookbus.HookBus, Path, Any], hookbus.Resume]


def save_keepers(run: Path) -> Path:
    """Make a run with a checkpoint of two keepers, of ones and of twos."""
    model, state = Keeper(), Keeper("restore_training_state")
    model.tensor += 1
    state.tensor += 2
    with make_bus(model=model, state=state) as bus:
        bus.resume(run)
        bus.save(step=1)
    return run
