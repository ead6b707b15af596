"""The checkpoint on disk: whole or not there, every byte accounted for, read in place."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import resource
import shutil
import signal
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hookbus.checkpoint import (
    Checkpoint,
    Part,
    Section,
    best,
    check_names,
    checkpoints,
    files,
    flatten,
    folders,
    make_run_directory,
    open_checkpoint,
    read_folder_name,
    sweep,
    write_checkpoint,
)
from hookbus.errors import (
    CallError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    ManyErrors,
    MismatchError,
    MissingSectionError,
    StateError,
    WriteError,
)

law = settings(deadline=None, suppress_health_check=list(HealthCheck))


def section(name: str, state: object = None, *, version: int = 1, **parts: object) -> Section:
    written = {None: Part(flatten(state), version)} if state is not None else {}
    written |= {part: Part(flatten(each), version) for part, each in parts.items()}
    return Section(name, "state", "Plugin", "some-dist", "1.2", written)


def save(run: Path, *sections: Section, step: int = 1, **changes: Any) -> Checkpoint:
    arguments = {
        "run_id": "run-1",
        "progress": {},
        "metrics": {},
        "settings": {},
        "versions": {},
        "why": "asked",
        **changes,
    }
    return write_checkpoint(run, step=step, sections=sections, **arguments)


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- what is written is what is read ---------------------------------------------------------------


def test_a_checkpoint_says_what_was_saved_with_it(tmp_path):
    before = datetime.now(UTC)
    written = save(
        tmp_path,
        section("model", {"w": torch.ones(2)}, version=3, second={"x": 1}),
        section("idle"),
        step=300,
        progress={"epoch": 2, "done": (1, 2)},
        metrics={"loss": float("inf"), "gap": float("nan"), "n": 3},
        settings={"threads": 1, "betas": (0.9, 0.99)},
        versions={"torch": "2.13"},
        why="policy",
        notes=["a batch was left"],
        world_size=4,
    )
    for each in (written, open_checkpoint(tmp_path / "step-00000300")):
        assert each.path == tmp_path / "step-00000300"
        assert (each.step, each.serial, each.run_id, each.world_size) == (300, 0, "run-1", 4)
        assert (each.why, each.notes) == ("policy", ("a batch was left",))
        assert each.progress == {"epoch": 2, "done": (1, 2)}
        assert each.metrics["loss"] == float("inf")
        assert np.isnan(each.metrics["gap"])
        assert type(each.metrics["n"]) is int
        assert each.settings == {"threads": 1, "betas": (0.9, 0.99)}
        assert each.versions == {"torch": "2.13"}
        assert before <= each.created <= datetime.now(UTC)
        assert each.created.tzinfo is UTC
        model, idle = each.sections.values()
        assert (model.name, model.kind, model.plugin) == ("model", "state", "Plugin")
        assert (model.distribution, model.distribution_version) == ("some-dist", "1.2")
        assert (model.parts, model.bytes, model.empty) == ((None, "second"), 8, False)
        assert (idle.name, idle.parts, idle.bytes, idle.empty) == ("idle", (), 0, True)
        assert each.metadata("model").version == 3
        assert each.read("model", "second") == {"x": 1}
    assert list_names(written.path) == ["manifest.json", "model.safetensors"]


def test_metrics_of_no_dimension_are_taken_by_value(tmp_path):
    metrics = {"a": torch.tensor(0.5), "b": np.float32(0.25), "c": np.array(2), "d": True}
    assert save(tmp_path, metrics=metrics).metrics == {"a": 0.5, "b": 0.25, "c": 2, "d": True}
    with pytest.raises(StateError, match="metrics are numbers: 'a' is a str, 'b' is a Tensor"):
        save(tmp_path, metrics={"a": "low", "b": torch.ones(2)})


def test_what_is_not_plain_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(StateError, match=r"progress: 1 value cannot be stored: \['x'\] \(object\)"):
        save(tmp_path / "run", progress={"x": object()})
    with pytest.raises(StateError, match="settings: lr: tensors belong into a section"):
        save(tmp_path / "run", settings={"lr": torch.ones(1)})
    assert not (tmp_path / "run").exists()


def test_a_second_checkpoint_of_a_step_gets_a_serial_above_all_that_were(tmp_path):
    names = [save(tmp_path, step=7).path.name for _ in range(3)]
    assert names == ["step-00000007", "step-00000007-1", "step-00000007-2"]
    shutil.rmtree(tmp_path / "step-00000007")
    (tmp_path / "step-00000007-4").write_text("in the way")
    assert save(tmp_path, step=7).path.name == "step-00000007-5"
    assert [c.serial for c in checkpoints(tmp_path)] == [1, 2, 5]


def test_bytes_are_told_as_they_are_written_and_verified(tmp_path):
    written, verified = [], []
    state = {"big": torch.zeros(5 * 2**20, dtype=torch.uint8), "small": torch.ones(3)}
    checkpoint = save(tmp_path, section("s", state), on_bytes=written.append)
    checkpoint.verify(on_bytes=verified.append)
    assert sum(written) == sum(verified) == checkpoint.sections["s"].bytes == 5 * 2**20 + 12
    assert max(written) < 5 * 2**20


def test_saving_equal_states_writes_equal_files(tmp_path):
    state = {"w": torch.arange(5), "names": {"b", "a"}}
    one, other = (save(tmp_path, section("s", state)) for _ in range(2))
    files_of = [(each.path / "s.safetensors").read_bytes() for each in (one, other)]
    assert files_of[0] == files_of[1]
    manifests = [json.loads((each.path / "manifest.json").read_bytes()) for each in (one, other)]
    assert manifests[0]["sections"] == manifests[1]["sections"]


# -- names -----------------------------------------------------------------------------------------


def test_a_colon_in_a_name_is_a_plus_in_the_file(tmp_path):
    checkpoint = save(tmp_path, section("ema-hook:ema", [torch.ones(1)], best=[torch.ones(1)]))
    assert list_names(checkpoint.path) == [
        "ema-hook+ema.best.safetensors",
        "ema-hook+ema.safetensors",
        "manifest.json",
    ]
    assert list(open_checkpoint(checkpoint.path).sections) == ["ema-hook:ema"]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".a", "-a", "a b", "ä", "a+b", "a\n", ":a"])
def test_a_name_that_is_no_file_name_everywhere_is_refused(tmp_path, name):
    with pytest.raises(CallError) as caught:
        save(tmp_path / "run", section(name, [torch.ones(1)]))
    assert (
        f"section {name!r}: up to 100 letters, digits, _ . - : only, and the first no . - or :"
        in str(caught.value)
    )
    assert not (tmp_path / "run").exists()


def test_names_that_are_equal_but_for_case_are_refused():
    with pytest.raises(CallError, match="sections 'Ema' and 'ema' are equal but for case"):
        check_names(["Ema", "model", "ema"])
    with pytest.raises(ManyErrors, match="sections cannot be named so"):
        check_names(["Ema", "ema", "a/b"])


def test_a_part_and_a_section_that_would_be_one_file_are_refused(tmp_path):
    with pytest.raises(CallError, match=r"'a\.b' and 'a\.B' are one file; rename"):
        save(tmp_path, section("a", None, b=1), section("a.B", 1))


# -- the commit ------------------------------------------------------------------------------------


def name_file(descriptor: int) -> str:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name


def test_the_manifest_is_last_and_all_is_on_the_disk_before_the_one_rename(tmp_path, monkeypatch):
    """Source: Lightning-AI/pytorch-lightning#688, petuum/adaptdl#81."""
    calls = []

    def record(name: str) -> Callable[..., Any]:
        real = getattr(files, name)

        def call(path: Path, *rest: Any) -> Any:
            calls.append((name, path.name))
            return real(path, *rest)

        return call

    for name in ("create_folder", "write_file", "sync_folder", "rename_folder", "remove_folder"):
        monkeypatch.setattr(files, name, record(name))
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(name_file(fd)) or fsync(fd))
    run = tmp_path / "run"
    make_run_directory(run)
    save(run, section("a", [torch.ones(1)]), section("b", [torch.ones(1)]))
    hidden = next(name for kind, name in calls if kind == "rename_folder")
    assert calls == [
        ("sync_folder", tmp_path.name),
        ("create_folder", hidden),
        ("write_file", "a.safetensors"),
        ("write_file", "b.safetensors"),
        ("write_file", "manifest.json"),
        ("sync_folder", hidden),
        ("rename_folder", hidden),
        ("sync_folder", "run"),
    ]
    in_hidden = ["a.safetensors", "b.safetensors", "manifest.json"]
    assert synced == [tmp_path.name, *in_hidden, hidden, "run"]
    assert hidden.startswith(f".step-00000001.{os.getpid()}-")
    assert hidden.endswith(".tmp")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_save_that_is_broken_off_leaves_nothing(tmp_path, error):
    """Source: petuum/adaptdl#81."""
    old = save(tmp_path, section("s", [torch.ones(3)]))

    def stop(count: int) -> None:
        raise error("stop")

    with pytest.raises(error, match="stop"):
        save(tmp_path, section("s", [torch.zeros(3)]), step=2, on_bytes=stop)
    assert list_names(tmp_path) == ["step-00000001"]
    assert old.read("s")[0].tolist() == [1, 1, 1]


