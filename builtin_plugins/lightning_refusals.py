"""Which Lightning ``Trainer`` cannot go on exactly, and what to change."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from builtin_plugins.lightning_callbacks import is_a, list_stateful
from hookbus.errors import CallError, HookbusError


def list_problems(bridge: object, trainer: Any, module: Any) -> list[HookbusError]:
    """List all reasons at once."""
    return [CallError(text) for text in _describe_all(bridge, trainer, module)]


def check_path(trainer: Any) -> None:
    """Refuse a checkpoint of Lightning's, which the Trainer tells of after it was loaded.

    Raises:
        CallError: there is one.
    """
    if trainer.ckpt_path is not None:
        raise CallError(
            f"ckpt_path={str(trainer.ckpt_path)!r}: the bridge resumes from its own run; leave"
            " ckpt_path out"
        )


def _describe_all(bridge: object, trainer: Any, module: Any) -> Iterator[str]:
    strategy = type(trainer.strategy).__name__
    if trainer.world_size != 1 or strategy != "SingleDeviceStrategy":
        yield (
            f"{strategy} on {trainer.world_size} devices: the bridge is for one; pass"
            " Trainer(devices=1, strategy='auto')"
        )
    if trainer.overfit_batches > 0:
        yield "overfit_batches changes the training data; leave it out"
    if trainer.reload_dataloaders_every_n_epochs:
        yield (
            "reload_dataloaders_every_n_epochs makes a loader that nobody can tell from the one"
            " before; build it once, and change the data in its dataset or sampler"
        )
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        yield "val_check_interval by the clock is another in each run; pass a number of batches"
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        yield "training_step(dataloader_iter) fetches by itself; take batch and batch_idx instead"
    yield from _describe_callbacks(bridge, trainer.callbacks)


def _describe_callbacks(bridge: object, callbacks: list[Any]) -> Iterator[str]:
    before = list_stateful(callbacks[: callbacks.index(bridge)])
    if before:
        yield (
            f"{type(before[0]).__name__} comes before the bridge; put the bridge first:"
            " Trainer(callbacks=[bridge, …])"
        )
    for callback in callbacks:
        name = type(callback).__name__
        if type(callback) is type(bridge) and callback is not bridge:
            yield "there are two bridges; leave one out"
        elif is_a(callback, "LearningRateFinder", "BatchSizeFinder"):
            yield f"{name} trains to try something out; use it in a Trainer without the bridge"
        elif is_a(callback, "StochasticWeightAveraging"):
            yield f"{name} changes the scheduler in the middle of a run; use WeightAveraging"
        elif is_a(callback, "GradientAccumulationScheduler"):
            yield (
                f"{name} sets how many batches are gathered as an epoch begins, and so not in the"
                " middle of one; pass Trainer(accumulate_grad_batches=…)"
            )
        elif is_a(callback, "BaseFinetuning"):
            yield (
                f"{name} gives the optimizer more parameters in the middle of a run; build the"
                " optimizer with all of them, and freeze them in the module"
            )
