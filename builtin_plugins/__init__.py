"""The plugins that come with hookbus, registered by the same entry points as anybody's."""

from builtin_plugins.callbacks import Callbacks
from builtin_plugins.datamodule import DataModule
from builtin_plugins.keep import Keep, KeepBest, KeepEvery, KeepLast, KeepTagged
from builtin_plugins.loader import Loader
from builtin_plugins.loop import Loop
from builtin_plugins.metrics import Metrics
from builtin_plugins.model import Model
from builtin_plugins.optimizer import Optimizer
from builtin_plugins.precision import Precision
from builtin_plugins.preemption import Preemption
from builtin_plugins.progress import Progress
from builtin_plugins.rng import AttachedGenerator, Rng
from builtin_plugins.save_policy import SavePolicy
from builtin_plugins.schedule_free import ScheduleFree
from builtin_plugins.scheduler import Scheduler
from builtin_plugins.state import Stateful, TensorState, Values
from builtin_plugins.strategy import Strategy
from builtin_plugins.strategy_ddp import DDP
from builtin_plugins.strategy_fsdp2 import FSDP2
from builtin_plugins.strategy_single import Single
from builtin_plugins.when import EveryEpochs, EverySeconds, EverySteps, Moment, OverheadTarget, When

__all__ = [
    "AttachedGenerator",
    "Callbacks",
    "DDP",
    "DataModule",
    "EveryEpochs",
    "EverySeconds",
    "EverySteps",
    "FSDP2",
    "Keep",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepTagged",
    "Loader",
    "Loop",
    "Metrics",
    "Model",
    "Moment",
    "Optimizer",
    "OverheadTarget",
    "Precision",
    "Preemption",
    "Progress",
    "Rng",
    "SavePolicy",
    "ScheduleFree",
    "Scheduler",
    "Single",
    "Stateful",
    "Strategy",
    "TensorState",
    "Values",
    "When",
]
