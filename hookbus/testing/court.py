"""Notes what comes of each law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from hookbus.testing.source import Fault
from hookbus.testing.verdict import LAWS, LawResult, Outcome


class NotChecked(Exception):  # noqa: N818 - an answer, and not a failure
    """Why a law cannot be checked."""


@attrs.define(eq=False)
class Court:
    """What came of each law so far; those of ``skip`` are left out."""

    skip: tuple[str, ...]
    results: dict[str, LawResult] = attrs.field(factory=dict)

    def try_law(self, key: str, check: Callable[..., list[str] | None], *given: Any) -> bool:
        """Note what comes of one law, and whether it holds."""
        if key in self.skip:
            self.note(key, "left out")
            return True
        try:
            seen = check(*given) or []
        except Fault:
            raise
        except NotChecked as error:
            self.note(key, "not checked", str(error))
            return True
        except Exception as error:
            seen = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
        self.note(key, "broken" if seen else "holds", *seen)
        return not seen

    def note(self, key: str, outcome: Outcome, *seen: str) -> None:
        law = next(law for law in LAWS if law.key == key)
        if self.results.get(key, LawResult(law, "holds")).outcome != "broken":
            self.results[key] = LawResult(law, outcome, seen)

    def give_up(self, why: str) -> None:
        """Note that what is left cannot be checked."""
        for law in LAWS:
            if law.key not in self.results:
                self.note(law.key, "not checked", why)
