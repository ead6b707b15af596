"""Save a module's weights and buffers, and what its ``state_dict`` leaves out."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
from torch import nn

import hookbus
from builtin_plugins import metric_state
from builtin_plugins.module_state import (
    compare,
    compare_frozen,
    compare_ties,
    describe_lazy,
    find_buffers,
    find_frozen,
    fits,
    list_extra_buffers,
    list_lazy,
    list_modules,
    list_own_loaders,
    list_tensors,
    needs_load_state_dict,
    restore_extra_buffers,
    restore_training,
    suggest_rename,
)
from builtin_plugins.names import (
    add_wrappers,
    describe_faults,
    drop_wrappers_of_keys,
    find_innermost,
    list_some,
    rename,
)
from builtin_plugins.sharded import make_targets
from builtin_plugins.strategy_ddp import SUMS_DIFFER, sums_differ
from hookbus.errors import AttachError, CallError, MismatchError, StateError

_LIGHTNING = ("lightning.", "pytorch_lightning.")


@attrs.define(eq=False)
class Model:
    """Look after a module: weights, buffers of every kind, ``requires_grad`` and ``training``.

    Names are those of the module without its wrappers, so a compiled, a parallel and a plain
    model read each other's checkpoints. Values are copied into the live tensors, which stay the
    same. With ``strict=False`` what fits is loaded and the report tells the rest. ``rename`` maps
    saved names, or dotted beginnings of them, to those of this run. ``trainable_only`` leaves out
    parameters that require no gradient, which the script has to bring itself. ``frozen_apart``
    keeps them in a file of their own, which the next checkpoints share as long as they stay the
    same.
    """

    component: nn.Module
    strict: bool = attrs.field(default=True, kw_only=True)
    rename: Mapping[str, str] = attrs.field(factory=dict, kw_only=True)
    trainable_only: bool = attrs.field(default=False, kw_only=True)
    frozen_apart: bool = attrs.field(default=False, kw_only=True)
    kind = "model"

    def __attrs_post_init__(self) -> None:
        if self.trainable_only and self.frozen_apart:
            raise CallError("frozen_apart keeps what trainable_only leaves out; pass one of them")

    @hookbus.hookimpl
    def save_start(self, save: hookbus.Save) -> None:
        if lazy := list_lazy(self.component):
            raise StateError(f"{save.name}: {describe_lazy(lazy, 'bus.save()')}")

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        module, state = self.component, self.component.state_dict()
        metadata = getattr(state, "_metadata", {})
        checkpoint: dict[str, Any] = {"state_dict": state}
        if hook := _find_lightning_hook(module, "on_save_checkpoint"):
            hook(checkpoint)
        named = drop_wrappers_of_keys(module, checkpoint.pop("state_dict"))
        frozen = find_frozen(module)
        apart = frozen if self.trainable_only or self.frozen_apart else ()
        own = [name for name in find_buffers(module) if name in named]
        save.write({n: v for n, v in named.items() if n not in apart}, uncompared=own)
        if save.world_size > 1 and own:
            # Each process has seen data of its own; the weights' file has those of the first.
            save.write({name: named[name] for name in own}, part="buffers", per_rank=None)
        if self.frozen_apart:
            save.write({name: named[name] for name in named if name in apart}, part="frozen")
        rest = {
            "training": {name: owner.training for _, name, owner in list_modules(module)},
            "metadata": {
                name: dict(metadata[path])
                for path, name, _ in list_modules(module)
                if path in metadata
            },
            "frozen": sorted(frozen),
            "buffers": {
                name: owner._buffers[key] for name, owner, key in list_extra_buffers(module)
            },
            "checkpoint": checkpoint,
        }
        save.write(rest, part="rest", per_rank=None)
        if metrics := _find_metrics(module):
            save.write(metric_state.collect(metrics), part="metrics", per_rank=None)

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
        return False if any(tensor.is_meta for tensor in list_tensors(self.component)) else None

    @hookbus.hookimpl
    def check_state(self, resume: hookbus.Resume) -> None:
        if not resume.set_up:  # layers may still be built
            return
        module, rest = self.component, resume.metadata("rest").state
        if lazy := list_lazy(module, loading=True):
            resume.problem(describe_lazy(lazy, "bus.resume()"))
            return
        saved = self._rename_keys(_look_at_state(resume))
        live = drop_wrappers_of_keys(module, module.state_dict())
        frozen = find_frozen(module)
        if self.trainable_only:
            live = {name: v for name, v in live.items() if name in saved or name not in frozen}
        faults = compare(saved, live, list_own_loaders(module, self._rename_keys(rest["metadata"])))
        faults += compare_ties(saved, module)
        metrics = _find_metrics(module)
        # Only their names: a cache may have grown, or be made by the first forward.
        faults += compare(
            dict.fromkeys(self._rename_keys(rest["buffers"])),
            dict.fromkeys(name for name, *_ in list_extra_buffers(module)),
            metrics,
        )
        if _goes_on(resume):
            faults += metric_state.compare(self._look_at_metrics(resume), metrics)
            was_frozen = {rename(name, self.rename) for name in rest["frozen"]}
            faults += compare_frozen(was_frozen, frozen, [name for name in live if name in saved])
        if not faults:
            return
        text = describe_faults(faults)
        if self.strict:
            resume.problem(
                f"{text}; to load what fits, bus.register(builtin_plugins.Model(model, "
                f"strict=False), {resume.name!r}){suggest_rename(saved, live)}"
            )
        else:
            resume.note(f"{text}; what fits is restored, so not bit for bit", warn=True)

    @hookbus.hookimpl
    def restore_model(self, resume: hookbus.Resume) -> None:
        module = self.component
        if unmade := sum(tensor.is_meta for tensor in list_tensors(module)):
            raise MismatchError(
                f"{resume.name}: {unmade} tensors are on the meta device, so there is nothing to "
                "load into; call model.to_empty(device=…) in configure_sharded"
            )
        rest = resume.read("rest")
        metadata = self._rename_keys(rest["metadata"])
        hook = _find_lightning_hook(module, "on_load_checkpoint")
        if hook or needs_load_state_dict(module, metadata):
            state = {k: v for part in _list_parts(resume) for k, v in self._read(resume, part)}
            checkpoint = {**rest["checkpoint"], "state_dict": self._rename_keys(state)}
            if hook:
                hook(checkpoint)
            self._load_state_dict(resume, checkpoint["state_dict"], metadata)
        else:
            live = drop_wrappers_of_keys(module, module.state_dict())
            for part in _list_parts(resume):
                saved = resume.metadata(part).state
                names = {name: rename(name, self.rename) for name in saved}
                fitting = {
                    name: live[names[name]]
                    for name, info in saved.items()
                    if names[name] in live and fits(info, live[names[name]])
                }
                resume.read_into(fitting, part, partial=not self.strict)
        if "buffers" in resume.parts and _goes_on(resume) and not resume.is_new_rank:
            live = drop_wrappers_of_keys(module, module.state_dict())
            saved = {rename(name, self.rename): name for name in resume.metadata("buffers").state}
            own = {name: live[new] for new, name in saved.items() if new in live}
            resume.read_into(own, "buffers", partial=True)
        restore_extra_buffers(module, self._rename_keys(rest["buffers"]))
        if _goes_on(resume):
            changed = restore_training(module, self._rename_keys(rest["training"]))
            if changed:
                resume.note(f"modes put back: {list_some(changed)}")
            if "metrics" in resume.parts:
                gathered = self._rename_keys(resume.read("metrics"))
                metric_state.grow(gathered, _find_metrics(module))
                metric_state.restore(gathered, _find_metrics(module))

    @hookbus.hookimpl
    def resume_end(self, resume: hookbus.Resume) -> None:
        if resume.stage == "fit" and resume.world_size > 2 and sums_differ(self.component):
            resume.note(SUMS_DIFFER, warn=resume.ranks.is_first)

    def _load_state_dict(
        self, resume: hookbus.Resume, state: dict[str, Any], metadata: Mapping[str, Any]
    ) -> None:
        """Let code of the module's own load, with the versions of the modules that saved."""
        module, live = self.component, self.component.state_dict()
        given = OrderedDict((add_wrappers(module, name), value) for name, value in state.items())
        if not self.strict:
            for path in given.keys() & live.keys():
                if not fits(given[path], live[path]):
                    del given[path]
        given._metadata = OrderedDict(  # type: ignore[attr-defined]
            (path, metadata[name]) for path, name, _ in list_modules(module) if name in metadata
        )
        try:
            module.load_state_dict(given, strict=self.strict and not self.trainable_only)
        except RuntimeError as error:
            raise MismatchError(f"{resume.name}: {error}") from error

    def _read(self, resume: hookbus.Resume, part: str | None) -> Iterable[tuple[str, Any]]:
        """Read a part; what is sharded here is read as this rank has it."""
        live, targets = drop_wrappers_of_keys(self.component, self.component.state_dict()), {}
        for name, info in resume.metadata(part).state.items():
            if (ours := live.get(rename(name, self.rename))) is not None and fits(info, ours):
                targets.update(make_targets(info, ours))
        state: dict[str, Any] = resume.read(part, targets=targets)
        return state.items()

    def _look_at_metrics(self, resume: hookbus.Resume) -> dict[str, Any]:
        found = resume.metadata("metrics").state if "metrics" in resume.parts else {}
        return self._rename_keys(found)

    def _rename_keys(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        renamed = {rename(name, self.rename): value for name, value in saved.items()}
        if len(renamed) < len(saved):
            raise MismatchError(f"rename={dict(self.rename)} gives two saved names the same name")
        return renamed


def _list_parts(resume: hookbus.Resume) -> list[str | None]:
    """Return the parts of the section that hold weights and buffers."""
    return [part for part in (None, "frozen") if part in resume.parts]


def _look_at_state(resume: hookbus.Resume) -> dict[str, Any]:
    parts = (resume.metadata(part).state for part in _list_parts(resume))
    return {name: info for state in parts for name, info in state.items()}


def _find_metrics(module: nn.Module) -> dict[str, Any]:
    return metric_state.pick_metrics((name, each) for _, name, each in list_modules(module))


def _goes_on(resume: hookbus.Resume) -> bool:
    """Whether training goes on where it was; a warm start with weights alone is a new training."""
    return resume.stage == "fit" and (not resume.fresh or "*" in resume.request.init_only)


def _find_lightning_hook(module: nn.Module, name: str) -> Callable[[dict[str, Any]], None] | None:
    hook = getattr(find_innermost(module), name, None)
    # Lightning's own does nothing, and would cost a second copy of the weights.
    return hook if callable(hook) and not hook.__module__.startswith(_LIGHTNING) else None


@hookbus.hookimpl
def plugin_for(name: str, component: object) -> Model | None:
    if not isinstance(component, nn.Module):
        return None
    grows = any(hasattr(find_innermost(component), each) for each in ("setup", "configure_model"))
    is_empty = next(list_tensors(component), None) is None and not component.state_dict()
    holds_metrics = not metric_state.is_metric(component) and _find_metrics(component)
    if is_empty and not grows and not holds_metrics:
        raise AttachError(
            f"{name}: {type(component).__name__} has neither parameters nor buffers and its "
            "state_dict() is empty, so nothing of it would be saved; leave it out of attach(), or "
            "register a plugin that knows what to save"
        )
    return Model(component)
