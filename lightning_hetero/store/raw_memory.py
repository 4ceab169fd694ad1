"""Tensors over memory that is not torch's, and the bytes of tensors."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.units import MIB

PAGE = 4096
_OWN_BYTES = MIB
_DATA: Any = vars(torch._C.TensorBase)["data"]
# Torch's own ``param.data``.
plain_data: Callable[[Tensor], Tensor] = _DATA.__get__
set_data: Callable[[Tensor, Tensor], None] = _DATA.__set__


def tensor_at(owner: object, address: int, numel: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor over memory that ``owner`` keeps alive while any view of it lives."""
    buffer = (ctypes.c_char * max(1, numel * dtype.itemsize)).from_address(address)
    vars(buffer)["owner"] = owner  # the tensor keeps the buffer, the buffer its owner
    return torch.frombuffer(buffer, dtype=dtype, count=numel)


def own_memory(numel: int, dtype: torch.dtype) -> Tensor:
    """A flat CPU tensor with any content, whose memory goes back to the system with it.

    [Note: Memory of its own]
    malloc keeps what is freed, and glibc before 2.38 cannot use a hole of an aligned block for the
    next one of that size once a small one lies in it: reading a model tensor by tensor then takes
    as much memory as several of them, or all. A large tensor that is read to be dropped has a
    mapping of its own instead. Source: glibc bug 14581.
    """
    num_bytes = numel * dtype.itemsize
    if num_bytes < _OWN_BYTES:
        return torch.empty(numel, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge(pages, num_bytes)
    return torch.frombuffer(pages, dtype=dtype)


def page_aligned(num_bytes: int) -> Tensor:
    """Flat bytes with any content, which begin with a page and go back as in :func:`own_memory`."""
    buffer = own_memory(num_bytes + (PAGE if num_bytes < _OWN_BYTES else 0), torch.uint8)
    return buffer[-buffer.data_ptr() % PAGE :][:num_bytes]


def advise_huge(pages: mmap.mmap, num_bytes: int) -> None:
    """Asks the system for huge pages, if the memory is large enough to have any."""
    if num_bytes >= _OWN_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages is slower, not wrong
            pages.madvise(mmap.MADV_HUGEPAGE)


def zero_pages(numel: int) -> Tensor:
    """Flat fp32 zeros to read. Large ones take no memory: the system maps one page everywhere."""
    zeros = own_memory(numel, torch.float32)
    return zeros if zeros.nbytes >= _OWN_BYTES else zeros.zero_()


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous, non-empty CPU tensor, to read and write while it lives."""
    assert tensor.is_contiguous()
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def check_has_memory(name: str, tensor: Tensor) -> None:
    """Refuses a tensor whose content is several tensors: it has no memory of its own, only theirs.

    Raises:
        UnsupportedError: It is of such a class, as torchao's; ``name`` is named.
    """
    if is_traceable_wrapper_subclass(tensor):
        raise UnsupportedError(
            f"{name!r} is a {type(tensor).__name__}: its content is several tensors, as torchao quantizes. Only weights of one "
            f"tensor are offloaded and exported. Load the model without quantization, or with layers of bitsandbytes."
        )
