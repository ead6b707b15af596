"""Save where a Lightning ``Trainer`` stands: its loops, its metrics, and whether it was stopped."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

import hookbus

# Whose change changes the run from here on.
_SETTINGS = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "precision",
    "limit_train_batches",
    "check_val_every_n_epoch",
    "val_check_interval",
)
_LIMITS = ("max_epochs", "max_steps")
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_MOMENT = ("_first_loop_iter", "_current_fx")
_LOGGED = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)
_GATHERED = ("value", "cumulated_batch_size", "_update_count", "_computed", "_forward_cache")


class TrainerState:
    """Saves the progress of the Trainer's loops, and what was logged in the epoch in hand.

    The latter is in no checkpoint of Lightning's: an epoch's mean would start anew in its middle,
    and schedulers and callbacks go by it.
    """

    kind = "trainer"
    after = ("scheduler",)

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._ended = False

    @property
    def is_complete(self) -> bool:
        """Whether the last epoch was gone through to its end."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        whole = progress.current.ready >= self._trainer.num_training_batches
        return bool(whole or progress.is_last_batch)

    def end(self) -> None:
        """Note that what is saved from now on is the end."""
        self._ended = True

    @hookbus.hookimpl
    def save_state(self, save: hookbus.Save) -> None:
        trainer = self._trainer
        loops = trainer.fit_loop.state_dict()
        loops["state_dict"] = {}
        connector = trainer._logger_connector
        save.write(
            {
                "loops": loops,
                "limits": {name: getattr(trainer, name) for name in _LIMITS},
                "ended": self._ended,
                "complete": self.is_complete,
                "stopped": bool(trainer.should_stop),
                "settings": {name: _make_plain(getattr(trainer, name)) for name in _SETTINGS},
                "moment": {name: getattr(connector, name) for name in _MOMENT},
            },
            per_rank=None,
        )
        save.write(
            {
                "seen": {name: dict(getattr(connector, name)) for name in _METRICS},
                "gathered": _collect_results(trainer.fit_loop.epoch_loop._results),
            },
            part="metrics",
            per_rank=None,
        )

    @hookbus.hookimpl
    def restore_training_state(self, resume: hookbus.Resume) -> None:
        trainer, saved, metrics = self._trainer, resume.read(), resume.read("metrics")
        fit_loop, loops = trainer.fit_loop, saved["loops"]
        if self._goes_on_from_end(resume, saved) and not saved["complete"]:
            # The Trainer counts an epoch as done that it left in the middle.
            for count in loops["epoch_progress"].values():
                count["processed"] = count["completed"] = count["processed"] - 1
        fit_loop.load_state_dict(loops)
        trainer.num_sanity_val_steps = 0  # it would go on from what was restored
        if saved["ended"] and saved["complete"]:
            # Nothing is restarted: with max_steps the Trainer would take up the epoch that is over.
            for loop in (fit_loop, fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop):
                loop._restarting = False
        connector = trainer._logger_connector
        for name, value in saved["moment"].items():
            setattr(connector, name, value)
        for name, values in metrics["seen"].items():
            getattr(connector, name).update(values)
        _restore_results(trainer, metrics["gathered"])

    def _goes_on_from_end(self, resume: hookbus.Resume, saved: Mapping[str, Any]) -> bool:
        """Whether a run that was ended goes on, under a larger limit; note what else differs."""
        trainer = self._trainer
        for name, was in saved["settings"].items():
            now = _make_plain(getattr(trainer, name))
            if was != now:
                resume.change(name, was, now, then="adapt", exact=False)
        if not saved["ended"]:
            return False
        larger = [
            name for name in _LIMITS if _is_larger(getattr(trainer, name), saved["limits"][name])
        ]
        if not larger:
            trainer.should_stop = saved["stopped"]
        elif not saved["complete"]:
            resume.note(
                f"the run was ended in the middle of an epoch and goes on under a larger"
                f" {larger[0]}; what the hooks did at that end is not undone, so not bit for bit",
                warn=True,
            )
        return bool(larger)


def _is_larger(now: int | None, was: int | None) -> bool:
    numbers = [sys.maxsize if each in (None, -1) else each for each in (now, was)]
    return numbers[0] > numbers[1]


def _make_plain(value: Any) -> Any:
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def _collect_results(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was logged in the epoch in hand and is gathered until its end."""
    collected = {}
    for key, each in results.items():
        if each.has_reset:
            continue
        values = {name: getattr(each, name) for name in _GATHERED if hasattr(each, name)}
        if not each.is_tensor:  # a metric that belongs to the module, which saves it
            del values["value"]
        meta = {name: getattr(each.meta, name) for name in _LOGGED}
        meta["reduce_fx"] = each.meta.reduce_fx.__name__
        sync = {"_should": each.meta.sync.should, "rank_zero_only": each.meta.sync.rank_zero_only}
        collected[key] = {"tensor": each.is_tensor, "meta": meta, "sync": sync, "values": values}
    return collected


def _restore_results(trainer: Any, collected: Mapping[str, Any]) -> None:
    results = trainer.fit_loop.epoch_loop._results
    classes: Any = sys.modules[type(results).__module__]
    for key, saved in collected.items():
        reduce_fx = getattr(torch, saved["meta"]["reduce_fx"])
        meta = classes._Metadata(**{**saved["meta"], "reduce_fx": reduce_fx})
        meta.sync = classes._Sync(fn=trainer.strategy.reduce, **saved["sync"])
        result = results[key] = classes._ResultMetric(meta, saved["tensor"])
        if not saved["tensor"]:
            result.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
        for name, value in saved["values"].items():
            setattr(result, name, value)
