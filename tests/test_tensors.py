"""Tensors and arrays on disk: the same bits, dtype, strides and ties, in files anybody can read."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hookbus.checkpoint import (
    Checkpoint,
    Part,
    Section,
    flatten,
    open_checkpoint,
    unflatten,
    write_checkpoint,
)
from hookbus.checkpoint.tensor_info import STORED
from hookbus.errors import FormatError, StateError

law = settings(deadline=None, suppress_health_check=list(HealthCheck))

NATIVE = [*safetensors.torch._TYPES.values()]
CARRIED = [torch.complex128, torch.complex32, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2]
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def save(run: Path, state: object) -> Checkpoint:
    section = Section("s", "state", "Plugin", None, None, {None: Part(flatten(state), 1)})
    checkpoint = write_checkpoint(
        run,
        run_id="r",
        step=1,
        sections=[section],
        progress={},
        metrics={},
        settings={},
        versions={},
        why="asked",
    )
    return open_checkpoint(checkpoint.path)


def round_trip(run: Path, state: object) -> object:
    checkpoint = save(run, state)
    checkpoint.verify()
    return checkpoint.read("s")


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        type(one) is type(other)
        and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        and bits(one) == bits(other)
    )


def make(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return a tensor of random bits, nan with payloads and all."""
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    chance = np.random.default_rng(seed)
    data = chance.integers(0, 2 if dtype is torch.bool else 256, count, dtype=np.uint8)
    return (
        torch.from_numpy(data).view(dtype).reshape(shape)
        if count
        else torch.empty(shape, dtype=dtype)
    )


