"""The synchronous kernels: Adam, sum of squares, digest, over memory named by address."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import NamedTuple

from lightning_hetero._native.library import (
    BF16,
    F16,
    F32,
    FLOATS,
    CHyper,
    check,
    check_address,
    check_dtype,
    check_range,
    functions,
)

# Hyper.flags
ADAMW, MAXIMIZE = 1, 2

_MAX_NUMEL = 1 << 44
_MAX_THREADS = 1024


class Isa(IntEnum):
    """Instruction sets of the kernels, best last. All give the same bits."""

    BASE = 0
    V3 = 1
    V4 = 2


class Hyper(NamedTuple):
    """One set of Adam hyper-parameters.

    Attributes:
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Term added to the denominator.
        weight_decay: Weight decay: decoupled with ``ADAMW``, else added to the gradient.
        step: The count after the increment: 1 for the first update.
        flags: ``ADAMW`` and ``MAXIMIZE``, or-ed.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: float
    flags: int = ADAMW


def isa() -> Isa:
    """The instruction set in use."""
    return Isa(functions()["isa"]())


def force_isa(value: Isa) -> None:
    """Uses one instruction set from now on, for tests and benchmarks.

    Raises:
        UnsupportedError: the CPU lacks it.
    """
    check(functions()["force_isa"](int(value)))


def adam(
    *,
    param: int,
    exp_avg: int,
    exp_avg_sq: int,
    grad: int,
    numel: int,
    hyper: Hyper,
    grad_dtype: int = F32,
    copy: int | None = None,
    copy_dtype: int = BF16,
    grad_scale: float = 1.0,
    threads: int = 1,
) -> None:
    """One Adam or AdamW update in place, with the bits of torch's ``fused=True`` on a CPU.

    Args:
        param: Address of the fp32 master weights, ``numel`` elements.
        exp_avg: Address of the first moment, fp32.
        exp_avg_sq: Address of the second moment, fp32.
        grad: Address of the gradient, ``numel`` elements of ``grad_dtype``.
        numel: Elements of each array.
        hyper: Hyper-parameters.
        grad_dtype: F32, BF16 or F16; 16-bit gradients are converted to fp32 first.
        copy: Address that receives the new weights rounded to nearest even, or None.
        copy_dtype: BF16 or F16.
        grad_scale: Factor on the gradient, applied in fp32 before everything else.
        threads: Threads that share the work.

    Raises:
        ConfigError: an argument is out of range, misaligned, or arrays overlap.
    """
    _check_arrays(param, exp_avg, exp_avg_sq, grad, grad_dtype, copy, numel)
    check_dtype("copy_dtype", copy_dtype, allowed=(BF16, F16))
    check_range("threads", threads, low=1, high=_MAX_THREADS)
    hyper_c = ctypes.byref(CHyper(*hyper))
    run = functions()["adam"]
    check(run(param, exp_avg, exp_avg_sq, grad, grad_dtype, copy, copy_dtype, numel, hyper_c, grad_scale, threads))


def move_like_adam(
    *,
    param: int,
    exp_avg: int,
    exp_avg_sq: int,
    grad: int,
    numel: int,
    grad_dtype: int = F32,
    copy: int | None = None,
    threads: int = 1,
) -> None:
    """Moves the bytes of ``adam`` with almost no arithmetic, and destroys the values."""
    _check_arrays(param, exp_avg, exp_avg_sq, grad, grad_dtype, copy, numel)
    check_range("threads", threads, low=1, high=_MAX_THREADS)
    check(functions()["move_like_adam"](param, exp_avg, exp_avg_sq, grad, grad_dtype, copy, numel, threads))


def _check_arrays(param: int, exp_avg: int, exp_avg_sq: int, grad: int, grad_dtype: int, copy: int | None, numel: int) -> None:
    check_range("numel", numel, low=0, high=_MAX_NUMEL)
    for name, address in (("param", param), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        check_address(name, address, alignment=4)
    check_address("grad", grad, alignment=check_dtype("grad_dtype", grad_dtype, allowed=FLOATS))
    if copy is not None:
        check_address("copy", copy, alignment=2)


def sum_of_squares(address: int, numel: int, *, dtype: int = F32, threads: int = 1) -> float:
    """Sum of squares in double, in an order independent of threads and instruction set.

    Args:
        address: Address of ``numel`` elements of ``dtype``.
        numel: Number of elements.
        dtype: F32, BF16 or F16.
        threads: Threads that share the work.
    """
    check_range("numel", numel, low=0, high=_MAX_NUMEL)
    check_range("threads", threads, low=1, high=_MAX_THREADS)
    check_address("address", address, alignment=check_dtype("dtype", dtype, allowed=FLOATS))
    out = ctypes.c_double()
    check(functions()["sum_of_squares"](address, dtype, numel, threads, ctypes.byref(out)))
    return out.value


def digest(address: int, num_bytes: int) -> bytes:
    """CRC32C over four interleaved streams, 16 bytes: finds accidents, not attackers."""
    check_address("address", address, alignment=1)
    check_range("num_bytes", num_bytes, low=0, high=1 << 62)
    out = (ctypes.c_uint8 * 16)()
    check(functions()["digest"](address, num_bytes, out))
    return bytes(out)
