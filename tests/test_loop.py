"""The contract of the loop: what it hands out, what it counts, when a save is written."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from exact import CUT, Parts, Save, check_exact, run_bus, run_plain, seed, to_bits
from scenes import data_scene, make_loader, training_scene
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.data import DataLoader

import hookbus
from builtin_plugins import Loop
from hookbus.errors import AttachError, CallError, LoopError, SaveError, UnattachedError
from hookbus.saver import LEFT_NOTE


@attrs.define
class Training:
    """A linear model on three batches of two samples, and how to train it."""

    bus: hookbus.HookBus
    loop: Loop
    model: nn.Module
    optimizer: Any
    loader: DataLoader
    more: dict[str, object] = attrs.Factory(dict)
    bodies: list[tuple[int, int]] = attrs.Factory(list)
    tails: list[int] = attrs.Factory(list)

    @classmethod
    def build(cls, **more: object) -> Training:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(torch.arange(12.0).view(6, 2) / 12, batch_size=2)
        training = cls(hookbus.HookBus(), Loop(), model, optimizer, loader, more)
        training.bus.attach(model=model, optimizer=optimizer, loop=training.loop, **more)
        return training

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).sum().backward()
        self.optimizer.step()

    def train(
        self,
        epochs: int,
        body: Callable[[], object] = lambda: None,
        tail: Callable[[], object] = lambda: None,
    ) -> None:
        for epoch in self.loop.epochs(epochs):
            for x in self.loop.batches(self.loader):
                self.step(x)
                self.bodies.append((epoch, self.loop.batch))
                body()
            self.tails.append(epoch)
            tail()


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Training]]:
    """Build everything anew on the run of this test, or on ``run``; all buses are closed."""
    with contextlib.ExitStack() as stack:

        def build(run: Path = tmp_path, **more: object) -> Training:
            training = Training.build(**more)
            stack.callback(training.bus._let_go)
            training.bus.resume(run)
            return training

        yield build


def list_steps(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in hookbus.checkpoints(run)]


def list_places(run: Path) -> list[tuple[str, int, int]]:
    places = [checkpoint.read("loop")["position"] for checkpoint in hookbus.checkpoints(run)]
    return [(place["where"], place["batch"], place["step"]) for place in places]


# -- what it hands out and counts -----------------------------------------------------------------


def test_it_hands_out_what_is_not_done(start) -> None:
    """Source: Lightning-AI/pytorch-lightning#850, Lightning-AI/pytorch-lightning#5325,
    determined-ai/determined#6708.
    """
    first = start()
    with contextlib.suppress(KeyboardInterrupt):
        first.train(2, lambda: (first.loop.step == 4 and first.bus.save()) or stop_after(first, 5))
    first.bus.close()
    second = start()
    second.train(2)
    assert first.bodies == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]
    assert second.bodies == [(1, 2), (1, 3)]
    assert second.tails == [1]
    assert (second.loop.epoch, second.loop.batch, second.loop.step) == (1, 3, 6)
    assert second.loop.samples == 12


def stop_after(training: Training, steps: int) -> None:
    if training.loop.step == steps:
        raise KeyboardInterrupt


def test_after_the_last_batch_only_the_epochs_own_code_is_left(start) -> None:
    first = start()
    first.train(1, lambda: first.loop.batch == 3 and first.bus.save())
    second = start()
    second.train(1)
    assert (second.bodies, second.tails) == ([], [0])


def test_after_the_epochs_own_code_the_next_epoch_begins(start) -> None:
    """Source: Lightning-AI/pytorch-lightning#850."""
    first = start()
    first.train(1, tail=first.bus.save)
    second = start()
    second.train(2)
    assert second.bodies[0] == (1, 1)
    assert second.loop.step == 6


def test_steps_are_the_optimizers_completed_ones_after_a_resume_too(start, tmp_path) -> None:
    """Source: Lightning-AI/pytorch-lightning#11555."""
    saved = []
    for stop in (2, 5, 12):  # in an epoch, in another, and to the end
        training, calls = start(), []
        training.optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        before = training.loop.step
        with contextlib.suppress(KeyboardInterrupt):
            training.train(4, lambda t=training, n=stop: (t.bus.save(), stop_after(t, n)))
        training.bus.close()
        assert training.loop.step == stop == before + len(calls)
        saved.append(list_steps(tmp_path))
    assert saved == [[1, 2], list(range(1, 6)), list(range(1, 13))]


