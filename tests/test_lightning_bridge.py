"""Under the bridge, a Lightning run that is killed ends with the bits of the Trainer alone.

`lightning_run.py` trains, kills and compares; what it must see is told there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "lightning", reason="lightning is not installed: pip install hookbus[lightning]"
)

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from torch.utils.data import DataLoader, IterableDataset

import hookbus
from builtin_plugins import EverySteps, SavePolicy
from builtin_plugins.lightning import LightningBridge
from hookbus.errors import BusError, CallError, ManyErrors

SCRIPT = Path(__file__).parent / "lightning_run.py"
SCENES = ("plain", "plateau", "manual", "datamodule")
# Batches of epochs of six: odd ones in an epoch, even ones at its end, negative ones by SIGTERM.
PLACES = [1, 3, -3, 5, 6, 7, -9, 11, 12, 13, 13, 15]

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def train_and_kill(scene: str, kills: list[int], folder: Path) -> dict[str, Any]:
    process = subprocess.run(
        [sys.executable, SCRIPT, folder, scene, ",".join(map(str, kills))],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def check_killed(found: dict[str, Any]) -> None:
    """Hold a scene to both laws; alone, the Trainer goes on otherwise."""
    assert found["whole"] == found["alone"], "transparency"
    assert found["killed"] == found["alone"], "exactness"
    assert found["again"] == found["alone"], "a run that is over stays so"
    assert found["own"]["module"] != found["alone"]["module"], "what ckpt_path alone does"


@pytest.mark.parametrize(
    ("scene", "kills"),
    [
        ("plateau", [3, 9, -15]),
        *(pytest.param(scene, PLACES, marks=pytest.mark.sweep) for scene in SCENES),
    ],
    ids=str,
)
def test_a_trainer_that_is_killed_goes_on_bit_for_bit(
    scene: str, kills: list[int], tmp_path: Path
) -> None:
    """Source: Lightning-AI/pytorch-lightning#19764, #5325, #850"""
    check_killed(train_and_kill(scene, kills, tmp_path))


# -- in one process ------------------------------------------------------------------------------


class Line(pl.LightningModule):
    """The smallest thing to train, whose loss rises if it is told so."""

    def __init__(self, rises: bool = False) -> None:
        super().__init__()
        self.rises = rises
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss = torch.nn.functional.dropout(self.net(batch), 0.2).square().mean()
        self.log("height", float(self.global_step) * (1 if self.rises else -1), on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def make_loader() -> DataLoader:
    return DataLoader(torch.arange(16.0).view(8, 2), batch_size=2, shuffle=True)


def make_trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    own = {"accelerator": "cpu", "enable_checkpointing": False, "max_epochs": 2}
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, **own, **options})


def fit(run: Path | None, *callbacks: pl.Callback, seed: int = 0, **options: Any) -> Line:
    """Train, on a bridge or without, and return the module with its trainer."""
    pl.seed_everything(seed)
    module = Line(rises=bool(callbacks))
    bridge = [LightningBridge(run, SavePolicy(when=EverySteps(1), wait=True))] if run else []
    trainer = make_trainer(*bridge, *callbacks, **options)
    trainer.fit(module, make_loader())
    return module


def get_bits(module: Line) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in module.parameters()]


def test_a_longer_limit_goes_on_where_the_run_ended(tmp_path: Path) -> None:
    expected = get_bits(fit(None, max_epochs=4))
    fit(tmp_path, max_epochs=2)
    assert get_bits(fit(tmp_path, max_epochs=4, seed=9)) == expected


def test_more_steps_go_on_after_the_last_one_and_it_is_said_what_is_not_exact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = get_bits(fit(None, max_epochs=-1, max_steps=11))
    fit(tmp_path, max_epochs=-1, max_steps=6)
    module = fit(tmp_path, max_epochs=-1, max_steps=11, seed=9)
    assert "goes on under a larger max_steps; what the hooks did at that end" in caplog.text
    assert get_bits(module) == expected  # there are no such hooks here


def test_a_run_that_was_stopped_early_stays_so_under_the_same_limit(tmp_path: Path) -> None:
    stops = {"monitor": "height", "patience": 1, "check_on_train_epoch_end": True}
    for seed in (0, 9):
        module = fit(tmp_path, EarlyStopping(**stops), seed=seed, max_epochs=9)
        assert module.global_step == 8
    assert hookbus.history(tmp_path)[-1]["event"] == "start"  # nothing more was trained


