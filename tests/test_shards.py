"""Sharded tensors on disk: each chunk once, all of them there, and only what is needed is read.

Ranks are threads here, each with its piece of a tensor cut by hand; real processes with real
sharded tensors are elsewhere.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hookbus.checkpoint.dtensors import Cut
from hookbus.checkpoint.loading import Source, load, load_into
from hookbus.checkpoint.manifest import PartInfo
from hookbus.checkpoint.shard_files import find_shard_damage
from hookbus.checkpoint.shard_writer import Plans, describe_tensors, write_shards
from hookbus.checkpoint.shards import Chunk, Shards, find_gap
from hookbus.checkpoint.tree import Flat, flatten
from hookbus.errors import CorruptCheckpointError, FormatError, MismatchError, StateError

torch.set_num_threads(1)


class Peers:
    """Ranks that are threads of this process, and meet at a barrier."""

    def __init__(self, rank: int, meeting: threading.Barrier, table: list[Any]) -> None:
        self.rank, self._meeting, self._table = rank, meeting, table
        self.world_size = len(table)

    def exchange(
        self, work: Callable[[], Any], decide: Callable[[list[Any]], Sequence[Any]]
    ) -> Any:
        self._table[self.rank] = _try(work)
        self._meeting.wait(20)
        if self.rank == 0:
            broken = [error for _, error in self._table if error is not None]
            answers = _try(lambda: decide([value for value, _ in self._table]))
            error = broken[0] if broken else answers[1]
            size = len(self._table)
            given = answers[0] if error is None else [None] * size
            self._table[:] = [(given[rank], error) for rank in range(size)]
        self._meeting.wait(20)
        value, error = self._table[self.rank]
        self._meeting.wait(20)
        if error is not None:
            raise error
        return value


def _try(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def cut_rows(state: dict[str, Any], rank: int, ranks: int, whole: Sequence[str] = ()) -> Flat:
    """Flatten a state of which a rank has some rows of each tensor; of ``whole`` ones, all."""
    flat = flatten(state)
    for name, tensor in list(flat.tensors.items()):
        if name not in whole and tensor.ndim:
            rows = -(-tensor.shape[0] // ranks)
            start = min(rank * rows, tensor.shape[0])
            flat.tensors[name] = tensor[start : start + rows]
            flat.cuts[name] = Cut(tuple(tensor.shape), (start, *(0,) * (tensor.ndim - 1)))
    return flat


def write(
    folder: Path | Sequence[Path],
    flats: Sequence[Flat],
    uncompared: Sequence[str] = (),
    plans: Sequence[Plans | None] = (None,) * 9,
) -> PartInfo:
    """Write what each rank has, all at once, and return what the manifest would say."""
    folders = [folder] * len(flats) if isinstance(folder, Path) else folder
    table: list[Any] = [None] * len(flats)
    meeting, results = threading.Barrier(len(flats)), list[Any]([None] * len(flats))

    def work(rank: int) -> None:
        peers = Peers(rank, meeting, table)
        results[rank] = _try(
            lambda: write_shards(folders[rank], flats[rank], peers, uncompared, plans=plans[rank])
        )

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(flats))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    errors = [error for _, error in results if error is not None]
    assert len(errors) in (0, len(flats)), "what one rank meets, all meet"
    if errors:
        raise errors[0]
    shards = results[0][0]
    assert [value for value, _ in results[1:]] == [None] * (len(flats) - 1)
    return PartInfo(1, flats[0].tree, None, describe_tensors(flats[0]), (), shards)


def open_source(folder: Path, part: PartInfo, *, trusted: bool = False) -> Source:
    return Source(part, None, folder, trusted)


def find_damage(folder: Path, part: PartInfo, *, hashes: bool = True) -> list[str]:
    ranks = part.list_writers()
    return [text for *_, text in find_shard_damage(folder, part, ranks, hashes, None)]


def make_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(7, 5, generator=generator),
        "b": torch.randn(2, 3, generator=generator).to(torch.bfloat16),
        "c": torch.arange(6).reshape(6, 1).to(torch.complex128),
        "d": torch.arange(9, dtype=torch.float32).to(torch.float8_e8m0fnu),
        "empty": torch.zeros(0, 4),
        "step": torch.tensor(3.0),
        "plain": [1, "two", {"x": None}],
        "more": {"whole": torch.arange(4)},
    }


WHOLE = ("more.whole",)


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, PartInfo, dict[str, Any]]:
    """A state on three ranks, some without rows."""
    state = make_state()
    folder = tmp_path / "model"
    part = write(folder, [cut_rows(make_state(), rank, 3, WHOLE) for rank in range(3)])
    return folder, part, state


def assert_same(read: dict[str, Any], state: dict[str, Any]) -> None:
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert read[name].dtype == value.dtype
            bits = [
                each.contiguous().view(torch.uint8) if each.ndim else each
                for each in (read[name], value)
            ]
            assert torch.equal(*bits), name
        elif name == "more":
            assert torch.equal(read[name]["whole"], value["whole"])
        else:
            assert read[name] == value


# -- there and back ------------------------------------------------------------------------------


def test_what_several_ranks_wrote_is_read_as_one_state(
    stored: tuple[Path, PartInfo, dict[str, Any]],
) -> None:
    folder, part, state = stored
    assert not find_damage(folder, part)
    assert_same(load(open_source(folder, part)), state)
    live = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    live["plain"], live["more"] = [], {"whole": torch.zeros(4, dtype=torch.int64)}
    where = live["a"].data_ptr()
    assert_same(load_into(open_source(folder, part, trusted=True), live, who="model"), state)
    assert live["a"].data_ptr() == where


def test_every_element_is_written_once_and_what_is_the_same_everywhere_by_one_rank(
    stored: tuple[Path, PartInfo, dict[str, Any]],
) -> None:
    folder, part, _ = stored
    names = [
        name
        for path in sorted(folder.glob("*.json"))
        for name in json.loads(path.read_text())["tensors"]
    ]
    assert sorted(names) == sorted(
        ["a", "a", "a", "b", "b", "c", "c", "c", "d", "d", "d", "step", "more.whole"]
    )
    assert part.shards is not None
    assert list(part.shards.find_gaps(part.tensors)) == []


def test_a_chunk_is_an_ordinary_tensor_in_an_ordinary_file(
    stored: tuple[Path, PartInfo, dict[str, Any]],
) -> None:
    safetensors = pytest.importorskip("safetensors")
    folder, _, state = stored
    with safetensors.safe_open(folder / "rank00001.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("a"), state["a"][3:6])


def test_only_the_files_that_are_needed_are_opened(
    stored: tuple[Path, PartInfo, dict[str, Any]],
) -> None:
    folder, part, state = stored
    assert part.shards is not None
    (chunk,) = part.shards.get_layout("step")
    for path in folder.iterdir():
        if not path.name.startswith(f"rank{chunk.rank:05d}."):
            path.unlink()
    live = torch.zeros(())
    open_source(folder, part).fill({"step": live})
    assert torch.equal(live, state["step"])
    with pytest.raises(CorruptCheckpointError, match=r"json: cannot be read"):
        load(open_source(folder, part))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    saved=st.integers(1, 4),
    axis=st.integers(0, 2),
    trusted=st.booleans(),
    data=st.data(),
)
def test_any_box_of_any_cut_has_its_bits(
    shape: list[int],
    saved: int,
    axis: int,
    trusted: bool,
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    axis %= len(shape)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    flats = []
    for rank in range(saved):
        rows = -(-shape[axis] // saved)
        start = min(rank * rows, shape[axis])
        piece = tensor.narrow(axis, start, min(rows, shape[axis] - start))
        flat = Flat({"t": {"$tensor": ["t", False]}}, {"t": piece})
        flat.cuts["t"] = Cut(
            tuple(shape), tuple(start if i == axis else 0 for i in range(len(shape)))
        )
        flats.append(flat)
    folder = tmp_path_factory.mktemp("shards") / "t"
    part = write(folder, flats)
    live = torch.zeros([n + 1 for n in shape])[tuple(slice(n) for n in shape)]  # with gaps
    load_into(open_source(folder, part, trusted=trusted), {"t": live}, who="t")
    assert torch.equal(live, tensor)


def test_targets_are_filled_and_stand_in_the_state(
    stored: tuple[Path, PartInfo, dict[str, Any]],
) -> None:
    folder, part, state = stored
    ours = torch.zeros(7, 5)
    read = load(open_source(folder, part), {"a": ours})
    assert read["a"].data_ptr() == ours.data_ptr()
    assert_same(read, state)
    with pytest.raises(MismatchError, match=r"a: saved \[7, 5\] float32, run has \[7, 4\]"):
        load(open_source(folder, part), {"a": torch.zeros(7, 4)})


# -- who writes what -----------------------------------------------------------------------------


def list_written(folder: Path) -> list[list[str]]:
    """Return the names in the list of each rank."""
    lists = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [[*each["tensors"]] for each in lists]


def test_many_tensors_that_are_cut_alike_are_planned_as_few_and_all_come_back(
    tmp_path: Path,
) -> None:
    state = {f"t{i}": torch.randn(5 + i % 2, 3) for i in range(60)}
    part = write(tmp_path / "model", [cut_rows(state, rank, 3) for rank in range(3)])
    assert part.shards is not None
    assert len(part.shards.layouts) == 2
    assert [sorted(each) for each in list_written(tmp_path / "model")] == [sorted(state)] * 3
    assert_same(load(open_source(tmp_path / "model", part)), state)


def test_what_every_rank_has_is_not_all_written_by_one(tmp_path: Path) -> None:
    state = {"cut": torch.randn(4, 2), **{f"t{i}": torch.randn(9) for i in range(40)}}
    whole = [name for name in state if name != "cut"]
    part = write(tmp_path / "model", [cut_rows(state, rank, 2, whole) for rank in range(2)])
    first, second = list_written(tmp_path / "model")
    assert abs(len(first) - len(second)) <= 2
    assert sorted([*first, *second]) == sorted([*state, "cut"])
    assert_same(load(open_source(tmp_path / "model", part)), state)


def test_a_plan_is_used_again_until_a_tensor_is_cut_another_way(tmp_path: Path) -> None:
    plans: list[Plans] = [{}, {}]
    state = {"a": torch.randn(6, 2), "b": torch.randn(3)}
    kept = []
    for number, cut in enumerate((2, 2, 3)):
        folder = tmp_path / str(number) / "model"
        folder.parent.mkdir()
        flats = [cut_rows(state, rank, 2, ["b"]) for rank in range(2)]
        for rank, (start, end) in enumerate(((0, cut + 1), (cut + 1, 6))):
            flats[rank].tensors["a"] = state["a"][start:end]
            flats[rank].cuts["a"] = Cut((6, 2), (start, 0))
        part = write(folder, flats, plans=plans)
        assert_same(load(open_source(folder, part)), state)
        kept.append([each["model"] for each in plans])
    assert kept[0][0] is kept[1][0] is not kept[2][0]
    assert kept[0][1] is kept[1][1] is not kept[2][1]


# -- what is never written -----------------------------------------------------------------------


def test_of_what_may_differ_between_ranks_that_of_rank_0_is_written(tmp_path: Path) -> None:
    flats = [cut_rows(make_state(), rank, 2, WHOLE) for rank in range(2)]
    flats[1].tensors["more.whole"] = torch.tensor([0, 1, 2, 4])
    part = write(tmp_path / "model", flats, uncompared=WHOLE)
    assert_same(load(open_source(tmp_path / "model", part)), make_state())


def test_what_lies_in_another_folder_is_missed_before_it_counts(tmp_path: Path) -> None:
    """Source: TensorAuto/OpenTau#396"""
    flats = [cut_rows(make_state(), rank, 2, WHOLE) for rank in range(2)]
    (tmp_path / "other" / "model").mkdir(parents=True)
    folders = [tmp_path / "model", tmp_path / "other" / "model"]
    with pytest.raises(CorruptCheckpointError, match=r"rank 1 wrote is not here.*same run direct"):
        write(folders, flats)


