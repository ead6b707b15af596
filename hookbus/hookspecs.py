"""The events: each a typed function with a docstring and no body.

Each docstring answers in this order: when the event fires; what is there already and what is
not; what to do or to return; who is asked first; what must not be changed; what may be raised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hookbus.bus import HookBus
    from hookbus.checkpoint import Checkpoint
    from hookbus.resume import Resume
    from hookbus.save import Save
    from hookbus.transfer import Transfer

PROJECT = "hookbus"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# -- a plugin and its bus -----------------------------------------------------------------------


@hookspec
def bus_open(bus: HookBus) -> None:
    """Fire for one plugin alone, when it has come on a bus.

    Keep the bus if you call it later, by a weak reference or until ``bus_close``. It may hold no
    other plugin yet. Anything raised takes the plugin off the bus again.
    """


@hookspec
def bus_close() -> None:
    """Fire when the bus closes, or for one plugin alone that is taken off it.

    Let go of what belongs to the process.
    """


# -- restoring, in this order -------------------------------------------------------------------


@hookspec
def resume_start(resume: Resume) -> None:
    """Fire once the checkpoint is chosen, verified and open.

    Only its metadata has been read; no component has been set up or changed. A fresh start has
    no checkpoint (``resume.checkpoint is None``).

    Look at ``resume.metadata()`` and prepare; say what does not fit with ``resume.problem()``.
    Plugins are asked in their declared order. No component may be changed. Anything raised ends
    the resume before a change.
    """


@hookspec
def check_state(resume: Resume) -> None:
    """Fire at the end of ``resume_start``, and right before each event that restores something.

    Components are as they stand then: before ``on_setup`` (``resume.set_up`` is false) a model
    may still lack layers, so whoever looks after one waits. A plugin with a section is asked if
    that is going to be restored, until it has been read, so more than once.

    Compare ``resume.metadata()`` with the component and call ``resume.problem()`` for each thing
    that does not fit; all problems of all plugins are raised together, before the first change.
    Nothing may be changed, and no data is read.
    """


@hookspec
def on_setup(resume: Resume, stage: str) -> None:
    """Fire when components are to be built, with ``stage`` as ``"fit"``, ``"test"`` and so on.

    Nothing has been restored yet. Build what depends on data or configuration; do not restore.
    Datamodules come first, then models. It fires in fresh runs too, once per resume.
    """


@hookspec
def restore_before_configure_sharded(resume: Resume) -> bool | None:
    """Ask, after ``on_setup``, whether weights can be loaded before the model is sharded.

    Return ``False`` to have ``restore_model`` fire behind ``configure_sharded``; one ``False``
    is enough, and the report names who said it. ``None`` and ``True`` leave it in front.
    Nothing may be changed.
    """


@hookspec
def restore_model(resume: Resume) -> None:
    """Fire when weights come back: datamodules, then models, then callbacks.

    Everything is set up and has been checked. Fires once, before ``pre_configure_sharded`` or
    after ``configure_sharded``. Does not fire without a checkpoint.

    Take ``resume.read()`` or, better, ``resume.read_into(live)``, which needs no second copy.
    Anything raised ends the resume; what was restored by then stays.
    """


@hookspec
def pre_configure_sharded(resume: Resume) -> None:
    """Fire at the last moment before the model is wrapped or sharded.

    Weights are back unless somebody answered ``False`` to ``restore_before_configure_sharded``.
    """


@hookspec
def configure_sharded(resume: Resume) -> object:
    """Fire when the model is to be wrapped or sharded.

    Return what takes the model's place (a dict of name to object where there are several), or
    ``None`` if it was wrapped in place or is not yours. One strategy, or the function given to
    ``bus.resume(configure_sharded=…)``: two answers are an error.
    """


@hookspec
def restore_training_state(resume: Resume) -> None:
    """Fire when optimizers and progress come back.

    Models are restored and sharded, optimizers and schedulers exist. Precision comes first, then
    optimizers, their schedulers, everything else, and the loop's progress. Does not fire without
    a checkpoint, nor for another stage than ``"fit"``.
    """


@hookspec
def resume_end(resume: Resume) -> None:
    """Fire when everything is back; random streams are put back last.

    After it the report is complete, the checkpoint is closed and nothing of it is in memory.
    """


# -- saving -------------------------------------------------------------------------------------


@hookspec
def check_attached(components: Mapping[str, object]) -> None:
    """Fire when ``bus.save`` is called, which may be some time before the save is written.

    ``components`` are the live objects on the bus by name. Raise `UnattachedError`, with the line
    to add, for something that trains and belongs to none of them. Nothing may be changed.
    """


@hookspec
def save_start(save: Save) -> None:
    """Fire before a state is collected; streams have been noted, so drawing does no harm.

    Raise to refuse the save; nothing has been written. Components may not be changed.
    """


@hookspec
def save_state(save: Save) -> None:
    """Fire when each plugin hands over its live state with ``save.write(state)``.

    The bus copies or writes it before training goes on: do not clone. A plugin that has nothing
    to save writes nothing, and is still named in the checkpoint. Components may not be changed.
    """


@hookspec
def save_end(checkpoint: Checkpoint) -> None:
    """Fire after the checkpoint is committed and visible under its final name.

    It fires in the thread that trains: for a save behind training at the next safe point, save or
    ``close``, and not if the bus is left by an exception. No save can be asked for here.
    """


# -- training -----------------------------------------------------------------------------------


@hookspec
def safe_point(loop: Any) -> None:
    """Fire at the end of each batch after which a resume is exact, and of each epoch's own code.

    Ask for a save with ``bus.save()``: it is written as soon as this event is over.
    """


@hookspec(firstresult=True)
def optimizer_stepped(optimizer: object) -> bool | None:
    """Ask who looks after an optimizer that has just stepped while the loop runs.

    Answer ``True`` if it is yours and the step counts, ``False`` if it is yours and the step was
    void (a gradient scaler found an overflow), ``None`` if it is not yours. Only steps inside a
    body are counted.
    """


@hookspec
def gradients_waiting() -> bool | None:
    """Ask, at the end of a batch without a step, whether gradients wait for the next one.

    Return ``True`` if a gradient was written since its optimizer's last step.
    """


@hookspec
def note_streams(slot: str) -> Mapping[str, str] | None:
    """Ask each owner of random streams to keep a copy of them under ``slot``.

    ``slot`` is ``"epoch"`` (just before the loader's iterator is made), ``"now"`` (a save), or
    another word of the caller's. Return the digest of each stream by name. Draw nothing.
    """


@hookspec
def put_streams(slot: str) -> None:
    """Ask each owner of random streams to put back what it noted under ``slot``."""


# -- everybody ----------------------------------------------------------------------------------


@hookspec
def bytes_moved(transfer: Transfer) -> None:
    """Fire while a checkpoint is verified or written; not for a save behind training.

    It fires at the start, as bytes go by, and once more at the end, when ``transfer.ended`` is
    true; ``transfer.failed`` says whether it came to nothing. For progress bars.
    """


@hookspec(firstresult=True)
def plugin_for(name: str, component: object) -> object | None:
    """Ask who looks after a component given to ``bus.attach(name=component)``.

    Return a plugin for it, or ``None``. Asked first: plugins registered by hand (latest first),
    then third parties' entry points by name, then the built-in ones, and last the catch-all.
    The component may not be changed.
    """
