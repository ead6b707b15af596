"""What metrics of torchmetrics have gathered comes back, though it is in no ``state_dict``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import Parts, check_exact, seed, to_bits

torchmetrics = pytest.importorskip(
    "torchmetrics", reason="torchmetrics is not installed: pip install hookbus[torchmetrics]"
)

import builtin_plugins  # noqa: E402
import hookbus  # noqa: E402
from hookbus.errors import AttachError, MismatchError  # noqa: E402

BATCHES, CUT = 6, 3
POINTS = torch.arange(48.0).view(12, 4) / 48
CLASSES = {"task": "multiclass", "num_classes": 3}


def make_collection(**options: Any) -> torchmetrics.MetricCollection:
    names = ("Accuracy", "Precision", "Recall", "AUROC")
    metrics = [getattr(torchmetrics, name)(**CLASSES, average="macro") for name in names]
    return torchmetrics.MetricCollection(metrics, **options)


METRICS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: torchmetrics.Accuracy(**CLASSES, average="none"),
    "lists": lambda: torchmetrics.AUROC(**CLASSES, thresholds=None),
    "lists on the cpu": lambda: torchmetrics.AUROC(**CLASSES, compute_on_cpu=True),
    "buffers": lambda: torchmetrics.AUROC(**CLASSES, thresholds=5),
    "a collection": make_collection,
    "a collection without groups": lambda: make_collection(compute_groups=False),
    "best and worst": lambda: torchmetrics.MinMaxMetric(torchmetrics.Accuracy(**CLASSES)),
    "running": lambda: torchmetrics.wrappers.Running(torchmetrics.Accuracy(**CLASSES), window=2),
    "bootstrapped": lambda: torchmetrics.BootStrapper(torchmetrics.Accuracy(**CLASSES), 3),
    "a tracker": lambda: torchmetrics.MetricTracker(torchmetrics.Accuracy(**CLASSES)),
    "tracked collections": lambda: torchmetrics.MetricTracker(make_collection()),
    "composed": lambda: torchmetrics.Accuracy(**CLASSES) + torchmetrics.Recall(**CLASSES),
    "persistent": lambda: make_persistent(),
}


def make_persistent() -> Any:
    metric = torchmetrics.AUROC(**CLASSES)
    metric.persistent(True)
    return metric


def update(metric: Any, batch: int) -> None:
    """Update it, by all the ways that there are."""
    chance = torch.Generator().manual_seed(batch)
    scores = torch.rand(8, 3, generator=chance).softmax(-1)
    target = torch.arange(8).remainder(3)
    if hasattr(metric, "increment") and batch % 2 == 0:
        metric.increment()
    if batch % 2:
        metric(scores, target)
    else:
        metric.update(scores, target)
    if batch == CUT - 1:
        metric.compute()


def read(metric: Any) -> Any:
    """Return everything that it holds, and what it makes of that."""
    held = {
        name: {key: value for key, value in vars(each).items() if is_held(each, key)}
        for name, each in metric.named_modules()
    }
    return to_bits([held, metric.compute()])


def is_held(metric: Any, key: str) -> bool:
    states = getattr(metric, "_defaults", {})
    groups = ("_groups", "_groups_checked", "_state_is_copy")
    return key in (*states, *groups, "_update_count", "_computed", "min_val", "_num_vals_seen")


def make_component(kind: str, *, inside: bool) -> tuple[Any, Any]:
    metric = METRICS[kind]()
    if not inside:
        return metric, metric
    module = torch.nn.Linear(2, 2)
    module.metric = metric
    return module, metric


@pytest.mark.filterwarnings("ignore::UserWarning")  # its advice about memory
@pytest.mark.parametrize("inside", [False, True], ids=["attached", "inside a module"])
@pytest.mark.parametrize("kind", METRICS)
def test_a_metric_goes_on_as_if_nothing_had_happened(
    kind: str, inside: bool, tmp_path: Path
) -> None:
    seed(0)
    component, metric = make_component(kind, inside=inside)
    with hookbus.HookBus() as bus:
        bus.attach(metric=component)
        bus.resume(tmp_path)
        for batch in range(BATCHES):
            update(metric, batch)
            if batch == CUT:
                bus.save(step=1)
    expected = read(metric)
    seed(1)
    component, metric = make_component(kind, inside=inside)
    with hookbus.HookBus() as bus:
        bus.attach(metric=component)
        bus.resume(tmp_path)
        for batch in range(CUT + 1, BATCHES):
            update(metric, batch)
    assert read(metric) == expected


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_metrics_of_one_group_go_on_sharing_their_lists(tmp_path: Path) -> None:
    def make() -> Any:
        names = ("AUROC", "AveragePrecision")
        return torchmetrics.MetricCollection(
            [getattr(torchmetrics, name)(**CLASSES, thresholds=None) for name in names]
        )

    for trained in (True, False):
        metrics = make()
        with hookbus.HookBus() as bus:
            bus.attach(metrics=metrics)
            bus.resume(tmp_path)
            if trained:
                update(metrics, 0)
                update(metrics, 1)
                bus.save(step=1)
    one, other = (each for _, each in metrics.items(copy_state=False))
    assert one.preds is other.preds
    assert len(one.preds) == 2


class Judged(torch.nn.Module):
    """A network with a metric inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.error = torchmetrics.MeanSquaredError()


