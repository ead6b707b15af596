"""Let every process train a replica of the models (DistributedDataParallel)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hookbus
from builtin_plugins.names import find_innermost
from builtin_plugins.strangers import list_members
from hookbus.errors import AttachError

SUMS_DIFFER = (
    "a DistributedDataParallel sums its first gradients in another order than all later ones, so"
    " with three or more processes a resume is not bit for bit; give it"
    " find_unused_parameters=True, as builtin_plugins.DDP() does"
)


@attrs.define(eq=False)
class DDP:
    """Wrap each attached model that an attached optimizer trains (where there is none, every one).

    Weights come back first: each process reads them into its own replica. The wrapper stands in
    ``resume.components`` afterwards, and names stay without ``module.``. Without a process group
    nothing is wrapped, so that the same script runs in one process.

    ``models`` are the names of those to wrap. ``options`` go to `DistributedDataParallel`. With
    three or more processes ``find_unused_parameters`` is true unless it is given: without it torch
    lays the gradients out anew after the first backward of each process, sums them in another
    order, and a run that goes on has other bits.
    """

    models: tuple[str, ...] | None = attrs.field(default=None, kw_only=True)
    options: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True)
    kind = "strategy"

    @hookbus.hookimpl
    def restore_before_configure_sharded(self) -> bool | None:
        return True

    @hookbus.hookimpl
    def configure_sharded(self, resume: hookbus.Resume) -> dict[str, object] | None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        options = {"find_unused_parameters": dist.get_world_size() > 2, **self.options}
        models = self._find_models(resume.components)
        wrapped: dict[str, nn.Module] = {}
        for name, model in models.items():
            kept = [buffer.clone() for buffer in model.buffers()]
            wrapped[name] = DistributedDataParallel(model, **options)
            # torch has handed those of rank 0 out, and each process may have had its own.
            if resume.fates.judge(name) == "restored" and not resume.is_new_rank:
                with torch.no_grad():
                    for buffer, own in zip(model.buffers(), kept, strict=True):
                        buffer.copy_(own)
        return dict[str, object](wrapped) or None

    def _find_models(self, components: Mapping[str, object]) -> dict[str, nn.Module]:
        models = {name: each for name, each in components.items() if isinstance(each, nn.Module)}
        if self.models is not None:
            if missing := [name for name in self.models if name not in models]:
                raise AttachError(
                    f"there is no model {', '.join(map(repr, missing))} to wrap; attached are"
                    f" {', '.join(models) or 'none'}"
                )
            return {name: models[name] for name in self.models}
        trained = {
            id(parameter)
            for component in components.values()
            for optimizer in list_members(component)
            for group in getattr(optimizer, "param_groups", ())
            for parameter in group["params"]
        }
        found = {
            name: each
            for name, each in models.items()
            if not trained or any(id(parameter) in trained for parameter in each.parameters())
        }
        if not found:
            raise AttachError(
                f"there is no model to wrap: attached are {', '.join(models) or 'none'}, and no"
                " attached optimizer trains one; attach it, or pass models="
            )
        wrapped = DistributedDataParallel  # by the script already
        return {name: each for name, each in found.items() if not isinstance(each, wrapped)}


def sums_differ(module: nn.Module) -> bool:
    """Whether a process that goes on sums gradients in another order than one that never ended."""
    return (
        isinstance(module, DistributedDataParallel)
        and dist.get_world_size(module.process_group) > 2
        and not module.find_unused_parameters
        and sum(p.requires_grad for p in find_innermost(module).parameters()) > 1
    )
