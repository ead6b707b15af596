"""What a module's state is beside its weights, and where a saved one and a live one differ."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain, product
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from builtin_plugins.names import drop_wrappers, list_some

# The loading and saving code of these leaves values alone, so they can be copied into place.
_KNOWN_CODE = (
    "torch.nn.modules.",
    "torch.nn.parallel.",
    "torch.nn.utils.",
    "torch.optim.",
    "torch.distributed.algorithms._checkpoint.",
    "torch.distributed.fsdp._fully_shard.",
)
_LOADING = ("load_state_dict", "_load_from_state_dict")
_SAVING = ("state_dict", "_save_to_state_dict", "get_extra_state", "set_extra_state")


def list_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    return chain(module.parameters(), module.buffers())


def list_modules(module: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield path, name without wrappers, and module, for each time that a module is found."""
    for path, owner in module.named_modules(remove_duplicate=False):
        yield path, drop_wrappers(module, path), owner


def find_frozen(module: nn.Module) -> set[str]:
    parameters = module.named_parameters(remove_duplicate=False)
    return {drop_wrappers(module, path) for path, p in parameters if not p.requires_grad}


def find_buffers(module: nn.Module) -> set[str]:
    """Return the names of all buffers."""
    return {
        f"{name}.{key}" if name else key
        for _, name, owner in list_modules(module)
        for key in owner._buffers
    }


def list_lazy(module: nn.Module, *, loading: bool = False) -> list[str]:
    """Name the tensors that have no shape yet; with ``loading`` those that a load gives none.

    A lazy layer takes the shapes of what it loads, and no other module does, nor a buffer that is
    not in the ``state_dict``.
    """
    found = []
    for path, owner in module.named_modules(remove_duplicate=False):
        for key, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            is_loaded = key not in owner._non_persistent_buffers_set
            takes_shape = loading and is_loaded and isinstance(owner, LazyModuleMixin)
            if tensor is not None and is_lazy(tensor) and not takes_shape:
                found.append(drop_wrappers(module, f"{path}.{key}".lstrip(".")))
    return found


def describe_lazy(names: list[str], when: str) -> str:
    return (
        f"{list_some(names)} {'has' if len(names) == 1 else 'have'} no shape yet; run one batch "
        f"through the model before {when}, or give it its shapes in setup="
    )


