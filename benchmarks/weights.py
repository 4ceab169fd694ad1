"""Peak memory of loading and saving 1.3 billion parameters that are never in memory at once.

A safetensors directory of random weights in bfloat16 (2.6 GB) is made, one tensor at a time. Then a
GPT on the meta device gets them as float32 parameters (5.3 GB) that live on disk, and, each phase
in a process of its own,

* ``import``: is evaluated on one batch;
* ``export``, ``weights``: is exported to safetensors, and saved as a checkpoint of weights;
* ``train``: gets them again, in a store that keeps its steps, and makes three steps of AdamW;
* ``begin``: repeats that for only the first step; and then
* ``save``: is saved as an ordinary Lightning checkpoint with optimizer state (16 GB), one tensor at
  a time;
* ``resume_store``: resumes from the store, for the other two steps;
* ``resume_checkpoint``: the same from the checkpoint.

A phase that fails is reported, and phases that do not need it continue. ``resumed_the_same``: both
resumes had the losses of ``train``, to the bit; the last loss depends on all weights and all of
Adam's state.

The limit of a phase is ``host_memory``, which bounds weights, gradients, state and staging, plus
the largest block, which is the embedding. It counts from the memory of the interpreter, torch and
Lightning before the phase (``rss_before_bytes``) to the process's high-water mark
(``peak_rss_bytes``, VmHWM, reset when the phase begins). Pages of files are included, although the
system can drop them; ``peak_anonymous_bytes`` and ``peak_files_bytes`` are the peaks of the two
kinds, sampled every few milliseconds. ``over_bytes`` is the excess of a phase over the limit, and
``within_limit`` says that there is none. For phases that train, ``ordinary_bytes`` is the memory of
plain torch for forward and backward of the same batch beside weights and gradients, which no plan
changes. Prints one line of JSON last. 51 GB on disk at most, removed in the end.

    python benchmarks/weights.py --dir /path/on/the/disk
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
LOOK_EVERY_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all phases share."""

    root: Path
    size: Size
    host_memory: int
    seq: int

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def checkpoint(self) -> Path:
        return self.root / "last.ckpt"


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
    """Memory of a batch's forward and backward beside weights and gradients, from a few layers.

    It runs in a process of its own.
    """
    model = Transformer(replace(size, layers=min(size.layers, ORDINARY_LAYERS)))
    batch = next(iter(RandomTokens(size, batch=1, length=seq)))
    reset_peak()
    before = resident_bytes()
    model.loss(batch).backward()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    return max(0, peak_resident_bytes() - before - gradients)


# ---- what a phase takes --------------------------------------------------------------------------


def reset_peak() -> None:
    """Sets VmHWM back to what is in memory now."""
    Path("/proc/self/clear_refs").write_text("5")