def run_in_fork(action: Callable[[], None]) -> int:
    """Run in a forked process; return its exit status, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_full_disk_is_the_first_cause_and_the_old_checkpoint_stays(tmp_path):
    """Source: XavierXiao/Dreambooth-Stable-Diffusion#45."""
    old = save(tmp_path, section("s", [torch.ones(3)]))

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(WriteError) as caught:
            save(tmp_path, section("s", [torch.zeros(2**16)]), step=2)
        assert caught.value.errno == errno.EFBIG
        assert Path(caught.value.filename).name == "s.safetensors"
        assert "cannot write: File too large" in str(caught.value)
        assert isinstance(caught.value.__cause__, OSError)

    assert run_in_fork(fill) == 0
    assert list_names(tmp_path) == ["step-00000001"]
    old.verify()


def test_a_file_in_the_way_of_the_run_directory_is_a_write_error(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(WriteError, match="cannot create the run directory: File exists") as caught:
        make_run_directory(tmp_path / "run")
    assert caught.value.errno == errno.EEXIST
    with pytest.raises(WriteError, match="cannot create the run directory: Not a directory"):
        make_run_directory(tmp_path / "run" / "inner")


def test_a_process_killed_at_any_moment_of_a_save_leaves_the_old_or_the_new_checkpoint(
    tmp_path, monkeypatch
):
    """Source: Lightning-AI/pytorch-lightning#688, NVIDIA-NeMo/Speech#7952."""
    states = [section("a", [torch.ones(3)]), section("b", {"x": torch.zeros(2)})]
    save(tmp_path, *states)
    moment, status, left = 0, -signal.SIGKILL, 0
    while status == -signal.SIGKILL:
        countdown = iter(range(moment, -1, -1))

        def kill_at_zero(real: Any, countdown: Iterator[int] = countdown) -> Any:
            def call(*arguments: Any) -> Any:
                if next(countdown, None) == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments)

            return call

        def die() -> None:
            for name in ("mkdir", "open", "write", "fsync", "close", "rename"):
                monkeypatch.setattr(os, name, kill_at_zero(getattr(os, name)))
            save(tmp_path, *states, step=2)

        status = run_in_fork(die)
        found = checkpoints(tmp_path)
        for each in found:
            each.verify()
        assert [c.step for c in found] in ([1], [1, 2])
        left += len(sweep(tmp_path))
        assert list_names(tmp_path) == [c.path.name for c in found]
        if len(found) == 2:
            shutil.rmtree(found[1].path)
        moment += 1
    assert status == 0
    assert moment > 15  # a rename, a dozen other calls
    assert left > 10