def test_the_bus_of_the_bridge_saves_from_any_hook(tmp_path: Path) -> None:
    class Asking(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
            if trainer.global_step == 4:
                bridge.bus.save(tag="asked")

    bridge = LightningBridge(tmp_path, SavePolicy())
    make_trainer(bridge, Asking()).fit(Line(), make_loader())
    assert [(each.step, each.tag) for each in hookbus.checkpoints(tmp_path)] == [
        (5, "asked"),
        (8, None),
    ]


def test_the_weights_are_those_of_any_other_script(tmp_path: Path) -> None:
    module = fit(tmp_path)
    plain = Line()
    with hookbus.HookBus() as bus:
        bus.attach(model=plain)
        bus.resume(tmp_path, stage="test")
    assert get_bits(plain) == get_bits(module)


def test_an_error_ends_the_run_without_a_save_and_leaves_the_trainer_as_it_was(
    tmp_path: Path,
) -> None:
    class Breaking(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
            if trainer.global_step == 3:
                raise RuntimeError("broken")

    trainer = make_trainer(LightningBridge(tmp_path, SavePolicy(when=EverySteps(1))), Breaking())
    source = trainer.fit_loop._data_source
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Line(), make_loader())
    assert trainer.fit_loop._data_source is source
    assert hookbus.checkpoints(tmp_path)[-1].step == 2
    assert get_bits(fit(tmp_path, seed=9))  # the run directory was let go


def test_another_model_is_refused_before_a_step(tmp_path: Path) -> None:
    fit(tmp_path)
    module = Line()
    module.net = torch.nn.Linear(2, 3)
    with pytest.raises(ManyErrors) as raised:
        make_trainer(LightningBridge(tmp_path), max_epochs=3).fit(module, make_loader())
    assert "net.weight saved [1, 2] float32, run has [3, 2]" in str(raised.value)
    assert module.global_step == 0


def test_a_setting_that_changes_the_run_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path)
    fit(tmp_path, max_epochs=3, accumulate_grad_batches=2)
    assert "accumulate_grad_batches: saved 1, run has 2" in caplog.text


def test_fast_dev_run_and_other_stages_leave_the_run_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path / "a", fast_dev_run=True)
    assert "fast_dev_run: nothing is saved and nothing resumed" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


# -- what cannot go on exactly -------------------------------------------------------------------

CALLBACKS = {
    "early first": (lambda bridge: [EarlyStopping("x"), bridge], "put the bridge first"),
    "finder": (
        lambda bridge: [bridge, LearningRateFinder()],
        "LearningRateFinder trains to try something out",
    ),
    "averaging": (
        lambda bridge: [bridge, StochasticWeightAveraging(0.1)],
        "StochasticWeightAveraging changes the scheduler in the middle of a run",
    ),
    "accumulation": (
        lambda bridge: [bridge, GradientAccumulationScheduler({0: 2})],
        r"not in the middle of one; pass Trainer\(accumulate_grad_batches=…\)",
    ),
    "finetuning": (
        lambda bridge: [bridge, BackboneFinetuning()],
        "BackboneFinetuning gives the optimizer more parameters in the middle",
    ),
}


@pytest.mark.parametrize("case", CALLBACKS)
def test_callbacks_that_cannot_go_on_are_refused_before_a_step(case: str, tmp_path: Path) -> None:
    make, message = CALLBACKS[case]
    module = Line()
    with pytest.raises(CallError, match=message):
        make_trainer(*make(LightningBridge(tmp_path))).fit(module, make_loader())
    assert module.global_step == 0


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "devices": ({"devices": 2, "strategy": "ddp_spawn"}, "the bridge is for one; pass Trainer"),
    "overfit": ({"overfit_batches": 2}, "overfit_batches changes the training data"),
    "reload": ({"reload_dataloaders_every_n_epochs": 1}, "build it once"),
    "clock": ({"val_check_interval": "00:00:01:00"}, "by the clock is another in each run"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_cannot_go_on_are_refused_before_a_step(case: str, tmp_path: Path) -> None:
    options, message = OPTIONS[case]
    bridge, module = LightningBridge(tmp_path), Line()
    trainer = make_trainer(bridge, **options)
    trainer.strategy._lightning_module = module
    with pytest.raises(CallError, match=message):
        bridge.setup(trainer, module, "fit")


def test_all_reasons_are_told_at_once(tmp_path: Path) -> None:
    bridge, module = LightningBridge(tmp_path), Line()
    trainer = make_trainer(EarlyStopping("x"), bridge, overfit_batches=2)
    with pytest.raises(ManyErrors) as raised:
        trainer.fit(module, make_loader())
    assert "overfit_batches" in str(raised.value)
    assert "put the bridge first" in str(raised.value)


def test_a_checkpoint_of_lightning_is_refused_beside_the_bridge(tmp_path: Path) -> None:
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Line(), make_loader())
    trainer.save_checkpoint(path := tmp_path / "own.ckpt")
    module = Line()
    with pytest.raises(CallError, match=r"own.ckpt': the bridge resumes from its own run"):
        make_trainer(LightningBridge(tmp_path)).fit(module, make_loader(), ckpt_path=path)
    assert module.global_step == 0


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.ones(4, 2))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([make_loader(), make_loader()], "the training data is a list of loaders"),
        (DataLoader(Endless()), "DataLoader has no length"),
    ],
    ids=["two", "endless"],
)
def test_data_that_cannot_be_counted_is_refused_before_a_step(
    data: Any, message: str, tmp_path: Path
) -> None:
    module = Line()
    with pytest.raises(CallError, match=message):
        make_trainer(LightningBridge(tmp_path)).fit(module, data)
    assert module.global_step == 0


def test_a_bridge_is_for_one_fit(tmp_path: Path) -> None:
    trainer = make_trainer(LightningBridge(tmp_path))
    trainer.fit(Line(), make_loader())
    with pytest.raises(BusError, match="make a new one for each"):
        trainer.fit(Line(), make_loader())
