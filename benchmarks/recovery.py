"""Recovery after machines left or joined: sources of the state, speed-up over remote storage.

    python benchmarks/recovery.py [--dir DIR] [--quick]

Four ranks train and save: ``hetero_parallel`` with two groups of two pipeline stages, the first
stages on node 0, the second ones on node 1, and ``LocalFirst``. Then other ranks continue with
another plan (AutoHet, section V-C, at small scale):

* ``A``: half of the groups is lost. Both nodes still have all of their stage.
* ``B``: node 0 is lost; tensor parallelism grows from 1 to 2 on node 1, which has half of the
  layers.
* ``C``: a group is added, on two empty nodes; the others send their state.

Nodes are folders and processes of this machine. Sources are throttled to a thousandth of the
paper's: the link to remote storage, which all share, 1.2 MB/s; each node's disk 3.5 MB/s; each link
between nodes 50 MB/s. So only the sources of bytes matter, not this machine's compute.
``remote_only`` is the same without local tiers. Bytes are compared with those computed from the
shapes and the map of the files; weights and optimizer state in the trainer are compared bit by bit
with the saved ones. ``--quick``: a small model, not throttled or timed. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import os
import re
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.plugins.environments import LightningEnvironment
from scratch import free_port, scratch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import LocalFirst
from lightning_hetero.ir.cluster_plan import ClusterPlan, GroupPlan, StagePlan
from lightning_hetero.parallel import StagedSteps
from lightning_hetero.parallel.recovery import LayerMap
from lightning_hetero.parallel.recovery.peers import PeerTransfers
from lightning_hetero.strategies import HeteroParallelStrategy

MB = 1e6
REMOTE, DISK, LINK = 1.2 * MB, 3.5 * MB, 50 * MB  # bytes per second
LAYERS, MICRO_BATCHES = 8, 4
BARS = {"A": 4.0, "B": 1.4, "C": 3.5}
HALVES = (range(LAYERS // 2), range(LAYERS // 2, LAYERS))  # of the layers: what node 0 and node 1 had
# Of each group the node of each stage; in B two ranks of one node are one stage.
SAVED = ((0, 1), (0, 1))
AFTER: dict[str, tuple[tuple[int, ...], ...]] = {"A": ((0, 1),), "B": ((1,),), "C": ((0, 1), (2, 3))}


class Shape:
    """The size of the model, and of what one checksum covers."""

    def __init__(self, quick: bool) -> None:
        self.narrow, self.wide = (16, 64) if quick else (128, 512)
        self.piece_bytes = 2048 if quick else 16 * 1024


# ---- throttles -----------------------------------------------------------------------------------

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


def receive_throttled(self: PeerTransfers, content: torch.Tensor, source: int) -> None:
    dist.recv(content, src=source, group=self._group)
    throttle(f"link{self.rank}", content.nbytes, LINK)


# ---- the model and its plans ---------------------------------------------------------------------


class Block(nn.Module):
    """A feed-forward block, which tensor parallelism cuts by itself."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(shape.narrow, shape.wide, bias=False), nn.Linear(shape.wide, shape.narrow, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(StagedSteps, pl.LightningModule):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(shape) for _ in range(LAYERS))

    def stage_layers(self) -> nn.ModuleDict:
        return nn.ModuleDict({str(i): layer for i, layer in enumerate(self.layers)})

    def loss_sum(self, output: Tensor, batch: Any) -> Tensor:
        return output.square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def cluster_plan(scenario: str | None) -> ClusterPlan:
    """Equal stages; ranks are numbered node by node."""
    nodes = SAVED if scenario is None else AFTER[scenario]
    groups = []
    for of_group in nodes:
        layers = LAYERS // len(of_group)
        stages = [StagePlan(node=f"node{n}", device="cpu", layers=layers, micro_batch_s=1.0, memory_bytes=0) for n in of_group]
        groups.append(GroupPlan(micro_batches=MICRO_BATCHES // len(nodes), seconds=1.0, stages=tuple(stages)))
    return ClusterPlan(
        name="ranks",
        tensor_parallel=2 if scenario == "B" else 1,
        tokens=1,
        iteration_s=1.0,
        sync_s=0.0,
        utilisation=1.0,
        groups=tuple(groups),
    )


def nodes_of(scenario: str | None) -> list[int]:
    """Each rank's node."""
    plan = cluster_plan(scenario)
    return sorted(int(s.node[4:]) for group in plan.groups for s in group.stages for _ in range(plan.tensor_parallel))


def fit(rank: int, world: int, shape: Shape, scenario: str | None, local_first: Any, resume: str | None) -> pl.Trainer:
    """One step, or what is left of it."""
    torch.manual_seed(rank)
    data = TensorDataset(torch.randn(MICRO_BATCHES, shape.narrow, generator=torch.Generator().manual_seed(1)))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=HeteroParallelStrategy(plan=cluster_plan(scenario)),
        plugins=[local_first, LightningEnvironment()],
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(shape), DataLoader(data, batch_size=1), ckpt_path=resume)
    return trainer


def held(trainer: pl.Trainer) -> Iterator[tuple[str, Any]]:
    """The tensors of this rank, weights and optimizer state, by the names in checkpoints."""
    state = trainer.optimizers[0].state
    for name, parameter in trainer.lightning_module.named_parameters():
        if parameter in state:
            yield f"state_dict.{name}", parameter.detach()
            yield from ((f"optimizer_0.state.{name}.{key}", value) for key, value in state[parameter].items())


# ---- ranks ---------------------------------------------------------------------------------------


def local_first(folder: Path, node: int, shape: Shape, *, local: bool = True) -> Any:
    return LocalFirst(disk=f"nodedisk://{folder}/node{node}" if local else None, piece_bytes=shape.piece_bytes)


def save(rank: int, world: int, folder: Path, shape: Shape) -> None:
    plugin = local_first(folder, nodes_of(None)[rank], shape)
    trainer = fit(rank, world, shape, None, plugin, None)
    trainer.save_checkpoint(f"cloud://{folder}/remote/step.ckpt")
    plugin.teardown()  # waits until it is written
    torch.save(dict(held(trainer)), folder / f"saved-{rank}.pt")


def load(rank: int, world: int, folder: Path, shape: Shape, scenario: str) -> dict[str, Any]:
    saved = {name: value for file in folder.glob("saved-*.pt") for name, value in torch.load(file).items()}
    wanted = {name for name in saved if layer_of(name) in layers_of(scenario, rank)}
    result: dict[str, Any] = {}
    for local in (True, False):
        plugin = local_first(folder, nodes_of(scenario)[rank], shape, local=local)
        seconds: list[float] = []
        plugin.checkpoints.load = timed(plugin.checkpoints.load, seconds)
        found = dict(held(fit(rank, world, shape, scenario, plugin, f"cloud://{folder}/remote/step.ckpt")))
        result["local_first" if local else "remote_only"] = {
            "seconds": seconds[0],
            "bytes": plugin.bytes_read,
            "equal": found.keys() == wanted and all(torch.equal(*same_part(saved[k], v, rank)) for k, v in found.items()),
        }
    result["expected"] = expected_bytes(scenario, rank, folder, found)
    return result


def timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """The same, which all ranks begin and end together."""

    def run(*arguments: Any, **options: Any) -> Any:
        dist.barrier()
        begin = time.monotonic()
        found = call(*arguments, **options)
        dist.barrier()
        seconds.append(time.monotonic() - begin)
        return found

    return run


# ---- what is expected ----------------------------------------------------------------------------


def layer_of(name: str) -> int:
    found = re.search(r"layers\.(\d)\.", name)
    assert found is not None
    return int(found[1])


def layers_of(scenario: str, rank: int) -> range:
    """Of a rank after the change."""
    node = nodes_of(scenario)[rank]
    group = next(of_group for of_group in AFTER[scenario] if node in of_group)
    return HALVES[group.index(node)] if len(group) == len(HALVES) else range(LAYERS)


def part(value: Any, rank: int) -> tuple[slice, ...]:
    """What a rank has of a tensor: half of one that tensor parallelism shares."""
    whole = [slice(0, size) for size in value.shape]
    for placement in getattr(value, "placements", ()):
        half = value.shape[placement.dim] // 2
        whole[placement.dim] = slice(rank * half, (rank + 1) * half)
    return tuple(whole)


def same_part(saved: Tensor, value: Any, rank: int) -> tuple[Tensor, Tensor]:
    return saved[part(value, rank)], value.to_local() if hasattr(value, "to_local") else value


def expected_bytes(scenario: str, rank: int, folder: Path, found: dict[str, Any]) -> dict[str, int]:
    """By source, from the shapes and from where the map says that a tensor begins."""
    (save,) = [path for path in (folder / "remote" / "step.ckpt").iterdir() if path.is_dir()]
    layer_map = LayerMap.decode((save / "map.json").read_bytes())
    size = layer_map.piece_bytes
    whole = [name for name in ("meta.pt", "other.distcp", f"rank_{rank}.pt") if name in layer_map.files]
    pieces = {name: set(range(-(-layer_map.files[name].bytes // size))) for name in whole}
    for name, value in found.items():
        start = layer_map.starts[f"{name}@{','.join('0' * value.dim())}"]
        rows, columns = part(value, rank) if value.dim() else (slice(0, 1), slice(0, 1))
        width = value.shape[-1] if value.dim() else 1
        own = pieces.setdefault(f"layers.{layer_of(name)}.0.distcp", set())
        for row in range(rows.start, rows.stop):
            first = start + (row * width + columns.start) * value.itemsize
            last = start + (row * width + columns.stop) * value.itemsize - 1
            own.update(range(first // size, last // size + 1))
    by_source = {"disk": 0, "peer": 0, "remote": 0}
    nodes = nodes_of(scenario)
    for name, needed in pieces.items():
        had = {0, 1} if name in whole else {n for n in (0, 1) if layer_of(name) in HALVES[n]}
        source = "disk" if nodes[rank] in had else "peer" if had & set(nodes) else "remote"
        by_source[source] += sum(min(size, layer_map.files[name].bytes - piece * size) for piece in needed)
    return by_source


# ---- all ranks -----------------------------------------------------------------------------------


def run_rank(rank: int, world: int, port: int, folder: Path, quick: bool, scenario: str | None, out: Path) -> None:
    global _links
    torch.set_num_threads(1)
    fsspec.register_implementation("nodedisk", Disk)
    fsspec.register_implementation("cloud", Remote)
    if not quick:
        _links = folder / "links"
        _links.mkdir(exist_ok=True)
        PeerTransfers.receive = receive_throttled  # type: ignore[method-assign]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    shape = Shape(quick)
    if scenario is None:
        save(rank, world, folder, shape)
    else:
        out.write_text(json.dumps(load(rank, world, folder, shape, scenario)))
    dist.barrier()
    dist.destroy_process_group()


def run(folder: Path, quick: bool, scenario: str | None) -> list[dict[str, Any]]:
    """All ranks of a save or of a scenario; what each of them found."""
    world = len(nodes_of(scenario))
    port = free_port()
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
