"""Memory, stores and parts: what the engine works on."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from lightning_hetero._native.geometry import PartGeometry
from lightning_hetero._native.library import (
    DTYPE_BYTES,
    CPatch,
    CRun,
    CRunFile,
    CStoreOptions,
    check,
    check_address,
    check_pointer,
    check_range,
    functions,
)
from lightning_hetero._native.process import Owner
from lightning_hetero.errors import ConfigError, HeteroError

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
_UUID_BYTES = 16
_PAGE = 4096
_SLOTS = 2


class Handle:
    """A native object, closed once: by ``close``, ``with``, garbage collection or at exit.

    In a child of fork it cannot be used, and it is not closed there: its threads, and whoever holds
    its locks, are in the parent.

    Args:
        pointer: Its address; null when it could not be made.
        destructor: Name of the native function that frees it.
        arguments: What that function takes after the address.
    """

    __slots__ = ("__weakref__", "_finalizer", "_owner", "_pointer")

    def __init__(self, pointer: int | None, destructor: str, *arguments: object) -> None:
        self._pointer = check_pointer(pointer)
        self._owner = Owner()
        # At exit the newest go first: engines before the blocks and stores that they work on.
        self._finalizer = weakref.finalize(self, _free, self._owner, functions()[destructor], self._pointer, *arguments)

    @property
    def pointer(self) -> int:
        """The native address.

        Raises:
            HeteroError: it has been closed; :class:`ForkedProcessError` in a child of fork.
        """
        self.check_process()
        if not self._finalizer.alive:
            raise HeteroError(f"This {type(self).__name__} has been closed; open a new one.")
        return self._pointer

    def check_process(self) -> None:
        """Refuses a child of fork.

        Raises:
            ForkedProcessError: This process has not made the object.
        """
        self._owner.check(f"this {type(self).__name__}")

    @property
    def is_open(self) -> bool:
        """Whether it can be used: it is not closed, and this process has made it."""
        return self._finalizer.alive and self._owner.is_here

    def close(self) -> None:
        """Frees the native object; a second call does nothing.

        Raises:
            ForkedProcessError: This is a child of fork; the parent's object stays as it is.
        """
        if self._finalizer.alive:
            self.check_process()
            check(self._finalizer() or 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            self.close()
        except Exception:
            if error is None:  # never hide the exception that ended the block
                raise


def _free(owner: Owner, destructor: Callable[..., int], *arguments: object) -> int:
    return destructor(*arguments) if owner.is_here else 0


class Arena(Handle):
    """Anonymous memory, 2 MiB aligned, on huge pages if possible; pages come when touched.

    Args:
        num_bytes: Length, at least 1.

    Raises:
        OutOfMemoryBudgetError: the address space cannot be reserved.
    """

    __slots__ = ("num_bytes",)

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = check_range("num_bytes", num_bytes, low=1, high=_INT64_MAX)
        super().__init__(functions()["reserve"](num_bytes), "unreserve", num_bytes)

    @property
    def address(self) -> int:
        """The first byte's address."""
        return self.pointer

    def map(self, file: int, first: int, *, shared: bool, offset: int = 0, num_bytes: int | None = None) -> None:
        """Puts pages of a file in the place of the memory, or of a range of it, whose content goes.

        Args:
            file: The file's descriptor.
            first: The file's byte that comes to ``offset``; all are multiples of a page.
            shared: Writes reach the file; else they stay in this process.
            offset: The range's first byte.
            num_bytes: Its length; ``None``: all that follows.

        Raises:
            StoreError: The system has refused.
        """
        check_range("offset", offset, low=0, high=self.num_bytes)
        length = self.num_bytes - offset if num_bytes is None else num_bytes
        check_range("num_bytes", length, low=0, high=self.num_bytes - offset)
        check_range("first", first, low=0, high=_INT64_MAX)
        if length:
            check(functions()["map"](self.pointer + offset, length, file, first, shared))

    def map_in_child(self, file: int, first: int) -> None:
        """In a child of fork: maps all of a shared file's pages anew, so that writes stay there."""
        if self._finalizer.alive and not self._owner.is_here:
            check(functions()["map"](self._pointer, self.num_bytes, file, first, False))

    def drop(self, offset: int = 0, num_bytes: int | None = None) -> None:
        """Gives whole pages inside a range back to the system; they read as zeros afterwards.

        Those of a shared file go back for all that map it.
        """
        check_range("offset", offset, low=0, high=self.num_bytes)
        length = self.num_bytes - offset if num_bytes is None else num_bytes
        check_range("num_bytes", length, low=0, high=self.num_bytes - offset)
        check(functions()["drop"](self.pointer + offset, length))


