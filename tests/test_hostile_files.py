"""A checkpoint that was made by hand, with seals that fit: refused with the file and the field."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hookbus
from hookbus.checkpoint import Checkpoint, Part, RunLock, Section, flatten, write_checkpoint
from hookbus.checkpoint.tensor_info import TensorInfo, make_header
from hookbus.checkpoint.tensors import describe
from hookbus.errors import (
    CallError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    HookbusError,
    RunLockedError,
    WriteError,
)

law = settings(deadline=None, suppress_health_check=list(HealthCheck))

Change = Callable[[dict[str, Any]], object]


def save(run: Path, state: object, step: int = 1, **changes: Any) -> Checkpoint:
    section = Section("s", "state", "Plugin", "some-dist", "1.2", {None: Part(flatten(state), 1)})
    arguments = {
        "run_id": "r",
        "progress": {"epoch": 1},
        "metrics": {"loss": 0.5},
        "settings": {"threads": 1},
        "versions": {"torch": "2"},
        "why": "asked",
        **changes,
    }
    return write_checkpoint(run, step=step, sections=[section], **arguments)


def reseal(checkpoint: Checkpoint, change: Change) -> Path:
    """Write the manifest anew, with a seal that fits; return the checkpoint's folder."""
    path = checkpoint.path / "manifest.json"
    manifest = json.loads(path.read_bytes())
    del manifest["seal"]
    change(manifest)
    return reseal_text(checkpoint, lambda text: json.dumps(manifest, separators=(",", ":"))[:-1])


def reseal_text(checkpoint: Checkpoint, change: Callable[[str], str]) -> Path:
    path = checkpoint.path / "manifest.json"
    body = change(path.read_text().rpartition(',"seal"')[0]).encode()
    path.write_bytes(body + b',"seal":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n')
    return checkpoint.path


def part_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["sections"]["s"]["parts"][0]


def change_tensor(**changes: Any) -> Change:
    """Change what is said of a tensor, and of its file so that the two fit."""

    def change(manifest: dict[str, Any]) -> None:
        part = part_of(manifest)
        part["tensors"]["w"].update(changes)
        infos = []
        for name, each in part["tensors"].items():
            shape, size = tuple(each["shape"]), each["bytes"]
            infos.append(TensorInfo(name, each["dtype"], shape, size, each["hash"]))
        header = make_header(infos)
        part["file"]["bytes"] = len(header) + sum(info.bytes for info in infos)
        part["file"]["header"] = xxhash.xxh3_128_hexdigest(header)

    return change


def refuse(folder: Path, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        hookbus.open(folder)
    assert str(caught.value).startswith(f"{folder / 'manifest.json'}: ")
    assert message in str(caught.value)


# -- laws ------------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
) | st.sampled_from([2**62, -1, 1.0, "../x", "w", [[0]], {"$tensor": ["w", True]}, {"$int": 1}])