class Sampler:
    """The peaks of anonymous memory and of files' pages, sampled every few milliseconds."""

    def __init__(self) -> None:
        self.peaks = {"RssAnon": 0, "RssFile": 0}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            text = Path("/proc/self/status").read_text()
            for name, most in self.peaks.items():
                found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
                self.peaks[name] = max(most, int(found[1]) * 1024 if found else 0)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class Meter:
    """Measures the phases of one process, against what it took before the first."""

    def __init__(self, setting: Setting) -> None:
        make_trainer(default_root_dir=setting.root)  # loads what Lightning loads lazily
        gc.collect()
        self.before = resident_bytes()
        self.found: dict[str, dict[str, float]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        reset_peak()
        begin = time.perf_counter()
        with Sampler() as sampler:
            yield
        self.found[name] = {
            "seconds": time.perf_counter() - begin,
            "rss_before_bytes": self.before,
            "peak_rss_bytes": peak_resident_bytes(),
            "peak_anonymous_bytes": sampler.peaks["RssAnon"],
            "peak_files_bytes": sampler.peaks["RssFile"],
        }
        peak = format_bytes(int(self.found[name]["peak_rss_bytes"]))
        print(f"{name}: {self.found[name]['seconds']:.1f} s, peak {peak}", flush=True)


# ---- from safetensors to tiers, and out again ----------------------------------------------------


def moving(setting: Setting, out: str) -> dict[str, Any]:
    """The import.

    And, if ``out`` is not empty, the way out that it names, which alone counts then.
    """
    meter = Meter(setting)
    strategy = HeteroOffloadStrategy(plan="disk", host_memory=setting.host_memory, weights=setting.weights)
    trainer = make_trainer(strategy=strategy, default_root_dir=setting.root, limit_predict_batches=BATCHES)
    module = Evaluated(setting.size)
    with meter.phase("import"):
        batches = DataLoader(RandomTokens(setting.size, batch=1, length=setting.seq), batch_size=None)
        losses: Any = trainer.predict(module, batches)
    result: dict[str, Any] = {} if out else {"loss": float(losses[0])}
    if out == "export":
        exported = setting.root / "out"
        with meter.phase(out):
            export_weights(module, exported, module="model", dtype=torch.bfloat16)
        mine, theirs = WeightFiles.open(exported).tensors, WeightFiles.open(setting.weights).tensors
        same = mine.keys() == theirs.keys() and all(torch.equal(mine[n].read(), t.read()) for n, t in theirs.items())
        result["exported_is_imported"] = same
        shutil.rmtree(exported)
    if out == "weights":
        with meter.phase(out):
            trainer.save_checkpoint(setting.root / "weights.ckpt", weights_only=True)
        (setting.root / "weights.ckpt").unlink()
    trainer.strategy.run.drop_session()
    return {"phases": {out or "import": meter.found[out or "import"]}, **result}


# ---- training, and going on ----------------------------------------------------------------------


def training(setting: Setting, name: str) -> dict[str, Any]:
    """One fit; ``begin`` is saved afterwards."""
    meter = Meter(setting)
    options: dict[str, Any] = {"host_memory": setting.host_memory, "disk_path": setting.store}
    resumed: dict[str, Any] = {}
    if name == "resume_store":
        resumed = {"ckpt_path": str(setting.store)}
    elif name == "resume_checkpoint":
        resumed = {"ckpt_path": str(setting.checkpoint), "weights_only": True}
    else:
        options["weights"] = setting.weights
    # Without an end of epochs: to Lightning, a checkpoint that is saved after fit has its epoch
    # behind it.
    trainer = make_trainer(
        strategy=HeteroOffloadStrategy(plan="disk", **options), max_epochs=-1, max_steps=1 if name == "begin" else STEPS,
        default_root_dir=setting.root,
    )  # fmt: skip
    # The same batch in every step: a checkpoint of Lightning does not say where in an epoch the
    # data was.
    batches = [next(iter(RandomTokens(setting.size, batch=1, length=setting.seq)))] * STEPS
    module = Evaluated(setting.size)
    with meter.phase(name):
        trainer.fit(module, DataLoader(batches, batch_size=None), **resumed)  # type: ignore[arg-type]
    result: dict[str, Any] = {"losses": {name: module.losses}}
    if name == "begin":
        with meter.phase("save"):
            trainer.save_checkpoint(setting.checkpoint)
        result["checkpoint_bytes"] = setting.checkpoint.stat().st_size
    trainer.strategy.run.drop_session()
    return {"phases": meter.found, **result}


class Report:
    """What the phases have found, or how they failed."""

    def __init__(self) -> None:
        self.phases: dict[str, dict[str, Any]] = {}
        self.losses: dict[str, list[float]] = {}
        self.rest: dict[str, Any] = {}

    def run(self, name: str, phase: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        """A phase, in a process of its own."""
        try:
            found = alone(phase, *arguments)
        except Exception as error:  # what failed is part of the report, and the other phases count
            self.phases[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
            print(f"{name}: {self.phases[name]['failed']}", flush=True)
            return
        self.phases |= found.pop("phases")
        self.losses |= found.pop("losses", {})
        self.rest |= found

    def judge(self, host_memory: int, block_bytes: int, ordinary: int) -> dict[str, Any]:
        """Whether the limits held."""
        for name, phase in self.phases.items():
            if "failed" not in phase:
                over = phase["peak_rss_bytes"] - phase["rss_before_bytes"] - host_memory - block_bytes
                phase["over_bytes"] = max(0, over)
                phase["over_with_ordinary_bytes"] = max(0, over - (ordinary if name in TRAINING else 0))
        first = self.losses.get("train", [])
        resumes = [self.losses.get(name) for name in ("resume_store", "resume_checkpoint")]
        whole = all("failed" not in phase for phase in self.phases.values())
        return {
            "within_limit": whole and all(not phase["over_bytes"] for phase in self.phases.values()),
            "within_limit_and_ordinary": whole and all(not phase["over_with_ordinary_bytes"] for phase in self.phases.values()),
            **({"resumed_the_same": all(found == first[1:] != [] for found in resumes)} if first else {}),
        }


def run(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """All phases, with their files in ``root``, which are deleted after their last use."""
    size = find_size(args.model, args.layers)
    host_memory = parse_bytes(args.host_memory, name="host_memory")
    assert host_memory is not None
    setting = Setting(root=root, size=size, host_memory=host_memory, seq=args.seq)
    with torch.device("meta"):
        blocks = partition(Transformer(size))
    block_bytes = max(4 * sum(p.numel() for p in b.params.values()) for b in blocks)
    ordinary = alone(ordinary_bytes, size, args.seq)
    report = Report()
    make_weights(setting.weights, size)
    for out in ("", "export", "weights"):
        report.run(out or "import", moving, setting, out)
    if args.train:
        report.run("train", training, setting, "train")
        shutil.rmtree(setting.store, ignore_errors=True)
        report.run("begin", training, setting, "begin")
        shutil.rmtree(setting.weights)
        report.run("resume_store", training, setting, "resume_store")
        shutil.rmtree(setting.store, ignore_errors=True)
        report.run("resume_checkpoint", training, setting, "resume_checkpoint")
    return {
        **report.judge(host_memory, block_bytes, ordinary),
        "phases": report.phases,
        "losses": report.losses,
        **report.rest,
        "host_memory_bytes": host_memory,
        "largest_block_bytes": block_bytes,
        "ordinary_bytes": ordinary,
        "parameters": num_params(size),
        "weights_bytes": 4 * num_params(size),
        "torch": torch.__version__,
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk; 51 GB free")
    parser.add_argument("--model", choices=SIZES, default="gpt-1.3b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, to try things out")
    parser.add_argument("--host-memory", default="3500MiB")
    parser.add_argument("--seq", type=int, default=16)
    parser.add_argument("--no-train", dest="train", action="store_false", help="weights alone; a quarter of the disk")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    per_param = BYTES_ON_DISK_PER_PARAM if args.train else BYTES_ON_DISK_PER_PARAM // 4
    check_space(args.dir, int(num_params(find_size(args.model, args.layers)) * per_param))
    with scratch(args.dir) as directory:
        result = run(args, directory)
    print(json.dumps({"benchmark": "weights", "model": args.model, "layers": args.layers, **result}))


if __name__ == "__main__":
    main()
