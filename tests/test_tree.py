"""State ↔ tree: what is stored comes back with its bits; what is not is refused by name."""

from __future__ import annotations

import argparse
import collections
import enum
import json
import pathlib
import random
import struct
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, time, timedelta, timezone

import attrs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

from hookbus.checkpoint import flatten, unflatten
from hookbus.checkpoint.kinds import DECODERS
from hookbus.checkpoint.nodes import LEAVES
from hookbus.checkpoint.torch_kinds import TORCH_DECODERS
from hookbus.errors import FormatError, StateError

law = settings(deadline=None, suppress_health_check=list(HealthCheck))


# -- a generator of states and a comparison that knows no tolerance --------------------------------

zones = st.one_of(
    st.none(),
    st.just(UTC),
    st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23))),
    st.just(timezone(timedelta(hours=1), "Home")),
    st.just(timezone(timedelta(0), "GMT")),
)
texts = st.text(st.characters(exclude_categories=()), max_size=5)  # surrogates too
floats = st.one_of(st.floats(), st.integers(0, 2**64 - 1).map(lambda n: struct.pack(">Q", n))).map(
    lambda v: v if isinstance(v, float) else struct.unpack(">d", v)[0]
)
dtypes = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
scalars = st.one_of(
    st.floats(width=32).map(np.float32),
    st.floats(width=16).map(np.float16),
    st.floats().map(np.float64),
    st.integers(0, 255).map(np.uint8),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.booleans().map(np.bool_),
    st.complex_numbers(allow_nan=False).map(np.complex128),
    st.just(np.datetime64("2026-01-02T03", "h")),
    st.just(np.timedelta64(5, "ms")),
    st.text("abc", max_size=3).map(np.str_),
)
keys = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    floats,
    texts,
    texts.map(lambda s: "$" + s),
    st.sampled_from(["", "$dict", "a.b", "__metadata__"]),
    st.binary(max_size=4),
    st.complex_numbers(),
    st.dates(),
    st.datetimes(timezones=zones, allow_imaginary=False),
    st.times(),
    st.timedeltas(),
    st.sampled_from(
        [pathlib.Path("a/b"), pathlib.Path("/"), torch.float32, torch.device("cuda", 1)]
    ),
    st.sampled_from(dtypes),
    st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3)),
    scalars,
)
keys = st.recursive(
    keys,
    lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner, max_size=3)),
    max_leaves=3,
)


def times(text: str, zone: timezone | None, fold: int) -> time:
    return time.fromisoformat(text).replace(tzinfo=zone, fold=fold)


plain = st.one_of(
    keys,
    st.binary(max_size=9).map(bytearray),
    st.builds(slice, st.none() | st.integers(), st.integers(), st.none() | st.integers()),
    st.builds(
        times, st.sampled_from(["00:00:00", "23:59:59.000001"]), zones, st.sampled_from([0, 1])
    ),
)


def extend(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    dicts = st.dictionaries(keys, inner, max_size=3)
    factories = st.sampled_from([int, float, str, list, dict, set, tuple, None])

    def tag(items: dict[object, object], text: str) -> OrderedDict[object, object]:
        ordered = OrderedDict(items)
        ordered._metadata = OrderedDict({"": {"version": 1, "text": text}})
        return ordered

    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        dicts,
        st.builds(tag, dicts, texts),
        dicts.map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=3).map(Counter),
        st.builds(defaultdict, factories, dicts),
        st.builds(deque, st.lists(inner, max_size=3), st.none() | st.integers(3, 9)),
        st.sets(keys, max_size=4),
    )


states = st.recursive(plain, extend, max_leaves=12)


