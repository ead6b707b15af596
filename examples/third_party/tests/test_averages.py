"""What this package adds to a run keeps the laws of plugins, and says what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hookbus_ema import Ema, Smoothed
from hookbus_ema.smoothed import SmoothedPlugin

import hookbus
from hookbus.errors import MismatchError
from hookbus.testing import check_plugin


def make_ema(bus: hookbus.HookBus) -> Ema:
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    bus.attach(model=model)
    return Ema()


def change_ema(ema: Ema) -> None:
    assert ema.average is not None
    for average in ema.average["model"].values():
        average += 1


def test_the_average_of_the_weights_keeps_the_laws() -> None:
    check_plugin(make_ema, change=change_ema)


def test_a_smoothed_figure_keeps_the_laws() -> None:
    def change(plugin: SmoothedPlugin) -> None:
        plugin.component.update(1.0)

    check_plugin(lambda: SmoothedPlugin(Smoothed()), change=change)


def test_another_model_is_refused_tensor_by_tensor(tmp_path: Path) -> None:
    for width in (2, 3):
        with hookbus.HookBus() as bus:
            bus.register(Ema(), "ema")
            bus.attach(model=torch.nn.Linear(width, 1))
            if width == 2:
                bus.resume(tmp_path)
                bus.save(step=1)
                continue
            with pytest.raises(MismatchError) as caught:
                bus.resume(tmp_path)
    assert (
        "ema: model.weight was saved as [1, 2] torch.float32, run has [1, 3] torch.float32"
        in str(caught.value)
    )
