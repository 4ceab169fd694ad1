"""Reads and checks the files of a store that no process uses.

This is a second reader of the format in docs/store-format.md, beside the native one. It needs only
the directory, since the head of every slot file has its geometry. It checks everything before it
uses it.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from lightning_hetero._native.geometry import PartGeometry
from lightning_hetero._native.kernels import digest
from lightning_hetero._native.library import BF16, F16, F32, U8
from lightning_hetero.errors import ConfigError, HeteroError, StoreCorruptError, StoreError
from lightning_hetero.store.format.manifest import MANIFEST, READABLE, identity_of, lock_manifest, open_manifest, read_manifest
from lightning_hetero.store.format.record import files_of
from lightning_hetero.store.format.state_files import fault_of
from lightning_hetero.store.format.stripes import holder, place_of, places_of
from lightning_hetero.store.raw_memory import PAGE, memory_of
from lightning_hetero.units import round_up

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_RING, _RECORD, _ENTRY = 16, struct.Struct("<8s16sqqiiII"), struct.Struct("<qQii")
_STAMP, _GEOMETRY, _DIGEST_BYTES = struct.Struct("<8s16sQqiiqII"), struct.Struct("<iiqiiiiq"), 16
_STAGGER = 17 * 64
_WIDTHS = {F32: 4, BF16: 2, F16: 2, U8: 1}
DTYPE_NAMES = {F32: "float32", BF16: "bfloat16", F16: "float16", U8: "bytes"}
_RECORD_BYTES_MAX, _HEAD_BYTES_MAX = 1 << 30, 1 << 28


def ring_bytes(num_blocks: int, user_bytes: int) -> int:
    """Bytes of a commit ring for so many blocks and so large a user blob."""
    return _RING * round_up(_RECORD.size + _ENTRY.size * num_blocks + user_bytes, PAGE)


@dataclass(frozen=True, slots=True)
class CommittedBlock:
    """What a record says of one block.

    Attributes:
        id: Number of its files.
        step: The step that wrote it.
        write_id: Names that rewrite.
        slot: 0 or 1: the file that counts.
        has_state: Whether the state was written; else it reads as zeros.
    """

    id: int
    step: int
    write_id: int
    slot: int
    has_state: bool

    @property
    def file(self) -> str:
        """The name of the file that counts."""
        return f"block-{self.id:05d}.{'ab'[self.slot]}"


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """One record of the ring.

    Attributes:
        sequence: Its number.
        step: The step that it commits.
        blocks: What it names.
        user: The user blob.
    """

    sequence: int
    step: int
    blocks: tuple[CommittedBlock, ...]
    user: bytes

    @property
    def states(self) -> Mapping[str, int]:
        """The state files that it names, with their bytes."""
        return files_of(self.user)

    @property
    def files(self) -> list[str]:
        """Names of all files that it names."""
        return [*(block.file for block in self.blocks), *self.states]


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong, and where.

    Attributes:
        block: The block's number; -1: none.
        file: The file in the store's directory, or its path if it is on another disk.
        offset: Byte in that file.
        what: What is wrong there.
    """

    block: int
    file: str
    offset: int
    what: str

    def __str__(self) -> str:
        return f"{self.file} at offset {self.offset}{'' if self.block < 0 else f', block {self.block}'}: {self.what}"


