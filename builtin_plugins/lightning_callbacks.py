"""Save the callbacks of a Lightning ``Trainer`` by both of the ways that Lightning has for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hookbus
from builtin_plugins.callbacks import Callbacks

_METHODS = ("state_dict", "load_state_dict", "on_save_checkpoint", "on_load_checkpoint")
# What these put into Lightning's checkpoint is attached instead: the averaged model.
_ATTACHED = "WeightAveraging"


class TrainerCallbacks(Callbacks):
    """Saves each callback's ``state_dict``, and what it puts into a checkpoint by its hook."""

    def __init__(self, callbacks: list[Any], trainer: Any, module: Any) -> None:
        super().__init__(callbacks)
        self._arguments = trainer, module

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        super().save_state(save)
        more: dict[str, Any] = {}
        for key, callback in self._list_hooked():
            callback.on_save_checkpoint(*self._arguments, more.setdefault(key, {}))
        save.write(more, part="hooks")

    @hookbus.hookimpl
    def restore_model(self, resume: hookbus.Resume) -> None:
        more = resume.read("hooks")
        for key, callback in self._list_hooked():
            if key in more:
                callback.on_load_checkpoint(*self._arguments, more[key])
        super().restore_model(resume)

    def _list_hooked(self) -> list[tuple[str, Any]]:
        return [
            (key, callback)
            for key, callback in self._find_keys().items()
            if has_own(callback, ("on_save_checkpoint",)) and not is_a(callback, _ATTACHED)
        ]


def list_stateful(callbacks: Iterable[Any]) -> list[Any]:
    """Return the callbacks that have a state, by what they do and not by what they inherit."""
    return [each for each in callbacks if has_own(each, _METHODS)]


def has_own(callback: Any, methods: Iterable[str]) -> bool:
    """Whether a callback does more in one of ``methods`` than Lightning's base class."""
    plain = next(each for each in type(callback).__mro__ if each.__name__ == "Callback")
    return any(getattr(type(callback), name) is not getattr(plain, name) for name in methods)


def is_a(callback: Any, *names: str) -> bool:
    """Whether a callback is of a class of Lightning's, or of one made from it, by its name."""
    return any(
        each.__name__ in names
        and each.__module__.split(".")[0] in ("lightning", "pytorch_lightning")
        for each in type(callback).__mro__
    )