def test_files_of_a_checkpoint_are_json_and_safetensors_only(tmp_path):
    """Source: huggingface/transformers#43140."""
    state = {"w": torch.ones(1), "a": np.array(["x"]), "b": b"\x80\x04" * 4096, "t": (1, {2})}
    checkpoint = save(tmp_path, section("s", state))
    assert list_names(checkpoint.path) == ["manifest.json", "s.safetensors"]
    json.loads((checkpoint.path / "manifest.json").read_bytes())


# -- damage ----------------------------------------------------------------------------------------


def change(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def is_found(checkpoint: Checkpoint) -> bool:
    try:
        open_checkpoint(checkpoint.path).verify()
    except CorruptCheckpointError:
        return True
    return False


def test_every_flipped_bit_and_every_cut_of_a_small_checkpoint_is_found(tmp_path):
    """Source: pytorch/pytorch#126952."""
    checkpoint = save(tmp_path, section("s", {"w": torch.ones(3), "n": 1}))
    assert not is_found(checkpoint)
    for name in list_names(checkpoint.path):
        path = checkpoint.path / name
        whole = path.read_bytes()
        missed = []
        with path.open("r+b", buffering=0) as file:
            for place, byte in enumerate(whole):
                for bit in range(8):
                    file.seek(place)
                    file.write(bytes([byte ^ 1 << bit]))
                    if not is_found(checkpoint):
                        missed.append((name, place, bit))
                file.seek(place)
                file.write(bytes([byte]))
        for size in range(len(whole)):
            change(path, whole[:size])
            if not is_found(checkpoint):
                missed.append((name, size))
        change(path, whole + b"\0")
        assert is_found(checkpoint)
        change(path, whole)
        assert missed == []
    assert not is_found(checkpoint)


@law
@given(st.data())
def test_any_damage_to_any_file_is_found(tmp_path_factory, data):
    """Source: pytorch/pytorch#126952, pytorch/torchtitan#4011."""
    run = tmp_path_factory.mktemp("run")
    state = {"w": torch.randn(2000), "m": torch.zeros(300, dtype=torch.bfloat16), "n": [1, 2]}
    checkpoint = save(run, section("model", state, extra=state), section("x:y", (1, "text")))
    path = checkpoint.path / data.draw(st.sampled_from(list_names(checkpoint.path)))
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "append", "insert", "swap", "empty", "gone"])):
        case "flip":
            other = whole[place] ^ data.draw(st.integers(1, 255))
            damaged = whole[:place] + bytes([other]) + whole[place + 1 :]
        case "cut":
            damaged = whole[:place]
        case "append":
            damaged = whole + data.draw(st.binary(min_size=1, max_size=9))
        case "insert":
            damaged = whole[:place] + b"\0" + whole[place:]
        case "swap":
            damaged = whole[place:] + whole[:place] if place else whole[::-1]
        case "empty":
            damaged = b""
        case _:
            damaged = None
    if damaged is None:
        path.unlink()
    else:
        path.write_bytes(damaged)
    if damaged == whole:
        assert not is_found(checkpoint)
    else:
        assert is_found(checkpoint)
        with pytest.raises(CorruptCheckpointError, match=path.name.replace("+", r"\+")):
            checkpoint.verify()  # it was opened before