def test_chunks_that_overlap_or_leave_a_hole_are_never_written(tmp_path: Path) -> None:
    for start, word in ((3, "overlap"), (5, "is not inside of it"), (4, "hold 14 of 16 elements")):
        flats = [cut_rows({"a": torch.randn(8, 2)}, rank, 2) for rank in range(2)]
        flats[1].cuts["a"] = Cut((8, 2), (start, 0))
        if start == 4:
            flats[1].tensors["a"] = flats[1].tensors["a"][:3]
        with pytest.raises(StateError, match=f"do not make up the whole: tensor 'a': .*{word}"):
            write(tmp_path / f"model{start}", flats)
        assert not list((tmp_path / f"model{start}").iterdir())


# -- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["rank00001.json", "rank00001.safetensors"])
def test_a_lost_file_is_found_before_anything_is_read(
    stored: tuple[Path, PartInfo, dict[str, Any]], file: str
) -> None:
    folder, part, _ = stored
    (folder / file).unlink()
    for hashes in (True, False):
        assert any(
            file in text and "cannot be read" in text
            for text in find_damage(folder, part, hashes=hashes)
        )


def test_every_flipped_byte_is_found(stored: tuple[Path, PartInfo, dict[str, Any]]) -> None:
    folder, part, _ = stored
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        for position in range(0, len(data), 7):
            path.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
            assert find_damage(folder, part), (path, position)
        path.write_bytes(data[:-1])
        assert find_damage(folder, part)
        path.write_bytes(data)
    assert not find_damage(folder, part)


