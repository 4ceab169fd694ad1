"""Peak memory of a model on its way in and out: 1.3 billion parameters that are never in memory at once.

A safetensors directory of random weights in bfloat16 (2.7 GB) is made, one tensor at a time. Then a GPT on the meta device gets
them as float32 parameters (5.3 GB) that live on disk, and

* ``import``, ``export``, ``weights``: is evaluated on one batch, exported to safetensors, and saved as a checkpoint of weights;
* ``train``: gets them again, in a store that keeps its steps, and makes three steps of AdamW;
* ``begin``: does so again, for the first step alone;
* ``save``: is saved as an ordinary Lightning checkpoint with optimizer state (16 GB), a tensor at a time;
* ``resume_store``: a second Trainer goes on from the store, for the other two steps;
* ``resume_checkpoint``: the same from the checkpoint.

``resumed_the_same``: either resume had the losses that ``train`` had, to the bit; the last one depends on all weights and all
of Adam's state.

``host_memory`` is what weights, gradients, state and staging may take. Prints one line of JSON last. ``peak_rss_bytes`` is the
process's high-water mark (VmHWM, set back before each phase), ``rss_before_bytes`` what the interpreter, torch and Lightning take,
``within_limit`` whether no phase took more than ``host_memory`` and, beyond that, one block (the largest: the embedding) or,
where it trains, ``ordinary_bytes``: what plain torch takes for forward and backward of the same batch beside weights and
gradients. Most of that are two more tensors like the embedding, which is also the head: autograd adds two gradients to a third.
51 GB on disk, removed in the end.

    python benchmarks/weights.py --dir /path/on/the/disk
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from gpt2 import GPT2, INIT_STD, SIZES, RandomTokens, Size, Transformer, find_size, make_trainer, num_params
from larger_than_ram import check_space
from scratch import alone, scratch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero import HeteroOffloadStrategy, export_weights
from lightning_hetero.convert.safetensors import TensorToWrite, WeightFiles, write_directory
from lightning_hetero.store.capacity import peak_resident_bytes, resident_bytes
from lightning_hetero.store.partition import partition
from lightning_hetero.units import format_bytes, parse_bytes

BYTES_ON_DISK_PER_PARAM = 2 + 2 * 12 + 12  # the directory, two slots of weights and Adam's state, and a checkpoint of both
BATCHES = 1
STEPS = 3
TRAINING = ("train", "begin", "resume_store", "resume_checkpoint")
ORDINARY_LAYERS = 2


class Evaluated(GPT2):
    """The model with a loss to predict; training keeps its losses."""

    def __init__(self, size: Size) -> None:
        super().__init__(size, meta=True)
        self.losses: list[float] = []

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss


def make_weights(directory: Path, size: Size) -> None:
    """A safetensors directory of random weights, as a model of this size has them."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Transformer(size).named_parameters()}
    generator = torch.Generator().manual_seed(0)

    def draw(shape: torch.Size) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(std=INIT_STD, generator=generator)

    tensors = [TensorToWrite(n, torch.bfloat16, s, lambda s=s: draw(s)) for n, s in shapes.items()]
    write_directory(directory, tensors, max_shard_bytes=1 << 30)


def ordinary_bytes(size: Size, seq: int) -> int:
    """What forward and backward of a batch take beside weights and gradients, in a process of its own; a few layers tell."""
    model = Transformer(replace(size, layers=min(size.layers, ORDINARY_LAYERS)))
    batch = next(iter(RandomTokens(size, batch=1, length=seq)))
    reset_peak()
    before = resident_bytes()
    model.loss(batch).backward()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    return max(0, peak_resident_bytes() - before - gradients)


def reset_peak() -> None:
    """Sets VmHWM back to what is in memory now."""
    Path("/proc/self/clear_refs").write_text("5")


class Phases:
    """Runs phases one after the other: the seconds of each, and the most memory that the process had in it."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}

    def run(self, name: str, phase: Callable[[], object]) -> None:
        reset_peak()
        begin = time.perf_counter()
        phase()
        self.found[name] = {"seconds": time.perf_counter() - begin, "peak_rss_bytes": peak_resident_bytes()}
        peak = format_bytes(int(self.found[name]["peak_rss_bytes"]))
        print(f"{name}: {self.found[name]['seconds']:.1f} s, peak {peak}", flush=True)


def weights_in_and_out(phases: Phases, root: Path, size: Size, host_memory: int, seq: int) -> dict[str, Any]:
    """From safetensors to tiers, and from there to safetensors and to a checkpoint of weights."""
    weights, out = root / "weights", root / "out"
    strategy = HeteroOffloadStrategy(plan="disk", host_memory=host_memory, weights=weights)
    trainer = make_trainer(strategy=strategy, default_root_dir=root, limit_predict_batches=BATCHES)
    module = Evaluated(size)
    losses: list[Tensor] = []

    def bring_in() -> None:
        losses.extend(trainer.predict(module, DataLoader(RandomTokens(size, batch=1, length=seq), batch_size=None)) or [])

    phases.run("import", bring_in)
    phases.run("export", lambda: export_weights(module, out, module="model", dtype=torch.bfloat16))
    mine, theirs = WeightFiles.open(out).tensors, WeightFiles.open(weights).tensors
    same = mine.keys() == theirs.keys() and all(torch.equal(mine[n].read(), t.read()) for n, t in theirs.items())
    shutil.rmtree(out)  # room for the checkpoint
    phases.run("weights", lambda: trainer.save_checkpoint(root / "weights.ckpt", weights_only=True))
    (root / "weights.ckpt").unlink()
    trainer.strategy._drop_session()
    return {"exported_is_imported": same, "loss": float(losses[0])}


def training(phases: Phases, root: Path, size: Size, host_memory: int, seq: int) -> dict[str, Any]:
    """Three steps; and again, saved in both ways after the first, with the other two from either."""
    checkpoint, store = root / "last.ckpt", root / "store"
    # The same batch in every step: a checkpoint of Lightning does not say where in an epoch the data was.
    batches = DataLoader([next(iter(RandomTokens(size, batch=1, length=seq)))] * STEPS, batch_size=None)

    made: list[tuple[pl.Trainer, Evaluated]] = []

    def fit(steps: int, **options: Any) -> None:
        strategy = HeteroOffloadStrategy(plan="disk", host_memory=host_memory, disk_path=store, **options.pop("strategy", {}))
        # Without an end of epochs: to Lightning, a checkpoint that is saved after fit has its epoch behind it.
        trainer = make_trainer(strategy=strategy, max_steps=steps, max_epochs=-1, default_root_dir=root)
        made.append((trainer, Evaluated(size)))
        made[-1][0].fit(made[-1][1], batches, **options)

    def let_go() -> list[float]:
        """Frees the store and the memory of the last fit, whose model may be parked there; its losses."""
        trainer, module = made.pop()
        trainer.strategy._drop_session()
        losses = module.losses
        del trainer, module
        gc.collect()
        return losses

    from_files = {"weights": root / "weights"}
    phases.run("train", lambda: fit(STEPS, strategy=from_files))
    losses = let_go()
    shutil.rmtree(store)  # room for the next one
    phases.run("begin", lambda: fit(1, strategy=from_files))
    phases.run("save", lambda: made[0][0].save_checkpoint(checkpoint))
    saved = checkpoint.stat().st_size
    let_go()
    phases.run("resume_store", lambda: fit(STEPS, ckpt_path=str(store)))
    resumed = [let_go()]
    shutil.rmtree(store)
    phases.run("resume_checkpoint", lambda: fit(STEPS, ckpt_path=str(checkpoint), weights_only=True))
    resumed.append(let_go())
    the_same = all(found == losses[1:] for found in resumed)
    return {"checkpoint_bytes": saved, "losses": losses, "resumed_losses": resumed, "resumed_the_same": the_same}


def run(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """All phases, with their files in ``root``."""
    size = find_size(args.model, args.layers)
    make_weights(root / "weights", size)
    with torch.device("meta"):
        blocks = partition(Transformer(size))
    block_bytes = max(4 * sum(p.numel() for p in b.params.values()) for b in blocks)
    host_memory = parse_bytes(args.host_memory, name="host_memory")
    assert host_memory is not None
    ordinary = alone(ordinary_bytes, size, args.seq)
    make_trainer(default_root_dir=root)  # loads what Lightning loads lazily
    phases, before = Phases(), resident_bytes()
    moved = weights_in_and_out(phases, root, size, host_memory, args.seq)
    gc.collect()
    trained = training(phases, root, size, host_memory, args.seq) if args.train else {}
    beside = {name: max(ordinary, block_bytes) if name in TRAINING else block_bytes for name in phases.found}
    return {
        "phases": phases.found,
        **moved,
        **trained,
        "rss_before_bytes": before,
        "host_memory_bytes": host_memory,
        "largest_block_bytes": block_bytes,
        "ordinary_bytes": ordinary,
        "within_limit": all(p["peak_rss_bytes"] - before <= host_memory + beside[name] for name, p in phases.found.items()),
        "parameters": num_params(size),
        "weights_bytes": 4 * num_params(size),
        "torch": torch.__version__,
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk; 51 GB free")
    parser.add_argument("--model", choices=SIZES, default="gpt-1.3b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, to try things out")
    parser.add_argument("--host-memory", default="2500MiB")
    parser.add_argument("--seq", type=int, default=16)
    parser.add_argument("--no-train", dest="train", action="store_false", help="weights alone; a quarter of the disk")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    check_space(args.dir, int(num_params(find_size(args.model, args.layers)) * BYTES_ON_DISK_PER_PARAM))
    with scratch(args.dir) as directory:
        result = run(args, directory)
    print(json.dumps({"benchmark": "weights", "model": args.model, "layers": args.layers, **result}))


if __name__ == "__main__":
    main()