def list_places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container of a manifest with each of its keys or positions."""
    children = node.items() if isinstance(node, dict) else enumerate(node)
    for key, child in list(children):
        yield node, key
        if isinstance(child, dict | list):
            yield from list_places(child)


@law
@given(st.data())
def test_whatever_stands_at_any_place_of_a_manifest_is_read_or_is_an_error_of_ours(
    tmp_path_factory, data
):
    state = {"w": torch.ones(2, 3).t(), "a": np.array(["x"]), "n": (1, 2.5), "b": bytes(5000)}
    checkpoint = save(tmp_path_factory.mktemp("run"), state)

    def put(manifest: dict[str, Any]) -> None:
        container, key = data.draw(st.sampled_from(list(list_places(manifest))))
        if isinstance(container, dict) and data.draw(st.booleans()):
            del container[key]
        else:
            container[key] = data.draw(values)

    folder = reseal(checkpoint, put)
    live = {"w": torch.zeros(2, 3).t(), "a": np.array(["y"]), "n": (0, 0.5), "b": b""}
    for act in (
        lambda opened: opened.verify(),
        lambda opened: opened.metadata("s"),
        lambda opened: opened.read("s"),
        lambda opened: opened.read_into("s", live),
    ):
        try:
            act(hookbus.open(folder))
        except HookbusError as error:
            assert str(error)  # noqa: PT017 - every other error fails the test


@law
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=4))
def test_every_layout_that_is_written_is_one_that_is_taken(axes):
    """The other side of the refusals: sizes and strides as torch makes them, gaps and all."""
    shape, stride = [n for n, _ in axes], [n for _, n in axes]
    tensor = torch.zeros(99).as_strided(shape, stride)
    written = json.loads(json.dumps(describe("w", tensor).to_json()))
    taken = TensorInfo.from_json("w", **written)
    assert taken == describe("w", tensor)
    assert taken.stride is None or torch.empty_strided(shape, taken.stride).stride() == taken.stride


# -- the manifest ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", True, "its format is True, and this version of hookbus reads 1"),
        ("format", 1.0, "its format is 1.0, and this version of hookbus reads 1"),
        ("run_id", 3, "run_id is 3, not a string"),
        ("run_id", None, "run_id is None, not a string"),
        ("step", "abc", "step is 'abc', not a whole number from 0 up"),
        ("step", -5, "step is -5, not a whole number from 0 up"),
        ("step", None, "step is None, not a whole number from 0 up"),
        ("step", True, "step is True, not a whole number from 0 up"),
        ("step", 1.0, "step is 1.0, not a whole number from 0 up"),
        ("serial", "x", "serial is 'x', not a whole number from 0 up"),
        ("world_size", "x", "world_size is 'x', not a whole number from 1 up"),
        ("world_size", 0, "world_size is 0, not a whole number from 1 up"),
        ("created", "2026-01-01T00:00:00", "not a time in UTC"),
        ("created", "2026-01-01T00:00:00+01:00", "not a time in UTC"),
        ("created", 3, "created: cannot be read: TypeError"),
        ("why", {}, "why is {}, not a string"),
        ("notes", 3, "notes is 3, not a list of strings"),
        ("notes", None, "notes is None, not a list of strings"),
        ("notes", [3], "notes is [3], not a list of strings"),
        ("settings", [1], "settings: [1] are not values by name"),
        ("settings", {"$dict": [[1, 2]]}, "settings: {1: 2} are not values by name"),
        ("progress", None, "progress: None are not values by name"),
        ("progress", {"$tensor": ["w", False]}, "progress: $tensor stands where only plain"),
        ("progress", {"$quaternion": 1}, "progress: a state's tree holds '$quaternion'"),
        ("metrics", [1], "metrics: [1] are not values by name"),
        ("metrics", {"a": "x"}, "metrics: {'a': 'x'} are not numbers by name"),
        ("versions", None, "versions is None, not a dict of strings"),
        ("versions", [], "versions is [], not a dict of strings"),
        ("versions", {"torch": 2}, "versions is {'torch': 2}, not a dict of strings"),
        ("sections", [], "sections: cannot be read: AttributeError"),
        ("sections", {"a/b": {}}, "section 'a/b': cannot be read: CallError"),
        ("more", 1, "got an unexpected keyword argument 'more'"),
    ],
)
def test_a_field_that_nobody_writes_so_is_named(tmp_path, field, value, message):
    refuse(reseal(save(tmp_path, 1), lambda m: m.update({field: value})), message)


def test_a_field_that_is_missing_is_named(tmp_path):
    written = save(tmp_path, 1)
    whole = json.loads((written.path / "manifest.json").read_bytes())
    for field in [name for name in whole if name != "seal"]:
        folder = reseal(save(tmp_path, 1), lambda m, field=field: m.pop(field))
        refuse(folder, f"'{field}'")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(kind=3), "kind is 3, not a string"),
        (lambda s: s.update(plugin=None), "plugin is None, not a string"),
        (lambda s: s.update(distribution=3), "distribution is 3, not a string or null"),
        (lambda s: s.update(distribution_version=[]), "distribution_version is [], not a string"),
        (lambda s: s.update(parts=3), "cannot be read: TypeError"),
        (lambda s: s["parts"].append(s["parts"][0]), "two parts are of one name"),
        (lambda s: s["parts"][0].update(part=3), "part 3: its name is 3, not a string or null"),
        (lambda s: s["parts"][0].update(part="a/b"), "part 'a/b': cannot be read: CallError"),
        (lambda s: s["parts"][0].update(version="1"), "version is '1', not a whole number from 1"),
        (lambda s: s["parts"][0].update(version=0), "version is 0, not a whole number from 1"),
        (lambda s: s["parts"][0].update(file=None), "file is None, and its tensors make it {"),
        (lambda s: s["parts"][0].update(tensors={}), "and its tensors make it None"),
        (lambda s: s["parts"][0].update(tensors=[]), "part None: cannot be read: AttributeError"),
        (lambda s: s["parts"][0]["file"].update(bytes=9), "'bytes': 9,"),
        (lambda s: s["parts"][0]["file"].update(header="0"), "'header': '0'}"),
        (lambda s: s["parts"][0]["file"].update(more=1), "'more': 1}"),
    ],
)
def test_a_section_that_nobody_writes_so_is_named(tmp_path, change, message):
    folder = reseal(save(tmp_path, [torch.ones(2)]), lambda m: change(m["sections"]["s"]))
    refuse(folder, "manifest.json: section 's': ")
    refuse(folder, message)


@pytest.mark.parametrize(
    "name",
    ["../../outside.safetensors", "/etc/x.safetensors", 3, None, "a\0b", "", "t.safetensors", "s"],
)
def test_a_file_has_the_name_that_the_writer_gives_it(tmp_path, name):
    checkpoint = save(tmp_path, [torch.ones(2)])
    folder = reseal(checkpoint, lambda m: part_of(m)["file"].update(name=name))
    refuse(folder, f"section 's': part None: file is {{'name': {name!r}, ")
    refuse(folder, "and its tensors make it {'name': 's.safetensors', ")


def test_a_key_that_stands_twice_is_refused(tmp_path):
    change = '"step":1,"step":2'
    refuse(reseal_text(save(tmp_path, 1), lambda t: t.replace('"step":1', change)), "'step' stands")
    deep = '{"epoch":1,"epoch":1}'
    folder = reseal_text(save(tmp_path, 1), lambda t: t.replace('{"epoch":1}', deep))
    refuse(folder, "the key 'epoch' stands there twice")


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_what_json_has_not_is_refused(tmp_path, literal):
    folder = reseal_text(save(tmp_path, 1), lambda t: t.replace(":0.5", f":{literal}"))
    refuse(folder, f"it holds {literal}, which JSON has not")


@pytest.mark.parametrize("text", ["[1", "[" * 10**5, '{"a":'])
def test_what_is_no_dict_is_refused(tmp_path, text):
    refuse(reseal_text(save(tmp_path, 1), lambda t: text), "cannot be read: ")


# -- tensors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stride", [[2**40, 1], [2**62, 1], [-3, 1], [0, 0], [1], ["a", "b"], [1, 1], [3, 1.0], 3, "ab"]
)
def test_strides_that_are_not_dense_are_refused(tmp_path, stride):
    checkpoint = save(tmp_path, {"w": torch.ones(2, 3)})
    message = f"tensor 'w': stride is {stride!r}, not that of a dense tensor of shape [2, 3]"
    refuse(reseal(checkpoint, change_tensor(stride=stride)), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": [-2, -3]}, "shape is [-2, -3], not a list of sizes"),
        ({"shape": [2.0, 3]}, "shape is [2.0, 3], not a list of sizes"),
        ({"shape": [True, 6]}, "shape is [True, 6], not a list of sizes"),
        ({"shape": 6}, "shape is 6, not a list of sizes"),
        ({"shape": [2**70, 0]}, "not a list of sizes"),
        ({"shape": [0, 2**62, 2**62]}, "not a list of sizes"),
        ({"shape": [2, 4]}, "bytes is 24 and not that of shape [2, 4] and float32"),
        ({"bytes": 28}, "bytes is 28 and not that of shape [2, 3] and float32"),
        ({"bytes": 24.0}, "bytes is 24.0 and not that of shape [2, 3] and float32"),
        ({"dtype": "float64"}, "bytes is 24 and not that of shape [2, 3] and float64"),
        ({"dtype": "object"}, "dtype 'object', which this version cannot read"),
        ({"dtype": []}, "cannot be read: TypeError"),
        ({"hash": 3}, "hash is 3, not a string"),
        ({"more": 3}, "got an unexpected keyword argument 'more'"),
    ],
)
def test_a_tensor_that_nobody_writes_so_is_named(tmp_path, changes, message):
    def change(manifest: dict[str, Any]) -> None:
        part_of(manifest)["tensors"]["w"].update(changes)

    folder = reseal(save(tmp_path, {"w": torch.ones(2, 3)}), change)
    refuse(folder, "section 's': part None: tensor 'w': ")
    refuse(folder, message)


def test_another_dtype_over_the_same_bytes_is_refused(tmp_path):
    one, other = (save(tmp_path, {"w": torch.ones(2)}) for _ in range(2))
    folder = reseal(one, lambda m: part_of(m)["tensors"]["w"].update(dtype="int32"))
    refuse(folder, "and its tensors make it ")
    opened = hookbus.open(reseal(other, change_tensor(dtype="int32")))  # the manifest fits itself
    for act in (opened.verify, lambda: opened.read("s")):
        with pytest.raises(CorruptCheckpointError, match=r"s\.safetensors: its header .* damaged"):
            act()


def test_a_header_is_compared_and_not_its_hash_only(tmp_path, monkeypatch):
    """The hash is one for which other bytes can be found; here, any."""
    checkpoint = save(tmp_path, {"w": torch.ones(2)})
    path = checkpoint.path / "s.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
    monkeypatch.setattr(xxhash, "xxh3_128_hexdigest", lambda data: "0" * 32)
    with pytest.raises(CorruptCheckpointError, match="its header"):
        checkpoint.read("s")


def test_a_huge_shape_fails_before_memory_is_asked_for(tmp_path):
    changes = change_tensor(shape=[2**40], bytes=2**42)
    opened = hookbus.open(reseal(save(tmp_path, {"w": torch.ones(2)}), changes))
    for act in (opened.verify, lambda: opened.read("s")):
        with pytest.raises(CorruptCheckpointError, match=r"s\.safetensors: has \d+ bytes, saved"):
            act()


@pytest.mark.parametrize(
    "node",
    [
        {"$tensor": ["gone", False]},
        {"$tensor": []},
        {"$tensor": [3, False]},
        {"$array": ["w", "O", [2]]},
        {"$array": ["w", "<i8", [2]]},
        {"$array": ["w", "<i8", [2**60]]},
        {"$array": ["w", "bogus", [1]]},
        {"$array": ["w", "<U0", [2**60]]},
        {"$tensor": [{"is": "sparse_coo", "shape": [2], "parts": {"values": "w"}}, False]},
        {"$tensor": [{"is": [], "shape": [2], "parts": {"values": "w"}}, False]},
        {"$blob": [3, "bytes"]},
    ],
)
def test_a_tree_that_nobody_writes_so_is_named_with_its_section(tmp_path, node):
    def change(manifest: dict[str, Any]) -> None:
        part_of(manifest)["tree"]["w"] = node

    opened = hookbus.open(reseal(save(tmp_path, {"w": torch.ones(2)}), change))
    message = re.escape(f"{opened.path / 'manifest.json'}: section 's': a state's tree cannot be")
    with pytest.raises(FormatError, match=message):
        opened.read("s")
    with pytest.raises(HookbusError):  # a sparse one does not fit the live one
        opened.read_into("s", {"w": torch.zeros(2)})


# -- what stands in a file's place -----------------------------------------------------------------


@pytest.fixture
def _alarm():
    """End what waits for ever."""

    def ring(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("_alarm")
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
@pytest.mark.parametrize("name", ["s.safetensors", "manifest.json"])
def test_a_pipe_or_folder_in_place_of_a_file_is_not_waited_for(tmp_path, name, make):
    checkpoint = save(tmp_path, [torch.ones(2)])
    (checkpoint.path / name).unlink()
    make(checkpoint.path / name)
    with pytest.raises(CorruptCheckpointError, match=f"{name}: cannot be read: not a regular file"):
        checkpoint.verify()


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def pickle_plainly(payload: object) -> bytes:
    return pickle.dumps(payload)


def pickle_as_torch_does(payload: object) -> bytes:
    stream = io.BytesIO()
    torch.save({"state": payload}, stream)
    return stream.getvalue()


@pytest.mark.parametrize("make", [pickle_plainly, pickle_as_torch_does])
def test_a_pickle_in_place_of_any_file_is_never_loaded(tmp_path, make):
    """Source: huggingface/transformers#43140, NVIDIA-NeMo/Automodel#3240, ecmwf/anemoi-core#1416"""
    mark, run = tmp_path / "mark", tmp_path / "run"
    payload = make(Payload(mark))
    torch.load(io.BytesIO(payload), weights_only=False) if make is pickle_as_torch_does else (
        pickle.loads(payload)
    )
    mark.rmdir()  # the negative control: it does what it says

    def attach(bus: hookbus.HookBus) -> None:
        model = torch.nn.Linear(40, 40)
        bus.attach(model=model, optimizer=torch.optim.Adam(model.parameters()), more={"a": 1})

    with hookbus.HookBus() as bus:
        attach(bus)
        bus.resume(run)
        folder = bus.save(step=1).path
    files = sorted(folder.iterdir())
    assert [each.name for each in files] == [
        "manifest.json",
        "model.safetensors",
        "rng.safetensors",
    ]
    for stray in ("rng_state.pth", "optimizer.pt", ".metadata", "more.pkl"):
        (folder / stray).write_bytes(payload)
    for file in files:
        whole = file.read_bytes()
        for content in (payload, payload.ljust(len(whole), b"\0")):
            file.write_bytes(content)
            for act in (
                lambda: hookbus.open(folder).verify(),
                lambda: [hookbus.open(folder).read(name) for name in ("model", "rng")],
                lambda: resume_with(attach, run),
                lambda: resume_with(attach, run, verify="sizes"),
            ):
                with pytest.raises(CorruptCheckpointError, match=re.escape(str(file))):
                    act()
            hookbus.checkpoints(run)
            hookbus.best(run, "loss")
        file.write_bytes(whole)
    resume_with(attach, run)
    assert not mark.exists()