def test_hashes_of_tensors_alone_would_miss_a_changed_header(tmp_path):
    """The negative control: header and manifest hold what the hashes of tensors do not cover."""
    checkpoint = save(tmp_path, section("s", {"w": torch.ones(3)}))
    path = checkpoint.path / "s.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
    data = path.read_bytes()[-12:]
    assert xxhash.xxh3_128_hexdigest(data) == checkpoint.metadata("s").tensors["w"].hash
    with pytest.raises(CorruptCheckpointError, match="its header"):
        checkpoint.verify(hashes=False)


def test_all_damage_is_named_at_once_with_file_tensor_and_sizes(tmp_path):
    checkpoint = save(
        tmp_path,
        section("a", {"u": torch.ones(2), "v": torch.ones(2), "w": torch.ones(2)}),
        section("b", [torch.ones(4)]),
        section("c", [torch.ones(4)]),
        section("d", [torch.ones(4)]),
    )
    a, b, c, d = (checkpoint.path / f"{name}.safetensors" for name in "abcd")
    data = bytearray(a.read_bytes())
    data[-1] ^= 1
    data[-9] ^= 1
    change(a, bytes(data))
    size = len(b.read_bytes())
    change(b, b.read_bytes()[:-3])
    c.unlink()
    change(d, b"\xff" + d.read_bytes()[1:])
    with pytest.raises(CorruptCheckpointError) as caught:
        checkpoint.verify()
    lines = str(caught.value).split("; ")
    assert len(lines) == 5
    assert lines[0].startswith(
        f"{a}: tensor 'v' ([2] float32, 8 bytes from {len(data) - 16}) is damaged"
    )
    assert lines[1].startswith(
        f"{a}: tensor 'w' ([2] float32, 8 bytes from {len(data) - 8}) is damaged"
    )
    assert lines[2] == f"{b}: has {size - 3} bytes, saved were {size}"
    assert lines[3] == f"{c}: cannot be read: No such file or directory"
    assert lines[4].startswith(f"{d}: its header ({size - 16} bytes) is damaged: its hash is ")
    checkpoint.verify(["d"][:0])
    with pytest.raises(CorruptCheckpointError, match=r"b\.safetensors"):
        checkpoint.verify(["b"])


def test_without_hashes_sizes_and_headers_are_checked_and_data_is_not(tmp_path):
    checkpoint = save(tmp_path, section("s", [torch.ones(4)]))
    path = checkpoint.path / "s.safetensors"
    whole = path.read_bytes()
    change(path, whole[:-1] + b"\xff")
    checkpoint.verify(hashes=False)
    with pytest.raises(CorruptCheckpointError, match=r"its hash is .*, saved was "):
        checkpoint.verify()
    change(path, whole[:-1])
    with pytest.raises(CorruptCheckpointError, match="saved were"):
        checkpoint.verify(hashes=False)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_file_that_was_cut_short_is_a_typed_error_with_its_path(tmp_path, share):
    """Source: pytorch/pytorch#170244, facebookresearch/metaseq#158."""
    checkpoint = save(tmp_path, section("s", [torch.ones(100)]))
    path = checkpoint.path / "s.safetensors"
    whole = path.read_bytes()
    change(path, whole[: int(len(whole) * share)])
    with pytest.raises(CorruptCheckpointError) as caught:
        checkpoint.read("s")
    assert str(caught.value).startswith(f"{path}: has {int(len(whole) * share)} bytes, saved were ")


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    checkpoint = save(tmp_path, section("s", {"w": torch.ones(2**21)}))
    path = checkpoint.path / "s.safetensors"
    size = path.stat().st_size

    def shrink(count: int) -> None:
        os.truncate(path, size - 1)

    with pytest.raises(CorruptCheckpointError, match=f"safetensors: ends at byte {size - 1}"):
        checkpoint.verify(on_bytes=shrink)


def test_a_flipped_bit_is_found_while_it_is_read(tmp_path):
    """Source: pytorch/pytorch#126952."""
    checkpoint = save(tmp_path, section("s", {"w": torch.ones(4)}))
    path = checkpoint.path / "s.safetensors"
    change(path, path.read_bytes()[:-1] + b"\x3e")
    live = {"w": torch.zeros(4)}
    for action in (lambda: checkpoint.read("s"), lambda: checkpoint.read_into("s", live)):
        with pytest.raises(
            CorruptCheckpointError, match=r"s\.safetensors: tensor 'w' .* is damaged"
        ):
            action()


def test_a_manifest_changed_behind_an_open_checkpoint_is_noticed(tmp_path):
    one = save(tmp_path, section("s", {"n": 1}))
    other = save(tmp_path, section("s", {"n": 2}))
    shutil.copy(other.path / "manifest.json", one.path)
    with pytest.raises(CorruptCheckpointError, match="was changed since it was opened"):
        one.verify()