def test_void_steps_of_a_gradient_scaler_are_not_counted(tmp_path) -> None:
    for fused in (False, True):
        build = training_scene(
            lambda p, fused=fused: torch.optim.AdamW(p, fused=fused), overflow=(2,)
        )
        run_bus(build, tmp_path / str(fused), saves=[("tail", 1, 0)])
        assert list_steps(tmp_path / str(fused)) == [6]  # of eight batches


def test_two_optimizers_make_one_step_a_batch(start, tmp_path) -> None:
    """Source: Lightning-AI/pytorch-lightning#11555."""
    for number, total in enumerate((3, 6), 1):
        more = nn.Linear(2, 1)
        second = torch.optim.SGD(more.parameters(), lr=0.1)
        training = start(more=more, second=second)
        training.train(number, second.step, training.bus.save)
        training.bus.close()
        assert training.loop.step == total
        assert list_steps(tmp_path)[-1] == total


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(3, 2), 3),
        ({"name": "a", "x": torch.zeros(4, 2)}, 4),
        (("a", [torch.zeros(5)]), 5),
        (torch.tensor(1.0), 1),
        ("text", 0),
    ],
)
def test_samples_of_other_iterables_are_counted_by_the_first_tensor(batch, samples, start) -> None:
    training = start()
    for _ in training.loop.epochs(1):
        for _ in training.loop.batches([batch, batch]):
            training.step(torch.zeros(1, 2))
    assert training.loop.samples == 2 * samples


def test_samples_of_a_loader_are_its_indices(start) -> None:
    training = start()
    for _ in training.loop.epochs(2):
        for _ in training.loop.batches(make_loader("uneven")):
            training.step(torch.zeros(1, 2))
    assert training.loop.samples == 36


def test_batches_have_the_loaders_length(start) -> None:
    training = start()
    assert len(training.loop.batches(training.loader)) == 3
    assert len(training.loop.epochs(4)) == 4
    with pytest.raises(TypeError, match="generator has no length"):
        len(training.loop.batches(x for x in ()))


def test_every_is_true_from_the_step_to_the_end_of_its_body(start) -> None:
    training = start()
    asked = []
    every = training.loop.every
    for _ in training.loop.epochs(2):
        asked.append(every(1))
        for x in training.loop.batches(training.loader):
            before = every(2)
            training.step(x)
            asked.append((before, every(2), every(2), every(5)))
        asked.append(every(1))
    no, two, five = (False,) * 4, (False, True, True, False), (False, False, False, True)
    assert asked == [False, no, two, no, False, False, two, five, two, False]


def test_every_asked_only_before_the_step_is_warned_of_once(start, caplog) -> None:
    training = start()
    for _ in training.loop.epochs(1):
        for x in training.loop.batches(training.loader):
            assert not training.loop.every(1)
            training.step(x)
    (warning,) = caplog.messages
    assert warning == (
        "loop.every() was asked before the optimizer's step in this body, so it is never true;"
        " ask after optimizer.step()"
    )


def test_steps_over_a_loader_and_without_one(start) -> None:
    training = start()
    seen = []
    for x in training.loop.steps(5, training.loader):
        training.step(x)
        seen.append((training.loop.epoch, training.loop.batch, training.loop.step))
    assert seen == [(0, 1, 1), (0, 2, 2), (0, 3, 3), (1, 1, 4), (1, 2, 5)]
    bare = []
    for step in training.loop.steps(7):
        training.step(torch.zeros(1, 2))
        bare.append(step)
    assert bare == [5, 6]


def test_steps_that_never_come_are_an_error(start) -> None:
    training = start()
    with pytest.raises(LoopError, match=r"a whole epoch passed without a step .* steps\(5\) would"):
        for _ in training.loop.steps(5, training.loader):
            pass


def test_steps_may_be_void_for_epochs_with_a_gradient_scaler(start) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    training = start(scaler=scaler)
    for x in training.loop.steps(2, [torch.full((1, 2), 1e30)]):
        training.optimizer.zero_grad()
        scaler.scale(training.model(x).sum()).backward()
        scaler.step(training.optimizer)
        scaler.update()
    assert training.loop.step == 2
    assert training.loop.epoch > 2


