"""The other contestants of gpu_step.py, with their own loops, and code that all of them share."""

from __future__ import annotations

import argparse
import importlib
import os
from typing import Any

import torch
from contestants import Baton
from gpt2 import RandomTokens, Transformer
from scratch import free_port

DTYPES = {"bf16-true": torch.bfloat16, "bf16-mixed": torch.bfloat16, "32-true": torch.float32}


def capped(args: argparse.Namespace) -> None:
    """Leaves this process so much device memory."""
    if args.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.cap / total))
        torch.backends.cuda.matmul.allow_tf32 = True


def memory(args: argparse.Namespace, emulated_bytes: int | None = None) -> dict[str, int | None]:
    """The most device memory reserved by this process, and how often its allocator tried again.

    ``None`` where there is no such device, ``emulated_bytes`` for an emulated one.
    """
    if args.device != "cuda":
        return {"device_peak_bytes": emulated_bytes, "allocator_retries": None}
    return {
        "device_peak_bytes": torch.cuda.max_memory_reserved(),
        "allocator_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
    }


def accelerator(args: argparse.Namespace) -> str:
    """As the Trainer names it; an emulated device is the CPU's."""
    return "cuda" if args.device == "cuda" else "cpu"


def step_begins(baton: Baton, args: argparse.Namespace) -> bool:
    """The next step begins once the device has done the last one: the host runs ahead of it."""
    if args.device == "cuda":
        torch.cuda.synchronize()
    return baton.step_begins()


def fsdp2(baton: Baton, args: argparse.Namespace, *, recompute: bool = False) -> dict[str, Any]:
    """FSDP2 with parameters, gradients and optimizer state on the CPU.

    ``recompute``: layers keep their inputs only.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    capped(args)
    alone()
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = Transformer(args.size)
        mesh = torch.distributed.init_device_mesh(device.type, (1,))
        dtype = DTYPES[args.precision]
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        if on_gpu:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=True)
        for number, layer in enumerate(model.layers):
            model.layers[number] = checkpoint_wrapper(layer) if recompute else layer
            fully_shard(model.layers[number], **options)
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        for tokens in RandomTokens(args.size, batch=args.batch, length=args.seq):
            if not step_begins(baton, args):
                break
            moved = tokens.to(device)
            logits = model(moved[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), moved[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.distributed.destroy_process_group()
    return memory(args)


def alone() -> None:
    """A process group of this process."""
    port = free_port()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def deepspeed(baton: Baton, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """ZeRO-3 with parameters and optimizer offloaded to memory, or to the disk."""
    from peers.entrants import ENTRANTS
    from peers.process import PRECISIONS, Loss, filled

    if args.precision not in PRECISIONS:
        raise SystemExit(f"--precision {args.precision} with DeepSpeed; allowed: {', '.join(PRECISIONS)}.")
    capped(args)
    alone()
    os.environ["DS_ACCELERATOR"] = accelerator(args)
    engines: Any = importlib.import_module("deepspeed")
    torch.manual_seed(0)
    settings = filled(ENTRANTS["zero_infinity"], args, args.directory / "deepspeed")
    zero = settings["zero_optimization"]
    if name == "deepspeed_cpu":
        zero["offload_optimizer"] = {"device": "cpu"}
    zero["offload_param"] = {**zero["offload_optimizer"], "pin_memory": True}
    zero |= {"overlap_comm": True, "contiguous_gradients": True}
    for key in ("pipeline_read", "pipeline_write"):
        zero["offload_param"].pop(key, None)
    engine, *_ = engines.initialize(model=(module := Loss(args.size)), model_parameters=module.parameters(), config=settings)
    for tokens in RandomTokens(args.size, batch=args.batch, length=args.seq):
        if not step_begins(baton, args):
            break
        engine.backward(engine(tokens.to(engine.device)))
        engine.step()
    return memory(args)