def seal(path: Path, change_one: Callable[[dict[str, Any]], None]) -> None:
    """Write a manifest anew, with a seal that fits."""
    manifest = json.loads(path.read_bytes())
    del manifest["seal"]
    change_one(manifest)
    body = json.dumps(manifest, separators=(",", ":")).encode()[:-1]
    path.write_bytes(body + b',"seal":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n')


def test_a_newer_format_is_refused_with_both_versions(tmp_path):
    checkpoint = save(tmp_path, section("s", {"n": 1}))
    seal(checkpoint.path / "manifest.json", lambda m: m.update(format=2))
    with pytest.raises(FormatError) as caught:
        open_checkpoint(checkpoint.path)
    assert "manifest.json: its format is 2, and this version of hookbus reads 1" in str(
        caught.value
    )


@pytest.mark.parametrize(
    "change_one",
    [
        lambda m: m.pop("step"),
        lambda m: m.update(more=1),
        lambda m: m.update(created="yesterday"),
        lambda m: m.update(sections=[]),
        lambda m: m["sections"]["s"]["parts"][0].pop("tree"),
        lambda m: m["sections"]["s"]["parts"][0]["tensors"]["w"].update(dtype="float2"),
        lambda m: m["sections"]["s"]["parts"][0]["tensors"]["w"].update(bytes=-5),
        lambda m: m.update(progress={"$quaternion": 1}),
        lambda m: m.update(progress={"$tensor": ["w", False]}),
    ],
)
def test_a_sealed_manifest_that_nobody_wrote_is_a_format_error(tmp_path, change_one):
    checkpoint = save(tmp_path, section("s", {"w": torch.ones(2)}))
    seal(checkpoint.path / "manifest.json", change_one)
    with pytest.raises(FormatError):
        open_checkpoint(checkpoint.path)


def test_what_is_no_checkpoint_says_what_it_is(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(CorruptCheckpointError, match=r"is missing, so .* is no whole checkpoint"):
        open_checkpoint(tmp_path / "step-00000001")
    (tmp_path / "step-00000001").rmdir()
    with pytest.raises(CorruptCheckpointError, match=r"is missing, so .* is no whole checkpoint"):
        open_checkpoint(tmp_path)


def test_a_section_or_part_that_is_not_there_is_named_with_those_that_are(tmp_path):
    checkpoint = save(tmp_path, section("model", 1, ema=2), section("idle"))
    with pytest.raises(MissingSectionError, match="no section 'mode'; it has model, idle"):
        checkpoint.read("mode")
    with pytest.raises(MissingSectionError, match="no part 'x'; it has one without a name, ema"):
        checkpoint.metadata("model", "x")
    with pytest.raises(MissingSectionError, match="no state without a part; it has none"):
        checkpoint.read_into("idle", {})
    with pytest.raises(MissingSectionError, match="no section 'mode'"):
        checkpoint.verify(["mode"])


# -- the run directory -----------------------------------------------------------------------------


def test_checkpoints_go_by_number_whatever_the_text_or_the_clock_says(tmp_path):
    """Source: huggingface/transformers#27138, huggingface/accelerate#1163."""
    steps = [10000, 9900, 100_000_000, 2, 9800, 99_999_999]
    for step in steps:
        save(tmp_path, step=step)
    save(tmp_path, step=9900)
    for age, folder in enumerate(folders(tmp_path)):
        os.utime(folder, (1000 - age, 1000 - age))
    ordered = [2, 9800, 9900, 9900, 10000, 99_999_999, 100_000_000]
    assert [c.step for c in checkpoints(tmp_path)] == ordered
    assert [read_folder_name(f.name) for f in folders(tmp_path)] == [
        (step, int(i == 3)) for i, step in enumerate(ordered)
    ]


def test_names_that_are_not_exactly_ours_are_never_looked_at(tmp_path):
    """Source: pytorch/torchtitan#4292, pytorch/torchtitan#315."""
    good = save(tmp_path, step=6)
    for name in (
        "step-100.backup",
        "foo-step-00000100",
        "step-1x",
        "step-9",
        "step-000000009",
        "step-00000009-0",
        "step-00000009-01",
        "step-00000009\n",
        "step-\uff10\uff10\uff10\uff10\uff10\uff1009",
        "Step-00000009",
    ):
        shutil.copytree(good.path, tmp_path / name)
    (tmp_path / "step-00000050").write_text("a file")
    assert folders(tmp_path) == [good.path]
    assert [c.path for c in checkpoints(tmp_path)] == [good.path]
    assert sweep(tmp_path) == []


def test_a_damaged_checkpoint_is_left_out_with_a_warning(tmp_path, caplog):
    """Source: pytorch/torchtitan#4011, pytorch/torchtitan#315."""
    for step in (1, 2, 3):
        save(tmp_path, step=step)
    (tmp_path / "step-00000003" / "manifest.json").write_bytes(b"")
    seal(tmp_path / "step-00000002" / "manifest.json", lambda m: m.update(format=9))
    (tmp_path / "step-00000009").mkdir()
    with caplog.at_level(logging.WARNING, "hookbus"):
        assert [c.step for c in checkpoints(tmp_path)] == [1]
    said = [record.getMessage() for record in caplog.records]
    assert [s.split(" is left out: ")[0] for s in said] == [
        str(tmp_path / f"step-0000000{n}") for n in (2, 3, 9)
    ]
    assert "its format is 9" in said[0]
    assert "its seal does not fit its 0 bytes" in said[1]
    assert "manifest.json is missing" in said[2]


def test_a_run_that_is_not_there_has_no_checkpoints(tmp_path):
    assert (
        checkpoints(tmp_path / "run") == folders(tmp_path / "run") == sweep(tmp_path / "run") == []
    )


def test_the_best_is_never_one_without_a_number(tmp_path):
    nan = float("nan")
    for step, metrics in enumerate([{"x": nan}, {"x": 2.0}, {}, {"x": 1}, {"x": 1.0}, {"x": nan}]):
        save(tmp_path, step=step, metrics=metrics)
    assert best(tmp_path, "x").step == 3
    assert best(tmp_path, "x", mode="max").step == 1
    assert best(tmp_path, "y") is None
    with pytest.raises(CallError, match="mode='lowest': pass 'min' or 'max'"):
        best(tmp_path, "x", mode="lowest")


def test_a_sweep_takes_the_leftovers_of_dead_saves_and_nothing_else(tmp_path):
    """Source: NVIDIA-NeMo/Speech#7952, NVIDIA-NeMo/Automodel#3254."""
    save(tmp_path, step=5)
    ours = [".step-00000005.1-0123456789abcdef.tmp", ".step-00000006-2.99-fedcba9876543210.tmp"]
    others = [
        ".step-00000005.tmp",
        ".step-5.1-0123456789abcdef.tmp",
        "step-00000005.1-0123456789abcdef.tmp",
        ".step-00000005.1-0123456789abcdef.tmp.bak",
        ".cache",
    ]
    for name in ours + others:
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "inner" / "file").write_text("x")
    (tmp_path / ".step-00000007.1-0123456789abcdef.tmp").symlink_to(tmp_path / ".cache")
    kept = set(list_names(tmp_path)) - set(ours)
    assert sweep(tmp_path) == [tmp_path / name for name in sorted(ours)]
    assert set(list_names(tmp_path)) == kept
    assert (tmp_path / ".cache" / "inner" / "file").exists()


