"""The shared library: where it is, what its functions take, and how its codes become exceptions."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_uint8, c_void_p
from pathlib import Path
from typing import Any

from lightning_hetero.errors import (
    ConfigError,
    HeteroError,
    NativeMissingError,
    OutOfDiskError,
    OutOfMemoryBudgetError,
    StoreBusyError,
    StoreCorruptError,
    StoreError,
    UnsupportedError,
)

ABI_VERSION = 1
LIBRARY_ENV = "LIGHTNING_HETERO_LIBRARY"


# Element types: codes of the native interface, and the bytes of one element.
F32, BF16, F16, U8 = 0, 1, 2, 3
DTYPE_BYTES = {F32: 4, BF16: 2, F16: 2, U8: 1}
FLOATS = (F32, BF16, F16)
_DTYPE_NAMES = {F32: "F32", BF16: "BF16", F16: "F16", U8: "U8"}


class CHyper(ctypes.Structure):
    """``hetero_hyper``."""

    _fields_ = (
        ("lr", c_double),
        ("beta1", c_double),
        ("beta2", c_double),
        ("eps", c_double),
        ("weight_decay", c_double),
        ("step", c_double),
        ("flags", c_int64),
    )


class CSegment(ctypes.Structure):
    """``hetero_segment``."""

    _fields_ = (("offset", c_int64), ("numel", c_int64), ("grad", c_void_p), ("grad_dtype", c_int32), ("hyper", c_int32))


class CStoreOptions(ctypes.Structure):
    """``hetero_store_options``."""

    _fields_ = (
        ("uuid", c_uint8 * 16),
        ("create", c_int32),
        ("direct_io", c_int32),
        ("durability", c_int32),
        ("verify_digests", c_int32),
        ("num_blocks", c_int32),
        ("user_bytes", c_int32),
    )


class CBlockGeometry(ctypes.Structure):
    """``hetero_block_geometry``."""

    _fields_ = (
        ("id", c_int32),
        ("weight_dtype", c_int32),
        ("num_elements", c_int64),
        ("num_state", c_int32),
        ("weights_on_disk_file", c_int32),
        ("state_on_disk_file", c_int32),
        ("num_slots", c_int32),
        ("chunk_elements", c_int64),
    )


class CEngineOptions(ctypes.Structure):
    """``hetero_engine_options``."""

    _fields_ = (
        ("io_backend", c_int32),
        ("io_threads", c_int32),
        ("queue_depth", c_int32),
        ("update_threads", c_int32),
        ("staging_bytes", c_int64),
        ("synthetic_read_bytes_per_s", c_double),
        ("synthetic_write_bytes_per_s", c_double),
        ("chunk_bytes_max", c_int64),
    )


class CTask(ctypes.Structure):
    """``hetero_task``."""

    _fields_ = (("priority", c_int64), ("after", POINTER(c_int64)), ("num_after", c_int32))


class CPatch(ctypes.Structure):
    """``hetero_patch``."""

    _fields_ = (("offset", c_int64), ("numel", c_int64), ("data", c_void_p), ("array", c_int32))


class CRunFile(ctypes.Structure):
    """``hetero_run_file``."""

    _fields_ = (("path", c_char_p), ("bytes", c_int64), ("mtime_ns", c_int64))


class CRun(ctypes.Structure):
    """``hetero_run``."""

    _fields_ = (("offset", c_int64), ("file_offset", c_int64), ("bytes", c_int64), ("file", c_int32))


class CTimes(ctypes.Structure):
    """``hetero_times``."""

    _fields_ = tuple(
        (name, c_int64)
        for name in (
            "submitted_ns",
            "started_ns",
            "ready_ns",
            "done_ns",
            "bytes_read",
            "bytes_written",
            "read_busy_ns",
            "compute_busy_ns",
            "write_busy_ns",
        )
    )


class CStats(ctypes.Structure):
    """``hetero_engine_stats``."""

    _fields_ = tuple(
        (name, c_int64) for name in ("bytes_read", "bytes_written", "staging_bytes", "staging_in_use_peak_bytes", "tasks_done")
    )


_I32, _I64, _F64, _PTR, _TASK = c_int32, c_int64, c_double, c_void_p, POINTER(CTask)

# name: (result, arguments). A null pointer result is None.
_PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "abi_version": (_I32, ()),
    "last_error": (c_char_p, ()),
    "last_code": (_I32, ()),
    "isa": (_I32, ()),
    "force_isa": (_I32, (_I32,)),
    "reserve": (_PTR, (_I64,)),
    "map": (_I32, (_PTR, _I64, _I32, _I64, _I32)),
    "drop": (_I32, (_PTR, _I64)),
    "unreserve": (_I32, (_PTR, _I64)),
    "adam": (_I32, (_PTR, _PTR, _PTR, _PTR, _I32, _PTR, _I32, _I64, POINTER(CHyper), _F64, _I32)),
    "move_like_adam": (_I32, (_PTR, _PTR, _PTR, _PTR, _I32, _PTR, _I64, _I32)),
    "sum_of_squares": (_I32, (_PTR, _I32, _I64, _I32, POINTER(_F64))),
    "digest": (_I32, (_PTR, _I64, c_uint8 * 16)),
    "store_open": (_PTR, (c_char_p, POINTER(CStoreOptions))),
    "store_close": (_I32, (_PTR,)),
    "store_recover": (_I64, (_PTR, POINTER(_I64), _PTR, _I64)),
    "store_add_directory": (_I32, (_PTR, c_char_p)),
    "block_open_on": (_PTR, (_PTR, POINTER(CBlockGeometry), _PTR, _I32)),
    "block_open_runs": (_PTR, (POINTER(CBlockGeometry), _PTR, POINTER(CRunFile), _I32, POINTER(CRun), _I32, _I32)),
    "block_close": (_I32, (_PTR,)),
    "block_discard": (_I32, (_PTR,)),
    "block_retire": (_I32, (_PTR,)),
    "block_bind": (_I32, (_PTR, _PTR)),
    "block_state": (_PTR, (_PTR, _I32)),
    "block_file_bytes": (_I64, (POINTER(CBlockGeometry),)),
    "block_slot": (_I32, (_PTR, POINTER(_I64))),
    "block_committed_slot": (_I32, (_PTR,)),
    "store_names": (_I32, (_PTR, _I32)),
    "engine_create_for": (_PTR, (POINTER(CEngineOptions), _I32)),
    "engine_destroy": (_I32, (_PTR,)),
    "engine_io_backend": (_I32, (_PTR,)),
    "engine_resize_staging": (_I32, (_PTR, _I64)),
    "engine_error": (_I32, (_PTR,)),
    "engine_get_stats": (_I32, (_PTR, POINTER(CStats))),
    "engine_bytes_beyond": (_I64, (_PTR,)),
    "submit_fetch": (_I64, (_PTR, _PTR, _TASK)),
    "submit_release": (_I64, (_PTR, _PTR, _TASK)),
    "open_update": (_I64, (_PTR, _PTR, _I32, _TASK)),
    "arm_update": (_I32, (_PTR, _I64, POINTER(CSegment), _I32, POINTER(CHyper), _I32, _F64, _I64, _I64)),
    "cancel_update": (_I32, (_PTR, _I64)),
    "open_speculative_update": (_I64, (_PTR, _PTR, _I32, _TASK)),
    "keep_update": (_I32, (_PTR, _PTR)),
    "submit_discard": (_I64, (_PTR, _PTR, _TASK)),
    "submit_store": (_I64, (_PTR, _PTR, POINTER(CPatch), _I32, _I32, _I64, _TASK)),
    "submit_read": (_I64, (_PTR, _PTR, POINTER(CPatch), _I32, _TASK)),
    "submit_commit": (_I64, (_PTR, _PTR, _I64, c_char_p, _I64, _TASK)),
    "wait": (_I32, (_PTR, _I64, _I32, _F64)),
    "poll": (_I32, (_PTR, _I64)),
    "release_ticket": (_I32, (_PTR, _I64)),
    "ticket_times": (_I32, (_PTR, _I64, POINTER(CTimes))),
}

EPOISONED, ETIMEDOUT = -8, -9
_ERRORS: dict[int, type[Exception]] = {
    -1: ConfigError,
    -2: StoreError,
    -3: OutOfDiskError,
    -4: OutOfMemoryBudgetError,
    -5: StoreCorruptError,
    -6: StoreBusyError,
    -7: HeteroError,
    EPOISONED: StoreError,
    ETIMEDOUT: TimeoutError,
    -10: UnsupportedError,
}

_REMEDY = "Run `pip install .` in the source folder; that needs a C++20 compiler (Debian: `apt install g++`)."


def library_path() -> Path:
    """Path of the shared library: ``LIGHTNING_HETERO_LIBRARY``, else the package's own."""
    return Path(os.environ.get(LIBRARY_ENV) or Path(__file__).parent.parent / "_lib" / "libhetero.so")


