"""The errors of hookbus.

::

    HookbusError
    ├── BusError                      the bus was used wrongly
    │   ├── RegistrationError         (TypeError) refused by register()
    │   │   └── NameTakenError        two plugins of one name
    │   ├── AttachError               (TypeError) nobody looks after it, or it came too late
    │   ├── CallError                 (TypeError) wrong arguments of an event or a method
    │   ├── OrderError                before/after contradict each other, or an order is stale
    │   └── SequenceError             an event was fired twice, out of turn, or after the end
    ├── CheckpointError               something about a checkpoint on disk
    │   ├── CheckpointNotFoundError   the checkpoint, step or run asked for is not there
    │   ├── CorruptCheckpointError    a file is damaged, cut short, missing or not sealed
    │   ├── FormatError               written by a version this one cannot read
    │   ├── StateError                (TypeError) a state holds something that cannot be stored
    │   ├── RunLockedError            another process works in the run directory
    │   ├── ReadError                 (OSError) a file is there and cannot be read now
    │   └── WriteError                (OSError) the disk refused: full, read-only, no permission
    ├── ResumeError                   the run cannot go on as it was
    │   ├── MismatchError             a section and its component do not fit
    │   ├── UnclaimedSectionError     a section that no plugin restores
    │   ├── MissingSectionError       a plugin whose section is not in the checkpoint
    │   ├── MigrationError            a state of a version that cannot be brought to the plugin's
    │   └── SamplerError              the data order cannot be repeated
    ├── SaveError                     a save was refused or came at the wrong moment
    │   └── UnattachedError           something that trains belongs to nothing on the bus
    ├── LoopError                     the loop was used wrongly
    ├── RankError                     another process of the run broke, is gone, or differs
    ├── LawError                      (AssertionError) a plugin breaks laws of hookbus.testing
    ├── ExactnessError                (AssertionError) a resumed run went on with other bits
    └── ManyErrors                    (ExceptionGroup) several of these at once
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any


class HookbusError(Exception):
    """Everything that hookbus raises on purpose."""


class BusError(HookbusError):
    """The bus was used wrongly."""


class RegistrationError(BusError, TypeError):
    """A plugin was refused by ``register``."""


class NameTakenError(RegistrationError):
    """Two plugins of one name."""


class AttachError(BusError, TypeError):
    """Nobody can look after a component, or it came after its event had fired."""


class CallError(BusError, TypeError):
    """An event or a method was called with wrong arguments."""


class OrderError(BusError):
    """The declared order contradicts itself, or an event was fired through a stale relay."""


class SequenceError(BusError):
    """An event was fired twice, out of turn, or after the resume had ended."""


class CheckpointError(HookbusError):
    """Something about a checkpoint on disk."""


class CheckpointNotFoundError(CheckpointError):
    """The checkpoint, step or run that was asked for is not there."""


class CorruptCheckpointError(CheckpointError):
    """A file of a checkpoint is damaged, cut short, missing or not sealed."""


class FormatError(CheckpointError):
    """The checkpoint was written in a format that this version cannot read."""


class StateError(CheckpointError, TypeError):
    """A state holds something that cannot be stored; nothing was written."""


class RunLockedError(CheckpointError):
    """Another process works in the run directory."""


class ReadError(CheckpointError, OSError):
    """A file is there and cannot be read now; that it is damaged is not said."""


class WriteError(CheckpointError, OSError):
    """The disk refused a write; ``errno`` and ``filename`` are those of the first cause."""


class ResumeError(HookbusError):
    """The run cannot go on as it was."""


class MismatchError(ResumeError):
    """A section and its component do not fit."""


class UnclaimedSectionError(ResumeError):
    """A section of the checkpoint that no plugin on the bus restores."""


class MissingSectionError(ResumeError):
    """A plugin on the bus whose section is not in the checkpoint."""


class MigrationError(ResumeError):
    """A state of another version than the plugin's, and no step leads there, or one broke."""


class SamplerError(ResumeError):
    """The order or the contents of the data cannot be repeated."""


class SaveError(HookbusError):
    """A save was refused, or asked for at a moment at which the state is not whole."""


class UnattachedError(SaveError):
    """Something that trains belongs to nothing on the bus, so a resume would lose it."""


class LoopError(HookbusError):
    """The loop was used wrongly."""


class RankError(HookbusError):
    """Another process of the run broke or is gone, or the processes differ.

    Where another one broke with an error of ours, it is of that kind too.
    """


class LawError(HookbusError, AssertionError):
    """A plugin breaks laws; ``report`` has what came of each."""

    def __init__(self, message: str, report: Any) -> None:
        super().__init__(message)
        self.report = report


class ExactnessError(HookbusError, AssertionError):
    """A run that was cut and resumed went on with other bits than one that was not."""


class ManyErrors(HookbusError, ExceptionGroup[HookbusError]):  # noqa: N818 - a group, as in the standard library
    """Several errors at once; ``str()`` shows each of them."""

    def __str__(self) -> str:
        lines = "".join(f"\n  - {type(e).__name__}: {e}" for e in self.exceptions)
        return f"{self.message}:{lines}"

    def derive(self, excs: Sequence[HookbusError]) -> ManyErrors:  # type: ignore[override]
        return ManyErrors(self.message, excs)


def raise_all(message: str, problems: Sequence[HookbusError]) -> None:
    """Raise one problem as itself, several as a `ManyErrors`, none not at all.

    A group whose members are all of one kind is of that kind too, so that ``except ResumeError``
    catches one problem and many.
    """
    if len(problems) == 1:
        raise problems[0]
    if problems:
        common = [
            kind for kind in type(problems[0]).__mro__ if all(isinstance(p, kind) for p in problems)
        ]
        raise _find_group(common[0])(message, problems)


@functools.cache
def _find_group(kind: type) -> type[ManyErrors]:
    if issubclass(ManyErrors, kind):
        return ManyErrors
    return type("ManyErrors", (ManyErrors, kind), {"__module__": __name__})