# -- where it may be used -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["epochs", "batches", "steps"])
def test_a_loop_on_no_bus_or_without_a_resume_is_an_error(method: str, tmp_path) -> None:
    argument = [] if method == "batches" else 1
    loop = Loop()
    with pytest.raises(LoopError, match=rf"^{method}\(\): this loop is on no open bus; add"):
        getattr(loop, method)(argument)
    bus = hookbus.HookBus()
    bus.attach(loop=loop)
    with pytest.raises(LoopError, match=rf"^{method}\(\): call bus.resume\(RUN\) first, also for"):
        getattr(loop, method)(argument)
    bus.resume(tmp_path)
    iterator = iter(loop.epochs(2))
    next(iterator)
    bus.close()
    with pytest.raises(LoopError, match="on no open bus"):
        getattr(loop, method)(argument)
    with pytest.raises(LoopError, match="the bus was closed; nothing is handed out any more"):
        next(iterator)


@pytest.mark.parametrize("number", [-1, 1.5, True, "3", None])
def test_limits_are_whole_numbers(number, start) -> None:
    loop = start().loop
    for method, least in (("epochs", 0), ("steps", 0), ("every", 1)):
        text = rf"{method}\({number!r}\): pass a whole number from {least} up"
        with pytest.raises(LoopError, match=text):
            getattr(loop, method)(number)
    with pytest.raises(LoopError, match=r"every\(0\): pass a whole number from 1 up"):
        loop.every(0)


def test_batches_belong_inside_epochs(start) -> None:
    training = start()
    text = r"batches\(\) belongs inside epochs\(\); steps\(n, loader\) takes its own"
    with pytest.raises(LoopError, match=text):
        iter(training.loop.batches(training.loader))
    for _ in training.loop.steps(1):
        with pytest.raises(LoopError, match=text):
            iter(training.loop.batches(training.loader))
        training.step(torch.zeros(1, 2))
    training.train(2)
    with pytest.raises(LoopError, match=text):
        iter(training.loop.batches(training.loader))


def go_through_nested(training: Training) -> None:
    for _ in training.loop.epochs(1):
        for _ in training.loop.batches(training.loader):
            for x in training.loop.batches(training.loader):
                training.step(x)


def go_through_a_zip(training: Training) -> None:
    batches = training.loop.batches
    for _ in training.loop.epochs(1):
        for x, _ in zip(batches(training.loader), batches(training.loader), strict=True):
            training.step(x)


def go_through_nested_epochs(training: Training) -> None:
    for _ in training.loop.epochs(2):
        for _ in training.loop.epochs(4):
            pass


@pytest.mark.parametrize("go_through", [go_through_nested, go_through_a_zip])
def test_one_batches_inside_another_or_beside_it_is_an_error(go_through, start) -> None:
    with pytest.raises(LoopError, match=r"one batches\(\) inside another, or side by side in a zi"):
        go_through(start())


def test_one_epochs_inside_another_is_an_error(start) -> None:
    with pytest.raises(LoopError, match=r"one epochs\(\) or steps\(\) inside another"):
        go_through_nested_epochs(start())


def test_finish_belongs_inside_the_loop(start) -> None:
    training = start()
    with pytest.raises(LoopError, match=r"finish\(\) belongs inside epochs\(\) or steps\(\)"):
        training.loop.finish()


def test_a_bus_has_one_loop_and_a_loop_one_bus(start, tmp_path) -> None:
    training = start()
    with pytest.raises(AttachError, match="there is a loop on this bus already, and a run has one"):
        training.bus.attach(more=Loop())
    with hookbus.HookBus() as other, pytest.raises(LoopError, match="this loop is on another bus"):
        other.attach(loop=training.loop)


def test_a_loop_cannot_be_pickled_or_copied() -> None:
    for refused in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="a Loop cannot be pickled or copied"):
            refused(Loop())


def test_a_script_that_does_not_get_to_the_saved_place_is_an_error(start) -> None:
    first = start()
    first.train(1, lambda: first.loop.batch == 2 and first.bus.save())
    second = start()
    text = r"stands after batch 2 of batches\(\) number 1 of epoch 0, and the script did not get"
    with pytest.raises(LoopError, match=text):
        for _ in second.loop.epochs(1):
            pass


