"""Name parameters the same whatever wraps their module: compiled, parallel, averaged, sharded."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hookbus.errors import StateError

# Which child each wrapper wraps. Found by the full name of its class, because importing dynamo
# and FSDP takes seconds; never by the text of a name, because a child may be called "module".
_WRAPPERS = {
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": (
        "_checkpoint_wrapped_module"
    ),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "_fsdp_wrapped_module"
    ),
}


def find_innermost(module: nn.Module) -> nn.Module:
    """Return what all wrappers around ``module`` wrap."""
    while wrapped := _find_wrapped(type(module)):
        module = module.get_submodule(wrapped)
    return module


def drop_wrappers(module: nn.Module, path: str) -> str:
    """Return the dotted ``path`` below ``module`` as it is without wrappers."""
    kept: list[str] = []
    here: nn.Module | None = module
    for part in path.split(".") if path else ():
        while here is not None and (wrapped := _find_wrapped(type(here))):
            if part == wrapped or part in here._buffers:
                break
            # A checkpoint wrapper takes itself out of the names of its parameters.
            here = here.get_submodule(wrapped)
        if here is None or part != _find_wrapped(type(here)):
            kept.append(part)
        here = None if here is None else here._modules.get(part)
    return ".".join(kept)


def drop_wrappers_of_keys(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with the names that its keys have without wrappers.

    Raises:
        StateError: two keys would become one.
    """
    named: dict[str, Any] = {}
    for path, value in state.items():
        name = drop_wrappers(module, path)
        if name in named:
            raise StateError(
                f"{type(module).__name__} has two entries named {name!r} once its wrappers are "
                f"left out, one of them {path!r}; rename it in the model"
            )
        named[name] = value
    return named


def parameter_names(components: Mapping[str, object]) -> dict[int, str]:
    """Name the parameters of all components by the ``id`` of each: ``"generator.a.weight"``.

    The component's name stands in front; an attached parameter or tensor has that name alone.
    A parameter that is found twice keeps its first name.
    """
    names: dict[int, str] = {}
    for component_name, component in components.items():
        if isinstance(component, torch.Tensor):
            names.setdefault(id(component), component_name)
        elif isinstance(component, nn.Module):
            for path, parameter in component.named_parameters():
                name = f"{component_name}.{drop_wrappers(component, path)}"
                names.setdefault(id(parameter), name)
    return names


def rename(name: str, renamed: Mapping[str, str]) -> str:
    """Return ``name`` after ``renamed``, whose keys are names or dotted beginnings of names."""
    for saved in sorted(renamed, key=len, reverse=True):
        if name == saved or name.startswith(f"{saved}."):
            return renamed[saved] + name[len(saved) :]
    return name


@functools.cache
def _find_wrapped(cls: type) -> str | None:
    for base in cls.__mro__:
        if wrapped := _WRAPPERS.get(f"{base.__module__}.{base.__qualname__}"):
            return wrapped
    return None
