"""The Lightning bridge: a callback that puts a bus under an unchanged ``Trainer``.

``from builtin_plugins.lightning import LightningBridge``; importing this imports Lightning.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

import hookbus
from builtin_plugins.datamodule import DataModule
from builtin_plugins.lightning_callbacks import TrainerCallbacks, list_stateful
from builtin_plugins.lightning_data import Feed, TrainSource, list_validation_loaders
from builtin_plugins.lightning_refusals import check_path, list_problems
from builtin_plugins.lightning_trainer import TrainerState
from builtin_plugins.loop import Loop
from builtin_plugins.model import Model
from builtin_plugins.preemption import Preemption
from builtin_plugins.save_policy import SavePolicy
from builtin_plugins.when import EveryEpochs
from hookbus.errors import BusError, raise_all
from hookbus.logs import say


def _find_callback() -> Any:
    """Return the base class of the Lightning that the script has imported; there are two."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    if "lightning.pytorch" not in sys.modules and "pytorch_lightning" in sys.modules:
        names.reverse()
    try:
        return importlib.import_module(names[0]).Callback
    except ModuleNotFoundError:
        return importlib.import_module(names[1]).Callback


_Callback: Any = _find_callback()
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class BuiltModel(Model):
    """Looks after a module that the Trainer sets up by itself."""

    @hookbus.hookimpl
    def on_setup(self, stage: str) -> None:
        """Leave it to the Trainer, which has done it."""


class BuiltDataModule(DataModule):
    """Looks after a datamodule that the Trainer sets up by itself."""

    @hookbus.hookimpl
    def on_setup(self, stage: str) -> None:
        """Leave it to the Trainer, which has done it."""


class LightningBridge(_Callback):  # type: ignore[misc]
    """Go on with a Lightning run bit for bit: ``Trainer(callbacks=[LightningBridge("runs/a")])``.

    It comes first among the callbacks, and ``trainer.fit`` gets no ``ckpt_path``: the same command
    started again goes on. ``plugins`` are registered on the ``bus``, such as ``Preemption()``; if
    there is no `SavePolicy` among them, the run is saved at each epoch's end. ``bridge.bus.save()``
    works in any hook: the checkpoint is written when the Trainer asks for the next batch, after
    every callback and after validation; the end of an epoch is that of the next one's first. What
    else the script wants saved is attached to the bus before ``fit``.

    ``replay`` and ``inexact_ok`` are those of ``loop.batches``, ``options`` those of
    ``bus.resume``.

    Raises:
        CallError: at ``fit``, before anything is trained: this Trainer cannot go on exactly. It
            says what to change.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *plugins: object,
        replay: bool = False,
        inexact_ok: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.bus, self.loop = hookbus.HookBus(), Loop()
        self.resumed: hookbus.Resume | None = None
        self._run, self._options = run, options
        self._feed = Feed(self.loop, {"replay": replay, "inexact_ok": inexact_ok})
        self._state: TrainerState | None = None
        self._handlers: dict[int, Any] = {}
        for plugin in plugins:
            self.bus.register(plugin)
        if not any(isinstance(each.plugin, SavePolicy) for each in self.bus.plugins):
            self.bus.register(SavePolicy(when=EveryEpochs()))

    # -- what the Trainer calls, in this order -------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the place of the training data, before anybody asks for it."""
        if stage != "fit":
            return
        if trainer.fast_dev_run:
            say("fast_dev_run: nothing is saved and nothing resumed")
            return
        if self._state is not None:
            raise BusError("this bridge was used by another fit; make a new one for each")
        raise_all("this Trainer cannot go on exactly", list_problems(self, trainer, pl_module))
        self._state = TrainerState(trainer)
        self._feed.source = TrainSource.put_in(trainer, self._feed)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach what the Trainer has built, and resume."""
        if self._state is None:
            return
        check_path(trainer)
        bus = self.bus
        bus.register(BuiltModel(pl_module), "model")
        if trainer.datamodule is not None:
            bus.register(BuiltDataModule(trainer.datamodule), "datamodule")
        bus.attach(loop=self.loop, optimizers=list(trainer.optimizers))
        if schedulers := [each.scheduler for each in trainer.lr_scheduler_configs]:
            bus.attach(schedulers=schedulers)
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            bus.attach(scaler=scaler)
        if callbacks := list_stateful([each for each in trainer.callbacks if each is not self]):
            bus.register(TrainerCallbacks(callbacks, trainer, pl_module), "callbacks")
        for callback in callbacks:
            if (average := getattr(callback, "_average_model", None)) is not None:
                bus.attach(average=average)
        for number, loader in enumerate(list_validation_loaders(trainer)):
            # One with persistent workers, or that shuffles, would shift everything else.
            bus.attach(**{f"validation_{number}": loader})
            self.loop.let_begin_anew(loader)
        bus.register(self._state, "trainer")
        self.resumed = bus.resume(self._run, **self._options)
        if any(isinstance(each.plugin, Preemption) for each in bus.plugins):
            self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Let the Trainer go through the rest of the epoch as through any other."""
        for number, handler in self._handlers.items():
            # The Trainer's own handler would end the run before the safe point.
            signal.signal(number, handler)
        if self._state is not None and self.resumed is not None and not self.resumed.fresh:
            # It would leave out the schedulers at the epoch's end, since it has no metrics saved.
            trainer.fit_loop._restarting = False
            self._feed.hold_validation(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Save the end, when everybody is done with it."""
        if stage == "fit" and self._state is not None and self.resumed is not None:
            self._state.end()
            self._feed.end(complete=self._state.is_complete)
            if self.loop.step or self.loop.epoch:
                self.bus.save(why="end")
            self._let_go()
            self.bus.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write nothing new, unless the run was told to end."""
        if self._state is not None:
            self._let_go()
            self.bus.__exit__(type(exception), exception, None)

    def _let_go(self) -> None:
        self._feed.release()
