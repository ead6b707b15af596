"""Plain values, tensors and any object with a state come back in place."""

from __future__ import annotations

import copy
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import builtin_plugins.state
import hookbus
from hookbus.errors import AttachError, HookbusError, ManyErrors, MismatchError

torch.set_num_threads(1)


def save(run: Path, **components: object) -> None:
    with hookbus.HookBus() as bus:
        bus.attach(**components)
        bus.resume(run)
        bus.save(step=1)


def resume(run: Path, skip: tuple[str, ...] = (), /, **components: object) -> hookbus.Report:
    with hookbus.HookBus() as bus:
        bus.attach(**components)
        return bus.resume(run, skip=skip).report


def spell(value: Any) -> Any:
    """Spell a value out so that two spellings are equal only for the same types, order and bits."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        return kind, str(value.dtype), tuple(value.shape), value.requires_grad, raw
    if isinstance(value, dict):
        factory = getattr(value, "default_factory", None)
        return kind, factory, [(spell(key), spell(member)) for key, member in value.items()]
    if isinstance(value, list | tuple | deque):
        return kind, getattr(value, "maxlen", None), [spell(member) for member in value]
    return kind, struct.pack("<d", value) if kind == "float" else repr(value)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 2**70)
    | st.floats()
    | st.text(max_size=3)
    | st.builds(
        lambda values, dtype: torch.tensor(values, dtype=dtype),
        st.lists(st.integers(0, 9), max_size=3),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    )
)
KEYS = st.sampled_from(["a", "b", "c"]) | st.integers(0, 2) | st.booleans()


def extend_values(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(KEYS, values, max_size=3)
    lists = st.lists(values, max_size=3)
    return (
        dicts
        | dicts.map(OrderedDict)
        | dicts.map(lambda members: defaultdict(list, members))
        | lists
        | lists.map(tuple)
        | lists.map(lambda members: deque(members, maxlen=4))
    )


VALUES = st.recursive(LEAVES, extend_values, max_leaves=8)
DICTS = st.dictionaries(KEYS, VALUES, max_size=4)


def scramble(value: Any) -> Any:
    """Make something alike: the same tensors without their contents, dicts in another order."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        members = [(key, scramble(value[key])) for key in reversed(value)]
        return OrderedDict(members) if type(value) is dict else dict(members)
    if isinstance(value, list | tuple | deque):
        return type(value)(map(scramble, value))  # a deque without its limit
    return None


@settings(max_examples=80, deadline=None)
@given(saved=DICTS, other=DICTS, is_alike=st.booleans())
def test_a_dict_comes_back_as_it_was_whatever_it_holds_by_now(
    saved: dict[Any, Any],
    other: dict[Any, Any],
    is_alike: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    run = tmp_path_factory.mktemp("run")
    before = spell(saved)
    save(run, values=saved)
    assert spell(saved) == before
    live = dict(scramble(saved)) if is_alike else other
    tensors = {key: member for key, member in live.items() if isinstance(member, torch.Tensor)}
    resume(run, values=live)
    assert spell(live) == before
    if is_alike:
        assert all(live[key] is tensor for key, tensor in tensors.items())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (0.0, -0.0),
        ([1], (1,)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({}, OrderedDict()),
    ],
)
def test_spelling_tells_apart_what_python_calls_equal(one: object, other: object) -> None:
    """The negative control of the law above."""
    assert spell(one) == spell(copy.deepcopy(one))
    assert spell(one) != spell(other)


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        ([1, [2]], [5]),
        ([], [1, 2]),
        (deque([1, 2, 3], maxlen=3), deque([9], maxlen=3)),
        (Counter(a=2, b=0), Counter(a=7, c=1)),
        (OrderedDict(b=1, a=2), OrderedDict(a=0, b=0)),
        (defaultdict(int, a=1), defaultdict(list)),
    ],
)
def test_every_container_stays_the_same_object(saved: Any, live: Any, tmp_path: Path) -> None:
    save(tmp_path, values=saved)
    resume(tmp_path, values=live)
    assert spell(live) == spell(saved)


def test_containers_and_tensors_inside_stay_the_same_objects(tmp_path: Path) -> None:
    saved = {"sums": {"loss": 2.5, "seen": torch.tensor([1.0, 2.0])}, "history": [[1], [2]]}
    save(tmp_path, values=saved)
    for history in ([[0], [0]], [[0]]):  # one that fits as it is, and one that has to grow
        live = {"sums": {"loss": 0.0, "seen": torch.zeros(2)}, "history": history}
        sums, seen, first = live["sums"], live["sums"]["seen"], history[0]  # type: ignore[index]
        resume(tmp_path, values=live)
        assert spell(live) == spell(saved)
        assert live["sums"] is sums
        assert sums["seen"] is seen  # type: ignore[index]
        assert live["history"] is history
        assert history[0] is first