def resume_with(attach: Callable[[hookbus.HookBus], None], run: Path, **options: Any) -> None:
    with hookbus.HookBus() as bus:
        attach(bus)
        bus.resume(run, **options)


# -- paths, and the best ---------------------------------------------------------------------------


def test_a_run_directory_is_not_a_checkpoint_and_says_what_to_call(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(CheckpointNotFoundError) as caught:
        hookbus.open(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} is a run directory, not a checkpoint; pass the path of one of"
        f" hookbus.checkpoints({str(tmp_path)!r})"
    )


def test_a_folder_of_ours_that_holds_another_is_left_out_of_a_run(tmp_path, caplog):
    good = save(tmp_path, 1)
    shutil.copytree(good.path, tmp_path / "step-00000002" / "step-00000001")
    assert [each.path for each in hookbus.checkpoints(tmp_path)] == [good.path]
    assert "step-00000002 is left out: " in caplog.text


@pytest.mark.parametrize("path", [3, None, b"run", "", "a\0b", ["run"]])
def test_what_is_no_path_is_a_call_error(path):
    for argument, call in (
        ("path", hookbus.open),
        ("run", hookbus.checkpoints),
        ("run", lambda run: hookbus.best(run, "loss")),
    ):
        message = f"{argument}={path!r}: pass a path, as a str or pathlib.Path"
        with pytest.raises(CallError, match=f"^{re.escape(message)}$"):
            call(path)


