"""What is restored when, with real components: built, loaded, sharded, trained on, forgotten."""

from __future__ import annotations

import gc
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import digest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from keepers import WAYS, Keeper, Way, make_bus, make_spy, save_keepers
from torch import nn

import hookbus
from builtin_plugins import Loop
from hookbus.errors import (
    CallError,
    HookbusError,
    MismatchError,
    UnattachedError,
    UnclaimedSectionError,
)

torch.set_num_threads(1)


# -- real components ----------------------------------------------------------------------------


class Data:
    """A datamodule that knows the number of classes once it is set up."""

    def __init__(self) -> None:
        self.loaded = 0

    def setup(self, stage: str) -> None:
        self.num_classes = 5

    def train_dataloader(self) -> None: ...

    def state_dict(self) -> dict[str, int]:
        return {"shown": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded += 1


class GrowsHead(nn.Module):
    def __init__(self, data: Data) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.data = data
        self.set_up = 0

    def setup(self, stage: str) -> None:
        self.set_up += 1
        self.head = nn.Linear(4, self.data.num_classes)


@pytest.mark.parametrize("way", WAYS[:3])
def test_layers_made_while_setting_up_are_there_when_weights_come_back(
    way: Way, tmp_path: Path
) -> None:
    """Source: Lightning-AI/pytorch-lightning#5410, Lightning-AI/pytorch-lightning#14842"""
    heads = []
    for _ in range(2):
        data = Data()
        model = GrowsHead(data)
        with hookbus.HookBus() as bus:
            bus.attach(model=model, data=data)
            way(bus, tmp_path, "fit")
            assert model.set_up == 1
            assert data.loaded == len(heads)
            heads.append(model.head.weight.detach().clone())
            bus.save(step=1)
    assert torch.equal(*heads)


@pytest.mark.parametrize("way", WAYS)
def test_a_datamodule_that_fails_to_load_fails_every_way_to_resume(
    way: Way, tmp_path: Path
) -> None:
    """Source: Lightning-AI/pytorch-lightning#14842"""

    class Fails(Data):
        def load_state_dict(self, state: dict[str, int]) -> None:
            raise ValueError("cannot load")

    with hookbus.HookBus() as bus:
        bus.attach(data=Fails())
        bus.resume(tmp_path)
        bus.save(step=1)
    with hookbus.HookBus() as bus:
        bus.attach(data=Fails())
        with pytest.raises(ValueError, match="cannot load") as caught:
            way(bus, tmp_path, "fit")
    assert len(caught.value.__notes__) == 1
    assert caught.value.__notes__[0].startswith("plugin 'data' (hookbus ")


@pytest.mark.parametrize("way", WAYS[:3])
@pytest.mark.parametrize("meta", [False, True])
def test_weights_come_back_on_the_side_of_the_sharding_that_is_right(
    way: Way, meta: bool, tmp_path: Path
) -> None:
    """Source: Lightning-AI/pytorch-lightning#18358"""

    class Materializes:
        @hookbus.hookimpl
        def configure_sharded(self, resume: hookbus.Resume) -> None:
            model = resume.components["model"]
            assert isinstance(model, nn.Module)
            if meta:
                model.to_empty(device="cpu")

    model = nn.Linear(3, 2)
    with hookbus.HookBus() as bus:
        bus.attach(model=model)
        bus.resume(tmp_path)
        bus.save(step=1)
    with torch.device("meta" if meta else "cpu"):
        other = nn.Linear(3, 2)
    calls: list[str] = []
    with hookbus.HookBus() as bus:
        bus.attach(model=other)
        bus.register(Materializes(), "materializes")
        bus.register(make_spy(calls), "spy")
        report = way(bus, tmp_path, "fit").report
    calls = [call for call in calls if call in ("restore_model", "configure_sharded")]
    assert calls == (["restore_model", "configure_sharded"][:: -1 if meta else 1])
    assert report.sharded_first == (["model"] if meta else [])
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)


