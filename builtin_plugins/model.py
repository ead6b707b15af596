"""Save a module's weights and buffers, and what its ``state_dict`` leaves out."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from typing import Any

import attrs
import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

import hookbus
from builtin_plugins.names import drop_wrappers, drop_wrappers_of_keys, find_innermost, rename
from hookbus.errors import AttachError, MismatchError

_WORD = {True: "frozen", False: "trained"}

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
_LIGHTNING = ("lightning.", "pytorch_lightning.")


@attrs.define(eq=False)
class Model:
    """Look after a module: weights, buffers of every kind, ``requires_grad`` and ``training``.

    Names are those of the module without its wrappers, so a compiled, a parallel and a plain
    model read each other's checkpoints. Values are copied into the live tensors, which stay the
    same. With ``strict=False`` what fits is loaded and the report tells the rest. ``rename`` maps
    saved names, or dotted beginnings of them, to those of this run. ``trainable_only`` leaves out
    parameters that require no gradient, which the script has to bring itself.
    """

    component: nn.Module
    strict: bool = attrs.field(default=True, kw_only=True)
    rename: Mapping[str, str] = attrs.field(factory=dict, kw_only=True)
    trainable_only: bool = attrs.field(default=False, kw_only=True)
    kind = "model"

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        module, state = self.component, self.component.state_dict()
        metadata = getattr(state, "_metadata", {})
        checkpoint: dict[str, Any] = {"state_dict": state}
        if hook := _find_lightning_hook(module, "on_save_checkpoint"):
            hook(checkpoint)
        frozen = _find_frozen(module)
        named = drop_wrappers_of_keys(module, checkpoint.pop("state_dict"))
        if self.trainable_only:
            named = {name: value for name, value in named.items() if name not in frozen}
        save.write(named)
        modules = {
            drop_wrappers(module, path): {
                "training": owner.training,
                "metadata": dict(metadata.get(path, {})),
            }
            for path, owner in module.named_modules(remove_duplicate=False)
        }
        buffers = {name: owner._buffers[key] for name, owner, key in _list_extra_buffers(module)}
        save.write(
            {
                "modules": modules,
                "frozen": sorted(frozen),
                "buffers": buffers,
                "checkpoint": checkpoint,
            },
            part="rest",
        )

    @hookbus.hookimpl
    def on_setup(self, stage: str) -> None:
        module = find_innermost(self.component)
        setup = getattr(module, "setup", None)
        # A module of the script's own may have a `setup` that is something else.
        if callable(setup) and "stage" in inspect.signature(setup).parameters:
            setup(stage)
        if callable(configure_model := getattr(module, "configure_model", None)):
            configure_model()

    @hookbus.hookimpl
    def restore_before_configure_sharded(self) -> bool | None:
        return False if any(tensor.is_meta for tensor in _list_tensors(self.component)) else None

    @hookbus.hookimpl
    def check_state(self, resume: hookbus.Resume) -> None:
        if not resume.set_up:
            return
        module, rest = self.component, resume.metadata("rest").state
        saved = self._rename_keys(resume.metadata().state)
        live = drop_wrappers_of_keys(module, module.state_dict())
        frozen, was_frozen = _find_frozen(module), set(map(self._rename, rest["frozen"]))
        if self.trainable_only:
            live = {name: v for name, v in live.items() if name in saved or name not in frozen}
        faults = _compare(
            saved, live, _list_own_loaders(module, self._rename_keys(rest["modules"]))
        )
        faults += _compare_ties(saved, module)
        buffers = dict.fromkeys(name for name, *_ in _list_extra_buffers(module))
        # Only their names: a cache may have grown, or be made by the first forward.
        faults += _compare(dict.fromkeys(map(self._rename, rest["buffers"])), buffers, ())
        if _goes_on(resume):
            faults += [
                f"{name} was {_WORD[name in was_frozen]} when saved and is {_WORD[name in frozen]} "
                f"in the run, call requires_grad_({name not in was_frozen}) on it before the resume"
                for name in live
                if name in saved and (name in frozen) != (name in was_frozen)
            ]
        if not faults:
            return
        text = f"{len(faults)} differences between checkpoint and run: {'; '.join(faults)}"
        if self.strict:
            resume.problem(
                f"{text}; to load what fits, bus.register(builtin_plugins.Model(model, "
                f"strict=False), {resume.name!r}){_suggest_rename(saved, live)}"
            )
        else:
            resume.note(f"{text}; what fits is restored")

    @hookbus.hookimpl
    def restore_model(self, resume: hookbus.Resume) -> None:
        module = self.component
        if unmade := sum(tensor.is_meta for tensor in _list_tensors(module)):
            raise MismatchError(
                f"{resume.name}: {unmade} tensors are on the meta device, so there is nothing to "
                "load into; call model.to_empty(device=…) in configure_sharded"
            )
        rest = resume.read("rest")
        modules = self._rename_keys(rest["modules"])
        hook = _find_lightning_hook(module, "on_load_checkpoint")
        if hook or _needs_load_state_dict(module, modules):
            checkpoint = {**rest["checkpoint"], "state_dict": self._rename_keys(resume.read())}
            if hook:
                hook(checkpoint)
            self._load_state_dict(resume, checkpoint["state_dict"], modules)
        else:
            live = drop_wrappers_of_keys(module, module.state_dict())
            fitting = {
                name: live[self._rename(name)]
                for name, info in resume.metadata().state.items()
                if _fits(info, live.get(self._rename(name)))
            }
            resume.read_into(fitting, partial=not self.strict)
        _restore_extra_buffers(module, self._rename_keys(rest["buffers"]))
        if _goes_on(resume):
            _restore_training(resume, module, modules)

    def _load_state_dict(
        self, resume: hookbus.Resume, state: dict[str, Any], modules: Mapping[str, Any]
    ) -> None:
        """Let code of the module's own load, with the versions of the modules that saved."""
        module, live = self.component, self.component.state_dict()
        paths = {drop_wrappers(module, path): path for path in live}
        given = OrderedDict((paths.get(name, name), value) for name, value in state.items())
        if not self.strict:
            for path in [
                path for path in given if path in live and not _fits(given[path], live[path])
            ]:
                del given[path]
        given._metadata = OrderedDict(  # type: ignore[attr-defined]
            (path, modules[name]["metadata"])
            for path, _ in module.named_modules(remove_duplicate=False)
            if (name := drop_wrappers(module, path)) in modules
        )
        try:
            module.load_state_dict(given, strict=self.strict and not self.trainable_only)
        except RuntimeError as error:
            raise MismatchError(f"{resume.name}: {error}") from error

    def _rename(self, saved: str) -> str:
        return rename(saved, self.rename)

    def _rename_keys(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        renamed = {self._rename(name): value for name, value in saved.items()}
        if len(renamed) < len(saved):
            raise MismatchError(f"rename={dict(self.rename)} gives two saved names the same name")
        return renamed


def _goes_on(resume: hookbus.Resume) -> bool:
    """Whether training goes on where it was; a warm start with weights alone is a new training."""
    return resume.stage == "fit" and (not resume.fresh or "*" in resume.request.init_only)


def _list_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    return chain(module.parameters(), module.buffers())


def _find_frozen(module: nn.Module) -> set[str]:
    parameters = module.named_parameters(remove_duplicate=False)
    return {drop_wrappers(module, path) for path, p in parameters if not p.requires_grad}


def _list_extra_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield name, owner and key of each buffer that is not in the ``state_dict``."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for key in owner._buffers:
            if key in owner._non_persistent_buffers_set:
                yield drop_wrappers(module, f"{path}.{key}".lstrip(".")), owner, key


def _list_own_loaders(module: nn.Module, modules: Mapping[str, Any]) -> list[str]:
    """Name the modules that load with code of their own, or of another version than saved.

    It may rename, add or reshape what is below them, so only it can tell whether that fits.
    """
    found = []
    for path, owner in module.named_modules(remove_duplicate=False):
        name = drop_wrappers(module, path)
        hooks = (
            *owner._load_state_dict_pre_hooks.values(),
            *owner._load_state_dict_post_hooks.values(),
        )
        version = modules.get(name, {}).get("metadata", {}).get("version", owner._version)
        if version != owner._version or _is_own_code(owner, _LOADING, hooks):
            found.append(name)
    return found


def _needs_load_state_dict(module: nn.Module, modules: Mapping[str, Any]) -> bool:
    return (
        bool(_list_own_loaders(module, modules))
        or any(isinstance(tensor, UninitializedTensorMixin) for tensor in _list_tensors(module))
        or any(
            _is_own_code(
                owner,
                _SAVING,
                (*owner._state_dict_hooks.values(), *owner._state_dict_pre_hooks.values()),
            )
            for owner in module.modules()
        )
    )


def _is_own_code(module: nn.Module, methods: Collection[str], hooks: Collection[object]) -> bool:
    code = (*(getattr(type(module), method) for method in methods), *hooks)
    return not all(str(getattr(each, "__module__", "")).startswith(_KNOWN_CODE) for each in code)


def _find_lightning_hook(module: nn.Module, name: str) -> Callable[[dict[str, Any]], None] | None:
    hook = getattr(find_innermost(module), name, None)
    # Lightning's own does nothing, and would cost a second copy of the weights.
    return hook if callable(hook) and not hook.__module__.startswith(_LIGHTNING) else None


def _compare(
    saved: Mapping[str, Any], live: Mapping[str, Any], excused: Collection[str]
) -> list[str]:
    faults = []
    for name in {**saved, **live}:
        if any(name == each or not each or name.startswith(f"{each}.") for each in excused):
            continue
        if name not in live:
            faults.append(f"{name} is only in the checkpoint")
        elif name not in saved:
            faults.append(f"{name} is only in the run")
        elif not _fits(saved[name], live[name]):
            faults.append(f"{name} saved {_describe(saved[name])}, run has {_describe(live[name])}")
    return faults


def _compare_ties(saved: Mapping[str, Any], module: nn.Module) -> list[str]:
    """List the names that share a tensor in the checkpoint or in the run, and not in the other."""
    faults, first_saved, first_live = [], {}, {}
    tensors = chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    for path, tensor in tensors:
        name = drop_wrappers(module, path)
        info = saved.get(name)
        if info is None or 0 in info.shape:
            continue
        was, now = first_saved.setdefault(info.name, name), first_live.setdefault(id(tensor), name)
        if was != now:
            before, after = ("one tensor", "two") if was != name else ("two tensors", "one")
            other = was if was != name else now
            faults.append(f"{other} and {name} were {before} when saved and are {after} in the run")
    return faults


def _fits(saved: Any, live: Any) -> bool:
    return isinstance(live, UninitializedTensorMixin) or _describe(saved) == _describe(live)


def _describe(value: Any) -> str:
    if isinstance(getattr(value, "dtype", None), torch.dtype):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "no tensor"


def _suggest_rename(saved: Mapping[str, Any], live: Mapping[str, Any]) -> str:
    for old in saved.keys() - live.keys():
        for new in live.keys() - saved.keys():
            if _fits(saved[old], live[new]):
                return f", or with rename={{{old!r}: {new!r}}} if it is the same"
    return ""


def _restore_extra_buffers(module: nn.Module, saved: Mapping[str, torch.Tensor | None]) -> None:
    device = next((tensor.device for tensor in _list_tensors(module)), None)
    for name, owner, key in list(_list_extra_buffers(module)):
        live = owner._buffers[key]
        value = saved.get(name, live)
        if value is None or live is None or not _fits(value, live):
            owner._buffers[key] = None if value is None else value.to(device)
        else:
            live.copy_(value)


def _restore_training(
    resume: hookbus.Resume, module: nn.Module, modules: Mapping[str, Any]
) -> None:
    changed = []
    for path, owner in module.named_modules(remove_duplicate=False):
        name = drop_wrappers(module, path)
        saved = modules.get(name, {}).get("training", owner.training)
        if owner.training != saved:
            owner.training = saved
            changed.append(f"{name or 'the model itself'} {'train' if saved else 'eval'}")
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        resume.note(f"modes put back: {', '.join(changed[:3])}{more}")


@hookbus.hookimpl
def plugin_for(name: str, component: object) -> Model | None:
    if not isinstance(component, nn.Module):
        return None
    grows = any(hasattr(find_innermost(component), each) for each in ("setup", "configure_model"))
    if not grows and next(_list_tensors(component), None) is None and not component.state_dict():
        raise AttachError(
            f"{name}: {type(component).__name__} has neither parameters nor buffers and its "
            "state_dict() is empty, so nothing of it would be saved; leave it out of attach(), or "
            "register a plugin that knows what to save"
        )
    return Model(component)