def test_another_stage_leaves_the_loop_alone(start, tmp_path) -> None:
    first = start()
    first.train(2, first.bus.save)
    with hookbus.HookBus() as bus:
        loop = Loop()
        bus.attach(model=first.model, optimizer=first.optimizer, loop=loop)
        bus.resume(tmp_path, stage="test")
        assert (loop.epoch, loop.step) == (0, 0)


# -- limits ---------------------------------------------------------------------------------------


def test_a_larger_limit_goes_on_after_the_old_one(start, tmp_path) -> None:
    """Source: pytorch/ignite#993; ultralytics/ultralytics#7181."""
    first = start()
    first.train(2, tail=first.bus.save)
    first.bus.close()
    second = start()
    second.train(4, tail=second.bus.save)
    assert second.bodies[0] == (2, 1)
    assert second.tails == [2, 3]
    whole = start(tmp_path / "whole")
    whole.train(4)
    assert to_bits(second.model.state_dict()) == to_bits(whole.model.state_dict())


@pytest.mark.parametrize("limit", [1, 2])
def test_a_run_that_has_reached_its_limit_says_so_and_does_nothing(
    limit: int, start, tmp_path, capsys
) -> None:
    """Source: Lightning-AI/pytorch-lightning#1922; ultralytics/ultralytics#7181."""
    first = start()
    first.train(2, tail=first.bus.save)
    first.bus.close()
    before = list_steps(tmp_path)
    second = start()
    second.train(limit, second.bus.save, second.bus.save)
    assert second.bus.save().step == 6
    second.bus.close()
    assert second.bodies == []
    assert list_steps(tmp_path) == before
    text = f"this run is done: 2 of {limit} epochs, 6 steps are done; pass a larger limit to go on"
    assert text in capsys.readouterr().err


def test_a_lower_limit_of_steps_is_told_with_both_numbers(start, capsys) -> None:
    """Source: Lightning-AI/pytorch-lightning#1922."""
    first = start()
    for x in first.loop.steps(8, first.loader):
        first.step(x)
        first.bus.save()
    second = start()
    assert list(second.loop.steps(5, second.loader)) == []
    text = "this run is done: 8 of 5 steps are done; pass a larger limit to go on"
    assert text in capsys.readouterr().err


def test_finish_is_remembered_until_a_larger_limit_is_given(start, capsys) -> None:
    first = start()
    first.train(5, tail=lambda: (first.loop.epoch == 1 and first.loop.finish(), first.bus.save()))
    assert first.tails == [0, 1]
    second = start()
    second.train(5)
    assert second.tails == []
    assert "this run was finished early: 2 of 5 epochs" in capsys.readouterr().err
    second.train(6)
    assert second.tails == [2, 3, 4, 5]


def test_finish_in_a_body_still_runs_the_epochs_own_code(start) -> None:
    first = start()
    first.train(5, lambda: first.loop.step == 4 and (first.loop.finish(), first.bus.save()))
    assert first.bodies[-1] == (1, 1)
    assert first.tails == [0, 1]
    second = start()  # saved before the epoch's own code
    second.train(5)
    assert (second.bodies, second.tails) == ([], [1])


def test_a_finished_loop_can_be_followed_by_another(start) -> None:
    training = start()
    training.train(5, training.loop.finish)
    assert training.tails == [0]
    for x in training.loop.steps(4, training.loader):
        training.step(x)
    assert training.loop.step == 4


# -- when a save is written -----------------------------------------------------------------------


@pytest.mark.parametrize("order", ["save first", "save last"])
def test_it_does_not_matter_where_in_the_body_the_save_stands(order: str, tmp_path) -> None:
    """The scheduler, or an average of weights, comes after the save in the body."""

    def build() -> Parts:
        parts = data_scene("shuffle", epochs=2)()
        model, optimizer = parts.attached["model"], parts.attached["optimizer"]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        ema = torch.optim.swa_utils.AveragedModel(model)

        def script(loop: Any, save: Save) -> None:
            for epoch in loop.epochs(2):
                for x in loop.batches(parts.loader):
                    if order == "save first":
                        save(("body", epoch, loop.batch))
                    parts.body(loop.batch, x)
                    scheduler.step()
                    save(("middle", epoch, loop.batch))
                    ema.update_parameters(model)
                    if order == "save last":
                        save(("body", epoch, loop.batch))
                if order == "save first":
                    save(("tail", epoch, 0))
                for group in optimizer.param_groups:
                    group["weight_decay"] *= 0.5
                if order == "save last":
                    save(("tail", epoch, 0))

        attached = {**parts.attached, "scheduler": scheduler, "ema": ema}
        return attrs.evolve(parts, attached=attached, script=script)

    check_exact(build, tmp_path)


