"""The order of the restore events is kept, whoever fires them, and each fires once."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from keepers import BEHIND, IN_FRONT, WAYS, Keeper, Way, fire, make_bus, make_spy, save_keepers

import hookbus
from hookbus.errors import AttachError, SequenceError
from hookbus.sequence import RESTORE_EVENTS, RESUME_EVENTS


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_keepers(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("empty")


# -- the order, three ways ----------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("before", [None, True, False])
def test_every_way_to_resume_fires_the_same_events_in_the_same_order(
    way: Way, before: bool | None, saved: Path, tmp_path: Path
) -> None:
    """Source: Lightning-AI/pytorch-lightning#7652, Lightning-AI/pytorch-lightning#18358"""
    ask, check = "restore_before_configure_sharded", "check_state"
    front = ["pre_configure_sharded", "configure_sharded"]
    model, training = [check, "restore_model"], [check, "restore_training_state"]
    middle = front + model if before is False else model + front
    start = ["resume_start", check, "on_setup", ask]
    expected = {
        "fit": [*start, *middle, *training, "resume_end"],
        "test": [*start, *middle, "resume_end"],
        "fresh": ["resume_start", "on_setup", *front, "resume_end"],
    }
    for situation, events in expected.items():
        calls: list[str] = []
        keeper = Keeper(in_front=before)
        state = Keeper("restore_training_state")
        bus = make_bus(model=keeper, state=state, spy=make_spy(calls))
        run = tmp_path if situation == "fresh" else saved
        resume = way(bus, run, "fit" if situation == "fresh" else situation)
        bus.close()
        # Without a section a plugin is asked to check in another stage if it restores a model.
        assert calls[0] == "bus_open"
        assert calls[1:-1] == events, situation
        assert calls[-1] == "bus_close"
        assert keeper.restored == (situation != "fresh")
        assert state.restored == (situation == "fit")
        assert keeper.tensor.tolist() == [float(situation != "fresh")] * 3
        assert resume.report.sharded_first == (
            ["model"] if before is False and situation != "fresh" else []
        )


def list_allowed(situation: str) -> set[tuple[str, ...]]:
    """Return every sequence that may be fired by hand."""
    orders = {"fit": [IN_FRONT], "behind": [BEHIND], "test": [IN_FRONT]}.get(
        situation, [IN_FRONT, BEHIND]
    )
    skippable = {"test": RESTORE_EVENTS[1:], "fresh": RESTORE_EVENTS}.get(situation, ())
    left_out = itertools.chain.from_iterable(
        itertools.combinations(skippable, n) for n in range(len(skippable) + 1)
    )
    return {tuple(e for e in order if e not in out) for out in left_out for order in orders}


@st.composite
def turns(draw: st.DrawFn) -> list[str]:
    """Mostly the usual order, with some events moved, left out or doubled."""
    events = list(draw(st.sampled_from([IN_FRONT, BEHIND])))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(events) - 1))
        change = draw(st.sampled_from(["move", "drop", "double"]))
        event = events[at]
        if change in ("move", "drop") and len(events) > 1:
            del events[at]
        if change in ("move", "double"):
            events.insert(draw(st.integers(0, len(events))), event)
    return events


@settings(deadline=None, max_examples=150)
@example("fresh", [event for event in IN_FRONT if event != "restore_model"] + ["on_setup"])
@example("fresh", [*BEHIND[:4], "restore_training_state", "restore_model"])
@given(st.sampled_from(["fit", "behind", "test", "fresh"]), turns())
def test_every_wrong_turn_is_an_error_and_changes_nothing(
    saved: Path, empty: Path, situation: str, events: list[str]
) -> None:
    allowed = list_allowed(situation)
    calls: list[str] = []
    model = Keeper(in_front=False if situation == "behind" else None)
    bus = make_bus(model=model, state=Keeper("restore_training_state"), spy=make_spy(calls))
    with bus:
        resume = bus.prepare(
            empty if situation == "fresh" else saved,
            stage="test" if situation == "test" else "fit",
        )
        fired: tuple[str, ...] = ()
        for event in events:
            longer = (*fired, event)
            before = list(calls)
            if any(order[: len(longer)] == longer for order in allowed):
                fire(bus, event, resume)
                fired = longer
            else:
                with pytest.raises(SequenceError) as caught:
                    fire(bus, event, resume)
                assert "restore_training_state" in str(caught.value)  # it shows the sequence
                assert calls == before


def test_a_wrong_turn_shows_the_sequence_and_where_the_resume_stands(saved: Path) -> None:
    bus = make_bus(model=Keeper(), state=Keeper("restore_training_state"))
    resume = bus.prepare(saved)
    fire(bus, "resume_start", resume)
    shown = (
        "resume_start (fired), on_setup (next), restore_model, pre_configure_sharded,"
        " configure_sharded, restore_training_state, resume_end"
    )
    for event, what in (("resume_start", "twice"), ("restore_model", "out of turn")):
        with pytest.raises(SequenceError) as caught:
            fire(bus, event, resume)
        assert str(caught.value) == f"{event} was fired {what}: {shown}"
    resume.advance("resume_end")
    for event in ("resume_end", "restore_model"):
        with pytest.raises(SequenceError) as caught:
            fire(bus, event, resume)
        assert str(caught.value) == f"{event} was fired after the resume had ended: " + ", ".join(
            f"{each} (fired)" for each in RESUME_EVENTS
        )


