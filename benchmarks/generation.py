"""Tokens of a language model that is twice as large as the host memory that it may use.

Random weights of a Llama are written to safetensors once. Then, each in a process of its own:

* ``bandwidth``: the weights' file is read as fast as it can be, past the page cache.
* ``compute``: ``generate()`` with all weights in memory.
* ``ours``: ``generate()`` in ``predict_step`` under ``plan="disk"`` with ``host_memory`` half of
  the weights, which are read in place.
* ``accelerate``: Hugging Face accelerate's disk offload of the same model, with as many layers in
  memory as fit the same budget. It reads through the page cache, so another process drops the
  pages of its files all the time: on a machine without memory to spare they would not stay either.
  ``--keep-pages`` leaves them.

Prints one line of JSON last:

* ``vs_limit``: seconds / (tokens x (weights - ``host_memory``) / bandwidth).
* ``bytes_vs_limit``: bytes read / (tokens x (weights - ``host_memory``)).
* ``bytes_vs_plan``: bytes read / (tokens x bytes that the plan's schedule reads in a pass).
* ``vs_compute``: seconds / seconds of ``compute``.
* ``speedup_vs_accelerate``: its seconds / ours.
* ``same_tokens``: ours are those of ``compute``.

The first call of ``generate()`` fills caches and does not count.

    python benchmarks/generation.py --dir /path/on/the/disk
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from gpt2 import make_trainer
from scratch import alone, scratch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.convert.safetensors import TensorToWrite, write_directory
from lightning_hetero.ir.schedule import OpKind
from lightning_hetero.store.capacity import peak_resident_bytes, resident_bytes
from lightning_hetero.units import format_bytes

SHARD_BYTES = 4 << 30
PIECE_BYTES = 4 << 20
READERS = 4
PROMPT = 8
DROP_EVERY_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all processes share."""

    weights: Path
    layers: int
    hidden: int
    dtype: torch.dtype
    tokens: int
    keep_pages: bool
    host_memory: int = 0

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=1024, hidden_size=self.hidden, intermediate_size=11 * self.hidden // 4, num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.hidden // 64), num_key_value_heads=max(1, self.hidden // 64),
            max_position_embeddings=2 * (PROMPT + self.tokens), tie_word_embeddings=False,
        )  # fmt: skip

    def without_weights(self, device: Any) -> Any:
        """The model, built in a context that gives parameters no memory; buffers stay fp32."""
        with device:
            model = LlamaForCausalLM(self.config())
        for param in model.parameters():
            param.data = param.data.to(self.dtype)
        return model.requires_grad_(False).eval()

    @property
    def files(self) -> list[Path]:
        return sorted(self.weights.glob("*.safetensors"))


def write_weights(setting: Setting) -> int:
    """Random weights, one tensor at a time; returns their bytes."""

    def random(shape: torch.Size) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=setting.dtype)
        return torch.empty(shape).normal_(std=0.02).to(setting.dtype)

    torch.manual_seed(0)
    tensors = [
        TensorToWrite(name, setting.dtype, param.shape, partial(random, param.shape))
        for name, param in setting.without_weights(torch.device("meta")).named_parameters()
    ]
    write_directory(setting.weights, tensors, max_shard_bytes=SHARD_BYTES)
    setting.config().save_pretrained(setting.weights)
    os.sync()
    return sum(tensor.num_bytes for tensor in tensors)