def same(one: object, other: object) -> bool:
    """Whether two states have the same types, order and bits all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        apart = vars(one) != vars(other) if isinstance(one, OrderedDict) else False
        factories = (getattr(one, "default_factory", 0), getattr(other, "default_factory", 0))
        pairs = zip(one.items(), other.items(), strict=True) if len(one) == len(other) else ()
        return (
            len(one) == len(other)
            and not apart
            and factories[0] is factories[1]
            and all(same(k, j) and same(v, w) for (k, v), (j, w) in pairs)
        )
    if isinstance(one, set | frozenset):
        return len(one) == len(other) and sorted(map(show, one)) == sorted(map(show, other))
    if isinstance(one, list | tuple | deque) and type(one) is not torch.Size:
        lengths = len(one) == len(other) and getattr(one, "maxlen", 0) == getattr(
            other, "maxlen", 0
        )
        return lengths and all(map(same, one, other))
    return show(one) == show(other)


def show(value: object) -> object:
    """Return what tells a plain value from every other, nan and -0.0 included."""
    if isinstance(value, float):
        return (type(value).__name__, struct.pack(">d", value).hex())
    if isinstance(value, complex):
        return (type(value).__name__, struct.pack(">dd", value.real, value.imag).hex())
    if isinstance(value, np.generic):
        return (value.dtype.str, value.tobytes().hex())
    if isinstance(value, tuple | frozenset) and type(value) is not torch.Size:
        return (type(value).__name__, str(sorted(map(str, map(show, value)))))
    if isinstance(value, datetime | time):
        return (type(value).__name__, repr(value), value.fold)
    return (type(value).__name__, repr(value))


def round_trip(state: object) -> object:
    flat = flatten(state)
    text = json.dumps(flat.tree, allow_nan=False)
    text.encode("ascii")
    tensors = {name: tensor.clone() for name, tensor in flat.tensors.items()}
    return unflatten(json.loads(text), tensors)


# -- laws ------------------------------------------------------------------------------------------


@law
@given(states)
def test_every_state_of_the_closed_list_comes_back_with_its_types_and_bits(state):
    assert same(round_trip(state), state)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (float("nan"), struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0]),
        ({1: 0, 2: 0}, {2: 0, 1: 0}),
        ([1], (1,)),
        (np.float32(1), np.float64(1)),
        (deque([1]), deque([1], 3)),
        ({1}, {True}),
        (b"a", bytearray(b"a")),
    ],
)
def test_the_comparison_tells_apart_what_python_calls_equal(one, other):
    assert not same(one, other)
    assert flatten(one).tree != flatten(other).tree or repr(one) != repr(other)


@law
@given(states, states)
def test_two_states_that_differ_have_different_trees(one, other):
    assume(not same(one, other))
    assert json.dumps(flatten(one).tree) != json.dumps(flatten(other).tree)


@law
@given(states)
def test_flattening_twice_gives_equal_bytes(state):
    assert json.dumps(flatten(state).tree) == json.dumps(flatten(state).tree)


@law
@given(st.lists(keys, max_size=8), st.randoms(use_true_random=False))
def test_a_set_is_stored_in_an_order_of_its_own(members, chance):
    shuffled = list(members)
    chance.shuffle(shuffled)
    assume(len({str(show(m)) for m in members}) == len(set(members)))  # 1, True and 1.0 are one
    assert flatten(set(members)).tree == flatten(set(shuffled)).tree


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=4), inner, max_size=2),
        st.dictionaries(
            st.sampled_from([*DECODERS, *TORCH_DECODERS, *LEAVES, "$other"]),
            inner,
            min_size=1,
            max_size=1,
        ),
    ),
    max_leaves=8,
)


@law
@given(any_json)
def test_a_tree_that_nobody_wrote_is_a_format_error_or_some_state(tree):
    try:
        unflatten(tree, {})
    except FormatError as error:
        assert "a state's tree" in str(error)  # noqa: PT017 - either way is right


# -- what is kept ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state",
    [
        "\ud83d\ude00",  # two surrogates, which JSON takes for one letter
        "\U0001f600",
        2**127,
        -(2**63) - 1,
        pytest.param(7**6000, id="longer than Python reads from text"),
        -0.0,
        {1: "a", "1": "b"},
        {"$tensor": ["a", False]},
        {"": {"": 1}},
        struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0],
        pathlib.Path("/tmp/\udcff"),
        [[]] * 3,
    ],
    ids=repr,
)
def test_a_value_that_others_lose_comes_back(state):
    if isinstance(state, int):
        assert round_trip(state) == state
    else:
        assert same(round_trip(state), state)


def test_the_same_list_twice_comes_back_as_two_equal_ones():
    inner = [1]
    one, other = round_trip([inner, inner])
    assert one == other == [1]
    assert one is not other


def test_a_state_is_a_copy_of_the_moment_in_its_plain_values():
    state = {"history": [1, 2]}
    flat = flatten(state)
    state["history"].append(3)
    assert unflatten(flat.tree, flat.tensors) == {"history": [1, 2]}


def test_the_versions_of_modules_stay_with_a_state_dict():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    state = model.state_dict()
    back = round_trip(state)
    assert back._metadata == state._metadata
    assert type(back._metadata) is OrderedDict


def test_random_states_of_python_numpy_and_torch_are_plain_trees():
    """Source: huggingface/transformers#34631, NVIDIA-NeMo/Automodel#3240."""
    python, legacy, modern = random.Random(3), np.random.RandomState(4), np.random.default_rng(5)
    torch_one = torch.Generator().manual_seed(6)
    for draw in (python.random, legacy.rand, modern.random):
        draw()
    state = {
        "python": python.getstate(),
        "legacy": legacy.get_state(),
        "modern": modern.bit_generator.state,
        "philox": np.random.Philox(7).state,
        "torch": torch_one.get_state(),
    }
    back = round_trip(state)
    other, old, new, one = random.Random(), np.random.RandomState(), np.random.default_rng(), None
    other.setstate(back["python"])
    old.set_state(back["legacy"])
    new.bit_generator.state = back["modern"]
    one = torch.Generator()
    one.set_state(back["torch"])
    assert other.random() == python.random()
    assert old.rand() == legacy.rand()
    assert new.random() == modern.random()
    assert torch.rand(3, generator=one).equal(torch.rand(3, generator=torch_one))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_states_of_scalers_schedulers_averages_and_loaders_fit():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    loader = StatefulDataLoader(list(range(8)), batch_size=2, shuffle=True)
    next(iter(loader))
    for each in (
        torch.amp.GradScaler("cpu", init_scale=8.0),
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.swa_utils.AveragedModel(model),
        optimizer,
        loader,
    ):
        flat = flatten(each.state_dict())
        again = flatten(unflatten(flat.tree, flat.tensors))
        assert again.tree == flat.tree
        assert list(again.tensors) == list(flat.tensors)