class Store(Handle):
    """The commit ring and the block files of one directory.

    Args:
        directory: An existing private directory; the caller has checked its owner and mode.
        uuid: 16 bytes that every record carries.
        create: True creates the files; False opens existing ones.
        direct_io: True bypasses the page cache.
        durability: 0 none, 1 survives the process, 2 survives power loss.
        verify_digests: Write digests of everything, and check the contents of every chunk read, not
            only its stamp.
        write_digests: Write them, and check what a record is recovered with.
        further: Directories for files of blocks on further disks.
        num_blocks: Disk blocks that the store holds.
        user_bytes: Largest user blob of a commit record.

    Raises:
        StoreBusyError: another process holds the store.
        UnsupportedError: the file system refuses direct I/O.
        StoreError: a system call failed.
    """

    __slots__ = ("user_bytes",)

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        uuid: bytes,
        create: bool,
        direct_io: bool,
        durability: int,
        verify_digests: bool,
        num_blocks: int,
        user_bytes: int,
        write_digests: bool = False,
        further: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        if not isinstance(uuid, bytes) or len(uuid) != _UUID_BYTES:
            raise ConfigError(f"uuid is {uuid!r}; allowed: {_UUID_BYTES} bytes.")
        self.user_bytes = check_range("user_bytes", user_bytes, low=0, high=_INT32_MAX)
        options = CStoreOptions(
            (ctypes.c_uint8 * _UUID_BYTES)(*uuid),
            bool(create),
            bool(direct_io),
            check_range("durability", durability, low=0, high=2),
            1 if verify_digests else 2 * bool(write_digests),
            check_range("num_blocks", num_blocks, low=0, high=_INT32_MAX),
            user_bytes,
        )
        super().__init__(functions()["store_open"](os.fsencode(directory), ctypes.byref(options)), "store_close")
        for place in further:
            check(functions()["store_add_directory"](self.pointer, os.fsencode(place)))

    def recover(self) -> tuple[int, bytes]:
        """Applies the newest commit record to the open blocks; returns its step and user blob.

        Raises:
            StoreCorruptError: records exist, but none is valid.
            HeteroError: there is no record.
        """
        step = ctypes.c_int64()
        user = ctypes.create_string_buffer(max(self.user_bytes, 1))
        length = check(functions()["store_recover"](self.pointer, ctypes.byref(step), user, self.user_bytes))
        return step.value, user.raw[:length]

    def names(self, identifier: int) -> bool:
        """Whether the last record names files of the block with this number.

        Raises:
            ConfigError: The store has no room for such a number.
            HeteroError: A record is being written.
        """
        return bool(check(functions()["store_names"](self.pointer, identifier)))


class Patch(NamedTuple):
    """A run of one array of a block and the memory that holds, or receives, its content.

    Attributes:
        offset: First element in the block's flat order.
        numel: Elements.
        data: Address of ``numel`` elements: the block's weight dtype for the weights, fp32 for
            state.
        array: -1 the weights, 0.. a state array.
    """

    offset: int
    numel: int
    data: int
    array: int = -1