def test_a_layer_replaced_under_an_optimizer_is_noticed(tmp_path: Path) -> None:
    """Source: Lightning-AI/pytorch-lightning#7535"""

    class Replaces:
        after = ("model",)

        @hookbus.hookimpl
        def restore_model(self, resume: hookbus.Resume) -> None:
            resume.components["model"][0] = nn.Linear(2, 2)

    def attach(bus: hookbus.HookBus) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        bus.attach(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    with hookbus.HookBus() as bus:
        attach(bus)
        bus.resume(tmp_path)
        bus.save(step=1)
    with hookbus.HookBus() as bus:
        attach(bus)
        bus.register(Replaces(), "replaces")
        with pytest.raises(UnattachedError, match=r"optimizer: .*model\.0\.weight"):
            bus.resume(tmp_path)


def test_a_loader_made_before_the_resume_goes_on_at_its_place(tmp_path: Path) -> None:
    """Source: determined-ai/determined#6708"""

    def train(stop: int | None) -> list[int]:
        loader = torch.utils.data.DataLoader(torch.arange(20), batch_size=1)
        loop, seen = Loop(), []
        with hookbus.HookBus() as bus:
            bus.attach(loader=loader, loop=loop)
            bus.resume(tmp_path)
            for _ in loop.epochs(1):
                for batch in loop.batches(loader):
                    seen.append(int(batch))
                    if loop.batch == stop:
                        bus.save()
                    if loop.batch == (stop or 0) + 1 and stop:
                        raise SystemExit
        return seen

    with pytest.raises(SystemExit):
        train(7)
    assert train(None) == list(range(7, 20))


def build_everything(number: int) -> dict[str, Any]:
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {
        "datamodule": Data(),
        "model": model,
        "callbacks": [Shows()],
        "scaler": torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
        "loader": torch.utils.data.DataLoader(
            torch.arange(24.0).view(8, 3),
            2,
            shuffle=True,
            generator=torch.Generator().manual_seed(number),
        ),
        "ema": torch.optim.swa_utils.AveragedModel(model),
        "own": torch.Generator().manual_seed(number),
        "seen": {"loss": 0.0},
        "loop": Loop(),
    }


class Shows:
    """A callback that counts."""

    state_key = "shows"

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def train_everything(parts: dict[str, Any], epochs: int) -> None:
    model, optimizer, scaler = parts["model"], parts["optimizer"], parts["scaler"]
    for _ in parts["loop"].epochs(epochs):
        for x in parts["loop"].batches(parts["loader"]):
            optimizer.zero_grad()
            loss = model(x + torch.rand(1, generator=parts["own"])).square().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            parts["scheduler"].step()
            parts["ema"].update_parameters(model)
            parts["seen"]["loss"] += loss.item()
            parts["callbacks"][0].count += 1


def read_bits(parts: dict[str, Any]) -> list[Any]:
    counts = [each.count for each in parts.get("callbacks", ())]
    return digest({**parts, "callbacks": counts})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A run of two epochs, saved after the first, and its bits at the end."""
    run, parts = tmp_path_factory.mktemp("trained"), build_everything(0)
    with hookbus.HookBus() as bus:
        bus.attach(**parts)
        bus.resume(run)
        train_everything(parts, 1)
        bus.save()
        train_everything(parts, 2)
        return run, read_bits(parts)


NAMES = tuple(build_everything(0))


@settings(deadline=None, max_examples=12)
@given(order=st.permutations(NAMES))
@example(order=NAMES)
@example(order=NAMES[::-1])
def test_the_order_of_attaching_does_not_change_what_is_restored(
    order: list[str], trained: tuple[Path, list[Any]]
) -> None:
    saved, expected = trained
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(saved, run := Path(folder) / "run")
        parts = build_everything(1)
        with hookbus.HookBus() as bus:
            for name in order:
                bus.attach(**{name: parts[name]})
            bus.resume(run)
            train_everything(parts, 2)
            assert read_bits(parts) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_component_that_one_side_lacks_is_missed_by_name(
    name: str, trained: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """Source: Lightning-AI/pytorch-lightning#2613, NVIDIA-NeMo/Megatron-Bridge#5706,
    Lightning-AI/pytorch-lightning#14842
    """

    def resume(run: Path, parts: dict[str, Any], left_out: str | None) -> HookbusError:
        parts = {each: part for each, part in parts.items() if each != left_out}
        before = read_bits(parts)
        with hookbus.HookBus() as bus:
            bus.attach(**parts)
            with pytest.raises(HookbusError) as caught:
                bus.resume(run)
            assert read_bits(parts) == before
        return caught.value

    # The run lacks it; without a model its optimizer is refused as well.
    shutil.copytree(trained[0], lacks := tmp_path / "run")
    error = resume(lacks, build_everything(1), left_out=name)
    assert f"the checkpoint has a section {name!r}, written by plugin " in str(error)
    assert f"nobody on the bus restores it; attach it, or pass skip=({name!r},)" in str(error)
    # The checkpoint lacks it.
    parts = build_everything(2)
    alone = ("model", "ema", "optimizer", "scheduler")
    kept = {each: part for each, part in parts.items() if each != name and each not in alone}
    saved = tmp_path / "other"
    with hookbus.HookBus() as bus:
        bus.attach(**kept)
        bus.resume(saved)
        bus.save(**({"step": 1} if name == "loop" else {"metrics": {"x": 1}}))
    error = resume(saved, {**kept, name: build_everything(3)[name]}, left_out=None)
    assert f"has no section {name!r}; pass missing_ok=({name!r},) to start it fresh" in str(error)


# -- sharding by function -----------------------------------------------------------------------


class Checks(Keeper):
    """Counts how often it is asked whether its section fits."""

    checked = 0

    @hookbus.hookimpl
    def check_state(self) -> None:
        self.checked += 1


def test_a_section_is_checked_until_it_is_restored_and_never_if_it_is_not(tmp_path: Path) -> None:
    def resume(**options: Any) -> list[int]:
        plugins = {"model": Checks(), "state": Checks("restore_training_state")}
        with make_bus(**plugins) as bus:
            bus.resume(tmp_path, **options)
        return [plugin.checked for plugin in plugins.values()]

    assert resume() == [0, 0]
    save_keepers(tmp_path)
    assert resume() == [2, 3]
    assert resume(stage="test") == [2, 0]
    assert resume(skip=("model",)) == [0, 3]
    assert resume(init_from=tmp_path, skip=("state",)) == [2, 0]


def test_a_model_that_nobody_restores_is_missed_before_weights_come_back(tmp_path: Path) -> None:
    class Model(Keeper):
        kind = "model"

    with make_bus(generator=Model(), critic=Model(), state=Keeper()) as bus:
        bus.resume(tmp_path)
        bus.save(step=1)
    model = Model()
    with make_bus(generator=model) as bus:
        resume = bus.prepare(tmp_path)
        with pytest.raises(UnclaimedSectionError, match="section 'critic'"):
            resume.restore_model()  # the state may still come to life, the model may not
    assert model.restored == 0


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("as_dict", [False, True])
def test_what_configure_sharded_returns_takes_the_model_s_place(
    as_dict: bool, tmp_path: Path
) -> None:
    def shard(resume: hookbus.Resume) -> object:
        wrapper = Wrapper(resume.components["model"])
        return {"model": wrapper} if as_dict else wrapper

    with hookbus.HookBus() as bus:
        bus.attach(model=nn.Linear(2, 2))
        bus.resume(tmp_path, configure_sharded=shard)
        assert isinstance(bus.components["model"], Wrapper)
        with bus.resuming(tmp_path) as resume:
            resume.configure_sharded(shard)
        assert isinstance(bus.components["model"].module, Wrapper)
        resume = bus.prepare(tmp_path, configure_sharded=shard)
        with pytest.raises(CallError) as caught:
            resume.configure_sharded(shard)
        assert str(caught.value) == "configure_sharded was given twice; leave one of them out"


class Shards:
    def __init__(self, answer: object) -> None:
        self.answer = answer

    @hookbus.hookimpl
    def configure_sharded(self) -> object:
        return self.answer


@pytest.mark.parametrize(
    ("plugins", "function", "message"),
    [
        (
            {"a": Shards({"model": 1}), "b": Shards({"model": 2})},
            None,
            "plugin 'a' and plugin 'b' both answered configure_sharded; one of them shards the"
            " model",
        ),
        (
            {"a": Shards({"model": 1})},
            lambda resume: {"model": 2},
            "plugin 'a' and the function configure_sharded= both answered configure_sharded; one of"
            " them shards the model",
        ),
        (
            {},
            lambda resume: {"modle": 1},
            "the function configure_sharded= returned 'modle', which is no attached model; there"
            " are model, other",
        ),
        (
            {},
            lambda resume: 1,
            "the function configure_sharded= returned a int and there are 2 models; return a dict"
            " of name to object",
        ),
    ],
)
def test_an_answer_that_fits_no_model_is_refused(
    plugins: dict[str, object], function: Any, message: str, tmp_path: Path
) -> None:
    bus = hookbus.HookBus()
    bus.attach(model=nn.Linear(2, 2), other=nn.Linear(2, 2))
    for name, plugin in plugins.items():
        bus.register(plugin, name)
    with bus, pytest.raises(CallError) as caught:
        bus.resume(tmp_path, configure_sharded=function)
    assert str(caught.value) == message


# -- memory -------------------------------------------------------------------------------------


class Reads(Keeper):
    """Reads a copy of its own, and lets it go, by returning or by raising."""

    def __init__(self, *, raises: bool) -> None:
        self.raises = raises
        self.in_front = None

    @hookbus.hookimpl
    def restore_model(self, resume: hookbus.Resume) -> None:
        state = resume.read()
        self.alive = weakref.ref(state)
        if self.raises:
            raise MismatchError("no")


class Handles:
    @hookbus.hookimpl(wrapper=True)
    def restore_model(self) -> Any:
        try:
            return (yield)
        except MismatchError:
            return []


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_the_checkpoint_is_in_memory_after_the_resume(
    way: Way, raises: bool, tmp_path: Path
) -> None:
    """Source: Lightning-AI/pytorch-lightning#7652, huggingface/transformers#12718"""
    save_keepers(tmp_path)
    reads = Reads(raises=raises)
    with make_bus(model=reads, state=Keeper("restore_training_state"), handles=Handles()) as bus:
        gc.disable()
        try:
            resume = way(bus, tmp_path, "fit")
            assert reads.alive() is None
        finally:
            gc.enable()
        assert resume.checkpoint is not None
        assert resume.checkpoint._manifest is None
        with pytest.raises(hookbus.errors.CallError):
            resume.read()