def test_paths_and_durations_need_no_trust_and_a_namespace_is_refused_with_its_place():
    """Source: Lightning-AI/pytorch-lightning#20058."""
    state = {"out": pathlib.Path("a/b"), "budget": timedelta(hours=1)}
    assert same(round_trip(state), state)
    with pytest.raises(StateError, match=r"\['hyper'\]\[0\] \(argparse\.Namespace\)"):
        flatten({"hyper": [argparse.Namespace(lr=1)]})


# -- names of tensors ------------------------------------------------------------------------------


def test_names_of_tensors_are_the_keys_that_lead_to_them():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    state = {"layer.weight": a, "groups": [{"m": (b,)}], 3: deque([c])}
    assert list(flatten(state).tensors) == ["layer.weight", "groups.0.m.0", "3.0"]


def test_a_model_has_its_own_names():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    assert set(flatten(model.state_dict()).tensors) == set(model.state_dict())


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ({"a": {"b": 0}, "a.b": 1}, ["a.b", "a.b~1"]),
        ({"a.b": 0, "a": {"b": 1}, "a.b~1": 2}, ["a.b", "a.b~1", "a.b~1~1"]),
        ({"": 0}, ["tensor"]),
        (0, ["tensor"]),
        ({"__metadata__": 0}, ["__metadata__~1"]),
        ({"\ud800": 0, "?": 1}, ["?", "?~1"]),
        ({1: 0, "1": 1}, ["1", "1~1"]),
    ],
)
def test_a_name_that_says_nothing_or_too_much_is_made_up(state, names):
    def fill(value: object) -> object:
        if isinstance(value, dict):
            return {k: fill(v) for k, v in value.items()}
        return torch.tensor([float(value)])

    flat = flatten(fill(state))
    assert list(flat.tensors) == names
    assert flatten(unflatten(flat.tree, flat.tensors)).tree == flat.tree
    assert [tensor.item() for tensor in flat.tensors.values()] == list(range(len(names)))


# -- what is refused -------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Size(enum.IntEnum):
    SMALL = 1


class Mine(dict):
    pass


class Whole(int):
    pass


Point = collections.namedtuple("Point", "x y")


