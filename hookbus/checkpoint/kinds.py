"""What each plain type is as JSON: the closed list, without the types of torch."""

from __future__ import annotations

import json
import pathlib
import struct
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from typing import Any

import attrs
import numpy

from hookbus.errors import StateError

Walk = Callable[..., Any]  # encodes what stands for the value in hand, or lies a step below it


@attrs.frozen
class Kind:
    """How a type is written: ``encode`` gives the payload, ``decode`` what it was.

    ``encode`` is given the value and a `Walk`, ``decode`` the payload with its nodes decoded.
    """

    name: str
    type: type
    encode: Callable[[Any, Walk], Any]
    decode: Callable[[Any], object]


_FACTORIES = {f.__name__: f for f in (int, float, str, list, dict, set, tuple)}


def spell_type(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def read_dtype(name: str) -> numpy.dtype[Any]:
    """Return a numpy dtype by name; one of objects would take bytes of the file for addresses."""
    dtype = numpy.dtype(name)
    if dtype.kind in "OV":
        raise ValueError(f"an array of dtype {name}")
    return dtype


def _encode_set(value: Any, walk: Walk) -> list[Any]:
    """Sort by encoding, so that saving a set twice gives the same bytes."""
    return sorted((walk(each, each, key=True) for each in value), key=json.dumps)


def _encode_ordered(value: Any, walk: Walk) -> list[Any]:
    """Keep attributes: nn.Module puts the versions of its modules there."""
    return [walk(dict(value)), walk(vars(value), "__dict__")]


def _decode_ordered(payload: Any) -> OrderedDict[Any, Any]:
    items, attributes = payload
    ordered = OrderedDict(items)
    vars(ordered).update(attributes)
    return ordered


def _encode_defaultdict(value: Any, walk: Walk) -> list[Any]:
    factory = value.default_factory
    if factory is not None and factory not in _FACTORIES.values():
        raise StateError(f"a defaultdict of {factory!r}; of {', '.join(_FACTORIES)} or None it can")
    return [None if factory is None else factory.__name__, walk(dict(value))]


def _decode_defaultdict(payload: Any) -> defaultdict[Any, Any]:
    name, items = payload
    return defaultdict(None if name is None else _FACTORIES[name], items)


def _encode_float(value: float, walk: Walk) -> str:
    return struct.pack(">d", value).hex()


def _decode_float(payload: str) -> object:
    return struct.unpack(">d", bytes.fromhex(payload))[0]


def _encode_text(value: str, walk: Walk) -> str:
    return value.encode("utf-8", "surrogatepass").hex()


def _decode_text(payload: str) -> str:
    return bytes.fromhex(payload).decode("utf-8", "surrogatepass")


def _decode_bytearray(payload: str) -> bytearray:
    return bytearray(b64decode(payload))


def encode_scalar(value: numpy.generic) -> list[str]:
    if value.dtype.kind in "OV":
        raise StateError(f"a numpy scalar of dtype {value.dtype}")
    return [value.dtype.str, value.tobytes().hex()]


def _decode_scalar(payload: Any) -> object:
    dtype, data = read_dtype(payload[0]), bytes.fromhex(payload[1])
    return numpy.ndarray((), dtype, buffer=data)[()]


def _encode_moment(value: Any, walk: Walk) -> list[Any]:
    zone = value.tzinfo
    if zone is not None and type(zone) is not timezone:
        raise StateError(f"a {type(value).__name__} with a {spell_type(zone)}, not a timezone")
    kept = zone and [_encode_delta(zone.utcoffset(None), walk), zone.tzname(None)]
    return [value.replace(tzinfo=None).isoformat(), value.fold, kept]


def _decode_moment(kind: Any, payload: Any) -> object:
    text, fold, kept = payload
    zone = kept and timezone(timedelta(*kept[0]))
    if kept and zone.tzname(None) != kept[1]:
        zone = timezone(timedelta(*kept[0]), kept[1])
    return kind.fromisoformat(text).replace(fold=fold, tzinfo=zone)


def _encode_delta(value: timedelta, walk: Walk) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


_KINDS = (
    Kind("tuple", tuple, lambda v, walk: walk(list(v)), tuple),
    Kind("set", set, _encode_set, set),
    Kind("frozenset", frozenset, _encode_set, frozenset),
    Kind("OrderedDict", OrderedDict, _encode_ordered, _decode_ordered),
    Kind("Counter", Counter, lambda v, walk: walk(dict(v)), Counter),
    Kind("defaultdict", defaultdict, _encode_defaultdict, _decode_defaultdict),
    Kind("deque", deque, lambda v, walk: [walk(list(v)), v.maxlen], lambda p: deque(*p)),
    Kind("int", int, lambda v, walk: hex(v), lambda p: int(p, 16)),
    Kind("float", float, _encode_float, _decode_float),
    Kind("complex", complex, lambda v, walk: [walk(v.real), walk(v.imag)], lambda p: complex(*p)),
    Kind("str", str, _encode_text, _decode_text),
    Kind("bytes", bytes, lambda v, walk: b64encode(v).decode(), b64decode),
    Kind("bytearray", bytearray, lambda v, walk: b64encode(v).decode(), _decode_bytearray),
    Kind("slice", slice, lambda v, walk: walk([v.start, v.stop, v.step]), lambda p: slice(*p)),
    Kind("range", range, lambda v, walk: walk([v.start, v.stop, v.step]), lambda p: range(*p)),
    Kind("Path", type(pathlib.Path()), lambda v, walk: walk(str(v)), pathlib.Path),
    Kind("date", date, lambda v, walk: v.isoformat(), date.fromisoformat),
    Kind("time", time, _encode_moment, lambda p: _decode_moment(time, p)),
    Kind("datetime", datetime, _encode_moment, lambda p: _decode_moment(datetime, p)),
    Kind("timedelta", timedelta, _encode_delta, lambda p: timedelta(*p)),
)
BY_TYPE = {kind.type: kind for kind in _KINDS}
DECODERS: dict[str, Callable[[Any], object]] = {
    **{f"${kind.name}": kind.decode for kind in _KINDS},
    "$dict": dict,
    "$scalar": _decode_scalar,
}
