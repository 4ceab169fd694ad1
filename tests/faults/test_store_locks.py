"""Locks of a killed process are waited for; those of living processes are not."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models import Recipe, Shape, assert_same
from support.resuming import after, train

from lightning_hetero.errors import StoreBusyError
from lightning_hetero.store.format import holders
from lightning_hetero.store.format.directory import StoreDirectory
from lightning_hetero.strategies import HeteroOffloadStrategy

# Its descriptors outlive it, as those of a killed process do until its last write is on the disk.
IN_A_CHILD = """
import fcntl, os, sys, time
descriptors = [os.open(path, os.O_RDONLY) for path in sys.argv[2:]]
for descriptor in descriptors:
    fcntl.flock(descriptor, fcntl.LOCK_EX)
reader, writer = os.pipe()
if os.fork() == 0:
    os.close(writer)
    os.read(reader, 1)  # until the other one has ended
    time.sleep(float(sys.argv[1]))
    os._exit(0)
print("held", flush=True)
time.sleep(600)
"""
# The main thread ends by the system call, so the process is a zombie. Its other thread has the
# files.
IN_A_THREAD = """
import ctypes, fcntl, os, sys, threading, time
descriptors = [os.open(path, os.O_RDONLY) for path in sys.argv[2:]]
for descriptor in descriptors:
    fcntl.flock(descriptor, fcntl.LOCK_EX)
def linger():
    while open(f"/proc/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    print("held", flush=True)
    time.sleep(float(sys.argv[1]))
    os._exit(0)
threading.Thread(target=linger).start()
ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
"""
GEOMETRY = {"blocks": []}


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store that can be resumed, which no process uses."""
    path = tmp_path / "store"
    layout = {"num_blocks": 1, "user_bytes": 0, "parts": []}
    directory = StoreDirectory.create_or_adopt(path, default_root=tmp_path, manifest=GEOMETRY, needed_bytes=0, layout=layout)
    for name in ("COMMIT", "block-00000.a"):
        (path / name).write_bytes(b"")
    directory.close()
    return path


def resume(path: Path) -> None:
    StoreDirectory.create_or_adopt(path, default_root=path.parent, manifest=GEOMETRY, needed_bytes=0, resume=True).close()


def hold(started: list[subprocess.Popen[str]], program: str, seconds: float, *paths: Path) -> int:
    """Another process that holds the locks, and for so long after its end."""
    process = subprocess.Popen([sys.executable, "-c", program, str(seconds), *map(str, paths)], stdout=subprocess.PIPE, text=True)
    started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process.pid


@pytest.mark.parametrize("name", ["MANIFEST", "COMMIT", "block-00000.a"])
@pytest.mark.parametrize("program", [IN_A_CHILD, IN_A_THREAD], ids=["its child", "its thread"])
def test_locks_that_a_dead_process_still_holds_are_waited_for(
    store: Path, started: list[subprocess.Popen[str]], program: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    pid = hold(started, program, 0.3, store / name)
    if program is IN_A_CHILD:
        os.kill(pid, signal.SIGKILL)
        started[0].wait()
    with (store / name).open("rb") as file:
        with pytest.raises(BlockingIOError):  # it is held
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with caplog.at_level(logging.WARNING, "lightning_hetero"):
            resume(store)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (line,) = caplog.messages
    assert f"{str(store / name)!r} is still locked by process {pid}, which has ended" in line


def test_a_living_process_is_refused_without_waiting(
    store: Path, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hold(started, IN_A_CHILD, 0, *(store / name for name in ("MANIFEST", "COMMIT")))
    monkeypatch.setattr(holders.time, "sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(StoreBusyError, match="in use by process"):
        resume(store)
    holders.wait_for_files(store, ["COMMIT"])  # who opens the file refuses it
    assert not caplog.messages


def test_the_process_that_wrote_the_manifest_counts_where_the_kernel_hides_who_holds_a_lock(
    store: Path, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(holders, "holders_of", lambda _: [])
    pid = hold(started, IN_A_CHILD, 0.3, store / "MANIFEST")
    manifest = json.loads((store / "MANIFEST").read_text())
    with (store / "MANIFEST").open("r+") as file:  # in place: it is locked
        json.dump(manifest | {"pid": pid}, file)
        file.truncate()
    with pytest.raises(StoreBusyError, match=f"in use by process {pid}"):
        resume(store)
    assert not caplog.messages
    os.kill(pid, signal.SIGKILL)
    started[0].wait()
    resume(store)
    assert f"by process {pid}, which has ended" in caplog.text


def test_a_lock_that_is_released_as_its_holder_is_looked_for_is_taken(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest's process lives, and has nothing to do with the lock."""
    with (store / "MANIFEST").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def release(_: int) -> list[int]:
            fcntl.flock(other, fcntl.LOCK_UN)
            return []

        monkeypatch.setattr(holders, "holders_of", release)
        resume(store)


def test_a_lock_that_is_never_released_is_refused_in_the_end(
    store: Path, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pid = hold(started, IN_A_CHILD, 0.5, store / "MANIFEST")
    os.kill(pid, signal.SIGKILL)
    started[0].wait()
    monkeypatch.setattr(holders, "WAIT_S", 0.1)
    with pytest.raises(StoreBusyError):
        resume(store)
    assert "which has ended" in caplog.text


def test_a_process_is_not_living_from_the_signal_that_kills_it(started: list[subprocess.Popen[str]]) -> None:
    pid = hold(started, IN_A_CHILD, 0)
    assert holders.is_living(pid)
    os.kill(pid, signal.SIGKILL)
    assert not holders.is_living(pid)  # the signal waits for it, it is ending, or it is a zombie
    started[0].wait()
    assert not holders.is_living(pid)


def test_a_run_goes_on_from_the_store_of_a_process_whose_disk_is_busy(
    tmp_path: Path, started: list[subprocess.Popen[str]], caplog: pytest.LogCaptureFixture
) -> None:
    recipe, path = Recipe(steps=3, shape=Shape(layers=2)), tmp_path / "store"
    plain = train(tmp_path, "auto", recipe)
    train(tmp_path, HeteroOffloadStrategy("disk", disk_path=path), recipe, stop=2)
    names = [name for name in os.listdir(path) if (path / name).is_file()]
    pid = hold(started, IN_A_CHILD, 1.0, *(path / name for name in names))  # longer than the engine tries
    os.kill(pid, signal.SIGKILL)
    started[0].wait()
    assert_same(train(tmp_path, HeteroOffloadStrategy("disk", disk_path=path), recipe, store=path), after(plain, 1))
    assert f"COMMIT' is still locked by process {pid}, which has ended" in caplog.text
