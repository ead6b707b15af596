"""Averages for hookbus: of the weights in every run, and of a figure where a script wants one."""

from hookbus_ema.smoothed import Smoothed
from hookbus_ema.weights import Ema

__all__ = ["Ema", "Smoothed"]
