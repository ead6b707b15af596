"""Miss an ``AveragedModel`` of an attached model that nobody attached."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

from torch import nn
from torch.optim.swa_utils import AveragedModel

import hookbus
from builtin_plugins.names import list_some
from builtin_plugins.search import find_instances, find_living
from hookbus.errors import UnattachedError

# Those that are saved through some bus of this process.
_looked_after: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Averages:
    """Misses averages that are updated; one that is attached is a module like any other.

    Nothing leads from a model to its averages, so this goes through the objects of the process,
    which takes some 10 ms: at the first save, the second, fourth, eighth and so on.
    """

    def __init__(self) -> None:
        self._saves = 0
        # How often each was updated before the run went on: that is not the run's.
        self._before: weakref.WeakKeyDictionary[AveragedModel, int] = weakref.WeakKeyDictionary()

    @hookbus.hookimpl
    def resume_end(self, resume: hookbus.Resume) -> None:
        self._saves = 0
        self._before.clear()
        if resume.stage == "fit":
            _looked_after.update(_list_modules(resume.components))
            for each in find_instances([AveragedModel]):
                self._before[each] = _count_updates(each)

    @hookbus.hookimpl
    def check_attached(self, components: Mapping[str, object]) -> None:
        """Refuse a save without an average that a resume would start anew."""
        _looked_after.update(_list_modules(components))
        self._saves += 1
        if self._saves.bit_count() != 1:
            return
        lost = find_living(lambda: self._find_lost(components))
        if lost:
            what = list_some([f"{_count_updates(each)} updates of {_name(each)}" for each in lost])
            del lost  # the traceback would keep it alive, and a notebook keeps that
            raise UnattachedError(
                f"an AveragedModel of an attached model is attached to nothing, so it would start"
                f" anew after a resume: {what}; bus.attach(ema=ema); if it was for the moment only,"
                " let go of it before the save: del ema"
            )

    def _find_lost(self, components: Mapping[str, object]) -> list[AveragedModel]:
        models = [each for each in _list_modules(components) if not isinstance(each, AveragedModel)]
        return [
            each
            for each in find_instances([AveragedModel])
            if each not in _looked_after
            and _count_updates(each) > self._before.get(each, 0)
            and any(_is_copy(each.module, model) for model in models)
        ]


def _list_modules(components: Mapping[str, object]) -> Iterator[nn.Module]:
    """Yield the modules among ``components``, those inside, and those held as an attribute."""
    for component in components.values():
        members = component if isinstance(component, list | tuple) else [component]
        for each in members:
            held = [] if isinstance(each, nn.Module) else getattr(each, "__dict__", {}).values()
            for module in (each, *held):
                if isinstance(module, nn.Module):
                    yield from module.modules()


def _is_copy(module: nn.Module, model: nn.Module) -> bool:
    return type(module) is type(model) and _list_shapes(module) == _list_shapes(model)


def _list_shapes(module: nn.Module) -> list[tuple[str, object]]:
    return [(name, each.shape) for name, each in module.named_parameters()]


def _count_updates(averaged: AveragedModel) -> int:
    return int(averaged.n_averaged)


def _name(averaged: AveragedModel) -> str:
    return type(averaged.module).__qualname__