def test_a_network_with_a_metric_inside_trains_on_exactly(tmp_path: Path) -> None:
    def build() -> Parts:
        model, outside = Judged(), torchmetrics.MeanMetric()
        optimizer = torch.optim.Adam(model.parameters())
        loader = torch.utils.data.DataLoader(POINTS, 4, shuffle=True)
        seen: list[float] = []

        def body(batch: int, x: torch.Tensor) -> None:
            optimizer.zero_grad()
            out = model.layer(x)[:, 0]
            loss = model.error(out, torch.ones(4))  # a metric's value for this batch
            outside.update(loss)
            loss.backward()
            optimizer.step()

        def tail(epoch: int) -> None:
            seen.extend([model.error.compute().item(), outside.compute().item()])
            model.error.reset()

        attached = {"model": model, "optimizer": optimizer, "outside": outside, "seen": seen}
        return Parts({**attached, "data": loader}, loader, body, tail=tail, epochs=2)

    check_exact(build, tmp_path)


def test_without_the_plugin_a_metric_is_refused_and_starts_anew_if_blocked(tmp_path: Path) -> None:
    """Negative control: nothing else brings it back."""
    for trained in (True, False):
        metric = torchmetrics.Accuracy(**CLASSES)
        with hookbus.HookBus(block=("metrics",)) as bus:
            with pytest.raises(AttachError, match=r"its state_dict\(\) is empty"):
                bus.attach(metric=metric)
            bus.resume(tmp_path)
            if trained:
                update(metric, 0)
                bus.save(step=1)
    assert metric.update_count == 0


@pytest.mark.parametrize("inside", [False, True], ids=["attached", "inside a module"])
def test_a_metric_that_starts_with_other_states_is_refused(inside: bool, tmp_path: Path) -> None:
    def wrap(metric: Any) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(1, 1), metric) if inside else metric

    name = "1" if inside else "itself"
    with hookbus.HookBus() as bus:
        bus.attach(metric=wrap(torchmetrics.ConfusionMatrix(**CLASSES)))
        bus.resume(tmp_path)
        bus.save(step=1)
    other = torchmetrics.ConfusionMatrix(task="multiclass", num_classes=4)
    with hookbus.HookBus() as bus:
        bus.attach(metric=wrap(other))
        with pytest.raises(MismatchError) as raised:
            bus.resume(tmp_path)
        assert (
            f"states of metric {name} saved {{'confmat': [3, 3]}}, run has {{'confmat': [4, 4]}}"
        ) in str(raised.value)
        assert other.update_count == 0


def test_a_metric_that_came_or_went_is_told(tmp_path: Path) -> None:
    with hookbus.HookBus() as bus:
        bus.attach(metrics=torchmetrics.MetricCollection([torchmetrics.MeanSquaredError()]))
        bus.resume(tmp_path)
        bus.save(step=1)
    with hookbus.HookBus() as bus:
        bus.attach(metrics=torchmetrics.MetricCollection([torchmetrics.MeanAbsoluteError()]))
        with pytest.raises(MismatchError) as raised:
            bus.resume(tmp_path)
    assert "metric MeanSquaredError is only in the checkpoint" in str(raised.value)
    assert "metric MeanAbsoluteError is only in the run" in str(raised.value)
    assert "pass skip=('metrics',) to start fresh" in str(raised.value)


def test_an_evaluation_leaves_metrics_as_they_are(tmp_path: Path) -> None:
    model = Judged()
    with hookbus.HookBus() as bus:
        bus.attach(model=model)
        bus.resume(tmp_path)
        model.error.update(torch.ones(2), torch.zeros(2))
        bus.save(step=1)
    model = Judged()
    with hookbus.HookBus() as bus:
        bus.attach(model=model)
        bus.resume(tmp_path, stage="test")
    assert model.error.update_count == 0


def test_nobody_imports_torchmetrics_for_the_script() -> None:
    script = (
        "import sys, torch, hookbus, builtin_plugins; bus = hookbus.HookBus();"
        " bus.attach(model=torch.nn.Linear(1, 1)); assert bus.failed == ();"
        " print([n for n in ('torchmetrics', 'lightning', 'schedulefree') if n in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert result.stdout.strip() == "[]", result.stderr
    assert "Metrics" in builtin_plugins.__all__


def test_a_module_that_holds_nothing_but_metrics_is_looked_after_as_one(tmp_path: Path) -> None:
    for trained in (True, False):
        module = torch.nn.ModuleDict({"error": torchmetrics.MeanSquaredError()})
        with hookbus.HookBus() as bus:
            bus.attach(metrics=module)
            bus.resume(tmp_path)
            if trained:
                module["error"].update(torch.ones(2), torch.zeros(2))
                bus.save(step=1)
    assert module["error"].compute() == 1
