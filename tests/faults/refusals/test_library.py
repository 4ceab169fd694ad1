"""A native library or kernel interface that is missing."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.models import Outcome, assert_same, outcome
from support.refusals import fit, new_module, refused, tree
from support.scripts import output_of, result_of

from lightning_hetero._native import library
from lightning_hetero.errors import (
    NativeMissingError,
    UnsupportedError,
)
from lightning_hetero.strategies import HeteroOffloadStrategy

NATIVE = """
import json, os, sys
from pathlib import Path
from lightning_hetero.strategies import HeteroOffloadStrategy
from support.models import LitModel, Recipe, data, quiet_trainer

texts = []
module = LitModel(Recipe())
for library in sys.argv[2:]:
    os.environ["LIGHTNING_HETERO_LIBRARY"] = library
    try:
        strategy = HeteroOffloadStrategy(plan="disk")
        quiet_trainer(strategy=strategy, max_steps=1, limit_val_batches=0, default_root_dir=sys.argv[1]).fit(module, data())
    except Exception as error:
        texts.append([type(error).__name__, str(error)])
quiet_trainer(strategy="auto", max_steps=1, limit_val_batches=0, default_root_dir=sys.argv[1]).fit(module, data())
print(json.dumps(texts))
"""


def test_a_missing_or_foreign_native_library_is_refused(root: Path, tmp_path: Path) -> None:
    compiler = os.environ.get("CC", "cc")
    source, foreign = tmp_path / "foreign.c", tmp_path / "foreign.so"
    source.write_text("int hetero_abi_version(void) { return 4711; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(foreign), str(source)], check=True)
    script = tmp_path / "trains.py"
    script.write_text(NATIVE)
    texts = result_of(output_of(script, root, "/nowhere/libhetero.so", foreign, source, cwd=tmp_path))
    assert [kind for kind, _ in texts] == [NativeMissingError.__name__] * 3
    for (_, text), path in zip(texts, ["/nowhere/libhetero.so", str(foreign), str(source)], strict=True):
        assert path in text
        assert "pip install" in text
    assert "version 4711" in texts[1][1]
    assert f"needs {library.ABI_VERSION}" in texts[1][1]
    assert tree(root) == {}


class _Filter(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Filter)))


def without_io_uring(call: Callable[[], None]) -> None:
    """Runs ``call`` in a thread whose system calls to set up a ring are denied, as container
    runtimes deny them.
    """
    failures: list[BaseException] = []

    def body() -> None:
        # Load the call's number (offset 0 of seccomp_data); io_uring_setup, 425 everywhere, returns
        # EPERM; all else is allowed.
        rows = (_Filter * 4)((0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | 1), (0x06, 0, 0, 0x7FFF0000))
        libc = ctypes.CDLL(None, use_errno=True)
        program = _Program(4, rows)
        if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(program), 0, 0):
            failures.append(pytest.skip.Exception("seccomp is not available"))
            return
        try:
            call()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def test_a_denied_io_uring_is_refused_and_the_option_is_named(root: Path, plain: Outcome) -> None:
    module = new_module()

    def call() -> None:
        for path in (None, root / "store"):
            words = ["io_uring", "errno 1", "io_backend='pool'"]
            refused(UnsupportedError, words, root, module, io_backend="io_uring", disk_path=path)
        torch.manual_seed(11)
        assert_same(outcome(fit(module, root, HeteroOffloadStrategy(plan="disk", io_backend="auto")), module), plain)

    without_io_uring(call)
