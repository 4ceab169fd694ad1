"""The shape of a part: its arrays, and which of them have a section in a file. No engine."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from lightning_hetero._native.library import BF16, F16, F32, U8, CBlockGeometry, check, check_dtype, check_range, functions
from lightning_hetero.errors import ConfigError

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PartGeometry:
    """Shape of a part and where its arrays live; see ``hetero_block_geometry``.

    Attributes:
        id: Number of its files.
        weight_dtype: F32 (the weights are the master copy), BF16 or F16 (state array 0 is the fp32
            master), U8 (opaque bytes).
        num_elements: Flat length, a multiple of 16.
        num_state: fp32 state arrays.
        weights_on_disk_file: The weights have a section in the block's files.
        state_on_disk_file: The state arrays have sections in the block's files.
        num_slots: 2; 1 for blocks that are written once.
        chunk_elements: Elements per chunk, a multiple of 4096.
    """

    id: int
    weight_dtype: int
    num_elements: int
    num_state: int
    weights_on_disk_file: bool
    state_on_disk_file: bool
    num_slots: int = 2
    chunk_elements: int

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
            ConfigError: a field is out of its range.
        """
        check_range("id", self.id, low=0, high=_INT32_MAX)
        check_dtype("weight_dtype", self.weight_dtype, allowed=(F32, BF16, F16, U8))
        check_range("num_elements", self.num_elements, low=16, high=1 << 44)
        check_range("num_state", self.num_state, low=0, high=16)
        check_range("num_slots", self.num_slots, low=1, high=2)
        check_range("chunk_elements", self.chunk_elements, low=4096, high=1 << 40)
        if self.num_elements % 16 or self.chunk_elements % 4096:
            got = f"num_elements is {self.num_elements}, chunk_elements {self.chunk_elements}"
            raise ConfigError(f"{got}; allowed: multiples of 16 and of 4096.")

    def as_c(self) -> CBlockGeometry:
        """The native structure."""
        return CBlockGeometry(
            self.id,
            self.weight_dtype,
            self.num_elements,
            self.num_state,
            self.weights_on_disk_file,
            self.state_on_disk_file,
            self.num_slots,
            self.chunk_elements,
        )

    def array_dtype(self, array: int) -> int:
        """Dtype of array -1 (the weights) or of a state array."""
        return self.weight_dtype if array == -1 else F32


def file_bytes(geometry: PartGeometry) -> int:
    """Bytes of one slot's file; 0 for a block wholly in memory."""
    return check(functions()["block_file_bytes"](ctypes.byref(geometry.as_c())))