@st.composite
def layouts(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor of any dtype that is dense in some order of its axes."""
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    dtype = draw(st.sampled_from(NATIVE + CARRIED))
    tensor = make(dtype, tuple(shape[i] for i in order), draw(st.integers(0, 99)))
    return tensor.permute([order.index(i) for i in range(len(shape))])


# -- laws ------------------------------------------------------------------------------------------


@law
@given(st.lists(layouts(), max_size=4))
def test_every_dtype_shape_and_order_of_axes_comes_back(tmp_path_factory, tensors):
    run = tmp_path_factory.mktemp("run")
    back = round_trip(run, tensors)
    assert all(map(same, back, tensors))
    assert len(back) == len(tensors)


@law
@given(st.lists(layouts(), min_size=1, max_size=4))
def test_safetensors_reads_every_file_and_finds_the_same_bytes(tmp_path_factory, tensors):
    checkpoint = save(tmp_path_factory.mktemp("run"), tensors)
    path = checkpoint.path / "s.safetensors"
    loaded = safetensors.torch.load_file(path)
    assert set(loaded) == {str(i) for i in range(len(tensors))}
    for i, tensor in enumerate(tensors):
        assert bits(loaded[str(i)]) == bits(tensor)
        if tensor.dtype in NATIVE:
            assert loaded[str(i)].dtype == tensor.dtype
            assert loaded[str(i)].shape == tensor.shape
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert all(bits(file.get_tensor(k)) == bits(loaded[k]) for k in loaded)


@law
@given(layouts())
def test_the_hash_is_that_of_the_bytes_in_the_file(tmp_path_factory, tensor):
    checkpoint = save(tmp_path_factory.mktemp("run"), {"w": tensor})
    info = checkpoint.metadata("s").state["w"]
    assert (info.name, info.dtype, info.shape) == ("w", tensor.dtype, tensor.shape)
    assert info.bytes == len(bits(tensor))
    assert info.hash == xxhash.xxh3_128_hexdigest(bits(tensor))


def test_what_safetensors_itself_stores_wrongly_shows_why_carriers_are_needed():
    """The negative control: these are written by ``save_file`` without a word."""
    conjugate = torch.tensor([1 + 2j], dtype=torch.complex64).conj()
    assert not torch.equal(
        safetensors.torch.load(safetensors.torch.save({"x": conjugate}))["x"], conjugate
    )
    for dtype in (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2):
        data = safetensors.torch.save({"x": make(dtype, (4,))})
        with pytest.raises(KeyError):
            safetensors.torch.load(data)


# -- dtypes, strides, bits -------------------------------------------------------------------------


def test_a_model_is_an_ordinary_file_under_its_own_names(tmp_path):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    model = model.to(memory_format=torch.channels_last)
    checkpoint = save(tmp_path, model.state_dict())
    loaded = safetensors.torch.load_file(checkpoint.path / "s.safetensors")
    other = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    other.load_state_dict(loaded)
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def test_wide_tensors_come_first_so_that_each_is_aligned(tmp_path):
    state = {"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(1, dtype=torch.float64)}
    data = (save(tmp_path, state).path / "s.safetensors").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    assert list(header) == ["__metadata__", "b", "a"]
    assert (8 + length) % 8 == header["b"]["data_offsets"][0] % 8 == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([0x7FC00001, 0x7F800001, -(2**31)], dtype=torch.int32).view(torch.float32),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(4, 1, 3, 3).to(memory_format=torch.channels_last),
        torch.ones(4, 1, 3, 3).as_strided((4, 1, 3, 3), (9, 1, 3, 1)),
        torch.empty_strided((0, 3), (7, 9)),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex128).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag.clone(),
        torch._neg_view(torch.ones(2)),
    ],
    ids=str,
)
def test_a_tensor_that_others_change_comes_back(tmp_path, tensor):
    assert same(round_trip(tmp_path, [tensor])[0], tensor)


def test_a_view_with_gaps_is_stored_dense_in_the_order_that_clone_gives_it(tmp_path):
    images = torch.randn(2, 3, 4, 6).to(memory_format=torch.channels_last)[..., ::2]
    imaginary = torch.randn(3, dtype=torch.complex64).conj().imag
    assert imaginary.is_neg()
    back = round_trip(tmp_path, [images, imaginary])
    assert same(back[0], images.clone())
    assert same(back[1], imaginary.clone())


def test_parameters_and_leaves_keep_whether_they_need_gradients(tmp_path):
    state = {
        "trained": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "leaf": torch.ones(2, requires_grad=True),
        "result": torch.ones(2, requires_grad=True) * 2,
    }
    back = round_trip(tmp_path, state)
    kept = {name: (type(t), t.requires_grad, t.is_leaf) for name, t in back.items()}
    assert kept == {
        "trained": (torch.nn.Parameter, True, True),
        "frozen": (torch.nn.Parameter, False, True),
        "leaf": (torch.Tensor, True, True),
        "result": (torch.Tensor, False, True),
    }


# -- shared memory ---------------------------------------------------------------------------------


def test_two_names_of_one_view_come_back_as_one_tensor(tmp_path):
    """Source: huggingface/transformers#38870."""
    weight = torch.nn.Parameter(torch.randn(4, 3))
    state = {
        "head": weight,
        "embedding": weight,
        "raw": weight.detach(),
        "array": weight.detach().numpy(),
    }
    checkpoint = save(tmp_path, state)
    assert list(checkpoint.metadata("s").tensors) == ["head"]
    back = checkpoint.read("s")
    assert back["head"] is back["embedding"]
    assert back["raw"].data_ptr() == back["head"].data_ptr() == back["array"].ctypes.data
    assert same(back["head"], weight)


def test_a_tied_model_comes_back_tied(tmp_path):
    """Source: huggingface/transformers#38870."""

    def build() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    model, other = build(), build()
    checkpoint = save(tmp_path, model.state_dict())
    checkpoint.read_into("s", other.state_dict())
    assert other[0].weight.data_ptr() == other[1].weight.data_ptr()
    assert same(other[0].weight, model[0].weight)


def test_views_that_overlap_in_another_way_are_refused_with_both_places():
    base = torch.arange(10.0)
    for state in (
        {"a": base[:6], "b": {"c": base[4:]}},
        {"a": base, "b": {"c": base[2:3]}},
        {"a": base, "b": {"c": base.view(2, 5)}},
        {"a": base, "b": {"c": base.view(torch.int32)}},
        {"a": base, "b": {"c": base[::2]}},
        {"a": base.numpy()[:6], "b": {"c": base.numpy()[4:]}},
    ):
        with pytest.raises(StateError) as caught:
            flatten(state)
        assert (
            "['b']['c'] (shares memory with ['a'] and is another view; pass its .clone())"
            in str(caught.value)
        )


def test_a_conjugate_and_its_origin_are_two_views(tmp_path):
    x = torch.randn(3, dtype=torch.complex64)
    with pytest.raises(StateError, match="shares memory"):
        flatten([x, x.conj()])


@law
@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_only_tensors_that_share_a_byte_are_refused(rows, columns, data):
    """Columns of a matrix lie between each other and share nothing; the law knows by counting."""
    base = torch.arange(rows * columns * 2, dtype=torch.int16)
    views = []
    for _ in range(data.draw(st.integers(2, 4))):
        start = data.draw(st.integers(0, rows * columns * 2 - 1))
        step = data.draw(st.integers(1, 4))
        size = data.draw(st.integers(0, (rows * columns * 2 - start + step - 1) // step))
        views.append(base[start::step][:size])
    keys = {(v.data_ptr(), v.shape, v.stride()) for v in views if v.numel()}
    distinct = [
        set(torch.as_strided(base, k[1], k[2], (k[0] - base.data_ptr()) // 2).tolist())
        for k in keys
    ]
    apart = sum(map(len, distinct)) == len(set().union(*distinct))
    if apart:
        flatten(views)
    else:
        with pytest.raises(StateError, match="shares memory"):
            flatten(views)


def test_columns_of_a_matrix_come_back(tmp_path):
    cosine, sine = torch.randn(5, 2).unbind(-1)
    back = round_trip(tmp_path, [cosine, sine])
    assert [b.tolist() for b in back] == [cosine.tolist(), sine.tolist()]


# -- what cannot be stored -------------------------------------------------------------------------


class Mine(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize(
    ("make_one", "reason"),
    [
        (lambda: torch.empty(2, device="meta"), "on the meta device, so it has no data"),
        (
            lambda: torch.zeros(1).expand(3),
            "larger than its storage (expanded, or its storage was freed)",
        ),
        (lambda: torch.zeros(9).as_strided((5, 3), (1, 2)), "larger than its storage"),
        (
            lambda: torch.zeros(99).as_strided((5, 3), (1, 1)),
            "overlapping itself; pass its .clone()",
        ),
        (lambda: torch.ones(2).as_subclass(Mine), "test_tensors.Mine, a subclass of torch.Tensor"),
        (lambda: torch.nn.UninitializedParameter(), "a subclass of torch.Tensor"),
        (lambda: torch.zeros(2, dtype=torch.uint8).view(torch.uint4), "a tensor of dtype uint4"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
            "a tensor nested or of layout",
        ),
        (lambda: torch.ones(2).to_mkldnn(), "a tensor nested or of layout torch._mkldnn"),
    ],
)
def test_a_tensor_that_cannot_come_back_is_refused(make_one, reason):
    with pytest.raises(StateError) as caught:
        flatten({"w": [make_one()]})
    assert str(caught.value).startswith("1 value cannot be stored: ['w'][0] (")
    assert reason in str(caught.value)


def test_a_freed_storage_is_refused():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(StateError, match="its storage was freed"):
        flatten([tensor])


# -- sparse and quantized --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_sparse_tensors_come_back_part_by_part(tmp_path, layout):
    dense = torch.randn(4, 6).relu()
    block = ((2, 3),) if layout[0] == "b" else ()
    sparse = getattr(dense, "to_sparse" if layout == "coo" else f"to_sparse_{layout}")(*block)
    checkpoint = save(tmp_path, {"m": sparse})
    info = checkpoint.metadata("s").state["m"]
    assert (info.name, info.dtype, info.shape) == ("m", torch.float32, sparse.shape)
    back = checkpoint.read("s")["m"]
    assert back.layout == sparse.layout
    assert bits(back.to_dense()) == bits(sparse.to_dense())


def test_a_sparse_tensor_with_an_index_twice_stays_so(tmp_path):
    sparse = torch.sparse_coo_tensor(
        [[0, 0], [1, 1]], [1.0, 2.0], (3, 3), check_invariants=True, requires_grad=True
    )
    back = round_trip(tmp_path, [sparse])[0]
    assert not back.is_coalesced()
    assert back._values().tolist() == [1.0, 2.0]
    assert back.requires_grad


@pytest.mark.parametrize(
    ("form", "indices"),
    [
        ({"is": "sparse_coo", "coalesced": True, "parts": {"indices": "i", "values": "v"}}, [[9]]),
        (
            {"is": "sparse_csr", "parts": {"compressed": "c", "plain": "i", "values": "v"}},
            [9],
        ),
    ],
)
def test_a_sparse_tensor_made_to_reach_foreign_memory_is_a_format_error(form, indices):
    shape = [1, 2] if form["is"] == "sparse_csr" else [2]
    tensors = {"i": torch.tensor(indices), "v": torch.ones(1), "c": torch.tensor([0, 1])}
    with pytest.raises(FormatError, match="a state's tree cannot be read"):
        unflatten({"$tensor": [{**form, "shape": shape}, False]}, tensors)


@pytest.mark.filterwarnings("ignore:torch.quantize_per")
def test_quantized_tensors_come_back_with_their_parameters(tmp_path):
    x = torch.randn(2, 3)
    whole = torch.quantize_per_tensor(x, 0.1, 3, torch.quint8)
    rows = torch.quantize_per_channel(
        x, torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
    )
    checkpoint = save(tmp_path, [whole, rows])
    assert checkpoint.metadata("s").state[1].dtype is torch.qint8
    back = checkpoint.read("s")
    assert torch.equal(back[0], whole)
    assert (back[0].q_scale(), back[0].q_zero_point()) == (whole.q_scale(), whole.q_zero_point())
    assert torch.equal(back[1], rows)
    assert torch.equal(back[1].q_per_channel_scales(), rows.q_per_channel_scales())


@pytest.mark.filterwarnings("ignore:torch.quantize_per")
def test_packed_quantized_tensors_are_refused():
    packed = torch.quantize_per_tensor(torch.randn(4), 0.1, 2, torch.quint4x2)
    with pytest.raises(StateError, match="a tensor of dtype quint4x2"):
        flatten([packed])


# -- numpy and long bytes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.uint16).reshape(2, 3)),
        np.array(3, dtype=np.float16),
        np.zeros((0, 2), np.complex128),
        np.arange(3, dtype=">i4"),
        np.arange(3, dtype=np.longdouble),
        np.array(["a", "bcd"]),
        np.array([b"x", b""]),
        np.array(["", ""]),
        np.array(["2026-01-01", "NaT"], "datetime64[D]"),
        np.array([True, False]),
        np.frombuffer(b"12345678", np.int32),
    ],
    ids=lambda a: f"{a.dtype.str}-{a.shape}",
)
def test_an_array_comes_back_with_its_dtype_and_order(tmp_path, array):
    back = round_trip(tmp_path, {"a": array})["a"]
    assert type(back) is np.ndarray
    assert (back.dtype.str, back.shape, back.strides) == (
        array.dtype.str,
        array.shape,
        array.strides,
    )
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable


def test_an_array_that_runs_backwards_or_in_steps_comes_back_dense(tmp_path):
    base = np.arange(12).reshape(3, 4)
    record = np.zeros(3, [("a", "i1"), ("b", "<i8")])
    record["b"] = [1, 2, 3]
    state = [base[::-1], np.arange(4)[::2], np.broadcast_to(np.float32(2), (2, 2)), record["b"]]
    back = round_trip(tmp_path, state)
    assert all(
        np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(state, back, strict=True)
    )


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_long_bytes_lie_beside_the_tensors_and_short_ones_in_the_tree(tmp_path, kind):
    long, short = kind(range(256)) * 16, kind(b"a" * 4095)
    checkpoint = save(tmp_path, {"long": long, "short": short})
    assert {i.name: i.bytes for i in checkpoint.metadata("s").tensors.values()} == {"long": 4096}
    back = checkpoint.read("s")
    assert back == {"long": long, "short": short}
    assert type(back["long"]) is type(back["short"]) is kind


def test_a_bytearray_can_still_grow_while_its_state_is_held():
    data = bytearray(5000)
    flat = flatten(data)
    data.append(1)
    assert flat.tensors["tensor"].numel() == 5000


# -- whose memory ----------------------------------------------------------------------------------


def test_dense_tensors_are_handed_on_without_a_copy():
    tensor, array = torch.ones(3), np.ones(3)
    flat = flatten({"t": tensor, "a": array})
    assert flat.tensors["t"].data_ptr() == tensor.data_ptr()
    assert flat.tensors["a"].data_ptr() == array.ctypes.data
    assert flat.bytes == 36


def test_what_is_read_shares_nothing_with_the_file(tmp_path):
    checkpoint = save(tmp_path, [torch.ones(1024)])
    path = checkpoint.path / "s.safetensors"
    back = checkpoint.read("s")[0]
    mapped = safetensors.torch.load_file(path)["0"]
    with path.open("r+b") as file:
        file.seek(-4096, 2)
        file.write(b"\xff" * 4096)
    assert mapped.isnan().all()  # the negative control: this one is the file
    assert back.equal(torch.ones(1024))
    del mapped


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_state_is_read_on_the_cpu_whatever_the_default_device_is(tmp_path, device):
    """Source: pytorch/ignite#2076, huggingface/lerobot#4009."""
    checkpoint = save(tmp_path, [torch.ones(2, 3).t(), torch.get_rng_state(), np.ones(2)])
    with torch.device(device):
        back = checkpoint.read("s")
        again = flatten(back)
    assert back[0].device.type == back[1].device.type == "cpu"
    assert back[1].dtype is torch.uint8
    assert {t.device.type for t in again.tensors.values()} == {"cpu"}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tensor_on_an_accelerator_comes_back_to_it_in_place(tmp_path):
    tensor = torch.randn(5, 3, device="cuda").t()
    checkpoint = save(tmp_path, {"w": tensor})
    assert same(checkpoint.read("s")["w"], tensor.cpu())
    live = {"w": torch.zeros_like(tensor)}
    checkpoint.read_into("s", live)
    assert live["w"].is_cuda
    assert torch.equal(live["w"], tensor)


def test_what_is_known_of_a_dtype_without_torch_is_what_torch_says() -> None:
    assert set(STORED) == {str(d).removeprefix("torch.") for d in NATIVE + CARRIED}
    for name, stored in STORED.items():
        assert getattr(torch, name).itemsize == stored.itemsize, name
