"""Where streams begin in a process of a run under test: known, and others where it goes on."""

from __future__ import annotations

import random

import numpy
import torch

from hookbus.testing.recorder import VARIABLE

SITE = f"""\
import importlib.util, json, os, random, sys

seed = json.loads(os.environ["{VARIABLE}"])["seed"]
random.seed(seed)

class Seeding:
    def find_spec(self, name, path=None, target=None):
        if name not in ("numpy", "torch"):
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None:
            load = spec.loader.exec_module
            def load_and_seed(module):
                load(module)
                (module.random.seed if name == "numpy" else module.manual_seed)(seed)
            spec.loader.exec_module = load_and_seed
        return spec

sys.meta_path.insert(0, Seeding())

# What stands behind this one has its turn too.
sys.path.remove(os.path.dirname(__file__))
here = sys.modules.pop("sitecustomize")
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = here
"""
"""What Python runs before a script. What it does not seed begins anywhere, and is compared too."""


def seed(number: int) -> None:
    """Begin with other streams where a run goes on, as a new process would.

    A start from nothing begins as the first one did: what it does not seed is nobody's fault here.
    """
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)