def test_a_sweep_leaves_the_save_in_hand_alone(tmp_path):
    swept = []
    save(
        tmp_path,
        section("s", [torch.ones(2)]),
        on_bytes=lambda n: swept.append(sweep(tmp_path)),
    )
    assert swept == [[]]
    assert [c.step for c in checkpoints(tmp_path)] == [1]


# -- reading in place ------------------------------------------------------------------------------


def make_live(value: float) -> dict[str, Any]:
    return {
        "shadow": OrderedDict(w=torch.full((3, 2), value), b=torch.full((2,), value).double()),
        "wide": torch.full((2, 3, 4, 5), value).to(memory_format=torch.channels_last),
        "column": torch.full((4, 4), value)[:, 1],
        "p": torch.nn.Parameter(torch.full((2,), value)),
        "pair": (torch.full((1,), value), value),
        "array": np.full((2, 2), value),
        "text": np.full(3, str(value)),
        "steps": int(value),
        "history": [value] * int(value),
        "seen": deque([value] * int(value), 5),
        "by_epoch": {n: {"loss": [value]} for n in range(int(value))},
        "nothing": None,
        "blob": bytes([int(value)]) * 5000,
    }


def test_a_state_is_read_into_the_tensors_and_containers_that_are_there(tmp_path):
    checkpoint = save(tmp_path, section("s", make_live(3.0)))
    live = make_live(1.0)
    inside = {
        name: value.data_ptr() if isinstance(value, torch.Tensor) else id(value)
        for name, value in [*live.items(), *live["shadow"].items()]
        if name not in ("pair", "steps", "blob")
    }
    strides = live["wide"].stride(), live["column"].stride()
    by_epoch = live["by_epoch"][0]
    assert checkpoint.read_into("s", live) is live
    assert flatten(live).tree == flatten(make_live(3.0)).tree
    for one, other in zip(
        flatten(live).tensors.values(), flatten(make_live(3.0)).tensors.values(), strict=True
    ):
        assert torch.equal(one, other)
    for name, value in [*live.items(), *live["shadow"].items()]:
        if name in inside:
            now = value.data_ptr() if isinstance(value, torch.Tensor) else id(value)
            assert now == inside[name]
    assert (live["wide"].stride(), live["column"].stride()) == strides
    assert live["by_epoch"][0] is by_epoch
    assert live["pair"][1] == 3.0