def test_metrics_go_with_the_next_save_and_are_emptied(start, tmp_path) -> None:
    training = start()
    training.loop.metrics["loss"] = 1.5
    training.train(1, training.bus.save)
    assert [checkpoint.metrics for checkpoint in hookbus.checkpoints(tmp_path)] == [
        {"loss": 1.5},
        {},
        {},
    ]
    assert training.loop.metrics == {}


def test_a_save_at_no_safe_point_waits_for_one(tmp_path) -> None:
    """Source: huggingface/transformers#22143."""
    build = training_scene(lambda p: torch.optim.SGD(p, lr=0.1), accumulate=4, samples_a_batch=3)
    run_bus(build, tmp_path, saves=[("body", 0, 2), ("body", 1, 1)])
    assert list_places(tmp_path) == [("body", 4, 1), ("body", 4, 2)]


WAYS_TO_LEAVE = ["break", "break twice", "return", "exit"]


@pytest.mark.parametrize("way", WAYS_TO_LEAVE)
def test_a_save_asked_for_in_a_batch_that_is_left_is_written(
    way: str, start, tmp_path, caplog
) -> None:
    training = start()

    def script() -> None:
        for _ in training.loop.epochs(1):
            for x in training.loop.batches(training.loader):
                training.step(x)
                training.bus.save()
                if way == "exit":
                    sys.exit()
                if way == "return":
                    return
                break
            if way == "break twice":
                break
            for _ in training.loop.batches(training.loader):
                break

    with contextlib.suppress(SystemExit), training.bus:
        script()
    (checkpoint,) = hookbus.checkpoints(tmp_path)
    assert checkpoint.notes == (LEFT_NOTE,)
    assert sum(LEFT_NOTE in message for message in caplog.messages) == 1
    again = start()
    assert sum(LEFT_NOTE in message for message in caplog.messages) == 2
    if way != "break":
        again.train(1)
        assert again.bodies == [(0, 2), (0, 3)]


def test_a_batch_left_by_break_is_whole_at_the_end_of_the_epoch(start, tmp_path, caplog) -> None:
    training = start()
    for _ in training.loop.epochs(2):
        for x in training.loop.batches(training.loader):
            training.step(x)
            training.bus.save()
            break
    assert caplog.messages == []
    assert list_places(tmp_path) == [("tail", 1, 1), ("tail", 1, 2)]


def test_an_epoch_left_in_its_own_code_counts_as_done(start, tmp_path, caplog) -> None:
    training = start()
    for _ in training.loop.epochs(3):
        for x in training.loop.batches(training.loader):
            training.step(x)
        training.bus.save()
        break
    training.bus.close()
    assert len(caplog.messages) == 1
    again = start()
    again.train(3)
    assert again.tails == [1, 2]


def test_save_beside_a_loop_takes_no_step(start) -> None:
    with pytest.raises(CallError, match=r"step= is for scripts without a loop; the loop counts"):
        start().bus.save(step=3)


def test_save_while_an_exception_is_handled_is_refused(start, tmp_path) -> None:
    training = start()
    for _ in training.loop.epochs(1):
        for x in training.loop.batches(training.loader):
            training.step(x)
            try:
                raise ValueError
            except ValueError:
                with pytest.raises(SaveError, match="while ValueError is being handled"):
                    training.bus.save()
    assert list_steps(tmp_path) == []


def test_a_save_before_the_place_is_taken_up_saves_that_place(tmp_path) -> None:
    build = data_scene("shuffle", generator=True)
    for number, cut in enumerate([("body", 1, 2), ("tail", 1, 0)]):
        run = tmp_path / str(number)
        assert run_bus(build, run, cut=cut) is CUT
        parts = build()
        with hookbus.HookBus() as bus:
            bus.attach(**parts.attached, loop=Loop())
            bus.resume(run)
            torch.rand(3)
            torch.rand(3, generator=parts.loader.generator)
            assert bus.save(metrics={"a": 1}).metrics == {"a": 1}
        assert run_bus(build, run, seed_number=9) == run_plain(build)