def bandwidth(setting: Setting) -> float:
    """Bytes per second of the weights' files, with some reads in flight, past the page cache."""
    pieces: list[tuple[int, int]] = []
    files = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in setting.files]
    for file in files:
        pieces += [(file, offset) for offset in range(0, os.fstat(file).st_size // PIECE_BYTES * PIECE_BYTES, PIECE_BYTES)]
        pieces = pieces or [(file, 0)]
    room = threading.local()

    def read(piece: tuple[int, int]) -> int:
        if not hasattr(room, "memory"):
            room.memory = mmap.mmap(-1, PIECE_BYTES)
        return os.preadv(piece[0], [room.memory], piece[1])

    with ThreadPoolExecutor(READERS) as pool:
        begin = time.perf_counter()
        num_bytes = sum(pool.map(read, pieces))
        seconds = time.perf_counter() - begin
    for file in files:
        os.close(file)
    return num_bytes / seconds


def generate(model: Any, setting: Setting) -> list[int]:
    """The tokens of one prompt."""
    prompt = torch.arange(1, PROMPT + 1)[None]
    with torch.inference_mode():
        found = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=setting.tokens, min_new_tokens=setting.tokens,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
    tokens: list[int] = found[0, PROMPT:].tolist()
    return tokens


def timed(model: Any, setting: Setting) -> dict[str, Any]:
    """The second of two calls."""
    generate(model, replace(setting, tokens=2))
    begin = time.perf_counter()
    tokens = generate(model, setting)
    return {"seconds": time.perf_counter() - begin, "tokens": tokens}


def in_memory(setting: Setting) -> dict[str, Any]:
    """All weights in memory."""
    model = LlamaForCausalLM.from_pretrained(setting.weights, dtype=setting.dtype).eval()
    return timed(model, setting)


class Generates(pl.LightningModule):
    """Generates in ``predict_step``."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting = setting
        self.model: Any = None
        self.found: dict[str, Any] = {}

    def configure_model(self) -> None:
        self.model = self.model or self.setting.without_weights(torch.device("meta"))

    def predict_step(self, batch: Tensor, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        session = strategy.session
        generate(self.model, replace(self.setting, tokens=2))
        session.drain()  # reads for the next pass are under way
        read = session.store.stats().bytes_read
        begin = time.perf_counter()
        tokens = generate(self.model, self.setting)
        seconds = time.perf_counter() - begin
        session.drain()
        per_pass = sum(op.num_bytes for op in session.executor.schedule.ops if op.kind is OpKind.FETCH)
        self.found = {
            "seconds": seconds, "tokens": tokens, "read_bytes": session.store.stats().bytes_read - read,
            "read_bytes_per_pass": per_pass, "cache_bytes": session.executor.context.placement.cache_bytes,
            "store_bytes": strategy.memory_report()["disk_bytes"],
        }  # fmt: skip


def ours(setting: Setting) -> dict[str, Any]:
    """Under the plan ``disk``."""
    before = resident_bytes()
    precision = {torch.float32: "32-true", torch.bfloat16: "bf16-true"}[setting.dtype]
    strategy = HeteroOffloadStrategy(plan="disk", host_memory=setting.host_memory, weights=setting.weights)
    trainer = make_trainer(strategy=strategy, default_root_dir=setting.weights.parent, precision=precision)
    module = Generates(setting)
    batches: Any = DataLoader(TensorDataset(torch.zeros(1, 1)))
    trainer.predict(module, batches, return_predictions=False)
    return {**module.found, "rss_before_bytes": before, "peak_rss_bytes": peak_resident_bytes()}


def drop_pages(files: list[Path], stop: Any) -> None:
    """Drops the files' pages from the page cache until it is stopped."""
    descriptors = [os.open(path, os.O_RDONLY) for path in files]
    while not stop.wait(DROP_EVERY_S):
        for descriptor in descriptors:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def accelerate(setting: Setting) -> dict[str, Any]:
    """Hugging Face accelerate, with layers in memory as far as the budget goes."""
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    model = setting.without_weights(init_empty_weights())
    sizes = {name: sum(p.nbytes for p in layer.parameters()) for name, layer in model.named_modules() if ".layers." in name}
    layers = {f"model.layers.{i}": sizes[f"model.layers.{i}"] for i in range(setting.layers)}
    rest = sum(p.nbytes for p in model.parameters()) - sum(layers.values())
    fit = int((setting.host_memory - rest) // max(layers.values())) - 1  # one more is in use
    spread = {
        name: "cpu" if (i * fit) // setting.layers < ((i + 1) * fit) // setting.layers else "disk" for i, name in enumerate(layers)
    }
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu", **spread}
    folder = setting.weights.parent / "accelerate"
    folder.mkdir(exist_ok=True)
    model = load_checkpoint_and_dispatch(
        model, str(setting.weights), device_map=device_map, offload_folder=str(folder), dtype=setting.dtype
    )
    stop = threading.Event()
    files = [*setting.files, *folder.glob("*.dat")]
    dropper = threading.Thread(target=drop_pages, args=(files, stop), daemon=True)
    if not setting.keep_pages:
        dropper.start()
    try:
        return {**timed(model, setting), "on_disk": sum(where == "disk" for where in spread.values())}
    finally:
        stop.set()


def main() -> None:
    """Runs the contestants and prints their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--keep-pages", action="store_true", help="accelerate may use the page cache")
    parser.add_argument("--no-peer", action="store_true", help="without accelerate")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the disk")
    args = parser.parse_args()
    with scratch(args.dir) as root:
        setting = Setting(
            weights=root / "weights", layers=args.layers, hidden=args.hidden, dtype=getattr(torch, args.dtype), tokens=args.tokens,
            keep_pages=args.keep_pages,
        )  # fmt: skip
        weight_bytes = write_weights(setting)
        setting = replace(setting, host_memory=weight_bytes // 2)
        print(f"{format_bytes(weight_bytes)} of weights, host_memory {format_bytes(setting.host_memory)}", flush=True)
        results = {name: alone(globals()[name], setting) for name in ("in_memory", "ours")}
        rates = [alone(bandwidth, setting)]
        if not args.no_peer and importlib.util.find_spec("accelerate") is None:
            print("accelerate is not installed: pip install accelerate")
        elif not args.no_peer:
            results["accelerate"] = alone(accelerate, setting)
        results["ours_again"] = alone(ours, setting)
        rates.append(alone(bandwidth, setting))
    print(json.dumps(report(setting, weight_bytes, results, rates)))


def report(setting: Setting, weight_bytes: int, results: dict[str, dict[str, Any]], rates: list[float]) -> dict[str, Any]:
    """The figures of all contestants; ours is the mean of two runs, before and after the peer's."""
    mine, again, rate = results["ours"], results["ours_again"], sum(rates) / len(rates)
    seconds = (mine["seconds"] + again["seconds"]) / 2
    least = setting.tokens * (weight_bytes - setting.host_memory)
    peer = results.get("accelerate", {}).get("seconds")
    figures = {name: {k: v for k, v in result.items() if k != "tokens"} for name, result in results.items()}
    return {
        "benchmark": "generation",
        "vs_limit": seconds / (least / rate),
        "bytes_vs_limit": mine["read_bytes"] / least,
        "bytes_vs_plan": mine["read_bytes"] / (setting.tokens * mine["read_bytes_per_pass"]),
        "vs_compute": seconds / results["in_memory"]["seconds"],
        "speedup_vs_accelerate": None if peer is None else peer / seconds,
        "same_tokens": mine["tokens"] == again["tokens"] == results["in_memory"]["tokens"],
        "peak_rss_bytes": mine["peak_rss_bytes"],
        "rss_before_bytes": mine["rss_before_bytes"],
        "host_memory_bytes": setting.host_memory,
        "weight_bytes": weight_bytes,
        "bandwidth_bytes_per_s": rate,
        "contestants": figures,
        "settings": {k: str(v) if isinstance(v, Path | torch.dtype) else v for k, v in asdict(setting).items()},
    }


if __name__ == "__main__":
    main()