@pytest.mark.parametrize(
    ("saved", "live", "fits"),
    [
        (torch.ones(2), torch.zeros(2), True),
        (torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(2)), True),
        (torch.ones(2, 3), torch.zeros(3, 2).t(), True),
        (torch.ones(2), torch.zeros(1), False),
        (torch.ones(2), torch.zeros(2, dtype=torch.int64), False),
        (torch.ones(2), torch.nn.Parameter(torch.zeros(2)), False),
        (
            torch.nn.Parameter(torch.ones(2)),
            torch.nn.Parameter(torch.zeros(2), requires_grad=False),
            False,
        ),
        (torch.ones(2), 0.0, False),
    ],
)
def test_in_a_dict_that_has_grown_a_tensor_is_filled_if_it_fits_and_replaced_if_not(
    saved: torch.Tensor, live: Any, fits: bool, tmp_path: Path
) -> None:
    save(tmp_path, values={"a": saved, "more": torch.ones(1)})
    values = {"a": live}
    resume(tmp_path, values=values)
    assert spell(values) == spell({"a": saved, "more": torch.ones(1)})
    assert (values["a"] is live) == fits


@pytest.mark.parametrize("has_weights", [True, False])
def test_the_metadata_of_a_kept_state_dict_comes_back(has_weights: bool, tmp_path: Path) -> None:
    module = torch.nn.BatchNorm1d(2)
    save(tmp_path, best={"weights": module.state_dict()})
    live: dict[str, Any] = {}
    if has_weights:
        live["weights"] = OrderedDict(other=1)
        live["weights"].stale = True
    resume(tmp_path, best=live)
    assert vars(live["weights"]) == vars(module.state_dict())
    module.load_state_dict(live["weights"])


def test_one_tensor_under_two_names_stays_one(tmp_path: Path) -> None:
    tensor = torch.tensor([1.0])
    save(tmp_path, values={"a": tensor, "b": tensor, "more": 1})
    live: dict[str, Any] = {"a": torch.zeros(1), "b": torch.zeros(1)}
    kept = live["a"]
    resume(tmp_path, values=live)
    assert live["a"] is live["b"] is kept
    assert live["a"].item() == 1.0


def test_two_tensors_do_not_become_one(tmp_path: Path) -> None:
    save(tmp_path, values={"a": torch.tensor([1.0]), "b": torch.tensor([2.0])})
    tensor = torch.zeros(1)
    live = {"a": tensor, "b": tensor}
    resume(tmp_path, values=live)
    assert (live["a"].item(), live["b"].item()) == (1.0, 2.0)


def test_a_tensor_of_another_layout_stays_in_its_dict(tmp_path: Path) -> None:
    save(tmp_path, values={"a": torch.arange(6.0).reshape(2, 3)})
    tensor = torch.zeros(3, 2).t()
    live = {"a": tensor}
    resume(tmp_path, values=live)
    assert live["a"] is tensor
    assert torch.equal(tensor, torch.arange(6.0).reshape(2, 3))


def test_a_default_device_does_not_lead_tensors_astray(tmp_path: Path) -> None:
    """Source: huggingface/lerobot#4009"""
    save(tmp_path, values={"a": torch.tensor([1.0])}, table=torch.tensor([2.0]))
    live: dict[str, Any] = {}
    table = torch.zeros(1)
    with torch.device("meta"):
        resume(tmp_path, values=live, table=table)
    assert live["a"].device == table.device == torch.device("cpu")
    assert (live["a"].item(), table.item()) == (1.0, 2.0)


def test_what_the_checkpoint_does_not_have_is_dropped_and_noted(tmp_path: Path) -> None:
    save(tmp_path, values={"a": 1})
    live = {"a": 0, "new": 2, 3: 4}
    report = resume(tmp_path, values=live)
    assert live == {"a": 1}
    assert report.notes == ["values: 'new', 3 dropped: not in the checkpoint"]


def test_another_length_of_deque_is_a_problem_with_both_values(tmp_path: Path) -> None:
    save(tmp_path, recent=deque([1], maxlen=3))
    with pytest.raises(
        MismatchError, match="recent: the deque was saved with maxlen=3, run has maxlen=2"
    ):
        resume(tmp_path, recent=deque(maxlen=2))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_is_filled_in_place(requires_grad: bool, tmp_path: Path) -> None:
    saved = torch.nn.Parameter(torch.tensor([1.5, -0.0]), requires_grad)
    save(tmp_path, temperature=saved)
    live = torch.nn.Parameter(torch.zeros(2), requires_grad)
    pointer, version = live.data_ptr(), live._version
    resume(tmp_path, temperature=live)
    assert spell(live) == spell(saved)
    assert live.data_ptr() == pointer
    assert live.grad_fn is None
    assert live._version >= version