def _load(path: Path) -> dict[str, Any]:
    try:
        handle = ctypes.CDLL(str(path))
        version = handle.hetero_abi_version()
        if version != ABI_VERSION:
            raise OSError(f"its interface has version {version}, this package needs {ABI_VERSION}")
        functions = {name: getattr(handle, f"hetero_{name}") for name in _PROTOTYPES}
    except (OSError, AttributeError) as error:
        raise NativeMissingError(f"The native library {path} cannot be used: {error}. {_REMEDY}") from error
    for name, function in functions.items():
        function.restype, function.argtypes = _PROTOTYPES[name]
    return functions


@functools.cache
def functions() -> dict[str, Any]:
    """The library's functions by name without their prefix; loaded on first use.

    Raises:
        NativeMissingError: no library at ``library_path()``, or one with another interface version.
    """
    return _load(library_path())


def failure(code: int) -> Exception:
    """The exception for a negative code, with the thread's last native error as its text."""
    text = functions()["last_error"]()
    message = text.decode(errors="replace") if text else f"native error {code}"
    return _ERRORS.get(code, HeteroError)(message)


def check_pointer(pointer: int | None) -> int:
    """Returns an address that is not null, or raises the thread's last native error."""
    if not pointer:
        raise failure(functions()["last_code"]())
    return pointer


def check(result: int) -> int:
    """Returns a result that is not negative; raises what a negative one stands for."""
    if result < 0:
        raise failure(result)
    return result


def check_dtype(name: str, value: int, *, allowed: tuple[int, ...]) -> int:
    """Bytes of one element of a dtype code, if it is among those allowed."""
    if value not in allowed:
        names = ", ".join(f"{_DTYPE_NAMES[code]} ({code})" for code in allowed)
        raise ConfigError(f"{name} is {value!r}; allowed: {names}.")
    return DTYPE_BYTES[value]


def check_address(name: str, address: int, *, alignment: int) -> int:
    """An address that is neither null nor misaligned."""
    if not isinstance(address, int) or address <= 0 or address >= 1 << 63 or address % alignment:
        raise ConfigError(f"{name} is {address!r}; allowed: the address of memory aligned to {alignment} bytes.")
    return address


def check_range(name: str, value: int, *, low: int, high: int) -> int:
    """An integer in ``[low, high]``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; allowed: an integer from {low} to {high}.")
    return value