@pytest.mark.parametrize(
    "again", ["setup", "restore_model", "configure_sharded", "restore_training_state"]
)
def test_a_step_taken_twice_in_resuming_is_an_error(again: str, saved: Path) -> None:
    bus = make_bus(model=Keeper(), state=Keeper("restore_training_state"))
    event = {"setup": "on_setup"}.get(again, again)
    with bus.resuming(saved) as resume:
        getattr(resume, again)()
        with pytest.raises(SequenceError, match=f"^{event} was fired twice: "):
            getattr(resume, again)()


def test_a_resume_that_broke_cannot_go_on(saved: Path) -> None:
    class Breaks:
        @hookbus.hookimpl
        def on_setup(self) -> None:
            raise KeyError("x")

    bus = make_bus(model=Keeper(), state=Keeper("restore_training_state"), breaks=Breaks())
    with pytest.raises(KeyError):
        bus.resume(saved)
    resume = bus.prepare(saved)
    fire(bus, "resume_start", resume)
    with pytest.raises(KeyError):
        fire(bus, "on_setup", resume)
    with pytest.raises(SequenceError) as caught:
        fire(bus, "restore_model", resume)
    assert str(caught.value) == (
        "restore_model: this resume broke in on_setup and cannot go on; start a new one"
    )
    bus.unregister("breaks")
    with pytest.raises(RuntimeError), bus.resuming(saved) as resume:
        raise RuntimeError
    with pytest.raises(SequenceError, match="this resume broke in the script"):
        resume.restore_model()
    assert bus.resume(saved).step == 1  # a new one can


def test_a_resume_that_was_replaced_or_belongs_to_another_bus_is_refused(saved: Path) -> None:
    bus, other = make_bus(spy=make_spy([])), make_bus(spy=make_spy([]))
    first = bus.prepare(saved, stage="test")
    bus.prepare(saved, stage="test")
    for each in (first, other.prepare(saved, stage="test")):
        with pytest.raises(SequenceError) as caught:
            fire(bus, "resume_start", each)
        assert str(caught.value) == (
            "resume_start: this resume is over, or another bus's; pass what this bus's last"
            " bus.prepare(run) returned"
        )


def test_asking_by_hand_where_weights_come_back_changes_nothing(saved: Path) -> None:
    bus = make_bus(model=Keeper(in_front=False), state=Keeper("restore_training_state"))
    resume = bus.prepare(saved)
    fire(bus, "resume_start", resume)
    assert bus.hook.restore_before_configure_sharded(resume=resume) == [False]
    resume.advance("resume_end")
    assert resume.report.sharded_first == ["model"]


# -- components that come to life in between ----------------------------------------------------


class Adds(Keeper):
    """Registers another keeper in an event, or when it is told to."""

    bus: hookbus.HookBus

    def __init__(self, event: str, added: Keeper) -> None:
        super().__init__()
        self.added = added
        if event != "never":
            setattr(self, event, hookbus.hookimpl(lambda resume: self.add()))

    def add(self) -> None:
        self.bus.register(self.added, "added")


def save_added(run: Path, event: str = "restore_model") -> None:
    added = Keeper(event)
    added.tensor += 3
    with make_bus(adds=Keeper(), added=added) as bus:
        bus.resume(run)
        bus.save(step=1)


def test_what_a_plugin_or_a_function_adds_while_it_is_set_up_is_set_up_and_restored(
    tmp_path: Path,
) -> None:
    class SetUp(Keeper):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        @hookbus.hookimpl
        def on_setup(self, stage: str) -> None:
            self.calls.append(stage)

    save_added(tmp_path)
    for way in ("plugin", "function"):
        added = SetUp()
        adds = Adds("on_setup" if way == "plugin" else "never", added)
        with make_bus(adds=adds) as adds.bus:
            if way == "plugin":
                with adds.bus.resuming(tmp_path):
                    pass
            else:
                adds.bus.resume(tmp_path, setup=lambda _, adds=adds: adds.add())
        assert added.calls == ["fit"]
        assert (added.restored, added.tensor.tolist()) == (1, [3.0] * 3)


def test_what_comes_after_its_event_is_refused(tmp_path: Path) -> None:
    save_added(tmp_path)
    bus = make_bus(adds=Keeper())
    with bus, bus.resuming(tmp_path) as resume:
        resume.setup()
        bus.register(added := Keeper(), "added")
        resume.restore_model()
        assert added.restored == 1
        with pytest.raises(AttachError) as caught:
            bus.register(Keeper(), "late")
        assert str(caught.value) == (
            "'late' came after restore_model, so its section would never be restored; attach it"
            " before"
        )
        assert "late" not in [each.name for each in bus.plugins]
        bus.register(make_spy([]), "spy")  # has no section, so nothing is lost
    with make_bus() as bus:
        bus.resume(tmp_path / "fresh")
        for late in (Keeper(), Keeper("restore_training_state")):
            with pytest.raises(AttachError):
                bus.register(late, "late")


def test_what_is_attached_during_an_event_that_restores_it_is_refused(tmp_path: Path) -> None:
    save_added(tmp_path)
    adds = Adds("restore_model", Keeper())
    adds.bus = make_bus(adds=adds)
    with pytest.raises(AttachError, match="'added' came after restore_model"):
        adds.bus.resume(tmp_path, skip=("added",))
