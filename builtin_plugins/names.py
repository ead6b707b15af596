"""Name parameters the same whatever wraps their module: compiled, parallel, averaged, sharded."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from builtin_plugins.sharded import reshard
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
# These take themselves out of the names of a state_dict, and put themselves back.
_HIDDEN = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def find_innermost(module: nn.Module) -> nn.Module:
    """Return what all wrappers around ``module`` wrap."""
    while wrapped := _find_wrapped(module):
        module = module.get_submodule(wrapped)
    return module


def drop_wrappers(module: nn.Module, path: str) -> str:
    """Return the dotted ``path`` below ``module`` as it is without wrappers."""
    kept: list[str] = []
    here: nn.Module | None = module
    for part in path.split(".") if path else ():
        while here is not None and (wrapped := _find_wrapped(here)):
            if part == wrapped or part in here._buffers:
                break
            # A checkpoint wrapper takes itself out of the names of its parameters.
            here = here.get_submodule(wrapped)
        if here is None or part != _find_wrapped(here):
            kept.append(part)
        here = None if here is None else here._modules.get(part)
    return ".".join(kept)


def add_wrappers(module: nn.Module, name: str) -> str:
    """Return the key that ``name``, without wrappers, has in a ``state_dict`` of ``module``."""
    path: list[str] = []
    here: nn.Module | None = module
    for part in name.split("."):
        while here is not None and (wrapped := _find_wrapped(here)) and part not in here._buffers:
            path += [] if wrapped in _HIDDEN else [wrapped]
            here = here.get_submodule(wrapped)
        path.append(part)
        here = None if here is None else here._modules.get(part)
    return ".".join(path)


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

    Raises:
        StateError: two parameters have one name.
    """
    names: dict[int, str] = {}
    for component_name, component in components.items():
        if isinstance(component, torch.Tensor):
            names.setdefault(id(component), component_name)
        elif isinstance(component, nn.Module):
            reshard(component)
            for path, parameter in component.named_parameters():
                name = f"{component_name}.{drop_wrappers(component, path)}"
                names.setdefault(id(parameter), name)
    if len({*names.values()}) < len(names):
        twice = next(name for name, count in Counter(names.values()).items() if count > 1)
        raise StateError(
            f"two parameters are named {twice!r}; attach one of them under another name"
        )
    return names


def rename(name: str, renamed: Mapping[str, str]) -> str:
    """Return ``name`` after ``renamed``, whose keys are names or dotted beginnings of names."""
    for saved in sorted(renamed, key=len, reverse=True):
        if name == saved or name.startswith(f"{saved}."):
            return renamed[saved] + name[len(saved) :]
    return name


def list_some(words: list[str]) -> str:
    more = f" and {len(words) - 5} more" if len(words) > 5 else ""
    return ", ".join(words[:5]) + more


def describe_faults(faults: list[str]) -> str:
    places = "1 place" if len(faults) == 1 else f"{len(faults)} places"
    return f"checkpoint and run differ in {places}: {'; '.join(faults)}"


def _find_wrapped(module: nn.Module) -> str | None:
    cls: Any = type(module)
    return _look_up(cls)


@functools.cache
def _look_up(cls: Any) -> str | None:
    for base in cls.__mro__:
        if wrapped := _WRAPPERS.get(f"{base.__module__}.{base.__qualname__}"):
            return wrapped
    return None