# -- rolling back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shuffle", "stream"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("attach", [False, True])
def test_a_run_that_is_rolled_back_goes_on_bit_for_bit(
    kind: str, workers: int, attach: bool, tmp_path
) -> None:
    """Source: pytorch/pytorch#196083."""
    build = data_scene(kind, attach=attach, num_workers=workers, persistent_workers=workers > 0)
    expected = run_plain(build)
    seed(0)
    parts = build()
    with hookbus.HookBus() as bus:
        loop = Loop()
        bus.attach(**parts.attached, loop=loop)
        bus.resume(tmp_path)

        def train(back_after: int | None) -> None:
            for epoch in loop.epochs(parts.epochs):
                for x in loop.batches(parts.loader):
                    parts.body(loop.batch, x)
                    if loop.step == 7:
                        bus.save(wait=False)
                    if loop.step == back_after:
                        return
                parts.tail(epoch)

        for back_after in (10, 9, None):
            train(back_after)
            if back_after is not None:
                bus.resume(tmp_path)
        assert parts.digest() == expected


def test_iterators_of_before_a_rollback_end_with_an_error(start, tmp_path) -> None:
    training = start()
    training.train(1, tail=training.bus.save)
    text = r"the run was rolled back by bus.resume\(\); start the loop again"
    epochs = iter(training.loop.epochs(3))
    next(epochs)
    batches = iter(training.loop.batches(training.loader))
    training.step(next(batches))
    steps = iter(training.loop.steps(9))
    training.bus.resume(tmp_path)
    for iterator in (epochs, batches, steps):
        with pytest.raises(LoopError, match=text):
            next(iterator)
    training.train(2)
    assert training.tails == [0, 1]


# -- crashes --------------------------------------------------------------------------------------


def test_a_crash_in_a_body_or_in_the_epochs_own_code_costs_what_was_not_saved(tmp_path) -> None:
    build = data_scene("shuffle", ("torch",), tail=lambda: torch.rand(1))
    for number, crash in enumerate([("body", 1, 3), ("tail", 1, 0), ("body", 0, 2)]):
        run, saves = tmp_path / str(number), [("body", 0, 1), ("body", 1, 2)]
        assert run_bus(build, run, saves=saves, crash=crash) is CUT
        assert run_bus(build, run, crash=("body", 2, 1), seed_number=1) is CUT  # nothing was saved
        assert run_bus(build, run, seed_number=2) == run_plain(build)


def test_a_run_that_was_done_goes_on_exactly_with_more_epochs(tmp_path) -> None:
    short, long = data_scene("shuffle", epochs=2), data_scene("shuffle", epochs=4)
    run_bus(short, tmp_path, saves=[("tail", 1, 0)])
    assert run_bus(long, tmp_path, seed_number=3) == run_plain(long)


def test_a_run_that_was_done_in_a_body_goes_on_exactly_with_more_steps(tmp_path) -> None:
    def make(limit: int) -> Callable[[], Parts]:
        def build() -> Parts:
            parts = data_scene("shuffle")()

            def script(loop: Any, save: Save) -> None:
                for x in loop.steps(limit, parts.loader):
                    parts.body(1, x)
                save(("end", 0, 0))

            return attrs.evolve(parts, script=script)

        return build

    run_bus(make(7), tmp_path, saves=[("end", 0, 0)])
    assert run_bus(make(13), tmp_path, seed_number=3) == run_plain(make(13))


# -- what nobody attached -------------------------------------------------------------------------


def test_an_optimizer_that_nobody_attached_refuses_the_save(start, tmp_path) -> None:
    training = start()
    copied = copy.deepcopy(training.optimizer)
    for steps in (copied.step, torch.optim.Adam(nn.Linear(1, 1).parameters()).step):
        with pytest.raises(UnattachedError) as caught:
            training.train(9, steps, training.bus.save)
        text = "an optimizer steps and is not on the bus, so its state would be lost: "
        assert text in str(caught.value)
        assert "; add bus.attach(optimizer=…)" in str(caught.value)
    assert list_steps(tmp_path) == []


