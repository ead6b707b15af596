"""The lock on a run directory: one process, and in it the newest holder."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from hookbus.checkpoint import RunLock
from hookbus.errors import RunLockedError, WriteError


def take(run: Path) -> RunLock:
    lock = RunLock(run)
    lock.take()
    return lock


def is_free(run: Path) -> bool:
    """Whether another process can take the lock."""

    def try_it() -> None:
        take(run)

    return run_in_fork(try_it) == 0


def run_in_fork(action: Callable[[], None]) -> int:
    """Run in a forked process; 0 if it went well, 3 if the run was locked, 1 for the rest."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except RunLockedError:
            os._exit(3)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def other_process(run: Path) -> Iterator[int]:
    """Have another process hold the lock until the end of the block; give its number."""
    told, tell = os.pipe()
    wait, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(end)
            lock = take(run)
            os.write(tell, b"1")
            os.read(wait, 1)
            lock.release()
        finally:
            os._exit(0)
    os.close(wait)
    os.close(tell)
    try:
        assert os.read(told, 1) == b"1"
        yield pid
    finally:
        os.close(end)
        os.close(told)
        os.waitpid(pid, 0)


def test_another_process_is_told_who_holds_the_run(tmp_path):
    with other_process(tmp_path) as pid:
        with pytest.raises(RunLockedError) as caught:
            take(tmp_path)
        who = re.escape(f"{tmp_path} is in use by process {pid} on {socket.gethostname()} since ")
        rest = (
            r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00; wait until it has ended, or pass another run"
        )
        assert re.match(who + rest + " directory$", str(caught.value))
    take(tmp_path).release()


def test_a_lock_that_was_not_taken_says_so_and_lets_go_of_nothing(tmp_path):
    with other_process(tmp_path):
        lock = RunLock(tmp_path)
        with pytest.raises(RunLockedError):
            lock.take()
        assert not lock.lost
        lock.release()
        lock.renew()
    assert is_free(tmp_path)


def test_a_released_run_can_be_taken_by_another_process(tmp_path):
    lock = take(tmp_path)
    assert not is_free(tmp_path)
    lock.release()
    assert is_free(tmp_path)
    lock.release()
    assert not lock.lost


def test_a_lock_ends_with_its_process(tmp_path):
    def hold_and_die() -> None:
        take(tmp_path)
        os.kill(os.getpid(), 9)

    assert run_in_fork(hold_and_die) == -9
    assert is_free(tmp_path)


def test_the_file_says_who_holds_it(tmp_path):
    lock = take(tmp_path)
    lock.release()
    owner = json.loads((tmp_path / "run.lock").read_text())
    assert owner["pid"] == os.getpid()
    assert owner["host"] == socket.gethostname()
    assert datetime.fromisoformat(owner["started"]).tzinfo is not None


def test_in_one_process_the_newest_holder_takes_over_and_the_older_learns(tmp_path):
    older = take(tmp_path)
    newer = take(tmp_path)
    assert older.lost
    assert not newer.lost
    older.release()  # not its own any more
    assert not is_free(tmp_path)
    older.renew()
    assert not is_free(tmp_path)
    newer.release()
    assert is_free(tmp_path)


def test_a_lost_lock_can_be_taken_back(tmp_path):
    older, newer = take(tmp_path), take(tmp_path)
    older.take()
    assert newer.lost
    assert not older.lost
    older.release()
    assert is_free(tmp_path)


