"""Everything that is parsed without trust: what reads it, and whole examples to begin from.

A reader returns or raises one of this package's errors. Anything else, and any touch of memory that
is not its own, is a fault. ``tests/faults/test_fuzzing.py`` mutates the examples in every test run;
``tests/fuzz/python.py`` lets atheris do it by coverage.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_hetero import _native
from lightning_hetero._native import Arena, Engine, NativePart, PartGeometry, Patch, Store
from lightning_hetero.convert.safetensors import INDEX, TensorToWrite, WeightFiles, write_file
from lightning_hetero.errors import HeteroError
from lightning_hetero.ir.cluster import Cluster, DeviceType, LayerTimes, Node
from lightning_hetero.ir.cluster_plan import ClusterPlan, GroupPlan, RunnerUp, StagePlan
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Prediction, Saved, Tier
from lightning_hetero.parallel.planner.known_clusters import load_cluster
from lightning_hetero.store.format import record
from lightning_hetero.store.format.audit import StoreFiles, crc32c
from lightning_hetero.store.format.encoding import Encoded, dumps, unpack
from lightning_hetero.store.format.manifest import check_same_store, identity_of, layout_of, read_manifest

HERE = Path("store")
GOLDEN = Path(__file__).parents[1] / "golden"
PAGE = 4096
UUID = bytes(range(16))


@dataclass(frozen=True, slots=True)
class Target:
    """Something that is parsed.

    Attributes:
        read: Parses bytes.
        examples: Whole ones.
    """

    read: Callable[[bytes], object]
    examples: Callable[[], list[bytes]]

    def __call__(self, data: bytes) -> None:
        """Parses bytes, which may be refused."""
        with suppress(HeteroError):
            self.read(data)


@contextmanager
def file_of(data: bytes) -> Iterator[int]:
    """A file in memory with this content; ``/proc/self/fd`` has a path to it."""
    descriptor = os.memfd_create("fuzz")
    try:
        os.write(descriptor, data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def by_path(read: Callable[[str], object]) -> Callable[[bytes], object]:
    def call(data: bytes) -> object:
        with file_of(data) as descriptor:
            return read(f"/proc/self/fd/{descriptor}")

    return call


# ---- JSON files ----------------------------------------------------------------------------------


def plans() -> list[bytes]:
    rows = (
        BlockPlan(name="layers.0", weights=Tier.DISK, state=Tier.DISK, saved=Saved.RECOMPUTE, operators={"mm": Saved.KEEP}),
        BlockPlan(name="*"),
    )
    predicted = Prediction(
        iteration_s=1.5, forward_s=0.5, backward_s=1.0, device_peak_bytes=1, host_peak_bytes=2, disk_bytes=3,
        bottleneck={"forward": "gpu"},
    )  # fmt: skip
    whole = Plan(name="p", blocks=rows, objective_s=1.0, decisions={"x": [1]}, predicted=predicted, origin={"batch": 2})
    return [whole.to_json().encode(), Plan(name="q", blocks=rows[1:], host_cache_bytes=1 << 30).to_json().encode()]


def clusters() -> list[bytes]:
    times = (LayerTimes(tensor_parallel=1, seconds=(0.1, 0.2)),)
    kind = DeviceType(name="new", memory_bytes=1 << 34, flop_per_s=1e13, peer_bytes_per_s=1e10, layer_times=times)
    nodes = (Node(name="a", device="new", count=2), Node(name="b", device="a100-80", count=1))
    return [Cluster(name="c", network_bytes_per_s=1e9, nodes=nodes, devices=(kind,)).to_json().encode()]


def yaml_clusters() -> list[bytes]:
    return [b"name: c\nnetwork_bytes_per_s: 50e9\nnodes:\n  - {name: a, device: a100-80, count: 2}\n", *clusters()]


def load_yaml(data: bytes) -> object:
    path = _folder() / "cluster.yaml"
    path.write_bytes(data)
    return load_cluster(path)


def cluster_plans() -> list[bytes]:
    stage = StagePlan(node="a", device="a100-80", layers=4, micro_batch_s=0.5, memory_bytes=1 << 30)
    plan = ClusterPlan(
        name="c", tensor_parallel=1, tokens=128, iteration_s=1.0, sync_s=0.1, utilisation=0.5,
        groups=(GroupPlan(micro_batches=2, seconds=1.0, stages=(stage,)),), idle={"b": 1},
        runner_ups=(RunnerUp(name="d", tensor_parallel=2, iteration_s=2.0, groups=("a",)),), origin={"model": "m"},
    )  # fmt: skip
    return [plan.to_json().encode()]


def safetensors() -> list[bytes]:
    tensors = [TensorToWrite(n, t.dtype, t.shape, lambda t=t: t) for n, t in (("a", torch.ones(2, 3)), ("b", torch.ones(4).half()))]
    path = _folder() / "whole.safetensors"
    write_file(path, tensors)
    return [path.read_bytes()]


def read_all(path: str) -> None:
    for tensor in WeightFiles.open(path).tensors.values():
        tensor.read()


def indexes() -> list[bytes]:
    return [json.dumps({"metadata": {}, "weight_map": {"a": "whole.safetensors", "b": "whole.safetensors"}}).encode()]


def read_index(data: bytes) -> object:
    folder = _folder() / "sharded"
    if not folder.exists():
        folder.mkdir()
        (folder / "whole.safetensors").write_bytes(safetensors()[0])
    (folder / INDEX).write_bytes(data)
    return WeightFiles.open(folder)


# ---- a store -------------------------------------------------------------------------------------

GEOMETRY = PartGeometry(
    id=0, weight_dtype=_native.F32, num_elements=8192, num_state=2, weights_on_disk_file=True, state_on_disk_file=True,
    chunk_elements=4096,
)  # fmt: skip
BLOB = record.compose(
    [record.PartEntry(GEOMETRY, stepped=True, weights=None, state=None).to_json()],
    dumps({"x": torch.ones(3), "y": (1, {2})}, "s"),
    "",
)
STATE = b"".join(Encoded({"x": torch.ones(3), "y": (b"bytes", {2})}, "s").pieces())
MODEL = {"model": "M", "blocks": [{"block": "b", "params": {"w": ["torch.float32", [8192]]}}]}
MANIFEST = {
    "format": "lightning-hetero-store", "version": 1, "uuid": UUID.hex(), "pid": 1, "temporary": False,
    "fingerprint": hashlib.sha256(json.dumps(MODEL, sort_keys=True).encode()).hexdigest(), "geometry": MODEL,
    "layout": {"num_blocks": 4, "user_bytes": 3000, "parts": [["w"]]},
}  # fmt: skip


@functools.cache
def _folder() -> Path:
    """A directory in memory that goes with the process."""
    directory = tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    _keep.append(directory)
    return Path(directory.name)


_keep: list[object] = []


@functools.cache
def _store() -> Path:
    """A store of one block, after one commit."""
    path = _folder() / "store"
    path.mkdir(mode=0o700)
    (path / "MANIFEST").write_text(json.dumps(MANIFEST))
    with _opened(path, create=True) as (store, block, engine):
        values = torch.arange(8192.0)
        patches = [Patch(offset=0, numel=8192, data=values.data_ptr(), array=array) for array in (-1, 0, 1)]
        engine.store(block, patches, weights_from_memory=False, step=1, keep=values).wait()
        engine.commit(store, 1, BLOB).wait()
    return path


@contextmanager
def _opened(path: Path, *, create: bool) -> Iterator[tuple[Store, NativePart, Engine]]:
    with ExitStack() as stack:
        store = stack.enter_context(
            Store(path, uuid=UUID, create=create, direct_io=False, durability=1, verify_digests=True, num_blocks=4, user_bytes=3000)
        )
        arena = Arena(4 * 8192)
        block = stack.enter_context(NativePart(store, GEOMETRY, arena.address, keep=arena))
        engine = Engine(io_backend="pool", io_threads=1, staging_bytes=1 << 20, chunk_bytes_max=1 << 17)
        stack.enter_context(engine)
        yield store, block, engine


def _read_store(path: Path) -> None:
    with StoreFiles(path) as files:
        list(files.check())
        if files.record is not None:
            with suppress(HeteroError):
                record.state_of(record.parse(files.record.user), "here")
    with _opened(path, create=False) as (store, block, engine):
        store.recover()
        values = torch.empty(8192)
        patches = [Patch(offset=0, numel=8192, data=values.data_ptr(), array=array) for array in (-1, 0, 1)]
        engine.read(block, patches, keep=values).wait()


def _with_file(name: str, offset: int, content: bytes) -> None:
    """Reads the store with other bytes in one of its files."""
    path = _store()
    whole = (path / name).read_bytes()
    try:
        with open(path / name, "r+b") as file:
            file.seek(offset)
            file.write(content)
        _read_store(path)
    finally:
        (path / name).write_bytes(whole)


_RECORD_CRC, _STAMP_CRC = 52, 60


def ring(data: bytes) -> None:
    """One record of the ring; where the first byte is odd its checksum is made right, or nothing
    behind it would be reached.
    """
    length = len((_store() / "COMMIT").read_bytes()) // 16
    content = bytearray(data[1 : length + 1].ljust(length, b"\0"))
    if data[:1] and data[0] & 1:
        num_blocks, user_bytes = struct.unpack_from("<ii", content, 40)
        end = 56 + 24 * max(0, num_blocks) + max(0, user_bytes)
        content[_RECORD_CRC : _RECORD_CRC + 4] = bytes(4)
        struct.pack_into("<I", content, _RECORD_CRC, crc32c(bytes(content[56 : min(end, length)]), crc32c(bytes(content[:56]))))
    _with_file("COMMIT", length, bytes(content))


def rings() -> list[bytes]:
    whole = (_store() / "COMMIT").read_bytes()
    length = len(whole) // 16
    return [b"\1" + whole[length : 2 * length], b"\0" + bytes(length)]


def slot(data: bytes) -> None:
    """The head or a footer of a slot's file; checksums as for a record."""
    place = _slot_places()[data[1] % 3] if len(data) > 1 else 0
    length = 136 if place == 0 else 80
    content = bytearray(data[2 : 2 + length].ljust(length, b"\0"))
    if data[:1] and data[0] & 1:
        content[_STAMP_CRC : _STAMP_CRC + 4] = bytes(4)
        struct.pack_into("<I", content, _STAMP_CRC, crc32c(bytes(content)))
    _with_file(_slot_name(), place, bytes(content))