class StoreFiles:
    """A store's directory, locked against its next user until it is closed.

    Args:
        path: The directory.
        locks: Lock it; false if another process of the same run has done so.

    Attributes:
        path: The directory.
        places: It, and its stripes on further disks.
        manifest: Its manifest.
        records: The records whose checksum is right, the newest last.
        record: The one whose step is read: the newest of them; ``None`` if there is none.
        notes: What is wrong with records beside the newest whole one: a process that is killed
            while it writes one leaves it torn.

    Raises:
        ConfigError: It is no store, or another version's.
        StoreBusyError: A living process uses it.
    """

    def __init__(self, path: str | os.PathLike[str], *, locks: bool = True) -> None:
        self.path = Path(path)
        self.places: tuple[Path, ...] = (self.path,)
        self.notes: list[Fault] = []
        self.records: list[CommitRecord] = []
        self.record: CommitRecord | None = None
        try:
            self._directory = os.open(self.path, _DIRECTORY)
        except OSError as error:
            raise ConfigError(f"{str(self.path)!r} cannot be opened: {error.strerror}. Give a store's directory.") from error
        try:
            manifest = lock_manifest(self.path, self._directory) if locks else open_manifest(self.path, self._directory)
            if manifest is None:
                raise ConfigError(f"{str(self.path)!r} has no {MANIFEST}: it is not a store. Give a store's directory.")
            self._lock = manifest
            self.manifest: dict[str, Any] = read_manifest(self.path, manifest)
            if self.manifest.get("version") not in READABLE:
                allowed = " and ".join(map(str, READABLE))
                raise ConfigError(
                    f"{str(self.path)!r} is a store of version {self.manifest.get('version')!r}; this package reads {allowed}."
                )
            self._uuid = identity_of(self.path, self.manifest).bytes
            self.places = places_of(self.path, self.manifest)
            self._read_ring()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Gives the directory free; a second call does nothing."""
        for name in ("_lock", "_directory"):
            descriptor, self.__dict__[name] = self.__dict__.get(name, -1), -1
            if descriptor >= 0:
                os.close(descriptor)

    def slot(self, block: CommittedBlock) -> SlotFile:
        """The file that counts of a block of the record.

        Raises:
            StoreCorruptError: It is missing, or its head is not right: names block, file, offset.
        """
        return SlotFile(self, block)

    def has_digests(self, block: CommittedBlock) -> bool:
        """Whether the block's contents can be checked, not only its stamps.

        Raises:
            StoreCorruptError: As for :meth:`slot`.
        """
        with self.slot(block) as slot:
            return slot.has_digests

    def check(self) -> Iterator[Fault]:
        """Reads everything that the newest record names, and yields all faults."""
        if self.record is None:
            yield from self.notes
            return
        for block in self.record.blocks:
            try:
                with self.slot(block) as file:
                    yield from file.check()
            except StoreCorruptError as error:
                if not isinstance(error.fault, Fault):
                    raise
                yield error.fault
        for name, size in self.record.states.items():
            if what := fault_of(self.path, name, size):
                yield Fault(-1, name, 0, what)

    def open(self, name: str) -> int:
        """A file of the store.

        Raises:
            OSError: It cannot be opened, or is not a regular file.
        """
        number = holder(self.places, name) or 0
        descriptor = os.open(name if number == 0 else self.places[number] / name, _FILE, dir_fd=self._directory)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError("it is not a regular file")
        return descriptor

    @property
    def uuid(self) -> bytes:
        """What every stamp and record repeats."""
        return self._uuid

    def _read_ring(self) -> None:
        try:
            descriptor = self.open("COMMIT")
        except OSError as error:
            self.notes.append(Fault(-1, "COMMIT", 0, f"it cannot be opened: {error.strerror or error}"))
            return
        try:
            size = os.fstat(descriptor).st_size
            length = size // _RING
            if size % (_RING * PAGE) or not PAGE <= length <= _RECORD_BYTES_MAX:
                self.notes.append(Fault(-1, "COMMIT", 0, f"{size} bytes are not {_RING} records of whole pages"))
                return
            found = (self._read_record(descriptor, place, length) for place in range(_RING))
            self.records = sorted(filter(None, found), key=lambda record: record.sequence)
            self.record = self.records[-1] if self.records else None
        finally:
            os.close(descriptor)
        if self.record is None and not self.notes:
            self.notes.append(Fault(-1, "COMMIT", 0, "there is no record: no step was committed"))

    def _read_record(self, ring: int, place: int, length: int) -> CommitRecord | None:
        head = _read_at(ring, self.path / "COMMIT", place * length, _RECORD.size)
        if len(head) < _RECORD.size or not any(head):
            return None  # never written
        magic, owner, sequence, step, num_blocks, user_bytes, version, crc = _RECORD.unpack(head)
        fault = ""
        room = length - _RECORD.size
        if magic != b"HTOCMMT1" or version != 1:
            fault = "no commit record of version 1 is here"
        elif owner != self._uuid:
            fault = "the record is of another store"
        elif num_blocks < 0 or user_bytes < 0 or num_blocks * _ENTRY.size + user_bytes > room:
            fault = "the record's length is out of range"
        elif sequence % _RING != place:
            fault = f"record {sequence} is in the place of another"
        else:
            payload_bytes = num_blocks * _ENTRY.size + user_bytes
            payload = _read_at(ring, self.path / "COMMIT", place * length + _RECORD.size, payload_bytes)
            if crc32c(payload, crc32c(head[:-4] + bytes(4))) != crc:
                fault = "the record's checksum differs"
        if fault:
            self.notes.append(Fault(-1, "COMMIT", place * length, fault))
            return None
        entries = enumerate(_ENTRY.iter_unpack(payload[: num_blocks * _ENTRY.size]))
        blocks = tuple(CommittedBlock(i, s, w, slot, bool(h)) for i, (s, w, slot, h) in entries if slot in (0, 1))
        return CommitRecord(sequence, step, blocks, payload[num_blocks * _ENTRY.size :])


def repeat_record(store: Path, sequence: int, behind: int) -> None:
    """Writes a copy of a whole record of a store's ring as its record number ``behind``.

    Raises:
        StoreError: A system call failed.
    """
    try:
        ring = os.open(store / "COMMIT", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            length = os.fstat(ring).st_size // _RING
            content = os.pread(ring, length, sequence % _RING * length)
            fields = _RECORD.unpack(content[: _RECORD.size])
            head = _RECORD.pack(*fields[:2], behind, *fields[3:-1], 0)
            size = _RECORD.size + fields[4] * _ENTRY.size + fields[5]
            crc = crc32c(content[_RECORD.size : size], crc32c(head))
            os.pwrite(ring, head[:-4] + crc.to_bytes(4, "little") + content[_RECORD.size :], behind % _RING * length)
            os.fsync(ring)
        finally:
            os.close(ring)
    except OSError as error:
        raise StoreError(f"{str(store / 'COMMIT')!r} cannot be written: {error.strerror}. Nothing is lost: try again.") from error


def _read_at(descriptor: int, file: Path, offset: int, length: int, whose: str = "") -> bytes:
    """At most so many bytes of a file."""
    try:
        return os.pread(descriptor, length, offset)
    except OSError as error:
        raise _unreadable(file, offset, error, whose) from error


def _unreadable(file: Path, offset: int, error: OSError, whose: str) -> StoreError:
    return StoreError(
        f"{whose}{str(file)!r} cannot be read at offset {offset}: {error.strerror}. If the disk fails, go on from a checkpoint on "
        f"another one."
    )


def step_of_slot(store: StoreFiles, name: str) -> int:
    """The step that last finished a rewrite of a slot file, by the file's head; 0: none did.

    Raises:
        StoreError: The file cannot be read.
    """
    try:
        with open(store.open(name), "rb", buffering=0) as file:
            head = file.read(_STAMP.size)
    except OSError as error:
        raise StoreError(f"{str(place_of(store.places, name))!r} cannot be read: {error.strerror or error}.") from error
    return int(_STAMP.unpack(head)[3]) if len(head) == _STAMP.size else 0


class SlotFile:
    """The slot file of one committed block.

    Args:
        store: Its store.
        block: The block.

    Attributes:
        block: The block.
        geometry: Its geometry, as the file's head says it.

    Raises:
        StoreCorruptError: It is missing, or its head is not right: names block, file, offset.
    """

    def __init__(self, store: StoreFiles, block: CommittedBlock) -> None:
        self.block = block
        self._store = store
        try:
            self._descriptor = store.open(block.file)
        except OSError as error:
            raise self._corrupt(0, f"it cannot be opened: {error.strerror or error}") from error
        try:
            self._read_head()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    @property
    def num_chunks(self) -> int:
        """Chunks of the block."""
        return -(-self.geometry.num_elements // self.geometry.chunk_elements)

    @property
    def has_digests(self) -> bool:
        """Whether the contents can be checked, not only the stamps."""
        g = self.geometry
        if g.weights_on_disk_file or not (g.state_on_disk_file and self.block.has_state):
            return bool(self._digests)
        footer = self._bytes(self._state_start + self._footer_offset(0), _STAMP.size)
        return len(footer) == _STAMP.size and bool(_STAMP.unpack(footer)[-2])

    def check(self) -> Iterator[Fault]:
        """Reads all of it, and gives what is wrong."""
        g = self.geometry
        buffer = torch.empty(max(self._weight_stride, self._state_stride), dtype=torch.uint8)
        for chunk in range(len(self._digests)):
            if fault := self._read_chunk(chunk, buffer):
                yield fault
        if not (g.state_on_disk_file and self.block.has_state):
            return
        for chunk in range(self.num_chunks):
            offset, footer = self._state_start + chunk * self._state_stride, self._footer_offset(chunk)
            if not self._read(offset, footer + _STAMP.size + _DIGEST_BYTES, buffer):
                yield self._fault(offset, "the file ends here")
                continue
            tail = bytes(memory_of(buffer)[footer : footer + _STAMP.size + _DIGEST_BYTES])
            if what := self._stamp_fault(tail[: _STAMP.size], b"HTOFOOT1", chunk, tail[_STAMP.size :]):
                yield self._fault(offset + footer, f"chunk {chunk} of the state: {what}")
            elif _STAMP.unpack(tail[: _STAMP.size])[-2] and digest(buffer.data_ptr(), footer) != tail[_STAMP.size :]:
                yield self._fault(offset, f"the digest of chunk {chunk} of the state differs")

    def read_weights(self, start: int, out: torch.Tensor) -> None:
        """Reads and checks elements of the weights from ``start`` on into a flat CPU tensor.

        Raises:
            StoreCorruptError: The file ends before, or a digest differs.
        """
        begin, raw = start * _WIDTHS[self.geometry.weight_dtype], out.view(torch.uint8)
        if not self._digests:
            if raw.numel() and not self._read(self._head_bytes + begin, raw.numel(), raw):
                raise self._corrupt(self._head_bytes + begin, "the file ends here")
            return
        buffer, done = torch.empty(self._weight_stride, dtype=torch.uint8), 0
        while done < raw.numel():
            chunk, first = divmod(begin + done, self._weight_stride)
            if chunk >= self.num_chunks:
                raise self._corrupt(self._head_bytes + begin + done, "the file ends here")
            length = self._chunk_elements(chunk) * _WIDTHS[self.geometry.weight_dtype]
            count = min(raw.numel() - done, length - first)
            whole = count == length
            if fault := self._read_chunk(chunk, raw[done:] if whole else buffer):
                raise self._damaged(fault)
            if not whole:
                raw[done : done + count] = buffer[first : first + count]
            done += count

    def read_state(self, array: int, start: int, out: torch.Tensor) -> None:
        """Reads elements of a state array from ``start`` on into a flat fp32 CPU tensor.

        Raises:
            StoreCorruptError: The file ends before, or a chunk is not of this rewrite.
        """
        if not self.block.has_state:
            out.zero_()
            return
        size, done = self.geometry.chunk_elements, 0
        while done < out.numel():
            chunk, first = divmod(start + done, size)
            count = min(out.numel() - done, self._chunk_elements(chunk) - first)
            begin = self._state_start + chunk * self._state_stride
            tail = self._bytes(begin + self._footer_offset(chunk), _STAMP.size + _DIGEST_BYTES)
            if len(tail) < _STAMP.size + _DIGEST_BYTES:
                raise self._corrupt(begin, "the file ends here")
            if what := self._stamp_fault(tail[: _STAMP.size], b"HTOFOOT1", chunk, tail[_STAMP.size :]):
                raise self._corrupt(begin, f"chunk {chunk} of the state: {what}")
            offset = begin + self._array_offsets(chunk)[array] + 4 * first
            if not self._read(offset, 4 * count, out[done : done + count]):
                raise self._corrupt(offset, "the file ends here")
            done += count

    def _read_chunk(self, chunk: int, out: torch.Tensor) -> Fault | None:
        """Reads a chunk of weights that has a digest, and says what is wrong with it."""
        offset = self._head_bytes + chunk * self._weight_stride
        length = self._chunk_elements(chunk) * _WIDTHS[self.geometry.weight_dtype]
        if not self._read(offset, length, out):
            return self._fault(offset, "the file ends here")
        if digest(out.data_ptr(), length) != self._digests[chunk]:
            return self._fault(offset, f"the digest of chunk {chunk} of the weights differs")
        return None

    def _read_head(self) -> None:
        fixed = self._bytes(0, _STAMP.size + _GEOMETRY.size)
        if len(fixed) < _STAMP.size + _GEOMETRY.size:
            raise self._corrupt(0, "the file ends here")
        number, dtype, elements, state, weights_here, state_here, slots, chunk = _GEOMETRY.unpack(fixed[_STAMP.size :])
        num_chunks = -(-elements // chunk) if chunk > 0 and 0 < elements < 1 << 44 else 0
        digests = self._bytes(len(fixed), min(num_chunks * _DIGEST_BYTES, _HEAD_BYTES_MAX))
        # A head that its checksum proves was written by the engine; only then its numbers are used.
        if what := self._stamp_fault(fixed[: _STAMP.size], b"HTOHEAD1", num_chunks, fixed[_STAMP.size :] + digests):
            raise self._corrupt(0, what)
        try:
            self.geometry = PartGeometry(
                id=number, weight_dtype=dtype, num_elements=elements, num_state=state, weights_on_disk_file=bool(weights_here),
                state_on_disk_file=bool(state_here), num_slots=slots, chunk_elements=chunk,
            )  # fmt: skip
        except HeteroError as error:
            raise self._corrupt(_STAMP.size, f"its geometry cannot be: {error}") from error
        has_digests = bool(_STAMP.unpack(fixed[: _STAMP.size])[-2])  # of the weights
        self._digests = [digests[i : i + 16] for i in range(0, len(digests), 16)] if has_digests else []
        self._lay_out()

    def _lay_out(self) -> None:
        g = self.geometry
        self._head_bytes = round_up(_STAMP.size + _GEOMETRY.size + self.num_chunks * _DIGEST_BYTES, PAGE)
        weights = round_up(g.num_elements * _WIDTHS[g.weight_dtype], PAGE) if g.weights_on_disk_file else 0
        self._weight_stride = g.chunk_elements * _WIDTHS[g.weight_dtype]
        self._state_start = self._head_bytes + weights
        self._state_stride = self._state_bytes(0) if g.state_on_disk_file else 0
        wanted = self._state_start
        if g.state_on_disk_file:
            wanted += (self.num_chunks - 1) * self._state_stride + self._state_bytes(self.num_chunks - 1)
        size = os.fstat(self._descriptor).st_size
        if size != wanted:
            raise self._corrupt(min(size, wanted), f"the file has {size} bytes, its geometry {wanted}")

    def _chunk_elements(self, chunk: int) -> int:
        return min(self.geometry.chunk_elements, self.geometry.num_elements - chunk * self.geometry.chunk_elements)

    def _array_offsets(self, chunk: int) -> list[int]:
        """Where the state arrays begin in their chunk."""
        array_bytes, offsets = 4 * self._chunk_elements(chunk), [_STAGGER]
        for k in range(1, self.geometry.num_state):  # each has an offset of its own
            residue = (k + 1) * _STAGGER % PAGE
            offsets.append(round_up(offsets[-1] + array_bytes - residue, PAGE) + residue)
        return offsets

    def _state_bytes(self, chunk: int) -> int:
        return round_up(self._array_offsets(chunk)[-1] + 4 * self._chunk_elements(chunk) + _STAMP.size + _DIGEST_BYTES, PAGE)

    def _footer_offset(self, chunk: int) -> int:
        return self._state_bytes(chunk) - _STAMP.size - _DIGEST_BYTES

    def _stamp_fault(self, stamp: bytes, magic: bytes, chunk: int, rest: bytes) -> str:
        got, owner, write_id, step, number, slot, place, _, crc = _STAMP.unpack(stamp)
        if got != magic:
            return "no stamp is here: the write was lost or torn"
        if owner != self._store.uuid:
            return "the stamp names another store"
        if (number, slot) != (self.block.id, self.block.slot) or place != chunk:
            return "the stamp names another place: a write was misdirected or files were exchanged"
        if (write_id, step) != (self.block.write_id, self.block.step):
            return "the stamp is of another rewrite: a write was lost"
        return "" if crc32c(stamp[:-4] + bytes(4) + rest) == crc else "the stamp's checksum differs"

    def _bytes(self, offset: int, length: int) -> bytes:
        return _read_at(self._descriptor, place_of(self._store.places, self.block.file), offset, length, f"block {self.block.id}: ")

    def _read(self, offset: int, length: int, out: torch.Tensor) -> bool:
        view, done = memory_of(out)[:length], 0
        while done < length:
            try:
                got = os.preadv(self._descriptor, [view[done:]], offset + done)
            except OSError as error:
                file = place_of(self._store.places, self.block.file)
                raise _unreadable(file, offset + done, error, f"block {self.block.id}: ") from error
            if got <= 0:
                return False
            done += got
        return True

    def _fault(self, offset: int, what: str) -> Fault:
        where = place_of(self._store.places, self.block.file)
        return Fault(self.block.id, self.block.file if where.parent == self._store.path else str(where), offset, what)

    def _corrupt(self, offset: int, what: str) -> StoreCorruptError:
        return self._damaged(self._fault(offset, what))

    def _damaged(self, fault: Fault) -> StoreCorruptError:
        return StoreCorruptError(os.path.join(self._store.path, str(fault)), fault)


def _crc_table() -> tuple[int, ...]:
    rows = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        rows.append(value)
    return tuple(rows)


_TABLE = _crc_table()


def crc32c(data: bytes, seed: int = 0) -> int:
    """CRC32C (Castagnoli) of ``data``, continued from ``seed``, the checksum of earlier bytes."""
    crc = seed ^ 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF
