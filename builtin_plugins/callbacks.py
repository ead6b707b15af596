"""Save the states of a list of callbacks, each under its own key."""

from __future__ import annotations

from typing import Any

import attrs

import hookbus
from builtin_plugins.state import SPOKEN_FOR, give_back, has_state
from hookbus.errors import AttachError, HookbusError, raise_all


@attrs.define(eq=False)
class Callbacks:
    """Look after a list or tuple of callbacks, or one with a ``state_key``.

    Each has ``state_dict`` and ``load_state_dict`` and is found again by its ``state_key``, or
    else by the name of its class, wherever it stands in the list. With ``strict=False`` those
    that only the run or only the checkpoint has are noted in the report.

    Raises:
        AttachError: two callbacks have one key.
    """

    component: Any
    strict: bool = attrs.field(default=True, kw_only=True)
    kind = "callbacks"

    def __attrs_post_init__(self) -> None:
        self._find_keys()

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        callbacks = self._find_keys()
        states = {key: callback.state_dict() for key, callback in callbacks.items()}
        save.write(states, per_rank=None)
        save.write({key: type(c).__name__ for key, c in callbacks.items()}, part="classes")

    @hookbus.hookimpl
    def check_state(self, resume: hookbus.Resume) -> None:
        saved = resume.metadata("classes").state
        live = {key: type(callback).__name__ for key, callback in self._find_keys().items()}
        for key in live.keys() & saved.keys():
            if saved[key] != live[key]:
                resume.problem(f"{key!r} was saved by a {saved[key]}, run has a {live[key]}")
        for difference in _list_differences(live, saved) if self.strict else ():
            resume.problem(
                f"{difference}; register builtin_plugins.Callbacks(…, strict=False) to go on"
            )

    @hookbus.hookimpl
    def restore_model(self, resume: hookbus.Resume) -> None:
        saved, live = resume.read(), self._find_keys()
        for difference in _list_differences(live, saved):
            resume.note(difference)
        for key, callback in live.items():
            if key in saved:
                give_back(callback, saved[key])

    def _find_keys(self) -> dict[str, Any]:
        one = not isinstance(self.component, list | tuple)
        found: dict[str, Any] = {}
        problems: list[HookbusError] = []
        for callback in [self.component] if one else self.component:
            key = getattr(callback, "state_key", type(callback).__name__)
            if key in found:
                names = f"{type(found[key]).__name__} and {type(callback).__name__}"
                problems.append(
                    AttachError(
                        f"two callbacks have the key {key!r}: {names}; "
                        "give each a state_key of its own"
                    )
                )
            found[key] = callback
        raise_all("callbacks cannot be told apart", problems)
        return found


def _list_differences(live: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    only_live = [f"the checkpoint has no callback {key!r}" for key in live if key not in saved]
    return only_live + [f"the run has no callback {key!r}" for key in saved if key not in live]


def _is_callback(component: object) -> bool:
    # What can be iterated is a loader or a sampler, and not restored by `load_state_dict` alone.
    is_other = isinstance(component, SPOKEN_FOR) or hasattr(component, "__iter__")
    return has_state(component) and not is_other


# Last, so that lists of optimizers and schedulers go to those who know them.
@hookbus.hookimpl(trylast=True)
def plugin_for(name: str, component: object) -> Callbacks | None:
    if isinstance(component, list | tuple):
        is_ours = bool(component) and all(map(_is_callback, component))
    else:
        is_ours = _is_callback(component) and hasattr(component, "state_key")
    return Callbacks(component) if is_ours else None
