"""What a run can be seen to do, record by record, with the place of each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from hookbus.errors import CallError, StateError

VARIABLE = "HOOKBUS_RECORD"
"""Of the environment of a script that is started by `assert_exact_resume`."""


@attrs.frozen
class Seen:
    """One value that was recorded: a digest of all its bits, and what of it can be shown."""

    digest: str
    shown: str


@attrs.frozen
class Record:
    """What was recorded at once: its place, and the values by name."""

    place: str
    seen: Mapping[str, Seen]


class Recorder:
    """Takes what a run can be seen to do: ``record(batch=x, loss=loss)``.

    Values are tensors, arrays, plain values, and containers of these; their bits are noted at
    once. The place, such as epoch and batch, is that of the loop on the bus; ``at`` names it where
    there is none. Made by `open_record` in a script that nobody tests, it does nothing.
    """

    def __init__(self, run: Path | None, take: Callable[[Record], None] | None) -> None:
        self._run, self._take = run, take

    def __call__(self, *, at: object = None, **values: object) -> None:
        """Note some values.

        Raises:
            CallError: nothing to note, or what cannot be compared.
        """
        if not values:
            raise CallError("record() notes values by name, such as record(batch=x, loss=loss)")
        if self._take is not None:
            place = _find_place(self._run) if at is None else str(at)
            self._take(Record(place, {name: _look_at(name, each) for name, each in values.items()}))


def open_record() -> Recorder:
    """Return what a script notes with what it can be seen to do.

    It does nothing unless `assert_exact_resume` started the script, which it then ends where it is
    to be cut.
    """
    text = os.environ.get(VARIABLE)
    return Recorder(None, None) if text is None else open_by(json.loads(text))


def open_by(order: Mapping[str, Any]) -> Recorder:
    """Return a recorder that writes into a file, and ends this process at the cut."""
    left = [order["cut"]]

    def take(record: Record) -> None:
        with open(order["file"], "a", encoding="utf-8") as file:
            file.write(json.dumps(attrs.asdict(record)) + "\n")
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), order["signal"])

    return Recorder(Path(order["run"]), take)


def read_records(path: Path) -> list[Record]:
    """Read what a process has written; a line that it could not end is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    found = [json.loads(line) for line in lines]
    return [
        Record(each["place"], {name: Seen(**seen) for name, seen in each["seen"].items()})
        for each in found
    ]


def _look_at(name: str, value: object) -> Seen:
    from hookbus.testing.pictures import Picture

    try:
        picture = Picture.take(value)
    except StateError as error:
        raise CallError(f"record({name}=…): {error}") from error
    return Seen(picture.digest, str(picture))


def _find_place(run: Path | None) -> str:
    from hookbus.bus import made

    for bus in list(made):
        saver = bus._saver
        if bus.loop is not None and saver is not None and saver.writer.run == run:
            return _show_place(bus.loop.position)
    return ""


def _show_place(position: Mapping[str, Any]) -> str:
    if position.get("where") == "start":
        return "before the first epoch"
    words = [f"{word} {position[word]}" for word in ("epoch", "batch") if word in position]
    if position.get("where") == "tail":
        words[1:] = ["after its batches"]
    if position.get("call"):
        words.append(f"batches() number {position['call'] + 1}")
    return ", ".join(words) or f"step {position.get('step')}"