def test_reading_in_place_counts_as_a_change_for_autograd(tmp_path):
    checkpoint = save(tmp_path, section("s", [torch.zeros(2), torch.zeros(2, 2).t()]))
    live = [torch.ones(2, requires_grad=True), torch.ones(2, 2).t().requires_grad_()]
    versions = [t._version for t in live]
    (live[0] * live[0]).sum()
    checkpoint.read_into("s", live)
    assert all(t._version > v for t, v in zip(live, versions, strict=True))
    assert [t.requires_grad for t in live] == [True, True]
    assert live[0].tolist() == [0, 0]
    with torch.inference_mode():
        frozen = [torch.ones(2), torch.ones(2, 2)]
        checkpoint.read_into("s", frozen)
    assert frozen[0].tolist() == [0, 0]


def test_a_live_view_that_is_conjugated_takes_the_values_and_not_the_bytes(tmp_path):
    value = torch.tensor([1 + 2j])
    live = [torch.zeros(1, dtype=torch.complex64).conj()]
    save(tmp_path, section("s", [value])).read_into("s", live)
    assert live[0].is_conj()
    assert torch.equal(live[0], value)


def test_all_differences_are_named_and_nothing_is_changed(tmp_path):
    saved = {
        "shadow": OrderedDict(
            {"head.weight": torch.zeros(10, 64), "head.bias": torch.zeros(10), "x": torch.zeros(1)}
        ),
        "same": torch.zeros(3),
        "array": np.zeros(2),
        "list": [torch.zeros(1), torch.zeros(1)],
        "tuple": (torch.zeros(1),),
        "none": None,
        "steps": 5,
        "names": np.array(["ab"]),
    }
    live = {
        "shadow": {
            "head.weight": torch.ones(12, 64),
            "head.bias": torch.ones(10, dtype=torch.bfloat16),
            "y": {"z": torch.ones(2)},
        },
        "same": torch.ones(3),
        "array": np.ones(2, np.float32),
        "list": [torch.ones(1)],
        "tuple": [torch.ones(1)],
        "none": torch.ones(4),
        "steps": 1,
        "names": np.array(["a"]),
    }
    checkpoint = save(tmp_path, section("ema", None, best=saved))
    with pytest.raises(MismatchError) as caught:
        checkpoint.read_into("ema", live, "best")
    assert str(caught.value) == (
        "ema.best: 9 of 11 do not fit:"
        " shadow.head.weight saved [10, 64] float32, run has [12, 64] float32;"
        " shadow.head.bias saved [10] float32, run has [10] bfloat16;"
        " shadow.x saved [1] float32, run has nothing;"
        " shadow.y.z saved nothing, run has [2] float32;"
        " array saved [2] float64, run has [2] float32;"
        " list.1 saved [1] float32, run has nothing;"
        " tuple saved a tuple of 1, run has a list of 1;"
        " none saved None, run has [4] float32;"
        " names saved [1] <U2, run has [1] <U1"
    )
    assert live["same"].tolist() == [1, 1, 1]
    assert live["steps"] == 1


def test_a_plain_value_beside_tensors_that_one_side_lacks_is_a_difference(tmp_path):
    checkpoint = save(tmp_path, section("s", {"w": torch.zeros(1), "decay": 0.9, "kind": "a"}))
    with pytest.raises(MismatchError) as caught:
        checkpoint.read_into("s", {"w": torch.ones(1), "steps": 3, "log": []})
    assert str(caught.value) == (
        "s: 4 of 5 do not fit: decay saved 0.9, run has nothing;"
        " kind saved a str, run has nothing; steps saved nothing, run has 3;"
        " log saved nothing, run has a list of 0"
    )


def test_with_partial_only_what_both_have_is_read(tmp_path):
    saved = {"w": torch.zeros(2), "gone": torch.zeros(1), "deep": {"a": torch.zeros(1), "n": 1}}
    checkpoint = save(tmp_path, section("s", {**saved, "pair": (torch.zeros(1), 5)}))
    live = {"w": torch.ones(2), "new": torch.ones(1), "deep": {"a": torch.ones(1), "m": 2}}
    live["pair"] = (torch.ones(1), 4, "more")
    checkpoint.read_into("s", live, partial=True)
    assert (live["w"].tolist(), live["new"].tolist()) == ([0, 0], [1])
    assert live["deep"] == {"a": torch.zeros(1), "m": 2}
    assert live["pair"] == (torch.zeros(1), 5, "more")
    assert set(live) == {"w", "new", "deep", "pair"}
    with pytest.raises(MismatchError, match=r"1 of 3 .*: w saved \[2\] float32, run has \[3\]"):
        checkpoint.read_into("s", {**live, "w": torch.ones(3)}, partial=True)


def test_a_container_of_plain_values_takes_all_that_was_saved(tmp_path):
    saved = {"a": {"x": 1}, "d": [1, 2]}
    checkpoint = save(tmp_path, section("s", saved), section("l", [1, [2]]), section("t", (1, 2)))
    live = Counter(a=5, b=6)
    assert checkpoint.read_into("s", live) is live
    assert dict(live) == saved
    numbers = deque([7, 8, 9], 4)
    assert checkpoint.read_into("l", numbers) == [1, [2]]  # another type: it is replaced
    assert list(numbers) == [7, 8, 9]
    listed = [0]
    assert checkpoint.read_into("l", listed) is listed
    assert listed == [1, [2]]
    assert checkpoint.read_into("t", (0, 0)) == (1, 2)


