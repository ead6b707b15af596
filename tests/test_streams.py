"""Random streams: every kind comes back with its next number, and saving moves none."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from exact import Parts, check_exact, list_places, run_bus, run_plain, seed
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import SAMPLES, OwnRandom, Points, data_scene
from torch.utils import data

import hookbus
from builtin_plugins.streams import find_streams
from hookbus.errors import AttachError, CorruptCheckpointError, MismatchError
from hookbus.registration import EVENTS

MAKERS: dict[str, Callable[[int], Any]] = {
    "torch.Generator on cpu": lambda n: torch.Generator().manual_seed(n),
    "numpy Generator PCG64": np.random.default_rng,
    "numpy Generator PCG64DXSM": lambda n: np.random.Generator(np.random.PCG64DXSM(n)),
    "numpy Generator MT19937": lambda n: np.random.Generator(np.random.MT19937(n)),
    "numpy Generator Philox": lambda n: np.random.Generator(np.random.Philox(n)),
    "numpy Generator SFC64": lambda n: np.random.Generator(np.random.SFC64(n)),
    "numpy RandomState": np.random.RandomState,
    "random.Random": random.Random,
}


def draw(stream: Any, count: int) -> list[float]:
    """Draw from the normal distribution too, of which some streams keep a second number."""
    if isinstance(stream, torch.Generator):
        return torch.randn(count, generator=stream).tolist()
    normal = stream.gauss if isinstance(stream, random.Random) else stream.normal
    return [normal(0, 1) for _ in range(count)]


def draw_process(count: int) -> list[Any]:
    return [
        torch.randn(count).tolist(),
        [random.gauss() for _ in range(count)],
        np.random.randn(count).tolist(),
    ]


def save(run: Path, **components: object) -> hookbus.HookBus:
    bus = hookbus.HookBus()
    bus.attach(**components)
    bus.resume(run)
    return bus


@pytest.mark.parametrize("kind", MAKERS)
def test_an_attached_generator_goes_on_with_its_next_number(kind: str, tmp_path) -> None:
    """Source: huggingface/transformers#34631."""
    before = MAKERS[kind](1)
    draw(before, 3)
    with save(tmp_path, stream=before) as bus:
        bus.save(step=1)
    after = MAKERS[kind](2)
    with save(tmp_path, stream=after):
        assert draw(after, 5) == draw(before, 5)


