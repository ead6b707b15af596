"""Starts several processes again and again without waiting for their imports.

``python gang.py``: one warm process, which itself never trains, forks the processes of each start.
They find each other by a file, since a store with a thread does not outlive a fork. It reads what
to do from its standard input, a line of JSON each, and answers with one: what a scene of
`gang_scenes` told, or how it broke.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

import hookbus

LIMIT = 30.0  # seconds within which every process ends when one is gone


@attrs.frozen
class End:
    """How a process ended: its status, what it told, and how long after the first one."""

    status: int
    told: Any
    seconds: float


class Gang:
    """Starts the processes of a run, one start after the other; their number may change."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self.folder, self.world_size = folder, world_size
        self._starts = 0

    def start(self, act: Callable[[int], Any]) -> list[End]:
        """Run ``act(rank)`` in each process; return how each ended, by rank."""
        self._starts += 1
        files_ = [self.folder / f"told-{self._starts}-{rank}" for rank in range(self.world_size)]
        pids = [self._fork(act, rank, file) for rank, file in enumerate(files_)]
        ended: dict[int, tuple[int, float]] = {}
        deadline = time.monotonic() + 2 * LIMIT
        while len(ended) < len(pids):
            for pid in set(pids) - set(ended):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[pid] = os.waitstatus_to_exitcode(status), time.monotonic()
            if time.monotonic() > deadline:
                for pid in set(pids) - set(ended):
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(
                    f"rank {[r for r, p in enumerate(pids) if p not in ended]} hangs"
                )
            time.sleep(0.005)
        first = min(at for _, at in ended.values())
        return [
            End(
                ended[pid][0],
                json.loads(file.read_text()) if file.exists() else None,
                ended[pid][1] - first,
            )
            for pid, file in zip(pids, files_, strict=True)
        ]

    def _fork(self, act: Callable[[int], Any], rank: int, file: Path) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(self.folder / f"store-{self._starts}"), self.world_size),
                rank=rank,
                world_size=self.world_size,
            )
            try:
                told = act(rank)
                status = 0
            except Exception as error:
                notes = "\n".join(getattr(error, "__notes__", ()))
                told = {"error": type(error).__name__, "text": str(error), "notes": notes}
                kinds = [each.__name__ for each in type(error).__mro__]
                told["kinds"] = kinds
            except SystemExit as end:
                told, status = {"exit": end.code}, int(end.code or 0)
            written = file.with_suffix(".tmp")
            written.write_text(json.dumps(told))
            written.rename(file)
        except BaseException:
            logging.exception("rank %d broke", rank)
        finally:
            os._exit(status)


# -- the server ----------------------------------------------------------------------------------


def serve() -> None:
    """Answer one line of standard input after the other."""
    scenes = importlib.import_module("gang_scenes")
    importlib.import_module("torch._dynamo")  # by the first step of an optimizer
    torch.set_num_threads(1)
    with hookbus.HookBus():
        gc.freeze()  # what is here already is not searched by each child again
    for line in sys.stdin:
        scene, folder, world_size, arguments = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            gang = Gang(Path(folder), world_size)
            answer["told"] = getattr(scenes, scene)(gang, **arguments)
        except BaseException:
            answer["broke"] = traceback.format_exc()
        print(json.dumps(answer), flush=True)


class Server:
    """The warm process, as the tests see it."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, scene: str, folder: Path, world_size: int, **arguments: Any) -> Any:
        """Let a scene be played; return what it told."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = [scene, str(folder), world_size, arguments]
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "broke" not in answer, answer["broke"]
        return answer["told"]

    def end(self) -> None:
        self._process.communicate(timeout=30)


if __name__ == "__main__":
    serve()
