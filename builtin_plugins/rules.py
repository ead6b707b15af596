"""How the rules of a policy check what they are given."""

from __future__ import annotations

import functools
import logging
from typing import Any

import attrs

from hookbus.errors import CallError

logger = logging.getLogger("hookbus")


def check_count(rule: Any, attribute: object, value: Any) -> None:
    """Refuse what is no whole number from 1 up.

    Raises:
        CallError: it is something else.
    """
    if type(value) is not int or value < 1:
        raise CallError(f"pass a whole number from 1 up, not {spell(rule)}")


def check_positive(rule: Any, attribute: object, value: Any) -> None:
    """Refuse what is no number above 0.

    Raises:
        CallError: it is something else.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        raise CallError(f"pass a number above 0, not {spell(rule)}")


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, once in this process."""
    logger.warning(text)


def spell(rule: Any) -> str:
    """Return a rule as a script writes it, without what is as it would be anyhow."""
    given = [(field, repr(getattr(rule, field.name))) for field in attrs.fields(type(rule))]
    shown = [
        f"{field.name}={text}" if field.kw_only else text
        for field, text in given
        if text != repr(field.default)
    ]
    return f"{type(rule).__name__}({', '.join(shown)})"
