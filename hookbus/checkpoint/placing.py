"""What of a saved state goes where in a live one: all is compared before anything is changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import attrs
import numpy
import torch

from hookbus.checkpoint.dtensors import is_dtensor, take_local
from hookbus.checkpoint.leaves import KeyPath, list_steps
from hookbus.checkpoint.tensor_info import TensorInfo
from hookbus.checkpoint.tensors import dtype_name, find_overlaps, overlaps_itself, view_key
from hookbus.errors import MismatchError

_NOTHING = object()


@attrs.frozen(eq=False)
class Stored:
    """A tensor or array that is still in the file."""

    tag: str
    payload: Any
    info: TensorInfo

    @property
    def form(self) -> Any:
        """How a tensor is stored: the name of a dense one, else a dict with its parts."""
        return self.payload[0]


@attrs.frozen(eq=False)
class Match:
    """A tensor or array of the file, and the live one of the same shape and dtype for it."""

    stored: Stored
    live: Any
    name: str


def match(who: str, saved: object, live: object, *, partial: bool = False) -> list[Match]:
    """Compare a saved state, with `Stored` for its tensors, with a live one.

    Raises:
        MismatchError: they do not fit; all differences are named.
    """
    comparison = _Comparison(partial)
    comparison.compare(saved, live, None)
    problems = comparison.problems + list(_find_ties(comparison.matches, partial))
    if problems:
        raise MismatchError(
            f"{who}: {len(problems)} of {comparison.count} do not fit: {'; '.join(problems)}"
        )
    return comparison.matches


def place(saved: Any, live: Any) -> Any:
    """Put plain values into the containers of ``live``, and return what takes its place.

    Tensors stay as they are. Of a container with tensors below it, the keys that both have are
    set; one of plain values takes all that was saved.
    """
    if isinstance(saved, Stored):
        return live
    if not _same_kind(saved, live):
        return saved
    theirs, ours = _list_children(saved), _list_children(live)
    shared = {key: place(theirs[key], ours[key]) for key in theirs if key in ours}
    if _holds_tensors(saved) or _holds_tensors(live):
        if isinstance(live, tuple):
            return tuple({**ours, **shared}.values())
        for key, value in shared.items():
            live[key] = value
    elif isinstance(live, tuple):
        return saved
    else:
        live.clear()
        if isinstance(live, dict):
            live.update({**theirs, **shared})
        else:
            live.extend({**theirs, **shared}.values())
    return live


@attrs.define(eq=False)
class _Comparison:
    partial: bool
    matches: list[Match] = attrs.field(factory=list)
    problems: list[str] = attrs.field(factory=list)
    count: int = 0

    def compare(self, saved: object, live: object, path: KeyPath | None) -> None:
        if isinstance(saved, Stored) or _is_tensor(live):
            reason = _find_misfit(saved, live)
            if reason is None and isinstance(saved, Stored):
                self.count += 1
                self.matches.append(Match(saved, live, _join(path)))
            else:
                self._differ(saved, live, path, reason or "")
        elif _holds_tensors(saved) or _holds_tensors(live):
            if _same_kind(saved, live):
                self._compare_children(_list_children(saved), _list_children(live), path)
            else:
                self._differ(saved, live, path)

    def _compare_children(
        self, theirs: dict[Any, object], ours: dict[Any, object], path: KeyPath | None
    ) -> None:
        for key in {**theirs, **ours}:
            if key in theirs and key in ours:
                self.compare(theirs[key], ours[key], (path, key))
            elif not self.partial and key in theirs:
                for at, value in _list_leaves(theirs[key], (path, key)):
                    self._differ(value, _NOTHING, at)
            elif not self.partial:
                for at, value in _list_leaves(ours[key], (path, key)):
                    self._differ(_NOTHING, value, at)

    def _differ(self, saved: object, live: object, path: KeyPath | None, reason: str = "") -> None:
        self.count += 1
        self.problems.append(f"{_join(path)} saved {_show(saved)}, run has {_show(live)}{reason}")


def _find_misfit(saved: object, live: object) -> str | None:
    """Say why a stored tensor or array cannot be read into a live one, or return ``None``.

    An empty reason means that the two, shown side by side, say it themselves.
    """
    if not isinstance(saved, Stored) or not _is_tensor(live):
        return ""
    if saved.tag == "$array":
        if not isinstance(live, numpy.ndarray) or _show(saved) != _show(live):
            return ""
        return None if live.flags.writeable else " that is read-only"
    if not isinstance(live, torch.Tensor):
        return f", a {type(live).__name__}"
    if type(live) not in (torch.Tensor, torch.nn.Parameter) and not is_dtensor(live):
        return f", a {type(live).__name__}"
    if live.shape != saved.info.shape or live.dtype != saved.info.dtype:
        return ""
    layout = "strided" if isinstance(saved.form, str) else saved.form["is"]
    if live.is_quantized:
        return None
    if str(live.layout) != f"torch.{layout}":
        return f" of layout {live.layout}, not torch.{layout}"
    if layout not in ("strided", "sparse_coo"):
        return f"; one of layout {layout} is not filled in place, use read()"
    if live.is_meta:
        return " on the meta device, which has no data"
    if is_dtensor(live) and any(each.is_partial() for each in live.placements):
        return " that is partial, still to be summed up over the ranks"
    if layout == "strided" and overlaps_itself(take_local(live)):
        return " that overlaps itself"
    return None


def _find_ties(matches: list[Match], partial: bool) -> Iterator[str]:
    """Say what shares memory on one side only: bytes would be lost, or a tie."""
    dense = [m for m in matches if m.stored.tag != "$array" and isinstance(m.stored.form, str)]
    by_view = dict[object, Match]()
    by_name = dict[str, Match]()
    views = {id(each): view_key(take_local(each.live)) for each in dense}
    for each in dense:
        first = by_view.setdefault(views[id(each)] or id(each.live), each)
        if first.stored.form != each.stored.form:
            yield f"{first.name} and {each.name} are one tensor in the run, two in the checkpoint"
        first = by_name.setdefault(each.stored.form, each)
        if not partial and views[id(first)] != views[id(each)]:
            yield f"{first.name} and {each.name} are one tensor in the checkpoint, two in the run"
    seen = list(by_view.values())
    for one, other in find_overlaps([take_local(each.live) for each in seen]):
        yield f"{seen[one].name} and {seen[other].name} share memory in the run only"


# -- states of any shape -------------------------------------------------------------------------


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor | numpy.ndarray)


def _list_children(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, list | tuple | deque) else {}


def _same_kind(saved: object, live: object) -> bool:
    """Whether both are containers that can be walked side by side."""
    if isinstance(saved, dict) and isinstance(live, dict):
        return True
    return type(saved) is type(live) and isinstance(saved, list | tuple | deque)


def _list_leaves(
    value: object, path: KeyPath | None, above: tuple[int, ...] = ()
) -> Iterator[tuple[KeyPath | None, object]]:
    """Yield what a state holds that is no container, with its path; an empty container too."""
    children = _list_children(value)
    if not children:
        yield path, value
    for key, child in children.items():
        if id(child) not in above:
            yield from _list_leaves(child, (path, key), (*above, id(value)))


def _holds_tensors(value: object) -> bool:
    leaves = (leaf for _, leaf in _list_leaves(value, None))
    return any(isinstance(leaf, Stored) or _is_tensor(leaf) for leaf in leaves)


def _join(path: KeyPath | None) -> str:
    return ".".join(map(str, list_steps(path))) or "the state"


def _show(value: object) -> str:
    if value is _NOTHING:
        return "nothing"
    if isinstance(value, Stored) and value.tag == "$array" and len(value.payload) == 3:
        return f"{value.payload[2]} {numpy.dtype(value.payload[1])}"
    if isinstance(value, Stored):
        return str(value.info)
    if isinstance(value, torch.Tensor | numpy.ndarray):
        dtype = dtype_name(value.dtype) if isinstance(value, torch.Tensor) else value.dtype
        return f"{list(value.shape)} {dtype}"
    if _list_children(value) or isinstance(value, dict | list | tuple | deque):
        return f"a {type(value).__name__} of {len(_list_children(value))}"
    return repr(value) if value is None or isinstance(value, bool | int | float) else _name(value)


def _name(value: object) -> str:
    return f"a {type(value).__name__}"
