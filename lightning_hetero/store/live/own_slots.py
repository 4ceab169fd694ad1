"""Files that nobody has written since they were made, and what happens when somebody does.

[Note: One slot]
A part without any trained parameter is written once, when it gets its files, so one slot is enough.
The same holds for its mirror. A commit record names that slot, so it may not be written again.
Before a change reaches the disk, the part moves to a new number with two slots. The old files go
when a record names the new ones: a process that dies in between goes back to them. A change that
changes no byte (a checkpoint is loaded that has the same frozen weights) moves nothing. Weights
that are read in place ([Note: In place] in ``store/format/in_place.py``) move likewise. If the
slice of one rank changes, all ranks move theirs, because they write records together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_hetero._native import Engine, InPlacePart, NativePart, Patch, file_bytes
from lightning_hetero.errors import OutOfDiskError
from lightning_hetero.store.live.block_files import BlockFiles
from lightning_hetero.store.live.geometry import WEIGHTS
from lightning_hetero.store.raw_memory import own_memory, tensor_at
from lightning_hetero.units import MIB, format_bytes

_COMPARED_BYTES = 16 * MIB


def is_written_once(files: BlockFiles, native: NativePart) -> bool:
    """Whether the content must stay as it is: a record names it, or it is somebody else's."""
    if native.geometry.num_slots > 1 or isinstance(native, InPlacePart):
        return native.geometry.num_slots == 1
    files.wait_for_commit()
    return native.committed_slot() is not None


def with_two_slots(files: BlockFiles, native: NativePart, address: int) -> NativePart:
    """A native part with two slots in place of one with one slot; its content must follow.

    Args:
        files: The files. They close the old part, and remove its files, when a record names the new
            one.
        native: The old part; none of its tasks is under way.
        address: The memory of both.

    Raises:
        OutOfDiskError: There is no room for three slots, or ``disk_capacity`` does not allow them.
    """
    size, room = file_bytes(native.geometry), files.room_bytes() - files.added_bytes
    if 2 * size > room:
        raise OutOfDiskError(
            f"frozen weights have changed, so they need {format_bytes(2 * size)} on the disk beside the {format_bytes(size)} that "
            f"they have; disk_capacity leaves {format_bytes(max(int(room), 0))}. Raise disk_capacity, or do not change them."
        )
    new = files.open_part(replace(native.geometry, id=files.next_id(), num_slots=2), address)
    files.added_bytes += 2 * size if isinstance(native, InPlacePart) else size  # one was counted
    files.replace(native)
    return new


def differs(engine: Engine, native: NativePart, content: Sequence[tuple[int, Tensor]]) -> bool:
    """Whether runs of bytes ``(first byte, values)`` differ from what the file has there."""
    for first, values in content:
        flat = values.view(torch.uint8)
        for start in range(0, flat.numel(), _COMPARED_BYTES):
            new = flat[start : start + _COMPARED_BYTES]
            old = own_memory(new.numel(), torch.uint8)
            patch = Patch(first + start, new.numel(), old.data_ptr(), WEIGHTS)
            engine.read(native, [patch], keep=[old]).wait()
            if not torch.equal(new, old):
                return True
    return False


def bytes_at(owner: object, address: int, num_bytes: int) -> list[tuple[int, Tensor]]:
    """Memory as the one run of :func:`differs`."""
    return [(0, tensor_at(owner, address, num_bytes, torch.uint8))]
