"""DeepSpeed's ZeRO-3 on the CPU, as a contestant of step.py.

Settings are the best that we found on two cores and a virtual NVMe disk: pipelined reads and
writes, 8 MiB transfers, a queue of 32. DeepSpeed keeps its own loop: Lightning's DeepSpeedStrategy
needs an accelerator.
"""

from __future__ import annotations

import argparse
import importlib
import os
from typing import Any

import torch
from contestants import Baton
from gpt2 import RandomTokens, Size, Transformer
from scratch import free_port
from torch import Tensor, nn

PRECISIONS: dict[str, dict[str, Any]] = {"32-true": {}, "bf16-true": {"bf16": {"enabled": True}}}


class Loss(nn.Module):
    """The model with its loss inside: DeepSpeed wraps what it is given."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = Transformer(size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.loss(tokens)


def deepspeed_peer(baton: Baton, args: argparse.Namespace, name: str) -> None:
    """Trains under ZeRO-3, offloaded to memory (``deepspeed_cpu``) or disk (``deepspeed_nvme``)."""
    port = free_port()
    os.environ |= {
        "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }  # fmt: skip
    deepspeed: Any = importlib.import_module("deepspeed")  # compiles for minutes on first use
    torch.manual_seed(0)
    module = Loss(args.size)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config(args, name))
    for tokens in RandomTokens(args.size, batch=args.batch, length=args.seq):
        if not baton.step_begins():
            break
        engine.backward(engine(tokens))
        engine.step()


def config(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    if args.precision not in PRECISIONS:
        raise SystemExit(f"--precision {args.precision} with --peer deepspeed; allowed: {', '.join(PRECISIONS)}.")
    offload: dict[str, Any] = {"device": "cpu"}
    if name == "deepspeed_nvme":
        offload = {
            "device": "nvme", "nvme_path": str(args.directory / "deepspeed"), "buffer_count": 4, "pipeline_read": True,
            "pipeline_write": True,
        }  # fmt: skip
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "offload_optimizer": offload},
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "single_submit": False,
            "overlap_events": True,
            "intra_op_parallelism": 2,
        },
        **PRECISIONS[args.precision],
    }
