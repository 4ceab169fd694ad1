"""The update's speed in host memory, beside torch's optimizers, DeepSpeed's CPU Adam and memory.

    python benchmarks/update.py [--num-params 16777216] [--repeats 15] [--threads N]

Every contestant updates the same arrays in turn, once per repetition, in one process. Figures are
medians over the repetitions, ratios medians of the repetitions' own ratios, so that a machine that
drifts slows all of them alike. Prints one JSON line last.

The arrays are on huge pages, and each starts 64 bytes further into a page than the one before:
arrays with equal offsets modulo 4 KiB collide in the caches, which would slow torch more than us.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hetero import _native

STAGGER_BYTES = 64
LR, BETAS, EPS, WEIGHT_DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.01


@dataclass
class Arrays:
    """One model's flat arrays, all in one arena."""

    arena: _native.Arena
    param: Tensor  # fp32 master, [num_params]
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    grad16: Tensor  # bf16
    weight16: Tensor  # bf16

    @classmethod
    def make(cls, num_params: int) -> Arrays:
        """Reserves and fills the arrays with staggered starts."""
        widths = (4, 4, 4, 4, 2, 2)
        arena = _native.Arena(sum(width * num_params + 4096 + len(widths) * STAGGER_BYTES for width in widths))
        memory = (ctypes.c_char * arena.num_bytes).from_address(arena.address)
        tensors, offset = [], 0
        for index, width in enumerate(widths):
            offset = -(-offset // 4096) * 4096 + index * STAGGER_BYTES
            dtype = torch.float32 if width == 4 else torch.bfloat16
            tensors.append(torch.frombuffer(memory, dtype=dtype, count=num_params, offset=offset))
            offset += width * num_params
        arrays = cls(arena, *tensors)
        arrays.param.normal_(std=0.02)
        arrays.exp_avg.zero_()
        arrays.exp_avg_sq.zero_()
        arrays.grad.normal_(std=0.01)
        arrays.grad16.copy_(arrays.grad)
        arrays.weight16.copy_(arrays.param)
        return arrays

    def addresses(self) -> dict[str, int]:
        return {"param": self.param.data_ptr(), "exp_avg": self.exp_avg.data_ptr(), "exp_avg_sq": self.exp_avg_sq.data_ptr()}


def torch_optimizer(arrays: Arrays, **variant: bool) -> torch.optim.AdamW:
    """torch's AdamW over the shared arrays."""
    param = arrays.param.detach().requires_grad_()
    optimizer = torch.optim.AdamW([param], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, **variant)
    param.grad = arrays.grad
    state = {"step": torch.tensor(100.0), "exp_avg": arrays.exp_avg, "exp_avg_sq": arrays.exp_avg_sq}
    optimizer.state[param] = state
    return optimizer


def deepspeed_step(arrays: Arrays) -> Callable[[], object] | None:
    """DeepSpeed's CPU AdamW over the shared arrays; None where it is not installed.

    Compiles for minutes on first use.
    """
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return None
    param = arrays.param.detach().requires_grad_()
    optimizer = DeepSpeedCPUAdam([param], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, adamw_mode=True)
    param.grad = arrays.grad
    optimizer.state[param] = {"step": 100, "exp_avg": arrays.exp_avg, "exp_avg_sq": arrays.exp_avg_sq}
    return optimizer.step


def contestants(arrays: Arrays, moved: Arrays, threads: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name.

    ``moved`` has the same layout: moving leaves values that would slow the others down.
    """
    numel = arrays.param.numel()
    hyper = _native.Hyper(LR, *BETAS, EPS, WEIGHT_DECAY, 101.0, _native.ADAMW)
    common = dict(arrays.addresses(), numel=numel, hyper=hyper, threads=threads)
    fused = torch_optimizer(arrays, fused=True)

    def torch_16bit() -> None:
        arrays.grad.copy_(arrays.grad16)
        fused.step()
        arrays.weight16.copy_(arrays.param)

    grad16, weight16 = arrays.grad16.data_ptr(), arrays.weight16.data_ptr()
    move_common = dict(moved.addresses(), numel=numel, threads=threads)
    steps: dict[str, Callable[[], object]] = {
        "ours_16bit": lambda: _native.adam(**common, grad=grad16, grad_dtype=_native.BF16, copy=weight16),
        "torch_16bit": torch_16bit,
        "move_16bit": lambda: _native.move_like_adam(
            **move_common, grad=moved.grad16.data_ptr(), grad_dtype=_native.BF16, copy=moved.weight16.data_ptr()
        ),
        "ours_fp32": lambda: _native.adam(**common, grad=arrays.grad.data_ptr()),
        "torch_fused": fused.step,
        "torch_foreach": torch_optimizer(arrays, foreach=True).step,
        "move_fp32": lambda: _native.move_like_adam(**move_common, grad=moved.grad.data_ptr()),
    }
    deepspeed = deepspeed_step(arrays)
    if deepspeed is not None:
        steps["deepspeed"] = deepspeed
    return steps


def measure(steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every contestant in every repetition, after two that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repetition in range(repeats + 2):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if repetition >= 2:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-params", type=int, default=1 << 24)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    arrays, moved = Arrays.make(options.num_params), Arrays.make(options.num_params)
    seconds = measure(contestants(arrays, moved, options.threads), options.repeats)

    def ratio(slower: str, faster: str) -> float | None:
        if slower not in seconds:
            return None
        return round(statistics.median(a / b for a, b in zip(seconds[slower], seconds[faster], strict=True)), 3)

    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:14s} {1e3 * median:8.2f} ms  {options.num_params / median / 1e9:6.3f} G parameters/s")
    result = {
        "benchmark": "update",
        "vs_torch_16bit": ratio("torch_16bit", "ours_16bit"),
        "vs_torch_fused": ratio("torch_fused", "ours_fp32"),
        "vs_torch_foreach": ratio("torch_foreach", "ours_fp32"),
        "vs_deepspeed": ratio("deepspeed", "ours_fp32"),
        "share_of_dram_limit": ratio("move_16bit", "ours_16bit"),
        "share_of_dram_limit_fp32": ratio("move_fp32", "ours_fp32"),
        "params_per_s": round(options.num_params / statistics.median(seconds["ours_16bit"])),
        "dram_bytes_per_s": round(28 * options.num_params / statistics.median(seconds["move_16bit"])),
        "num_params": options.num_params,
        "threads": options.threads,
        "isa": _native.isa().name,
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