@attrs.define
class Record:
    x: int


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Colour.RED, "test_tree.Colour"),
        (Size.SMALL, "test_tree.Size"),
        (Mine(), "test_tree.Mine"),
        (Whole(1), "test_tree.Whole"),
        (Point(1, 2), "test_tree.Point"),
        (Record(1), "test_tree.Record"),
        (argparse.Namespace(), "argparse.Namespace"),
        (print, "builtin_function_or_method"),
        (int, "type"),
        (iter([]), "list_iterator"),
        (torch.Generator(), "torch._C.Generator"),
        (torch.strided, "torch.layout"),
        (np.array([None]), "a numpy array of dtype object"),
        (np.zeros(1, "i4,f4"), "a numpy array of dtype [('f0', '<i4'), ('f1', '<f4')]"),
        (np.zeros(1, "i4,f4")[0], "a numpy scalar of dtype [('f0', '<i4'), ('f1', '<f4')]"),
        (np.ma.array([1]), "numpy.ma.MaskedArray"),
        (pathlib.PurePosixPath("a"), "pathlib.PurePosixPath"),
        (
            datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
            "a datetime with a zoneinfo.ZoneInfo",
        ),
        (defaultdict(lambda: 0), "a defaultdict of <function"),
        ({torch.ones(1): 1}, "a tensor as a key or in a set"),
        ({(torch.ones(1),)}, "a tensor as a key or in a set"),
    ],
    ids=lambda v: v if isinstance(v, str) else type(v).__name__,
)
def test_what_would_need_an_import_or_lose_something_is_refused(value, reason):
    with pytest.raises(StateError) as caught:
        flatten({"a": [0, value]})
    message = str(caught.value)
    assert message.startswith("1 value cannot be stored: ['a'][1]")
    assert f"({reason}" in message
    assert "vars(x) of an object, x.value of an enum member, tuple(x) of a namedtuple" in message
    assert isinstance(caught.value, TypeError)


def test_all_that_cannot_be_stored_is_named_at_once():
    state = {
        "optimizer": {"groups": [Colour.RED]},
        "od": OrderedDict(x=Mine()),
        "t": (1, {Size.SMALL}),
        "w": torch.empty(2, device="meta"),
    }
    with pytest.raises(StateError) as caught:
        flatten(state)
    message = str(caught.value)
    assert message.startswith("4 values cannot be stored: ")
    for place in (
        "['optimizer']['groups'][0] (test_tree.Colour)",
        "['od']['x'] (test_tree.Mine)",
        "['t'][1][<Size.SMALL: 1>] (test_tree.Size)",
        "['w'] (a tensor on the meta device, so it has no data)",
    ):
        assert place in message


def test_a_state_that_is_itself_of_a_wrong_type_is_named_so():
    with pytest.raises(StateError, match=r"the state itself \(test_tree\.Colour\)"):
        flatten(Colour.RED)


def test_a_cycle_is_refused_and_the_same_object_twice_is_not():
    ring: list[object] = [1]
    ring.append({"back": ring})
    with pytest.raises(StateError, match=r"\[1\]\['back'\] \(a cycle: it holds itself\)"):
        flatten(ring)
    shared = (1, 2)
    assert same(round_trip([shared, shared]), [shared, shared])


def test_a_state_that_is_too_deep_is_refused_before_python_gives_up():
    deep: object = 1
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(StateError, match="nested too deeply"):
        flatten(deep)
    for _ in range(2000):
        deep = deep[0]
    for _ in range(45):
        deep = OrderedDict(a=(deep,)) if isinstance(deep, int) else [deep]
    assert same(round_trip(deep), deep)


@pytest.mark.parametrize(
    "tree",
    [
        {"$dtype": "os.system"},
        {"$dtype": "load"},
        {"$defaultdict": ["eval", {}]},
        {"$device": "nowhere:0"},
        {"$scalar": ["|O", "00" * 8]},
        {"$scalar": ["O,O", "00" * 16]},
        {"$array": ["a", "|O", [1]]},
        {"$array": ["a", "<f8", [5]]},
        {"$array": ["e", "<f8", [10**9]]},
        {"$tensor": ["missing", False]},
        {"$datetime": ["yesterday", 0, None]},
        {"$set": [[1]]},
        {"$OrderedDict": [{}, 3]},
    ],
    ids=json.dumps,
)
def test_a_tree_can_name_nothing_outside_the_closed_lists(tree):
    tensors = {"a": torch.zeros(8, dtype=torch.uint8), "e": torch.zeros(0, dtype=torch.uint8)}
    with pytest.raises(FormatError, match="a state's tree cannot be read: "):
        unflatten(tree, tensors)


def test_a_kind_of_value_from_a_later_version_is_named():
    with pytest.raises(
        FormatError, match=r"holds '\$quaternion', which this version does not know"
    ):
        unflatten({"a": [{"$quaternion": [1, 2, 3, 4]}]}, {})


def test_dates_and_times_keep_their_fold_and_the_name_of_their_zone():
    zone = timezone(timedelta(hours=2), "CEST")
    moment = datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zone)
    back = round_trip([moment, moment.timetz(), date(2026, 1, 1)])
    assert (back[0], back[0].fold, back[0].tzname()) == (moment, 1, "CEST")
    assert (back[1].fold, back[1].tzname()) == (1, "CEST")
    assert back[2] == date(2026, 1, 1)