@pytest.mark.parametrize("place", ["head", "tail", "body"])
def test_an_optimizer_that_nobody_attached_is_seen_in_the_whole_loop(
    place: str, start, tmp_path
) -> None:
    training = start()
    other = torch.optim.Adam(training.model.parameters())
    text = re.escape("would be lost: Adam of model.weight, model.bias; add")
    for _ in training.loop.epochs(1):
        if place == "head":
            other.step()
        for x in training.loop.batches(training.loader):
            training.step(x)
            if place == "body":
                other.step()
        if place == "tail":
            other.step()
        assert training.loop.step == 3
        with pytest.raises(UnattachedError, match=text):
            training.bus.save()
    assert list_steps(tmp_path) == []


def test_what_steps_outside_the_body_is_no_step(start) -> None:
    training = start()
    for _ in training.loop.epochs(1):
        training.step(torch.zeros(1, 2))
        assert not training.loop.every(1)
        for x in training.loop.batches(training.loader):
            training.step(x)
        training.step(x)
    assert training.loop.step == 3


def perturb(training: Training) -> None:
    """Make an adversarial sample, as in a step against an attack."""
    delta = nn.Parameter(torch.zeros(1, 2))
    attack = torch.optim.Adam([delta])
    training.model(delta).sum().backward()
    attack.step()


def adapt(training: Training) -> None:
    """Take an inner step on a copy, as in meta-learning."""
    copied = copy.deepcopy(training.model)
    inner = torch.optim.SGD(copied.parameters(), lr=0.1)
    copied(torch.ones(1, 2)).sum().backward()
    inner.step()
    inner.itself = inner  # only the garbage collector can free it


def calibrate(training: Training) -> None:
    """Fit a temperature, as after a validation."""
    temperature = nn.Parameter(torch.ones(1))
    fit = torch.optim.LBFGS([temperature])

    def closure() -> torch.Tensor:
        fit.zero_grad()
        loss = (temperature - 2).square().sum()
        loss.backward()
        return loss

    fit.step(closure)


def fine_tune(training: Training) -> None:
    """Train the model itself with an optimizer that is made anew each time."""
    training.step(torch.ones(1, 2))
    torch.optim.Adam(training.model.parameters()).step()


@pytest.mark.parametrize("for_a_moment", [perturb, adapt, calibrate, fine_tune])
def test_an_optimizer_that_is_gone_at_the_save_is_not_held_against_anybody(
    for_a_moment: Callable[[Training], None], start, tmp_path
) -> None:
    training = start()
    gc.disable()
    try:
        training.train(
            2,
            lambda: (for_a_moment(training), training.bus.save()),
            lambda: (for_a_moment(training), training.bus.save()),
        )
    finally:
        gc.enable()
    assert list_steps(tmp_path) == [1, 2, 3, 3, 4, 5, 6, 6]


def test_one_that_is_still_there_is_refused_with_the_way_out(start, tmp_path) -> None:
    training = start()
    kept = [torch.optim.Adam([nn.Parameter(torch.zeros(1, 2))])]
    with pytest.raises(
        UnattachedError,
        match=re.escape(
            "would be lost: Adam of parameters that belong to nothing attached; add "
            "bus.attach(optimizer=…), and attach the module that holds its parameters too; if it "
            "was for the moment only, let go of it before the save: del optimizer"
        ),
    ):
        training.train(1, tail=lambda: (kept[0].step(), training.bus.save()))
    kept.clear()
    training.bus.save()
    assert list_steps(tmp_path) == [3]


def test_an_optimizer_outside_the_loop_is_left_alone(start, tmp_path) -> None:
    training = start()
    other = torch.optim.Adam(training.model.parameters())
    other.step()
    training.train(1)
    other.step()
    training.bus.save()
    assert list_steps(tmp_path) == [3]


def test_a_loop_leaves_no_hook_behind(start) -> None:
    before = len(_global_optimizer_post_hooks)
    for _ in range(2):
        training = start()
        training.train(2, training.bus.save)
        training.train(3, training.bus.save)
        assert len(_global_optimizer_post_hooks) == before + 1
        training.bus.close()
        assert len(_global_optimizer_post_hooks) == before
        assert not training.optimizer._optimizer_step_post_hooks