def test_two_paths_of_one_run_are_one_lock(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    older, newer = take(tmp_path / "run"), take(tmp_path / "link")
    assert older.lost
    newer.release()


def test_locks_of_two_runs_do_not_touch_each_other(tmp_path):
    locks = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        locks.append(take(tmp_path / name))
    locks[0].release()
    assert is_free(tmp_path / "a")
    assert not is_free(tmp_path / "b")
    locks[1].release()


def test_a_forked_child_neither_holds_nor_releases(tmp_path):
    lock = take(tmp_path)

    def look() -> None:
        assert lock.lost
        lock.release()
        with pytest.raises(RunLockedError, match=f"process {os.getppid()} "):
            RunLock(tmp_path).take()

    assert run_in_fork(look) == 0
    assert not lock.lost
    assert not is_free(tmp_path)
    lock.release()


def test_a_child_that_outlives_its_parent_does_not_keep_the_run(tmp_path):
    wait, end = os.pipe()
    told, tell = os.pipe()

    def hold() -> None:
        take(tmp_path)
        if os.fork() == 0:
            os.close(end)
            os.close(told)
            os.read(wait, 1)
            os._exit(0)

    assert run_in_fork(hold) == 0  # the grandchild lives, and has the descriptor
    os.close(tell)
    assert is_free(tmp_path)
    os.close(end)
    assert os.read(told, 1) == b""  # it has ended
    os.close(wait)
    os.close(told)


def test_reading_the_file_in_the_same_process_drops_it_and_renew_takes_it_again(tmp_path):
    lock = take(tmp_path)
    (tmp_path / "run.lock").read_text()
    assert is_free(tmp_path)  # the negative control: POSIX says so
    lock.renew()
    assert not is_free(tmp_path)
    (tmp_path / "run.lock").read_text()
    with other_process(tmp_path) as pid, pytest.raises(RunLockedError, match=f"process {pid} "):
        lock.renew()
    lock.release()


def test_what_is_handed_on_in_one_process_is_a_lock_that_holds(tmp_path):
    take(tmp_path)
    (tmp_path / "run.lock").read_text()  # drops it
    newer = take(tmp_path)
    assert not is_free(tmp_path)
    newer.release()


def test_a_file_that_is_replaced_while_it_is_being_locked_is_not_the_lock(tmp_path, monkeypatch):
    lockf, replaced = fcntl.lockf, []

    def replace_once(descriptor: int, how: int) -> None:
        if not replaced:
            replaced.append((tmp_path / "run.lock").unlink())
        lockf(descriptor, how)

    monkeypatch.setattr(fcntl, "lockf", replace_once)
    lock = take(tmp_path)
    assert replaced
    assert not is_free(tmp_path)
    lock.release()
    assert is_free(tmp_path)


def test_a_lock_whose_file_was_taken_away_is_made_anew(tmp_path):
    lock = take(tmp_path)
    (tmp_path / "run.lock").unlink()
    other = take(tmp_path)
    assert not other.lost
    assert not is_free(tmp_path)
    lock.release()
    assert not is_free(tmp_path)
    other.release()
    assert is_free(tmp_path)


def test_of_many_threads_that_take_at_once_one_holds(tmp_path):
    gate = threading.Barrier(8)
    locks = [RunLock(tmp_path) for _ in range(8)]

    def go(lock: RunLock) -> None:
        gate.wait()
        for _ in range(50):
            lock.take()

    threads = [threading.Thread(target=go, args=[lock]) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = [lock for lock in locks if not lock.lost]
    assert len(held) == 1
    assert not is_free(tmp_path)
    held[0].release()
    assert is_free(tmp_path)


def test_a_holder_that_has_not_signed_yet_is_another_process(tmp_path):
    path = tmp_path / "run.lock"
    wait, end = os.pipe()
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end)
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        fcntl.lockf(file, fcntl.LOCK_EX)
        os.write(tell, b"1")
        os.read(wait, 1)
        os._exit(0)
    assert os.read(told, 1) == b"1"
    with pytest.raises(RunLockedError, match="is in use by another process; wait"):
        take(tmp_path)
    for descriptor in (wait, end, told, tell):
        os.close(descriptor)
    os.waitpid(pid, 0)


def test_a_run_directory_that_is_not_there_is_a_write_error(tmp_path):
    with pytest.raises(WriteError, match="cannot open the run's lock: No such file") as caught:
        take(tmp_path / "nowhere")
    assert caught.value.filename == str(tmp_path / "nowhere" / "run.lock")
