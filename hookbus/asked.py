"""What a save is asked for, until it is written."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from hookbus.errors import CallError, HookbusError, raise_all
from hookbus.logs import logger
from hookbus.registration import name_type


@attrs.frozen
class Wanted:
    """A save that somebody wants; the arguments are those of ``bus.save``."""

    metrics: Mapping[str, float]
    wait: bool
    why: tuple[str, ...]
    tag: str | None = None

    @classmethod
    def make(
        cls, metrics: Mapping[str, Any] | None, wait: bool, why: str, tag: str | None
    ) -> Wanted:
        """Check the arguments.

        Raises:
            CallError: one of them is not what is expected.
        """
        check_bool("wait", wait)
        if tag is not None:
            check_word("tag", tag)
        return cls(clean_metrics(metrics), wait, (check_word("why", why),), tag)

    def join(self, other: Wanted) -> Wanted:
        """Return one save that is what both want.

        Raises:
            CallError: each has a tag of its own.
        """
        if self.tag and other.tag and self.tag != other.tag:
            raise CallError(
                f"tag={other.tag!r}: this place is being saved with tag={self.tag!r}; several saves"
                " of one body are one"
            )
        return Wanted(
            metrics={**self.metrics, **other.metrics},
            wait=self.wait or other.wait,
            why=tuple(dict.fromkeys([*self.why, *other.why])),
            tag=other.tag or self.tag,
        )


@attrs.define(eq=False)
class Asked:
    """The save that was asked for inside the loop and is not written yet, if any."""

    run: Path
    wanted: Wanted | None = None

    def add(self, wanted: Wanted) -> None:
        """Ask for one more; several are one."""
        self.wanted = wanted if self.wanted is None else self.wanted.join(wanted)


def check_bool(argument: str, value: object) -> bool:
    """Return what is true or false.

    Raises:
        CallError: it is neither.
    """
    if not isinstance(value, bool):
        raise CallError(f"{argument}={value!r}: pass True or False")
    return value


def check_word(argument: str, text: object) -> str:
    """Return a text that is one.

    Raises:
        CallError: it is none, or empty.
    """
    if not isinstance(text, str) or not text:
        raise CallError(f"{argument}={text!r}: pass a word or two")
    return text


def warn_at_exit(bus: object, asked: Asked) -> None:
    """Warn, when ``bus`` goes or the process ends, of a save that was never written."""
    weakref.finalize(bus, _warn_of_unwritten, asked, os.getpid())


def _warn_of_unwritten(asked: Asked, process: int) -> None:
    if asked.wanted is not None and os.getpid() == process:
        logger.warning(
            "a save was asked for and never written into %s; call bus.close() at the end, or use"
            " with hookbus.HookBus() as bus:",
            asked.run,
        )


def clean_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics as plain numbers; a tensor or array of one element is taken by value."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise CallError(f"metrics={metrics!r}: pass a dict of names and numbers")
    cleaned: dict[str, float] = {}
    problems: list[HookbusError] = []
    for name, value in metrics.items():
        number = value
        with contextlib.suppress(
            AttributeError, RuntimeError, TypeError, ValueError
        ):  # of more than one element
            number = value.item()
        if not isinstance(name, str):
            problems.append(CallError(f"metrics: {name!r} is no name; pass a str"))
        elif not isinstance(number, (int, float)):
            problems.append(CallError(f"metrics[{name!r}]: {name_type(value)} is no number"))
        else:
            cleaned[name] = number if type(number) in (int, float) else float(number)
    raise_all("metrics cannot be saved", problems)
    return cleaned
