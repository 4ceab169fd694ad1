"""Files of the disk tier for swapped activations, by the native engine.

They are native parts of plain bytes with one slot, in a store of their own. No commit record names
them, so activations and commits never wait for each other. Each transfer lends them host memory as
their weight memory (``NativePart.bind``), so bytes go between that memory and the disk without a
copy.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack

from torch import Tensor

from lightning_hetero._native import U8, Arena, Engine, NativePart, PartGeometry, Store, Ticket
from lightning_hetero.errors import OutOfDiskError
from lightning_hetero.store.format.directory import StoreDirectory
from lightning_hetero.units import MIB

_PAGE = 4096
_CHUNK_BYTES = 4 * MIB  # of one transfer
_MOST_FILES = 4096


class SwapFiles:
    """Makes files for swapped activations, in a directory of their own. Thread-safe.

    :meth:`close` removes the directory, which nothing else uses, and its content.

    Raises:
        UnsupportedError: The file system refuses direct transfers.
    """

    def __init__(self, engine: Engine, directory: StoreDirectory) -> None:
        self.engine, self.directory = engine, directory
        with ExitStack() as undo:
            undo.callback(directory.close, remove=True)
            self._store = Store(
                os.fspath(directory.path),
                uuid=directory.uuid,
                create=True,
                direct_io=not directory.in_memory,
                durability=0,
                verify_digests=False,
                num_blocks=_MOST_FILES,
                user_bytes=0,
            )
            undo.pop_all()
        self._nowhere = Arena(_PAGE)  # files are bound to it until memory is lent to them
        self._lock = threading.Lock()
        self._free = list(range(_MOST_FILES - 1, -1, -1))
        self._open: dict[int, NativePart] = {}

    def make(self, num_bytes: int) -> SwapFile:
        """A file of whole pages.

        Raises:
            OutOfDiskError: There are too many files.
        """
        with self._lock:
            if not self._free:
                raise OutOfDiskError(f"{_MOST_FILES} files of activations are in use; swap fewer blocks' activations to the disk.")
            number = self._free.pop()
            geometry = PartGeometry(
                id=number,
                weight_dtype=U8,
                num_elements=num_bytes,
                num_state=0,
                weights_on_disk_file=True,
                state_on_disk_file=False,
                num_slots=1,
                chunk_elements=min(_CHUNK_BYTES, num_bytes),
            )
            try:
                block = self._open[number] = NativePart(self._store, geometry, self._nowhere.address, keep=self._nowhere)
            except BaseException:
                self._free.append(number)
                raise
        return SwapFile(self, number, block)

    def discard(self, number: int) -> None:
        """Closes and removes a file; nothing of it is under way."""
        with self._lock:
            block = self._open.pop(number, None)
            if block is not None:
                block.discard()
                self.directory.remove_block(number)
                self._free.append(number)

    def close(self) -> None:
        """Removes all files and the directory; nothing is under way."""
        for number in list(self._open):
            self.discard(number)
        self._store.close()
        self.directory.close(remove=True)


class SwapFile:
    """A file for the activations of one use at a time: not kept, not safe from crashes."""

    def __init__(self, files: SwapFiles, number: int, block: NativePart) -> None:
        self._files, self._number, self._block = files, number, block

    def write(self, memory: Tensor) -> Ticket:
        """Begins to fill the file from memory; nothing of the file is under way.

        The memory is uint8, flat, whole pages, at least as large as the file; it stays unchanged
        until the ticket is DONE.
        """
        self._block.bind(memory.data_ptr(), keep=memory)
        return self._files.engine.store(self._block, [], weights_from_memory=True, step=0, priority=0, keep=memory)

    def read(self, memory: Tensor) -> Ticket:
        """Begins to read all of the file, as :meth:`write`."""
        self._block.bind(memory.data_ptr(), keep=memory)
        return self._files.engine.fetch(self._block, priority=0)

    def close(self) -> None:
        """Removes it; nothing of it is under way."""
        self._files.discard(self._number)