def test_an_optimizer_that_steps_after_the_save_was_asked_for_refuses_it_too(start) -> None:
    training = start()
    other = torch.optim.Adam(nn.Linear(1, 1).parameters())
    with pytest.raises(UnattachedError, match="would be lost: Adam"):
        training.train(1, lambda: (training.bus.save(), other.step()))


class Wrapped(torch.optim.Optimizer):
    """Passes for an optimizer, holds one, and lacks the hooks, as accelerate's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


def test_a_wrapped_optimizer_counts_its_steps(start, tmp_path) -> None:
    training = start()
    training.bus.unregister("optimizer")
    training.optimizer = Wrapped(training.optimizer)
    training.bus._let_go()
    bus, loop = hookbus.HookBus(), Loop()
    bus.attach(model=training.model, optimizer=training.optimizer, loop=loop)
    bus.resume(tmp_path)
    training.bus, training.loop = bus, loop
    training.train(1, bus.save)
    bus.close()
    assert list_steps(tmp_path) == [1, 2, 3]


def test_a_scheduler_that_nobody_attached_refuses_the_save(start) -> None:
    training = start()
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 2)
    with pytest.raises(UnattachedError, match="StepLR changes the lr of an attached optimizer"):
        training.train(1, scheduler.step, training.bus.save)


def test_a_trained_parameter_of_nothing_attached_refuses_the_save(start) -> None:
    training = start()
    training.optimizer.add_param_group({"params": list(nn.Linear(3, 1).parameters())})
    with pytest.raises(UnattachedError, match="belong to nothing attached"):
        training.train(1, training.bus.save)


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("kind", ["persistent workers", "own generator", "own numpy generator"])
def test_a_loader_that_nobody_looks_after_is_warned_of_once(
    kind: str, attach: bool, start, caplog
) -> None:
    make = {
        "persistent workers": lambda: make_loader(num_workers=1, persistent_workers=True),
        "own generator": lambda: make_loader(generator=True),
        "own numpy generator": lambda: make_loader("sequential", ("own",)),
    }[kind]
    held_out = make()
    training = start(**({"held_out": held_out} if attach else {}))

    def evaluate() -> None:
        training.bus.save()
        for _ in held_out:
            pass
        training.bus.save()

    training.train(3, tail=evaluate)
    messages = [m for m in caplog.messages if "is iterated and nobody looks after it" in m]
    assert len(messages) == (not attach)
    why = "its persistent workers are up" if "workers" in kind else "its stream moves ("
    for message in messages:
        assert why in message
        assert message.endswith("so a resume would start it anew; bus.attach(NAME=loader)")


def test_loaders_that_are_handed_to_the_loop_are_not_warned_of(start, caplog) -> None:
    training = start()
    loader = make_loader(generator=True, num_workers=1, persistent_workers=True)
    for _ in training.loop.epochs(2):
        for x in training.loop.batches(loader):
            training.step(x[:, :2])
            training.bus.save()
        for x, _ in training.loop.batches(zip(make_loader(), make_loader(), strict=True)):
            training.step(x[:, :2])
            training.bus.save()
    assert caplog.messages == []


def test_an_iterator_that_stands_half_way_is_warned_of_once(start, caplog) -> None:
    training = start()
    unlabelled = iter(make_loader())
    training.train(1, lambda: (next(unlabelled), training.bus.save()))
    (warning,) = caplog.messages
    assert warning == (
        "an iterator of a loader stands half-way and nobody saves where, so a resume would start"
        " it anew; hand out several loaders as one: loop.batches(zip(…))"
    )


@pytest.mark.parametrize("mistake", ["the optimizer", "the batches"])
def test_an_epoch_without_a_step_is_told_once_with_the_line_to_add(
    mistake: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), batch_size=2)
    loop = Loop()
    with hookbus.HookBus() as bus:
        bus.attach(model=model, data=loader, loop=loop)
        if mistake == "the batches":
            bus.attach(optimizer=optimizer)
        bus.resume(tmp_path)
        for _ in loop.epochs(3):
            for (x,) in loader if mistake == "the batches" else loop.batches(loader):
                model(x).sum().backward()
                optimizer.step()
    told = [text for text in caplog.messages if "no step is counted" in text]
    assert len(told) == 1
    line = "bus.attach(optimizer" if mistake == "the optimizer" else "iterate loop.batches(loader)"
    assert line in told[0]