class NativePart(Handle):
    """A part bound to the memory where its weights appear: ``hetero_block`` of the C interface.

    Args:
        store: The store that holds its files; None for a block wholly in memory.
        geometry: Its shape.
        weights_address: Address of ``num_elements`` weights, from an ``Arena``.
        disk: Which of the store's directories has its files, or gets them; 0 is the first.
        keep: What must live as long as the block: the arena.

    Raises:
        OutOfDiskError: its files do not fit the disk.
        StoreBusyError: another process holds its files.
        StoreError: a system call failed.
    """

    __slots__ = ("_keep", "disk", "geometry")

    def __init__(
        self, store: Store | None, geometry: PartGeometry, weights_address: int, *, disk: int = 0, keep: object = None
    ) -> None:
        if store is None and (geometry.weights_on_disk_file or geometry.state_on_disk_file):
            raise ConfigError(f"block {geometry.id} has sections on disk but no store; give it one, or keep it in memory.")
        self.geometry, self.disk = geometry, disk
        self._keep = (store, keep)
        check_address("weights_address", weights_address, alignment=DTYPE_BYTES[geometry.weight_dtype])
        pointer = None if store is None else store.pointer
        check_range("disk", disk, low=0, high=_INT32_MAX)
        opened = functions()["block_open_on"](pointer, ctypes.byref(geometry.as_c()), weights_address, disk)
        super().__init__(opened, "block_close")

    def bind(self, weights_address: int, *, keep: object = None) -> None:
        """Moves the address at which weights from disk appear. No task of the block may be running.

        Args:
            weights_address: Page-aligned memory for all weights, whole pages.
            keep: What must live until the block is bound anew: the memory.

        Raises:
            ConfigError: the address is no page's, or the block's weights live in memory.
            HeteroError: a task of the block is not done.
        """
        check(functions()["block_bind"](self.pointer, check_address("weights_address", weights_address, alignment=_PAGE)))
        self._keep = (self._keep[0], keep)

    def state_address(self, array: int) -> int | None:
        """Address of a state array in memory; None when it is on disk."""
        check_range("array", array, low=0, high=max(self.geometry.num_state - 1, 0))
        address: int | None = functions()["block_state"](self.pointer, array)
        return address

    def state_memory(self, array: int) -> int:
        """Address of a state array that is in memory.

        Raises:
            HeteroError: It is on disk.
        """
        address = self.state_address(array)
        if address is None:
            raise HeteroError(f"state array {array} of block {self.geometry.id} is on disk; read it through the engine.")
        return address

    def drop_state(self, array: int) -> None:
        """Gives the pages of a state array in memory, and its values, back to the system."""
        address = self.state_address(array)
        if address is not None:
            check(functions()["drop"](address, 4 * self.geometry.num_elements))

    def discard(self) -> None:
        """Closes the block for good: later commit records do not name it; its files may be removed.

        Once the next one is there, another block may have its id.
        """
        check(functions()["block_discard"](self.pointer))
        self._finalizer.detach()

    def retire(self) -> None:
        """Later records do not name the block; :meth:`discard` it after one of them is written."""
        check(functions()["block_retire"](self.pointer))

    def committed_slot(self) -> int | None:
        """The slot (0 or 1) that the last record names; ``None`` if that does not name the block.

        Raises:
            HeteroError: A record is being written.
        """
        slot = check(functions()["block_committed_slot"](self.pointer))
        return slot if slot < _SLOTS else None

    def slot(self) -> tuple[int, int]:
        """The newest slot (0 or 1) and its step; step 0: only weights, state reads as zeros."""
        step = ctypes.c_int64()
        slot = check(functions()["block_slot"](self.pointer, ctypes.byref(step)))
        return slot, step.value

    def patches_as_c(self, patches: Sequence[Patch]) -> ctypes.Array[CPatch]:
        """Checked native patches.

        Raises:
            ConfigError: a patch leaves the block or its memory is misaligned.
        """
        out = (CPatch * len(patches))()
        for index, patch in enumerate(patches):
            name = f"patch {index} of block {self.geometry.id}"
            check_range(f"array of {name}", patch.array, low=-1, high=self.geometry.num_state - 1)
            check_run(name, patch.offset, patch.numel, self.geometry.num_elements)
            width = DTYPE_BYTES[self.geometry.array_dtype(patch.array)]
            check_address(f"data of {name}", patch.data, alignment=width)
            out[index] = CPatch(patch.offset, patch.numel, patch.data, patch.array)
        return out


class RunFile(NamedTuple):
    """A file from which weights are read in place: absolute path, size, time of the last change."""

    path: str
    num_bytes: int
    mtime_ns: int


class InPlacePart(NativePart):
    """A part whose weights are read in place from files that are never written.

    Args:
        geometry: Its shape: U8, weights on disk, no state, one slot. Its id means nothing.
        weights_address: As for :class:`NativePart`.
        files: The files.
        runs: What of them it is, sorted; what is between is zero. Each is the first byte in the
            part, the number of the file, the first byte in the file, and how many bytes.
        direct_io: Bypass the page cache where the file system can.

    Raises:
        StoreCorruptError: a file is gone, or has another size or time.
        StoreError: a system call failed.
    """

    __slots__ = ()

    def __init__(
        self,
        geometry: PartGeometry,
        weights_address: int,
        *,
        files: Sequence[RunFile],
        runs: Sequence[tuple[int, int, int, int]],
        direct_io: bool,
    ) -> None:
        self.geometry, self.disk = geometry, 0
        self._keep = (None, None)
        check_address("weights_address", weights_address, alignment=_PAGE)
        c_files = (CRunFile * len(files))(*(CRunFile(os.fsencode(f.path), f.num_bytes, f.mtime_ns) for f in files))
        c_runs = (CRun * len(runs))(*(CRun(offset, start, num_bytes, file) for offset, file, start, num_bytes in runs))
        opened = functions()["block_open_runs"](
            ctypes.byref(geometry.as_c()), weights_address, c_files, len(files), c_runs, len(runs), bool(direct_io)
        )
        Handle.__init__(self, opened, "block_close")


def check_run(name: str, offset: int, numel: int, num_elements: int) -> None:
    """Checks that a run of elements lies inside a block."""
    check_range(f"offset of {name}", offset, low=0, high=num_elements)
    check_range(f"numel of {name}", numel, low=0, high=num_elements - offset)
