"""The settings of the process whose change changes the bits of a run."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import warnings
from collections.abc import Mapping

import torch

_PACKAGES = ("hookbus", "numpy", "torch")


def read_settings() -> dict[str, object]:
    """Return threads, devices, and the switches of determinism and precision, as plain values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns of an old name, whatever is read
        precision = torch.get_float32_matmul_precision()
    settings: dict[str, object] = {
        "threads": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": precision,
        "machine": platform.machine(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "flush denormal": _flushes_denormal(),
    }
    if torch.cuda.is_available():
        settings |= {
            "device": torch.cuda.get_device_name(),
            "cudnn.benchmark": torch.backends.cudnn.benchmark,
            "cudnn.deterministic": torch.backends.cudnn.deterministic,
            "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
            "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        }
    return settings


def _flushes_denormal() -> bool:
    """Whether numbers next to zero become zero; torch tells it in no other way."""
    smallest = torch.tensor(1e-310, dtype=torch.float64, device="cpu")
    return smallest.mul(0.5).item() == 0


@functools.cache
def read_versions() -> Mapping[str, str]:
    """Return the versions of Python and of the packages that decide about bits."""
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **versions}
