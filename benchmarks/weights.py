"""Peak memory of weights on their way in and out: 1.3 billion parameters that are never in memory at once.

A safetensors directory of random weights in bfloat16 (2.7 GB) is made, one tensor at a time. Then a GPT on the meta device gets
them as float32 parameters (5.3 GB) that live on disk, is evaluated on one batch, exported to safetensors and saved as a
Lightning checkpoint. ``host_memory`` is what weights and staging may take.

Prints one line of JSON last. ``peak_rss_bytes`` is the process's high-water mark (VmHWM, set back before each phase),
``rss_before_bytes`` what the interpreter, torch and Lightning take, ``within_limit`` whether no phase took more than
``host_memory`` and one block (the largest: the embedding) beyond that. 19 GB on disk, removed in the end.

    python benchmarks/weights.py --dir /path/on/the/disk
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpt2 import GPT2, INIT_STD, SIZES, RandomTokens, Size, Transformer, find_size, make_trainer, num_params
from larger_than_ram import check_space
from scratch import scratch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero import HeteroOffloadStrategy, export_weights
from lightning_hetero.convert.safetensors import TensorToWrite, WeightFiles, write_directory
from lightning_hetero.store.partition import partition
from lightning_hetero.units import format_bytes, parse_bytes

BYTES_ON_DISK_PER_PARAM = 2 + 2 * 4 + 4  # the directory, two slots of fp32 weights, and one of the files that come out
BATCHES = 1


class Evaluated(GPT2):
    """The model with a loss to predict."""

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)


def make_weights(directory: Path, size: Size) -> None:
    """A safetensors directory of random weights, as a model of this size has them."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Transformer(size).named_parameters()}
    generator = torch.Generator().manual_seed(0)

    def draw(shape: torch.Size) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(std=INIT_STD, generator=generator)

    tensors = [TensorToWrite(n, torch.bfloat16, s, lambda s=s: draw(s)) for n, s in shapes.items()]
    write_directory(directory, tensors, max_shard_bytes=1 << 30)


def measured(phase: Callable[[], object]) -> dict[str, float]:
    """Runs a phase: its seconds, and the most memory that the process had in it."""
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to what is in memory now
    begin = time.perf_counter()
    phase()
    return {"seconds": time.perf_counter() - begin, "peak_rss_bytes": status_bytes("VmHWM")}


def status_bytes(key: str) -> int:
    """A size in /proc/self/status."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024


def run(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """All phases, with their files in ``root``."""
    size = find_size(args.model, args.layers)
    weights, out = root / "weights", root / "out"
    make_weights(weights, size)
    with torch.device("meta"):
        blocks = partition(Transformer(size))
    block_bytes = max(4 * sum(p.numel() for p in b.params.values()) for b in blocks)
    host_memory = parse_bytes(args.host_memory, name="host_memory")
    assert host_memory is not None
    trainer = make_trainer(
        strategy=HeteroOffloadStrategy(plan="disk", host_memory=host_memory, weights=weights),
        default_root_dir=root, limit_predict_batches=BATCHES,
    )  # fmt: skip
    module = Evaluated(size, meta=True)
    losses: list[Tensor] = []

    def bring_in() -> None:
        batches = DataLoader(RandomTokens(size, batch=1, length=args.seq), batch_size=None)
        losses.extend(trainer.predict(module, batches) or [])

    def export() -> None:
        export_weights(module, out, module="model", dtype=torch.bfloat16)

    def save() -> None:
        trainer.save_checkpoint(root / "x.ckpt", weights_only=True)

    before = status_bytes("VmRSS")
    phases = {}
    for name, phase in (("import", bring_in), ("export", export), ("checkpoint", save)):
        phases[name] = measured(phase)
        print(f"{name}: {phases[name]['seconds']:.1f} s, peak {format_bytes(phases[name]['peak_rss_bytes'])}", flush=True)
        if name == "export":
            mine, theirs = WeightFiles.open(out).tensors, WeightFiles.open(weights).tensors
            same = mine.keys() == theirs.keys() and all(torch.equal(mine[n].read(), t.read()) for n, t in theirs.items())
            for file in out.iterdir():
                file.unlink()  # room for the checkpoint
    limit = host_memory + block_bytes
    return {
        "phases": phases,
        "exported_is_imported": same,
        "rss_before_bytes": before,
        "host_memory_bytes": host_memory,
        "largest_block_bytes": block_bytes,
        "within_limit": all(p["peak_rss_bytes"] - before <= limit for p in phases.values()),
        "parameters": num_params(size),
        "weights_bytes": 4 * num_params(size),
        "loss": float(losses[0]),
        "torch": torch.__version__,
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk; 19 GB free")
    parser.add_argument("--model", choices=SIZES, default="gpt-1.3b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, to try things out")
    parser.add_argument("--host-memory", default="1536MiB")
    parser.add_argument("--seq", type=int, default=16)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    check_space(args.dir, int(num_params(find_size(args.model, args.layers)) * BYTES_ON_DISK_PER_PARAM))
    with scratch(args.dir) as directory:
        result = run(args, directory)
    print(json.dumps({"benchmark": "weights", "model": args.model, "layers": args.layers, **result}))


if __name__ == "__main__":
    main()