def list_extra_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield name, owner and key of each buffer that is not in the ``state_dict``."""
    for path, _, owner in list_modules(module):
        for key in owner._buffers:
            if key in owner._non_persistent_buffers_set:
                yield drop_wrappers(module, f"{path}.{key}".lstrip(".")), owner, key


def restore_extra_buffers(module: nn.Module, saved: Mapping[str, torch.Tensor | None]) -> None:
    """Put buffers back in place, or in their place where shape or dtype differ."""
    device = next((tensor.device for tensor in list_tensors(module)), None)
    moved: dict[int, torch.Tensor] = {}
    for name, owner, key in list_extra_buffers(module):
        live = owner._buffers[key]
        value = saved.get(name, live)
        if value is None:
            owner._buffers[key] = None
        elif live is not None and fits(value, live):
            with torch.no_grad():
                live.copy_(value)
        else:  # modules that share a buffer go on sharing it
            owner._buffers[key] = moved.setdefault(id(value), value.to(device))


def restore_training(module: nn.Module, saved: Mapping[str, bool]) -> list[str]:
    """Put the ``training`` flags back, and list those that differed."""
    changed = []
    for _, name, owner in list_modules(module):
        if owner.training != saved.get(name, owner.training):
            owner.training = saved[name]
            changed.append(f"{name or 'the model itself'} {'train' if saved[name] else 'eval'}")
    return changed


def list_own_loaders(module: nn.Module, metadata: Mapping[str, Any]) -> list[str]:
    """Name the modules that load with code of their own, or what another version has saved.

    They may rename, add or reshape what is below them, so only they can tell whether it fits.
    """
    found = []
    for _, name, owner in list_modules(module):
        hooks = (
            *owner._load_state_dict_pre_hooks.values(),
            *owner._load_state_dict_post_hooks.values(),
        )
        version = metadata.get(name, {}).get("version", owner._version)
        if version != owner._version or _is_own_code(owner, _LOADING, hooks):
            found.append(name)
    return found


def needs_load_state_dict(module: nn.Module, metadata: Mapping[str, Any]) -> bool:
    """Whether values may not simply be copied into the tensors that ``state_dict`` returns."""
    if any(map(is_lazy, list_tensors(module))):
        return True
    return bool(list_own_loaders(module, metadata)) or any(
        _is_own_code(
            owner,
            _SAVING,
            (*owner._state_dict_hooks.values(), *owner._state_dict_pre_hooks.values()),
        )
        for owner in module.modules()
    )


def compare(
    saved: Mapping[str, Any], live: Mapping[str, Any], excused: Collection[str] = ()
) -> list[str]:
    """List what is on one side only, or of another shape or dtype; not below ``excused``."""
    faults = []
    for name in {**saved, **live}:
        if any(not each or f"{name}.".startswith(f"{each}.") for each in excused):
            continue
        if name not in live:
            faults.append(f"{name} is only in the checkpoint")
        elif name not in saved:
            faults.append(f"{name} is only in the run")
        elif not fits(saved[name], live[name]):
            faults.append(f"{name} saved {_describe(saved[name])}, run has {_describe(live[name])}")
    return faults


def compare_ties(saved: Mapping[str, Any], module: nn.Module) -> list[str]:
    """List the names that share a tensor in the checkpoint or in the run, and not in the other."""
    faults = []
    first_saved: dict[str, str] = {}
    first_live: dict[object, str] = {}
    for path, tensor in chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    ):
        name = drop_wrappers(module, path)
        info: Any = saved.get(name)
        if not _is_tensor(info) or 0 in info.shape:
            continue
        was = first_saved.setdefault(info.name, name)
        now = first_live.setdefault(_identify(tensor), name)
        if was != now:
            before, after = ("one tensor", "two") if was != name else ("two tensors", "one")
            other = was if was != name else now
            faults.append(f"{other} and {name} were {before} when saved and are {after} in the run")
    return faults


def _identify(tensor: torch.Tensor) -> object:
    """Return what two tensors have in common that are the same memory, as the checkpoint has it."""
    if is_lazy(tensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return id(tensor)
    if not tensor.numel() or not tensor.data_ptr():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def compare_frozen(was: set[str], now: set[str], names: Collection[str]) -> list[str]:
    """List the parameters among ``names`` that were frozen and are trained, or the other way."""
    words = {True: "frozen", False: "trained"}
    return [
        f"{name} was {words[name in was]} when saved and is {words[name in now]} in the run, call "
        f"requires_grad_({name not in was}) on it before the resume"
        for name in names
        if (name in was) != (name in now)
    ]


def suggest_rename(saved: Mapping[str, Any], live: Mapping[str, Any]) -> str:
    old = [name for name in saved if name not in live]
    new = [name for name in live if name not in saved]
    for one, other in product(old[:3], new):
        if fits(saved[one], live[other]):
            return f", or with rename={{{one!r}: {other!r}}} if it is the same"
    return ""


def fits(saved: Any, live: Any) -> bool:
    """Whether a saved tensor, or what is known of it, has the shape and dtype of a live one."""
    return is_lazy(live) or _describe(saved) == _describe(live)


def _is_own_code(module: nn.Module, methods: Collection[str], hooks: Collection[object]) -> bool:
    code = (*(getattr(type(module), method) for method in methods), *hooks)
    return not all(str(getattr(each, "__module__", "")).startswith(_KNOWN_CODE) for each in code)


def _is_tensor(value: Any) -> bool:
    return isinstance(getattr(value, "dtype", None), torch.dtype)


def _describe(value: Any) -> str:
    if not _is_tensor(value):
        return "no tensor"
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