def test_a_flipped_byte_is_found_as_it_is_read(
    stored: tuple[Path, PartInfo, dict[str, Any]],
) -> None:
    folder, part, _ = stored
    path = folder / "rank00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="is damaged"):
        load(open_source(folder, part))


def test_a_chunk_that_is_read_by_way_of_a_buffer_is_hashed_too(
    stored: tuple[Path, PartInfo, dict[str, Any]],
) -> None:
    folder, part, _ = stored
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    wide = torch.zeros(9, 2, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    live = {"d": wide[:, 0]}  # the last tensor of each file, into one with gaps
    with pytest.raises(CorruptCheckpointError, match=r"tensor 'd'.* is damaged"):
        load_into(open_source(folder, part, trusted=True), live, who="model", partial=True)


def test_a_manifest_with_a_hole_or_an_overlap_is_damaged(
    stored: tuple[Path, PartInfo, dict[str, Any]],
) -> None:
    folder, part, _ = stored
    assert part.shards is not None
    chunks = part.shards.get_layout("a")
    for other, word in (
        (chunks[:2], "its chunks hold 30 of 35 elements"),
        ((*chunks[:2], attrs.evolve(chunks[2], offsets=(5, 0))), "overlap"),
        ((*chunks[:2], attrs.evolve(chunks[2], offsets=(7, 0))), "is not inside of it"),
        ((*chunks[:2], attrs.evolve(chunks[2], rank=9)), "rank 9 holds chunks and has no file"),
    ):
        layouts = {name: part.shards.get_layout(name) for name in part.tensors}
        wrong = attrs.evolve(part, shards=Shards.make({**layouts, "a": other}, part.shards.ranks))
        assert any(word in text for text in find_damage(folder, wrong, hashes=False)), word


def test_a_list_of_other_chunks_than_the_manifest_is_damaged(
    stored: tuple[Path, PartInfo, dict[str, Any]],
) -> None:
    folder, part, _ = stored
    assert part.shards is not None
    layouts = {name: part.shards.get_layout(name) for name in part.tensors}
    one, two, three = layouts["c"]
    swapped = (attrs.evolve(one, rank=1), attrs.evolve(two, rank=0), three)
    wrong = attrs.evolve(part, shards=Shards.make({**layouts, "c": swapped}, part.shards.ranks))
    assert any("other chunks than the manifest" in text for text in find_damage(folder, wrong))
    with pytest.raises(CorruptCheckpointError, match="has no chunk of 'c'"):
        load(open_source(folder, wrong))


# -- covering ------------------------------------------------------------------------------------


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    data=st.data(),
)
def test_a_grid_covers_and_a_grid_without_a_box_or_with_one_twice_does_not(
    shape: list[int], cuts: list[int], data: st.DataObject
) -> None:
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size, parts in zip(shape, cuts, strict=False):
        step = -(-size // parts)
        ends = [(start, min(step, size - start)) for start in range(0, size, step)]
        boxes = [((*o, start), (*s, n)) for o, s in boxes for start, n in ends]
    layout = tuple(Chunk(rank, *box) for rank, box in enumerate(boxes))
    shuffled = data.draw(st.permutations(layout))
    assert find_gap(shape, tuple(shuffled)) is None
    i = data.draw(st.integers(0, len(layout) - 1))
    assert "elements" in (find_gap(shape, (*layout[:i], *layout[i + 1 :])) or "")
    assert "overlap" in (find_gap(shape, (*layout, layout[i])) or "")


def test_what_has_no_elements_needs_no_chunk_and_what_has_no_axis_needs_one() -> None:
    assert find_gap((0, 4), ()) is None
    assert find_gap((), (Chunk(0, (), ()),)) is None
    assert find_gap((), ()) == "its chunks hold 0 of 1 elements"
    assert "overlap" in (find_gap((), (Chunk(0, (), ()), Chunk(1, (), ()))) or "")


# -- the manifest --------------------------------------------------------------------------------


def test_tensors_that_are_cut_alike_share_a_layout() -> None:
    layouts = {f"{i}": tuple(Chunk(r, (r, 0), (1, 8)) for r in range(50)) for i in range(100)}
    shards = Shards.make(layouts, {})
    assert len(shards.layouts) == 1
    read = Shards.from_json(layouts, **json.loads(json.dumps(shards.to_json())))
    assert read.get_layout("7") == layouts["7"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"of": [1]},
        {"of": ["0"]},
        {"of": [-1]},
        {"layouts": [[[0, [0], [-1]]]]},
        {"layouts": [[[-1, [0], [1]]]]},
        {"layouts": [[["x", [0], [1]]]]},
        {"ranks": [[0, "x", "y", 4]]},
        {"ranks": [[0, 1, "y", 4], [0, 1, "y", 4]]},
        {"ranks": [[-1, 1, "y", 4]]},
    ],
)
def test_what_no_version_could_have_written_is_refused(wrong: dict[str, Any]) -> None:
    good = {"layouts": [[[0, [0], [1]]]], "of": [0], "ranks": [[0, 1, "y", 4]]}
    assert Shards.from_json(["t"], **good).get_layout("t") == (Chunk(0, (0,), (1,)),)
    with pytest.raises(FormatError):
        Shards.from_json(["t"], **{**good, **wrong})
