"""What a torchmetrics metric has gathered, which is in no ``state_dict`` unless it is told so."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

Named = Iterable[tuple[str, Any]]

# Beside its states: how often it was updated, and what was computed and is handed out again.
_ALWAYS = ("_update_count", "_computed", "_forward_cache")
# What some of torchmetrics' wrappers and collections keep in plain attributes.
_SOMETIMES = ("min_val", "max_val", "_num_vals_seen", "_increment_called")
_OF_A_COLLECTION = ("_groups", "_groups_checked", "_state_is_copy")


def is_metric(component: object) -> bool:
    """Whether it is a metric, a collection of them, or a tracker."""
    return isinstance(component, _find_classes())


def pick_metrics(modules: Named) -> dict[str, Any]:
    """Return the metrics among named modules; one that is found twice keeps its first name."""
    classes = _find_classes()
    found: dict[int, tuple[str, Any]] = {}
    for name, module in modules if classes else ():
        if isinstance(module, classes):
            found.setdefault(id(module), (name, module))
    return dict(found.values())


def collect(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree with the live tensors in it."""
    return {name: _collect(metric) for name, metric in metrics.items()}


def compare(saved: Mapping[str, Any], metrics: Mapping[str, Any]) -> list[str]:
    """List the metrics that are on one side only or are others; a tracker grows as it is used."""
    live = {name: _describe(metric) for name, metric in metrics.items()}
    trackers = [name for name, each in saved.items() if each["length"]]
    faults = []
    for name in {**saved, **live}:
        if any(_is_below(name, tracker) for tracker in trackers):
            continue
        if name not in live:
            faults.append(f"metric {name or 'itself'} is only in the checkpoint")
        elif name not in saved:
            faults.append(f"metric {name or 'itself'} is only in the run")
        else:
            for what, now in live[name].items():
                if saved[name][what] != now:
                    faults.append(
                        f"{what} of metric {name or 'itself'} saved {saved[name][what]}, run has"
                        f" {now}"
                    )
    return faults


def grow(saved: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
    """Give each tracker as many metrics as it had."""
    for name, each in saved.items():
        if each["length"] and name in metrics:
            tracker = metrics[name]
            while len(tracker) > each["length"]:
                tracker._modules.popitem()  # `del tracker[-1]` would rename the first one
            while len(tracker) < each["length"]:
                tracker.append(copy.deepcopy(tracker._base_metric))


def restore(saved: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
    """Put back what fits; the tensors of ``saved`` are used, not copied."""
    for name, metric in metrics.items():
        if name not in saved or any(saved[name][k] != v for k, v in _describe(metric).items()):
            continue
        for key, value in saved[name]["values"].items():
            is_kept = isinstance(value, list) and getattr(metric, "compute_on_cpu", False)
            setattr(metric, key, value if is_kept else _move(value, metric))
    for metric in metrics.values():
        # Metrics of one group have one state, and lists come back as two.
        if getattr(metric, "_groups_checked", False) and not metric._state_is_copy:
            metric._compute_groups_create_state_ref()


def _collect(metric: Any) -> dict[str, Any]:
    states = getattr(metric, "_defaults", {})
    names = [*states, *_ALWAYS, *_SOMETIMES, *_OF_A_COLLECTION]
    values = {name: vars(metric)[name] for name in names if name in vars(metric)}
    tracked = "_increment_called" in values
    return {**_describe(metric), "length": len(metric) if tracked else 0, "values": values}


def _describe(metric: Any) -> dict[str, Any]:
    """Return what must not differ: its class, and the states that it starts with."""
    states = {
        name: list(default.shape) if isinstance(default, torch.Tensor) else "a list"
        for name, default in getattr(metric, "_defaults", {}).items()
    }
    return {"class": type(metric).__qualname__, "states": states}


def _is_below(name: str, tracker: str) -> bool:
    """Whether it is one of the metrics that a tracker makes, which it numbers."""
    prefix = f"{tracker}." if tracker else ""
    return name.startswith(prefix) and name.removeprefix(prefix).split(".")[0].isdecimal()


def _move(value: Any, metric: Any) -> Any:
    device = getattr(metric, "device", None)
    if isinstance(value, torch.Tensor):
        return value if device is None else value.to(device)
    if type(value) in (list, tuple):
        return type(value)(_move(each, metric) for each in value)
    if type(value) is dict:
        return {key: _move(each, metric) for key, each in value.items()}
    return value


def _find_classes() -> tuple[type, ...]:
    """Return the classes, if the script has imported them; else there can be no metric."""
    module = sys.modules.get("torchmetrics")
    names = ("Metric", "MetricCollection", "MetricTracker")
    return tuple(_list_classes(module, names)) if module is not None else ()


def _list_classes(module: Any, names: Iterable[str]) -> Iterator[type]:
    for name in names:
        if isinstance(found := getattr(module, name, None), type):
            yield found