def test_a_tensor_in_another_layout_keeps_its_layout(tmp_path: Path) -> None:
    saved = torch.arange(6.0).reshape(2, 3)
    save(tmp_path, table=saved)
    live = torch.zeros(3, 2).t()
    resume(tmp_path, table=live)
    assert torch.equal(live, saved)
    assert live.stride() == (1, 2)


def test_tensors_that_do_not_fit_are_all_told_before_one_changes(tmp_path: Path) -> None:
    save(tmp_path, a=torch.ones(2), b=torch.ones(1), c=torch.nn.Parameter(torch.ones(1)))
    live = {
        "a": torch.zeros(3),
        "b": torch.zeros(1, dtype=torch.int64),
        "c": torch.nn.Parameter(torch.zeros(1), requires_grad=False),
    }
    with pytest.raises(ManyErrors) as raised:
        resume(tmp_path, **live)
    assert [str(error) for error in raised.value.exceptions] == [
        "a: saved [2] float32 requires_grad=False, run has [3] float32 requires_grad=False",
        "b: saved [1] float32 requires_grad=False, run has [1] int64 requires_grad=False",
        "c: saved [1] float32 requires_grad=True, run has [1] float32 requires_grad=False",
    ]
    assert all(not tensor.any() for tensor in live.values())


class Ema:
    """A plain object with the two methods and no base class."""

    def __init__(self, value: float = 0.0) -> None:
        self.shadow = torch.tensor([value])

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow.copy_(state["shadow"])


class Average(Ema):
    pass


def test_any_object_with_the_two_methods_keeps_its_state(tmp_path: Path) -> None:
    """Source: huggingface/transformers#29666"""
    save(tmp_path, ema=Ema(2.0))
    ema = Ema()
    shadow = ema.shadow
    resume(tmp_path, ema=ema)
    assert ema.shadow is shadow
    assert shadow.item() == 2.0


def test_the_file_of_a_state_has_the_names_of_the_state(tmp_path: Path) -> None:
    save(tmp_path, ema=Ema(2.0))
    [checkpoint] = hookbus.checkpoints(tmp_path)
    assert checkpoint.read("ema")["shadow"].item() == 2.0


@pytest.mark.parametrize(
    ("saved", "live", "names"),
    [
        (Ema(1.0), Average(), ("Ema", "Average")),
        ({"shadow": torch.ones(1)}, Ema(), ("dict", "Ema")),
        (Ema(1.0), {"shadow": 0.0}, ("Ema", "dict")),
        ([1], deque([0]), ("list", "deque")),
        (torch.ones(1), torch.nn.Parameter(torch.zeros(1)), ("Tensor", "Parameter")),
    ],
)
def test_another_class_is_a_problem_that_names_both(
    saved: object, live: Any, names: tuple[str, str], tmp_path: Path
) -> None:
    """Source: Lightning-AI/pytorch-lightning#11665"""
    save(tmp_path, ema=saved)
    with pytest.raises(MismatchError) as raised:
        resume(tmp_path, ema=live)
    assert str(raised.value) == (
        f"ema: saved by a {names[0]}, run has a {names[1]}; pass skip=('ema',) to start it fresh"
    )
    before = copy.deepcopy(live)
    resume(tmp_path, ("ema",), ema=live)
    assert spell(getattr(live, "shadow", live)) == spell(getattr(before, "shadow", before))


MODEL = torch.nn.Linear(1, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters())


@pytest.mark.parametrize(
    "component",
    [
        MODEL,
        OPTIMIZER,
        torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1),
        torch.utils.data.DataLoader([1]),  # type: ignore[arg-type]
        torch.amp.GradScaler("cpu"),
    ],
)
def test_nobody_half_restores_what_has_a_plugin_of_its_own(component: object) -> None:
    assert builtin_plugins.state.plugin_for("x", component) is None


@pytest.mark.parametrize("component", [Ema, object(), 1, (1, 2), [Ema(), 1], {"a": Ema()}])
def test_what_cannot_be_kept_is_refused_at_attach(component: object) -> None:
    with hookbus.HookBus() as bus, pytest.raises(AttachError, match="nobody can look after 'x'"):
        bus.attach(x=component)
    assert issubclass(AttachError, HookbusError)
