"""Recovery after machines were lost or added: from where does the state come, and how much faster than from remote storage alone?

    python benchmarks/recovery.py [--dir DIR] [--quick]

Four ranks save: two data-parallel groups of two pipeline stages, the first stages on node 0, the second ones on node 1. Then
(AutoHet, section V-C, at small scale):

* ``A``: half of the groups is lost. Both nodes still have all of their stage.
* ``B``: node 0 is lost; tensor parallelism grows from 1 to 2 on node 1, which has half of the layers.
* ``C``: a group is added, on two nodes that have nothing; the others send it what they have.

Nodes are folders and processes of this machine. Sources are throttled to a thousandth of the paper's: the link to remote storage,
which all share, 1.2 MB/s; each node's disk 3.5 MB/s; each link between nodes 50 MB/s. So what counts is where bytes come from, not
what this machine computes. ``remote_only`` is the same reader without local tiers. Bytes are compared with what follows from the
shapes and the map of the files; tensors, bit by bit, with what was saved. ``--quick``: a small model, not throttled or timed.
Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import os
import re
import socket
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from scratch import scratch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_hetero.parallel.recovery import LayerMap, TieredCheckpoints
from lightning_hetero.parallel.recovery.peers import Peers

MB = 1e6
REMOTE, DISK, LINK = 1.2 * MB, 3.5 * MB, 50 * MB  # bytes per second
LAYERS, STAGES, SAVED = 8, 2, 4
BARS = {"A": 4.0, "B": 1.4, "C": 3.5}
KINDS = ("weight", "exp_avg", "exp_avg_sq")
# Node and stage of each rank after the change; in B a rank has half of the rows of all layers instead.
AFTER: dict[str, list[tuple[int, int]]] = {"A": [(0, 0), (1, 1)], "B": [(1, 0), (1, 0)], "C": [(0, 0), (1, 1), (2, 0), (3, 1)]}


class Shape:
    """The size of the model, and of what one checksum covers."""

    def __init__(self, quick: bool) -> None:
        self.rows, self.columns = (64, 32) if quick else (256, 512)
        self.piece_bytes = 2048 if quick else 16 * 1024


# ---- throttles -------------------------------------------------------------------------------------------------------------------

_links: Path | None = None  # where all processes keep until when a link is busy; None: nothing is throttled


def throttle(link: str, size: int, bytes_per_s: float) -> None:
    """Waits until this many bytes have come over a link that others use as well."""
    if _links is None:
        return
    with open(_links / link, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        content = file.read()
        busy_until = struct.unpack("d", content)[0] if content else 0.0
        until = max(time.time(), busy_until) + size / bytes_per_s
        file.truncate(0)
        file.write(struct.pack("d", until))
    time.sleep(max(until - time.time(), 0))


class Disk(LocalFileSystem):
    """The disk of a node."""

    protocol = "nodedisk"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return LocalFileSystem._strip_protocol(str(path).removeprefix(f"{cls.protocol}://"))

    def unstrip_protocol(self, name: str) -> str:
        return f"{self.protocol}://{self._strip_protocol(name)}"

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        content: bytes = super().cat_file(self._strip_protocol(path), start, end, **options)
        self.wait(path, len(content))
        return content

    def wait(self, path: str, size: int) -> None:
        found = re.search(r"node\d", path)
        throttle(found[0] if found else "node", size, DISK)


class Remote(Disk):
    """Remote storage."""

    protocol = "cloud"

    def wait(self, path: str, size: int) -> None:
        throttle("remote", size, REMOTE)


def receive_throttled(self: Peers, content: torch.Tensor, source: int) -> None:
    dist.recv(content, src=source, group=self._group)
    throttle(f"link{self.rank}", content.nbytes, LINK)


# ---- states ----------------------------------------------------------------------------------------------------------------------


def tensor(layer: int, kind: str, shape: Shape) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(KINDS) * layer + KINDS.index(kind))
    return torch.randn(shape.rows, shape.columns, generator=generator)


def key(layer: int, kind: str) -> str:
    name = f"layers.{layer}.weight"
    return f"state_dict.{name}" if kind == "weight" else f"optimizer_0.state.{name}.{kind}"


def nested(tensors: dict[tuple[int, str], Any]) -> dict[str, Any]:
    state: dict[str, Any] = {"state_dict": {}, "optimizer_0": {"state": {}}}
    for (layer, kind), value in tensors.items():
        name = f"layers.{layer}.weight"
        if kind == "weight":
            state["state_dict"][name] = value
        else:
            state["optimizer_0"]["state"].setdefault(name, {})[kind] = value
    return state


def layers_of(stage: int) -> range:
    return range(stage * LAYERS // STAGES, (stage + 1) * LAYERS // STAGES)


def part_of(scenario: str, rank: int, shape: Shape) -> tuple[range, slice]:
    """Layers and rows of a rank after the change."""
    if scenario == "B":
        half = shape.rows // 2
        return range(LAYERS), slice(rank * half, (rank + 1) * half)
    return layers_of(AFTER[scenario][rank][1]), slice(0, shape.rows)


def expected_bytes(scenario: str, rank: int, shape: Shape, layer_map: LayerMap) -> dict[str, int]:
    """By source, from the shapes and from where the map says that a tensor begins."""
    by_source = {"disk": 0, "peer": 0, "remote": 0}
    layers, rows = part_of(scenario, rank, shape)
    node = AFTER[scenario][rank][0]
    row_bytes, piece = shape.columns * 4, shape.piece_bytes
    pieces: dict[str, set[int]] = {n: set(range(-(-layer_map.files[n].bytes // piece))) for n in ("meta.pt", f"rank_{rank}.pt")}
    for layer in layers:
        for kind in KINDS:
            start = layer_map.starts[f"{key(layer, kind)}@0,0"]
            first, last = start + rows.start * row_bytes, start + rows.stop * row_bytes - 1
            pieces.setdefault(f"layers.{layer}.0.distcp", set()).update(range(first // piece, last // piece + 1))
    for name, needed in pieces.items():
        size = sum(min(piece, layer_map.files[name].bytes - p * piece) for p in needed)
        lost = scenario == "B" and name.startswith("layers.") and int(name.split(".")[1]) in layers_of(0)
        by_source["remote" if lost else "disk" if node < STAGES else "peer"] += size
    return by_source


# ---- ranks -----------------------------------------------------------------------------------------------------------------------


def checkpoints(folder: Path, node: int, shape: Shape, *, local: bool = True) -> TieredCheckpoints:
    disk = f"nodedisk://{folder}/node{node}" if local else None
    return TieredCheckpoints(disk=disk, piece_bytes=shape.piece_bytes)


def save(rank: int, folder: Path, shape: Shape) -> None:
    node = rank % STAGES
    tensors = {(layer, kind): tensor(layer, kind, shape) for layer in layers_of(node) for kind in KINDS}
    writer = checkpoints(folder, node, shape)
    writer.save(nested(tensors), f"cloud://{folder}/remote/step.ckpt", step=1, rest=b"rest", own=b"own")
    writer.close()


def load(rank: int, folder: Path, shape: Shape, scenario: str) -> dict[str, Any]:
    node, _ = AFTER[scenario][rank]
    layers, rows = part_of(scenario, rank, shape)
    result: dict[str, Any] = {}
    for local in (True, False):
        reader = checkpoints(folder, node, shape, local=local)
        tensors: dict[tuple[int, str], Any] = {
            (layer, kind): torch.full((rows.stop - rows.start, shape.columns), torch.nan) for layer in layers for kind in KINDS
        }
        wrapped = tensors
        if scenario == "B":
            mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
            wrapped = {k: DTensor.from_local(v, mesh, [Shard(0)], run_check=False) for k, v in tensors.items()}
        dist.barrier()
        begin = time.monotonic()
        loaded = reader.load(f"cloud://{folder}/remote/step.ckpt", nested(wrapped))
        dist.barrier()
        seconds = time.monotonic() - begin
        assert loaded is not None
        equal = all(torch.equal(value, tensor(*k, shape)[rows]) for k, value in tensors.items())
        which = "local_first" if local else "remote_only"
        result[which] = {"seconds": seconds, "bytes": reader.bytes_read, "equal": equal}
        reader.close()
    result["expected"] = expected_bytes(scenario, rank, shape, loaded.layer_map)
    return result


def run_rank(rank: int, world: int, port: int, folder: Path, quick: bool, scenario: str | None, out: Path) -> None:
    global _links
    torch.set_num_threads(1)
    fsspec.register_implementation("nodedisk", Disk)
    fsspec.register_implementation("cloud", Remote)
    if not quick:
        _links = folder / "links"
        _links.mkdir(exist_ok=True)
        Peers.receive = receive_throttled  # type: ignore[method-assign]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    shape = Shape(quick)
    if scenario is None:
        save(rank, folder, shape)
    else:
        out.write_text(json.dumps(load(rank, folder, shape, scenario)))
    dist.barrier()
    dist.destroy_process_group()


def run(folder: Path, quick: bool, scenario: str | None) -> list[dict[str, Any]]:
    """All ranks of a save or of a scenario; what each of them found."""
    world = SAVED if scenario is None else len(AFTER[scenario])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    outs = [folder / f"{scenario}-{rank}.json" for rank in range(world)]
    ranks = [context.Process(target=run_rank, args=(r, world, port, folder, quick, scenario, outs[r])) for r in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
    if any(process.exitcode for process in ranks):
        sys.exit(f"scenario {scenario}: ranks ended with {[process.exitcode for process in ranks]}")
    return [] if scenario is None else [json.loads(out.read_text()) for out in outs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--quick", action="store_true", help="a small model; nothing is throttled or timed")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    with scratch(options.dir) as folder:
        run(folder, options.quick, None)
        for scenario, bar in BARS.items():
            ranks = run(folder, options.quick, scenario)
            total = {s: sum(rank["local_first"]["bytes"][s] for rank in ranks) for s in ("disk", "peer", "remote")}
            figures[scenario] = {
                "bytes": total,
                "bytes_exact": all(rank["local_first"]["bytes"] == rank["expected"] for rank in ranks),
                "remote_only_bytes": sum(rank["remote_only"]["bytes"]["remote"] for rank in ranks),
                "equal": all(rank[which]["equal"] for rank in ranks for which in ("local_first", "remote_only")),
            }
            if not options.quick:
                seconds = {which: max(rank[which]["seconds"] for rank in ranks) for which in ("local_first", "remote_only")}
                figures[scenario] |= {f"{which}_s": round(s, 3) for which, s in seconds.items()}
                figures[scenario] |= {"speedup": round(seconds["remote_only"] / seconds["local_first"], 2), "bar": bar}
    ok = all(f["bytes_exact"] and f["equal"] and f.get("speedup", 1e9) >= f.get("bar", 0) for f in figures.values())
    print(json.dumps({**figures, "ok": ok}))


if __name__ == "__main__":
    main()