@settings(max_examples=15, deadline=None)
@given(drawn=st.integers(0, 700), number=st.integers(1, 2**32 - 2))
def test_the_streams_of_the_process_go_on_with_their_next_numbers(
    drawn: int, number: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Source: huggingface/transformers#11323."""
    run = tmp_path_factory.mktemp("run")
    seed(number)
    draw_process(drawn)
    with save(run) as bus:
        bus.save(step=1)
        expected = draw_process(5)
    seed(number + 1)
    with save(run):
        assert draw_process(5) == expected


@pytest.mark.parametrize("kind", MAKERS)
def test_another_kind_of_generator_is_a_problem(kind: str, tmp_path) -> None:
    with save(tmp_path, stream=MAKERS[kind](1)) as bus:
        bus.save(step=1)
    other = next(name for name in MAKERS if name != kind)
    with pytest.raises(MismatchError) as caught:
        save(tmp_path, stream=MAKERS[other](1))
    assert str(caught.value) == f"stream: saved was a {kind}, the run has a {other}"


def test_another_kind_of_hidden_generator_is_a_problem_too(tmp_path) -> None:
    def make(stream: object) -> data.DataLoader:
        points = Points()
        points.own = stream
        return data.DataLoader(points)

    with save(tmp_path, data=make(np.random.default_rng(1))) as bus:
        bus.save(step=1)
    with pytest.raises(MismatchError) as caught:
        save(tmp_path, data=make(random.Random(1)))
    assert str(caught.value) == (
        "data: saved streams were dataset.own (numpy Generator PCG64), the run has dataset.own"
        " (random.Random); pass skip=('data',) to start it fresh"
    )


def test_a_generator_of_the_operating_system_cannot_be_attached(tmp_path) -> None:
    with pytest.raises(AttachError, match="nobody can look after 'stream'"):
        save(tmp_path, stream=random.SystemRandom())


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("holder", ["dataset", "sampler"])
def test_a_hidden_generator_goes_on_bit_for_bit(kind: str, holder: str, tmp_path) -> None:
    attach = (list(MAKERS).index(kind) + (holder == "sampler")) % 2 == 0

    class Sampler(OwnRandom):
        def __iter__(self):
            return iter([int(abs(x) * 10) % SAMPLES for x in draw(self.stream, SAMPLES)])

    class Noisy(Points):
        def __getitem__(self, index: int) -> torch.Tensor:
            return super().__getitem__(index) + draw(self.own, 1)[0]

    def build() -> Parts:
        parts = data_scene("sequential", epochs=2)()
        points, sampler = (Noisy(), None) if holder == "dataset" else (Points(), Sampler())
        if sampler is None:
            points.own = MAKERS[kind](7)
        else:
            sampler.stream = MAKERS[kind](7)
        loader = data.DataLoader(points, 4, sampler=sampler)
        attached = {k: v for k, v in parts.attached.items() if k != "data"}
        return attrs.evolve(
            parts, attached={**attached, "data": loader} if attach else attached, loader=loader
        )

    check_exact(build, tmp_path, every=3)


def test_hidden_generators_are_found_by_the_way_to_them() -> None:
    own, shared = random.Random(1), torch.Generator()
    points = data.Subset(Points("own"), range(SAMPLES))
    loader = data.DataLoader(
        points, batch_size=2, sampler=data.RandomSampler(points, generator=shared), generator=shared
    )
    points.dataset.own = own
    points.dataset.secure = random.SystemRandom()
    assert find_streams(loader) == {
        "generator (torch.Generator on cpu)": shared,
        "dataset.dataset.own (random.Random)": own,
    }


def test_two_open_buses_of_one_process_are_warned_of(tmp_path, caplog) -> None:
    with save(tmp_path / "a"):
        assert caplog.messages == []
        with save(tmp_path / "b") as bus:
            (warning,) = caplog.messages
            assert warning == (
                "another open bus of this process owns its random streams, and both would put them"
                ' back; close it, or pass HookBus(block=("rng",)) to one of them'
            )
            assert bus.resumed
        with hookbus.HookBus(block=("rng",)) as bus:
            bus.resume(tmp_path / "c")
    with save(tmp_path / "b"):
        pass
    assert len(caplog.messages) == 1


def test_another_stage_leaves_the_streams_alone(tmp_path) -> None:
    with save(tmp_path) as bus:
        bus.save(step=1)
    seed(5)
    expected = draw_process(3)
    seed(5)
    with hookbus.HookBus() as bus:
        bus.resume(tmp_path, stage="test")
        assert draw_process(3) == expected


def test_skipped_streams_are_left_alone_and_the_report_says_so(tmp_path) -> None:
    """Source: huggingface/accelerate#4308."""
    with save(tmp_path) as bus:
        bus.save(step=1)
    seed(5)
    expected = draw_process(3)
    seed(5)
    with hookbus.HookBus() as bus:
        report = bus.resume(tmp_path, skip=("rng",)).report
        assert draw_process(3) == expected
    assert report.sections["rng"].status == "skipped"


def test_damaged_streams_are_an_error_with_path_and_reason_and_can_be_skipped(tmp_path) -> None:
    """Source: huggingface/accelerate#4308."""
    with save(tmp_path) as bus:
        path = bus.save(step=1).path / "rng.safetensors"
    whole = path.read_bytes()
    damage = {
        "is damaged": whole[:-1] + bytes([whole[-1] ^ 1]),
        f"has {len(whole) - 9} bytes, saved were {len(whole)}": whole[:-9],
        "cannot be read: No such file": None,
    }
    for reason, content in damage.items():
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        seed(5)
        expected = draw_process(3)
        seed(5)
        with hookbus.HookBus() as bus:
            with pytest.raises(CorruptCheckpointError) as caught:
                bus.resume(tmp_path)
            assert str(path) in str(caught.value)
            assert reason in str(caught.value)
            report = bus.resume(tmp_path, skip=("rng",)).report
            assert draw_process(3) == expected
        assert report.sections["rng"].status == "skipped"


@pytest.mark.parametrize("device", ["cpu", "meta", "default meta"])
def test_streams_come_back_on_the_cpu_wherever_the_model_is(device: str, tmp_path) -> None:
    """Source: pytorch/ignite#2076."""
    own = torch.Generator().manual_seed(3)
    with save(tmp_path, model=torch.nn.Linear(2, 2), own=own) as bus:
        bus.save(step=1)
        expected = draw_process(3), draw(own, 3)
    with torch.device("cpu" if device == "cpu" else "meta"):
        model = torch.nn.Linear(2, 2)
    after = torch.Generator()
    if device == "default meta":
        model.to_empty(device="cpu")
    seed(5)
    with hookbus.HookBus() as bus:
        bus.attach(model=model, own=after)
        with torch.device("meta" if device == "default meta" else "cpu"):
            bus.resume(tmp_path, configure_sharded=lambda _: model.to_empty(device="cpu") and None)
        assert (draw_process(3), draw(after, 3)) == expected


class Draws:
    """Draws from every stream of the process in every event."""

    def __init__(self) -> None:
        self.events: set[str] = set()


def make_drawing(event: str) -> Any:
    def implementation(self: Draws) -> None:
        self.events.add(event)
        draw_process(3)

    return hookbus.hookimpl(implementation)


SAVING = ("check_attached", "save_start", "save_state", "save_end")
for _event in SAVING:
    setattr(Draws, _event, make_drawing(_event))


@pytest.mark.parametrize("wait", [True, False])
def test_a_plugin_that_draws_while_it_saves_changes_nothing(wait: bool, tmp_path) -> None:
    """Source: pytorch/pytorch#122697."""
    build = data_scene("shuffle", ("torch", "python", "numpy"))
    drawing = Draws()

    def build_with_it() -> Parts:
        return attrs.evolve(build(), plugins={"drawing": drawing})

    expected = run_plain(build)
    saves = list_places(build)
    assert run_bus(build_with_it, tmp_path, saves=saves, wait=wait) == expected
    assert set(SAVING) == drawing.events <= set(EVENTS)
