"""Several processes of one run: what they agree on, and how one's error reaches all.

They meet in a gloo group of their own, which all of them make at the first resume; nothing is ever
sent in the default group, in which training may be under way.

A meeting is named by its place, so that ranks that went different ways are told, and not left to
wait for each other. A rank that breaks tells the others where they meet next, and leaves word in
the store for those that wait for it elsewhere: they learn it when the connection to it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import attrs
import xxhash

from hookbus import errors
from hookbus.errors import HookbusError, RankError
from hookbus.logs import logger
from hookbus.ranks import ALONE, Ranks, is_distributed

_T = TypeVar("_T")
_R = TypeVar("_R")
_Error = TypeVar("_Error", bound=BaseException)

PATIENCE = timedelta(seconds=5)
"""How long a rank that broke waits for the others to hear of it; the store keeps it for them."""

_ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)  # the process is to end, and tells nobody


def find_ranks(known: Ranks = ALONE) -> Ranks:
    """Return the ranks of this run, as they are now; several make their group, all together."""
    if known.is_current:
        if known is ALONE and "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
            logger.warning(
                "there are %s processes, and torch.distributed is not initialised, so this one is a"
                " run of its own; call init_process_group() before bus.resume()",
                os.environ["WORLD_SIZE"],
            )
        return known
    known.close()
    return ManyRanks() if is_distributed() else ALONE


@attrs.frozen
class _Fault:
    """What a rank broke with."""

    rank: int
    where: str
    kind: str
    text: str
    trace: str

    @classmethod
    def make(cls, rank: int, where: str, error: BaseException) -> _Fault:
        trace = "".join(traceback.format_exception(error))
        return cls(rank, where, type(error).__name__, str(error), trace)

    def to_error(self, more: str = "") -> RankError:
        """Return it for another rank: of the same kind, where that is one of ours."""
        text = f"rank {self.rank} broke in {self.where}: {self.kind}: {self.text}{more}"
        ours = getattr(errors, self.kind, None)
        if isinstance(ours, type) and issubclass(ours, HookbusError) and self.kind != "ManyErrors":
            error = _find_kind(ours)(text)
        else:
            error = RankError(text)
        error.add_note(f"on rank {self.rank}:\n{self.trace}")
        return error


def _find_kind(kind: type[HookbusError]) -> type[RankError]:
    if issubclass(kind, RankError):
        return kind
    return type("RankError", (RankError, kind), {"__module__": __name__})


class ManyRanks(Ranks):
    """Several processes, in a gloo group of their own."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._default = dist.group.WORLD
        self._group: Any = dist.new_group(backend="gloo", group_desc="hookbus")
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._lost: str | None = None
        self._meetings = 0
        self._store: Any = dist.distributed_c10d._get_default_store()
        token = self.share("the first meeting", uuid.uuid4().hex)
        self._store = dist.distributed_c10d.PrefixStore(f"hookbus-{token}", self._store)

    @property
    def is_current(self) -> bool:
        import torch.distributed as dist

        return dist.is_initialized() and dist.group.WORLD is self._default

    def any(self, place: str, flag: bool) -> bool:
        return bool(self._meet(place, int(flag)))

    def largest(self, place: str, number: int) -> int:
        return self._meet(place, number)

    def gather(self, place: str, value: _T) -> list[_T]:
        self._meet(place)
        return self._gather(place, value)

    def share(self, place: str, value: _T) -> _T:
        import torch.distributed as dist

        self._meet(place)
        values: list[Any] = [value]
        with self._heeding(place):
            dist.broadcast_object_list(values, group=self._group, group_src=0)
        return cast(_T, values[0])

    def agree(self, place: str, values: Mapping[str, object]) -> None:
        texts = {name: json.dumps(value, default=str) for name, value in values.items()}
        digests = {name: xxhash.xxh3_128_hexdigest(text.encode()) for name, text in texts.items()}
        given = self.gather(place, digests)
        names = dict.fromkeys(name for each in given for name in each)
        differing = [name for name in names if len({each.get(name) for each in given}) > 1]
        if not differing:
            return
        told = self.gather(f"{place}, what differs", {n: texts.get(n) for n in differing})
        lines = [_tell_difference(name, [each[name] for each in told]) for name in differing]
        raise self._note_told(RankError(f"{place}: the ranks differ: {'; '.join(lines)}"))

    @contextlib.contextmanager
    def together(self, place: str) -> Iterator[None]:
        since = self._meetings
        try:
            yield
        except _ENDS as end:
            self.leave_word(place, end)
            raise
        except BaseException as error:  # torch has errors that are no Exception
            if not self._was_told(error, since):
                self._tell(place, error)
            raise
        if self._meet(place):
            raise self._hear(place, None)

    def exchange(self, work: Callable[[], _T], decide: Callable[[list[_T]], Sequence[_R]]) -> _R:
        import torch.distributed as dist

        sent: list[Any] | None = [None] * self.world_size if self.is_first else None
        with self.together("an exchange: work"):
            done = work()
        with self._heeding("an exchange"):
            dist.gather_object(done, sent, group=self._group, group_dst=0)
        answers: list[Any] | None = None
        with self.together("an exchange: decision"):
            if sent is not None:
                answers = list(decide(sent))
        taken: list[Any] = [None]
        with self._heeding("an exchange"):
            dist.scatter_object_list(taken, answers, group=self._group, group_src=0)
        return cast(_R, taken[0])

    def leave_word(self, where: str, error: BaseException) -> None:
        fault = _Fault.make(self.rank, where, error)
        with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone too
            self._store.compare_set("broke", "", json.dumps(attrs.asdict(fault)))
            if (text := self._read_word()) is not None and text not in _read_notes(error):
                error.add_note(text)

    def make_others(self) -> Ranks:
        return ManyRanks()

    def close(self) -> None:
        import torch.distributed as dist

        group, self._group = self._group, None
        self._lost = self._lost or "the bus was closed"
        if group is not None and self.is_current:
            dist.destroy_process_group(group)

    # -- inside --------------------------------------------------------------------------------

    def _meet(
        self,
        place: str,
        number: int = 0,
        *,
        fault: _Fault | None = None,
        patience: timedelta | None = None,
    ) -> int:
        """Meet the others at a place; return the largest of the ranks' numbers.

        Raises:
            RankError: a rank is gone, or is somewhere else.
        """
        import torch
        import torch.distributed as dist

        if self._lost is not None:
            raise RankError(f"{place}: {self._lost}")
        code = xxhash.xxh3_64_intdigest(place.encode()) >> 2
        # Of all ranks the largest; so also the smallest code, with its sign turned.
        header = torch.tensor([code, -code, number], dtype=torch.int64, device="cpu")
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        if patience is not None:
            options.timeout = patience  # not that of `wait`, after which the group cannot end
        with self._heeding(place):
            self._group.allreduce([header], options).wait()
        self._meetings += 1
        largest, smallest, found = header.tolist()
        if largest != -smallest:
            raise self._tell_places(place, fault)
        return int(found)

    def _gather(self, place: str, value: _T) -> list[_T]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        with self._heeding(place):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def _tell(self, place: str, error: BaseException) -> None:
        """Let the others know where they meet next, if they come soon."""
        self.leave_word(place, error)
        fault = _Fault.make(self.rank, place, error)
        try:
            self._meet(place, 1, fault=fault, patience=PATIENCE)
            self._hear(place, fault)
        except RankError as other:
            if self._lost is not None and not _read_notes(error):  # why this one broke, maybe
                error.add_note(str(other))
        self._note_told(error)

    def _hear(self, place: str, fault: _Fault | None) -> RankError:
        """Return the error for what other ranks broke with."""
        faults = [each for each in self._gather(place, fault) if each is not None]
        others = ", ".join(str(each.rank) for each in faults[1:])
        more = f" (and so did {others})" if others else ""
        return self._note_told(faults[0].to_error(more))

    def _tell_places(self, place: str, fault: _Fault | None) -> RankError:
        told = self._gather(place, (place, fault))
        faults = [each for _, each in told if each is not None]
        if faults:
            return self._note_told(faults[0].to_error())
        places = [where for where, _ in told]
        return self._note_told(
            RankError(f"the ranks are at different places: {_tell_difference('', places)}")
        )

    def _note_told(self, error: _Error) -> _Error:
        """Note that all ranks know of it, so that nobody tells it again."""
        with contextlib.suppress(AttributeError):
            error._told_at_meeting = self._meetings  # type: ignore[attr-defined]
        return error

    def _was_told(self, error: BaseException | None, since: int) -> bool:
        """Whether an error, or what led to it, was told since then; nobody is left to tell it."""
        while error is not None:
            if getattr(error, "_told_at_meeting", -1) > since or self._lost is not None:
                return True
            error = error.__cause__ or error.__context__
        return False

    @contextlib.contextmanager
    def _heeding(self, place: str) -> Iterator[None]:
        """Turn the end of a connection into an error that says who is gone, and why."""
        try:
            yield
        except RuntimeError as error:
            text = re.sub(r"^\[[^ ]*\] | This is typically .*", "", str(error).splitlines()[0])
            self._lost = self._explain_loss(text.rstrip("."))
            raise RankError(f"{place}: {self._lost}") from error

    def _explain_loss(self, text: str) -> str:
        with contextlib.suppress(RuntimeError, ValueError, TypeError):
            if (word := self._read_word()) is not None:
                return word
            missing = self._call_roll()
            if missing:
                who = ", ".join(map(str, missing))
                return f"a rank is gone, and rank {who} gives no answer ({text})"
        return f"a rank is gone ({text})"

    def _read_word(self) -> str | None:
        """Return what the rank that broke first has left, if that was another one."""
        if not self._store.check(["broke"]):
            return None
        fault = _Fault(**json.loads(self._store.get("broke")))
        if fault.rank == self.rank:
            return None
        return (
            f"rank {fault.rank} is gone: it broke in {fault.where}: {fault.kind}: {fault.text}\n"
            f"{fault.trace}"
        )

    def _call_roll(self) -> list[int]:
        """Return the ranks that do not answer within half a second."""
        self._store.set(f"here/{self.rank}", "1")
        keys = [f"here/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + 0.5
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.02)
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]


def _read_notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _tell_difference(name: str, values: Sequence[object]) -> str:
    """Say which ranks have which value; rank 0's first."""
    ranks: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    texts = [
        f"{_shorten(value, next(iter(ranks)))} on rank {_list_some(who)}"
        for value, who in list(ranks.items())[:4]
    ]
    return f"{name} {', '.join(texts)}".strip()


def _list_some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if ranks[4:] else "")


def _shorten(value: object, other: object) -> str:
    """Return a value, as far as it begins to differ from another where it is long."""
    text, beside = str(value), str(other)
    if len(text) <= 200:
        return text
    pairs = enumerate(zip(text, beside, strict=False))
    start = max(next((i for i, (a, b) in pairs if a != b), 0) - 40, 0)
    return ("…" if start else "") + text[start : start + 160] + "…"