@pytest.mark.parametrize(
    ("make_one", "reason"),
    [
        (
            lambda: torch.ones(2, device="meta"),
            "run has [2] float32 on the meta device, which has no data",
        ),
        (lambda: torch.ones(1).expand(2), "run has [2] float32 that overlaps itself"),
        (lambda: torch.eye(2).to_sparse()[0], "of layout torch.sparse_coo, not torch.strided"),
        (lambda: np.ones(2, np.float32), "run has [2] float32, a ndarray"),
        (lambda: torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})), ", a Mine"),
    ],
)
def test_a_live_tensor_that_cannot_be_written_is_a_difference(tmp_path, make_one, reason):
    checkpoint = save(tmp_path, section("s", [torch.zeros(2)]))
    with pytest.raises(MismatchError) as caught:
        checkpoint.read_into("s", [make_one()])
    assert str(caught.value).startswith("s: 1 of 1 do not fit: 0 saved [2] float32, run has ")
    assert str(caught.value).endswith(reason)


def test_a_read_only_array_is_a_difference(tmp_path):
    checkpoint = save(tmp_path, section("s", {"a": np.zeros(2)}))
    live = np.ones(2)
    live.flags.writeable = False
    with pytest.raises(MismatchError, match=r"a saved \[2\] float64, run has .* that is read-only"):
        checkpoint.read_into("s", {"a": live})


def test_ties_must_be_the_same_on_both_sides(tmp_path):
    """Source: huggingface/transformers#38870."""
    w = torch.zeros(2)
    tied = save(tmp_path, section("s", {"a": w, "b": w}))
    loose = save(tmp_path, section("s", {"a": torch.zeros(2), "b": torch.ones(2)}))
    live = torch.full((2,), 7.0)
    with pytest.raises(
        MismatchError, match="a and b are one tensor in the run, two in the checkpoint"
    ):
        loose.read_into("s", {"a": live, "b": live})
    with pytest.raises(MismatchError, match="a and b share memory in the run only"):
        loose.read_into("s", overlapping())
    with pytest.raises(
        MismatchError, match="a and b are one tensor in the checkpoint, two in the run"
    ):
        tied.read_into("s", {"a": torch.ones(2), "b": torch.ones(2)})
    assert live.tolist() == [7, 7]
    apart = {"a": torch.ones(2), "b": torch.ones(2)}
    tied.read_into("s", apart, partial=True)
    assert [t.tolist() for t in apart.values()] == [[0, 0], [0, 0]]
    tied.read_into("s", {"a": live, "b": live})
    assert live.tolist() == [0, 0]


def overlapping() -> dict[str, torch.Tensor]:
    base = torch.ones(3)
    return {"a": base[:2], "b": base[1:]}


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:torch.quantize_per")
def test_sparse_and_quantized_tensors_are_read_in_place(tmp_path):
    def make(x: torch.Tensor, scale: float) -> list[torch.Tensor]:
        return [x.to_sparse(), torch.quantize_per_tensor(x, scale, 0, torch.qint8)]

    checkpoint = save(tmp_path, section("s", make(torch.eye(3), 0.1)))
    live = make(torch.ones(3, 3), 0.5)
    kept = list(live)
    checkpoint.read_into("s", live)
    assert all(one is other for one, other in zip(live, kept, strict=True))
    assert torch.equal(live[0].to_dense(), torch.eye(3))
    assert torch.equal(live[1], make(torch.eye(3), 0.1)[1])
    compressed = save(tmp_path, section("s", [torch.eye(3).to_sparse_csr()]))
    with pytest.raises(MismatchError, match="layout sparse_csr is not filled in place, use read"):
        compressed.read_into("s", [torch.eye(3).to_sparse_csr()])


def test_metadata_is_the_state_without_its_data(tmp_path):
    state = {"w": [torch.zeros(2, 3)], "n": (1, None), "a": np.zeros(4, np.int16), "b": bytes(5000)}
    metadata = save(tmp_path, section("s", state, version=2)).metadata("s")
    shapes = {name: str(info) for name, info in metadata.tensors.items()}
    assert shapes == {"w.0": "[2, 3] float32", "a": "[4] int16", "b": "[5000] uint8"}
    assert metadata.state["w"] == [metadata.tensors["w.0"]]
    assert metadata.state["n"] == (1, None)
    assert metadata.state["a"] is metadata.tensors["a"]
    assert metadata.version == 2


def test_nothing_of_a_checkpoint_is_kept_once_it_was_handed_over(tmp_path):
    """Source: huggingface/transformers#12718."""
    checkpoint = save(tmp_path, section("s", {"w": torch.ones(3)}))
    state = checkpoint.read("s")
    alive = weakref.ref(state["w"])
    del state
    gc.collect()
    assert alive() is None
    descriptors = len(os.listdir("/proc/self/fd"))
    checkpoint.read("s")
    checkpoint.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert checkpoint.step == 1
    assert checkpoint.read("s")["w"].tolist() == [1, 1, 1]