def test_paths_are_taken_as_text_or_as_objects(tmp_path):
    folder = save(tmp_path, 1).path
    for path in (str, Path):
        assert hookbus.open(path(folder)).path == folder
        assert [each.path for each in hookbus.checkpoints(path(tmp_path))] == [folder]
        assert hookbus.best(path(tmp_path), "loss").path == folder


def test_the_best_is_found_among_numbers_of_any_size(tmp_path):
    for step, value in enumerate([1e308, 10**400, float("nan"), -(10**400), float("inf")]):
        save(tmp_path, 1, step=step, metrics={"x": value})
    assert hookbus.best(tmp_path, "x").step == 3
    assert hookbus.best(tmp_path, "x", mode="max").step == 4
    assert hookbus.best(tmp_path, "y") is None
    with pytest.raises(CallError, match=r"metric=\['x'\]: pass the name of a metric"):
        hookbus.best(tmp_path, ["x"])


# -- a run that goes away --------------------------------------------------------------------------


def run_in_fork(action: Callable[[], None]) -> int:
    """Run in a forked process; 0 if it went well."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def refuse_to_renew(lock: RunLock, run: Path) -> None:
    with pytest.raises(RunLockedError) as caught:
        lock.renew()
    assert str(caught.value) == (
        f"{run} was removed or replaced while this process held it, so nothing is written; put it"
        " back, or resume into another run directory"
    )


def make_locked(run: Path) -> RunLock:
    run.mkdir()
    lock = RunLock(run)
    lock.take()
    return lock


def test_a_run_that_was_removed_while_it_was_held_is_noticed(tmp_path):
    lock = make_locked(tmp_path / "run")
    lock.renew()
    shutil.rmtree(tmp_path / "run")
    refuse_to_renew(lock, tmp_path / "run")
    (tmp_path / "run").write_text("a file")
    refuse_to_renew(lock, tmp_path / "run")
    lock.release()
    assert (tmp_path / "run").read_text() == "a file"


def test_a_run_that_was_replaced_is_another_process_s(tmp_path):
    run = tmp_path / "run"
    lock = make_locked(run)
    shutil.move(run, tmp_path / "moved")

    def take() -> None:
        make_locked(run)
        save(run, 1)

    assert run_in_fork(take) == 0
    refuse_to_renew(lock, run)
    shutil.rmtree(run)
    shutil.move(tmp_path / "moved", run)
    lock.renew()  # put back, it is the one that is held
    lock.release()


def test_a_save_does_not_make_a_run_anew_that_is_gone(tmp_path):
    with pytest.raises(WriteError, match="the run directory is gone; nothing is written"):
        save(tmp_path / "run", 1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("shape", ["ab", [-1], [1.0], [True], None])
def test_the_shape_of_a_sparse_tensor_is_a_list_of_sizes(tmp_path: Path, shape: Any) -> None:
    form = {"is": "sparse_coo", "shape": shape, "parts": {"values": "w"}, "coalesced": True}

    def change(manifest: dict[str, Any]) -> None:
        part_of(manifest)["tree"]["w"] = {"$tensor": [form, False]}

    folder = reseal(save(tmp_path, {"w": torch.ones(2)}), change)
    with pytest.raises(FormatError) as caught:
        hookbus.open(folder).metadata("s")
    assert f"shape is {shape!r}, not a list of sizes" in str(caught.value)
