"""What a resume is asked for."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import attrs

from hookbus.checkpoint import take_path
from hookbus.errors import CallError

if TYPE_CHECKING:
    from hookbus.resume import Resume

Stage = Literal["fit", "validate", "test", "predict"]
SetUp = Callable[["Resume"], None]
Shard = Callable[["Resume"], object]


class Options(TypedDict, total=False):
    """The arguments of ``bus.resume``, which are explained there."""

    step: int | None
    stage: Stage
    only: Sequence[str] | None
    skip: Sequence[str]
    missing_ok: Sequence[str]
    aliases: Mapping[str, str]
    init_from: str | os.PathLike[str] | None
    init_only: Sequence[str]
    setup: SetUp | None
    configure_sharded: Shard | None
    verify: Literal["hashes", "sizes"]
    fallback: bool


STAGES = ("fit", "validate", "test", "predict")


def _check_words(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is None and attribute.name == "only":
        return
    if isinstance(value, str):
        raise CallError(f"{attribute.name}={value!r}: pass a tuple of names, such as ({value!r},)")
    if not isinstance(value, Collection) or not all(isinstance(word, str) for word in value):
        raise CallError(f"{attribute.name}={value!r}: pass a tuple of names or shell patterns")


def _check_aliases(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if isinstance(value, Mapping) and all(isinstance(w, str) for w in (*value, *value.values())):
        return
    raise CallError(
        f"aliases={value!r}: pass a dict of names to those in the checkpoint, such as"
        ' {"encoder": "model"}'
    )


def _check_choice(*choices: object) -> Callable[[object, attrs.Attribute[Any], object], None]:
    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value not in choices:
            raise CallError(
                f"{attribute.name}={value!r}: pass one of {', '.join(map(str, choices))}"
            )

    return check


def _check_function(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and not callable(value):
        raise CallError(f"{attribute.name}={value!r}: pass a function that takes the resume")


def _check_path(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None:
        take_path(attribute.name, value)


@attrs.frozen(eq=False, kw_only=True)
class Request:
    """What ``bus.resume`` was asked for; the arguments are explained there."""

    step: int | None = None
    stage: Stage = attrs.field(default="fit", validator=_check_choice(*STAGES))
    only: Sequence[str] | None = attrs.field(default=None, validator=_check_words)
    skip: Sequence[str] = attrs.field(default=(), validator=_check_words)
    missing_ok: Sequence[str] = attrs.field(default=(), validator=_check_words)
    aliases: Mapping[str, str] = attrs.field(factory=dict, validator=_check_aliases)
    init_from: str | os.PathLike[str] | None = attrs.field(default=None, validator=_check_path)
    init_only: Sequence[str] = attrs.field(default=("model",), validator=_check_words)
    setup: SetUp | None = attrs.field(default=None, validator=_check_function)
    configure_sharded: Shard | None = attrs.field(default=None, validator=_check_function)
    verify: Literal["hashes", "sizes"] = attrs.field(
        default="hashes", validator=_check_choice("hashes", "sizes")
    )
    fallback: bool = attrs.field(default=True, validator=_check_choice(True, False))

    @property
    def may_fall_back(self) -> bool:
        """Whether an older checkpoint may be taken where the newest is damaged."""
        return self.fallback and self.stage == "fit" and self.step is None

    @classmethod
    def make(cls, options: Options) -> Request:
        names = [field.name for field in attrs.fields(cls)]
        unknown = [name for name in options if name not in names]
        if unknown:
            raise CallError(
                f"resume() has no argument {', '.join(map(repr, unknown))}; there are"
                f" {', '.join(names)}"
            )
        return cls(**options)

    def __attrs_post_init__(self) -> None:
        if self.step is not None and (type(self.step) is not int or self.step < 0):
            raise CallError(f"step={self.step!r}: pass a whole number of steps, or None")
        if self.only is not None and self.stage == "fit":
            raise CallError('only= is for the stages "validate", "test", "predict"; pass skip=')
        if self.init_from is not None and (self.stage != "fit" or self.step is not None):
            raise CallError('init_from= is for stage="fit" without step=')


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
