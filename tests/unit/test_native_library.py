"""The native library in a process: how it is found and refused, how its codes become exceptions,
how the process ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_hetero
from lightning_hetero._native import library
from lightning_hetero.errors import (
    ConfigError,
    HeteroError,
    NativeMissingError,
    OutOfMemoryBudgetError,
    StoreBusyError,
    StoreError,
    UnsupportedError,
)


def _python(code: str, directory: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter, away from the source tree: its package would hide the
    installed one.
    """
    parent = str(Path(lightning_hetero.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": parent, **env}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=directory, timeout=600, check=False
    )


def _load_elsewhere(path: Path) -> str:
    code = """
from lightning_hetero import _native, errors
try:
    _native.isa()
except errors.NativeMissingError as error:
    print(error)
"""
    return _python(code, path.parent, LIGHTNING_HETERO_LIBRARY=str(path)).stdout


def test_a_missing_library_is_an_import_error_with_path_and_remedy(tmp_path: Path) -> None:
    text = _load_elsewhere(tmp_path / "none.so")
    assert str(tmp_path / "none.so") in text
    assert "pip install ." in text
    assert "g++" in text
    assert issubclass(NativeMissingError, ImportError)


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.so").write_bytes(b"not ELF")
    assert "cannot be used" in _load_elsewhere(tmp_path / "bad.so")


def test_another_interface_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI_VERSION", 999)
    with pytest.raises(NativeMissingError, match=r"has version 1, this package needs 999.*pip install \."):
        library._load(library.library_path())


def test_a_library_that_lacks_a_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(library._PROTOTYPES, "not_there", (None, ()))
    with pytest.raises(NativeMissingError, match="hetero_not_there"):
        library._load(library.library_path())


def test_every_code_has_its_exception() -> None:
    expected = {
        -1: ConfigError,
        -2: StoreError,
        -3: lightning_hetero.errors.OutOfDiskError,
        -4: OutOfMemoryBudgetError,
        -5: lightning_hetero.errors.StoreCorruptError,
        -6: StoreBusyError,
        -7: HeteroError,
        -8: StoreError,
        -9: TimeoutError,
        -10: UnsupportedError,
    }
    assert {code: type(library.failure(code)) for code in expected} == expected


def test_the_interpreter_ends_cleanly_with_everything_open(tmp_path: Path) -> None:
    code = f"""
import torch
from lightning_hetero import _native as n
store = n.Store({str(tmp_path)!r}, uuid=bytes(16), create=True, direct_io=False, durability=1, verify_digests=False,
                num_blocks=1, user_bytes=0)
arena = n.Arena(4 * 4096)
block = n.NativePart(store, n.PartGeometry(id=0, weight_dtype=n.F32, num_elements=4096, num_state=2, weights_on_disk_file=True,
                state_on_disk_file=True, chunk_elements=4096), arena.address)
engine = n.Engine(io_backend="pool", staging_bytes=1 << 20, chunk_bytes_max=1 << 17)
w = torch.zeros(4096)
tickets = [engine.store(block, [n.Patch(0, 4096, w.data_ptr())], weights_from_memory=False, step=0)]
tickets += [engine.commit(store, 0), engine.fetch(block)]
opened = engine.open_update(block, weights_resident=True)
print("end")
"""
    done = _python(code, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_ctrl_c_interrupts_a_wait(tmp_path: Path) -> None:
    code = """
import signal, threading, os
from lightning_hetero import _native as n
arena = n.Arena(4 * 4096)
block = n.NativePart(None, n.PartGeometry(id=0, weight_dtype=n.F32, num_elements=4096, num_state=2, weights_on_disk_file=False,
                state_on_disk_file=False, chunk_elements=4096), arena.address)
with n.Engine(io_backend="pool", staging_bytes=1 << 20, chunk_bytes_max=1 << 17) as engine:
    ticket = engine.open_update(block, weights_resident=True)
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        ticket.wait()
    except KeyboardInterrupt:
        print("interrupted")
"""
    done = _python(code, tmp_path)
    assert (done.stdout, done.returncode) == ("interrupted\n", 0), done.stderr