def _slot_name() -> str:
    with StoreFiles(_store()) as files:
        assert files.record is not None
        return files.record.blocks[0].file


def _slot_places() -> list[int]:
    size = (_store() / "block-00000.a").stat().st_size
    stride = (size - PAGE - 4 * 8192) // 2
    return [0, size - stride - 80, size - 80]


def slots() -> list[bytes]:
    whole = (_store() / _slot_name()).read_bytes()
    lengths = (136, 80, 80)
    return [bytes([1, i]) + whole[p : p + n] for i, (p, n) in enumerate(zip(_slot_places(), lengths, strict=True))]


def manifest(data: bytes) -> None:
    with file_of(data) as descriptor:
        found = read_manifest(HERE, descriptor)
    for check in (identity_of, layout_of):
        with suppress(HeteroError):
            check(HERE, found)
    check_same_store(HERE, found, MODEL)


TARGETS = {
    "plan": Target(by_path(Plan.load), plans),
    "cluster": Target(by_path(load_cluster), clusters),
    "cluster-yaml": Target(load_yaml, yaml_clusters),
    "cluster-plan": Target(by_path(ClusterPlan.load), cluster_plans),
    "hardware-profile": Target(by_path(HardwareProfile.load), lambda: [(GOLDEN / "hardware_profile.json").read_bytes()]),
    "model-profile": Target(by_path(ModelProfile.load), lambda: [(GOLDEN / "model_profile.json").read_bytes()]),
    "safetensors": Target(by_path(read_all), safetensors),
    "safetensors-index": Target(read_index, indexes),
    "manifest": Target(manifest, lambda: [json.dumps(MANIFEST).encode()]),
    "state-file": Target(lambda data: unpack(memoryview(bytearray(data))), lambda: [STATE]),
    "record": Target(lambda data: record.state_of(record.parse(data), "here"), lambda: [BLOB]),
    "commit-ring": Target(ring, rings),
    "slot-file": Target(slot, slots),
}
