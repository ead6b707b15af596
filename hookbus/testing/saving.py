"""The laws of what a plugin hands over to be saved."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import attrs

from hookbus.errors import StateError
from hookbus.testing.bench import Bench
from hookbus.testing.court import Court
from hookbus.testing.pictures import Pictures, list_differences
from hookbus.testing.source import Fault
from hookbus.testing.traces import Trace, list_changes
from hookbus.testing.trial import Trial


@attrs.frozen(eq=False)
class Saved:
    """What was saved in the checkpoint of ``run``, and would have been after one more change."""

    run: Path
    state: Pictures
    later: Pictures


@attrs.define(eq=False)
class Saving:
    """Has a plugin hand over its state, looks at what that does, and commits it."""

    court: Court
    bench: Bench
    may_change: tuple[str, ...]
    saved: Saved | None = None

    def check(self, trial: Trial) -> Saved | None:
        """Try the laws; return what was saved, if it could be."""
        try:
            before = trial.take_picture()
            if self.bench.other is not None:
                trial = self.bench.make_changed()
            self.bench.bring_on(trial)
            with trial.saving() as save:
                streams, start = self.bench.read_streams(), trial.trace()
                state = trial.collect(save)
                end, streams_after = trial.trace(), self.bench.read_streams()
            again = trial.take_picture()
        except StateError as error:
            self.court.note("storable", "broken", str(error))
            self.court.give_up("its state cannot be stored")
            return None
        except Fault:
            raise
        except Exception as error:
            self.court.note("something", "broken", f"{type(error).__name__}: {error}")
            self.court.give_up("it cannot be saved")
            return None
        drawn = [*list_drawn(streams, streams_after), *_list_own(start, end)]
        changed = list_own_changes(start, end, self.may_change) + list_held(end, ("Save",))
        self.court.try_law("something", _find_nothing, state)
        self.court.try_law("repeatable", list_differences, state, again)
        self.court.try_law("no draws", lambda: drawn)
        self.court.try_law("no changes", lambda: changed)
        self.court.try_law("differs", self._find_same, before, state)
        self.court.try_law("storable", self._commit, trial, state)
        if self.saved is None:
            self.court.give_up("no checkpoint could be written")
        return self.saved

    def _find_same(self, before: Pictures, after: Pictures) -> list[str]:
        if list_differences(before, after):
            return []
        how = "other= makes" if self.bench.other is not None else "change= leads to"
        return [f"what {how} is saved with the same bits as what make= makes"]

    def _commit(self, trial: Trial, state: Pictures) -> list[str]:
        """Write a checkpoint, and read it after one more change."""
        checkpoint = trial.commit()
        self.bench.bring_on(trial)
        self.saved = Saved(trial.run, state, trial.take_picture())
        return list_differences(state, trial.read(checkpoint))


def list_drawn(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Name the streams of the process that moved."""
    return [f"{name} was drawn from" for name in before if before[name] != after[name]]


def list_own_changes(start: Trace, end: Trace, may_change: tuple[str, ...]) -> list[str]:
    """Say which attributes changed that may not; of generators that is told elsewhere."""
    found = [(text, text.partition(": ")[0]) for text in list_changes(start, end)]
    return [
        text
        for text, path in found
        if path not in start.streams and not any(fnmatchcase(path, each) for each in may_change)
    ]


def list_held(moment: Trace, kinds: Collection[str]) -> list[str]:
    """Say what is kept of events that are over."""
    return [
        f"{path} still holds the {kind} of an event that is over"
        for path, kind in moment.held.items()
        if kind in kinds
    ]


def _list_own(start: Trace, end: Trace) -> list[str]:
    held = [path for path in start.streams if path in end.found]
    return [f"{path} was drawn from" for path in held if list_changes(start, end, path)]


def _find_nothing(state: Pictures) -> list[str]:
    if not state:
        return ["save_state wrote nothing"]
    if all(picture.is_empty for picture in state.values()):
        return [f"save_state wrote {' and '.join(map(str, state.values()))}"]
    return []
