"""Other programs that train adapters on weights from disk, for ``adapters.py``.

* ``accelerate``: Hugging Face accelerate's disk offload (a ``device_map`` with ``"disk"``) under
  PEFT, which reads the file in place through the page cache. Accelerate's hooks take weights away
  after a module's forward, but autograd keeps those that backward needs, so layers are checkpointed
  and read again.
* ``airllm``: airllm's layer-wise LoRA training. It is made for two families of models; here it has
  the names and the positions of Llama. It writes one file a layer, and recomputes each layer in
  backward.
* ``deepspeed``: DeepSpeed's ZeRO-3 with parameters and optimizer state on NVMe, under PEFT. It
  compiles for minutes on first use, and needs libaio-dev.

None of them runs below Lightning with the weights on disk, so each has the shortest loop of its
own: forward, backward, AdamW.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

import torch
from adapted import LEARNING_RATE, start_adapters
from contestants import Baton
from scratch import free_port
from torch import Tensor
from torch.nn import functional as F

from lightning_hetero.units import parse_bytes

Step = Callable[[Tensor], float]


def loop(baton: Baton, args: argparse.Namespace, package: str, step: Step) -> dict[str, Any]:
    """Trains in turns; the losses, and the version of the package."""
    losses = []
    for tokens in args.setting.tokens():
        if not baton.step_begins():
            break
        losses.append(step(tokens))
    return {"version": importlib.metadata.version(package), "losses": losses}


def accelerate(baton: Baton, args: argparse.Namespace) -> dict[str, Any]:
    """PEFT on a model of which accelerate keeps in memory what fits ``host_memory``."""
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(
        args.directory / "weights", dtype=torch.bfloat16, device_map=places(args), offload_folder=args.directory / "accelerate"
    )
    base.gradient_checkpointing_enable({"use_reentrant": False})
    base.enable_input_require_grads()
    model = args.setting.adapted(base)
    for layer in [module for module in model.modules() if hasattr(module, "lora_A")]:
        if layer.lora_A["default"].weight.is_meta:  # PEFT puts adapters where the base is, which is on disk
            layer.lora_A.to_empty(device="cpu")
            layer.lora_B.to_empty(device="cpu")
            layer.reset_lora_parameters("default", True)
    start_adapters(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, fused=True)

    def step(tokens: Tensor) -> float:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return loop(baton, args, "accelerate", step)


def places(args: argparse.Namespace) -> dict[str, str]:
    """Embeddings, head and as many layers as fit stay in memory, the others on disk."""
    setting, budget = args.setting, parse_bytes(args.host_memory, name="--host-memory")
    ends = 4 * setting.vocabulary * setting.hidden
    layer = (args.frozen_bytes - ends) // setting.layers
    kept = min(setting.layers - 1, max(0, (budget or 0) - ends) // layer)
    names = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", *(f"model.layers.{i}" for i in range(kept))]
    return dict.fromkeys(names, "cpu") | {f"model.layers.{i}": "disk" for i in range(kept, setting.layers)}


def airllm(baton: Baton, args: argparse.Namespace) -> dict[str, Any]:
    """airllm's trainer on a Llama."""
    trainer_class: Any = importlib.import_module("airllm.airllm_lora").AirLLMLoRA

    class Llama(trainer_class):  # type: ignore[misc]
        """The trainer with Llama's names, its positions and no tokenizer."""

        def set_layer_names_dict(self) -> None:
            ends = {"embed": "model.embed_tokens", "lm_head": "lm_head"}
            names = {**ends, "layer_prefix": "model.layers", "norm": "model.norm"}
            self.layer_names_dict = {**names, "resident": [], "cpu_resident": list(ends.values())}

        def get_tokenizer(self, hf_token: str | None = None) -> None:
            return None

        def _embed_and_context(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
            hidden = F.embedding(input_ids, self.layers[0].weight).requires_grad_()
            positions = torch.arange(input_ids.shape[1])[None]
            rotary = self.model.model.rotary_emb(hidden.detach(), positions)
            return hidden, {"position_embeddings": rotary, "position_ids": positions, "mask_map": None}

    trainer: Any = Llama(
        str(args.directory / "weights"), device="cpu", layer_shards_saving_path=str(args.directory / "airllm"),
        lora_r=args.setting.rank, lora_alpha=8, target_modules=args.setting.targets, lr=LEARNING_RATE, weight_decay=0.01,
    )  # fmt: skip
    return loop(baton, args, "airllm", trainer.train_step)


def deepspeed(baton: Baton, args: argparse.Namespace) -> dict[str, Any]:
    """PEFT under ZeRO-3, parameters on NVMe."""
    os.environ |= {
        "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }  # fmt: skip
    package: Any = importlib.import_module("deepspeed")
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    setting = args.setting
    files = {"nvme_path": str(args.directory / "deepspeed"), "device": "nvme", "pin_memory": False}
    largest = setting.config().intermediate_size * setting.hidden
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setting.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**files, "buffer_count": 24, "buffer_size": max(largest, setting.vocabulary * setting.hidden)},
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "stage3_max_live_parameters": 4 * largest,
            "stage3_max_reuse_distance": 0,  # a parameter that is used again would keep its buffer
            "stage3_prefetch_bucket_size": 0,  # with prefetch it fails: "already assigned swap buffer id"
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "single_submit": False,
            "overlap_events": True,
            "intra_op_parallelism": 2,
        },
    }
    package.init_distributed(dist_backend="gloo")
    keep = HfDeepSpeedConfig(config)  # from_pretrained looks for it
    base: Any = AutoModelForCausalLM.from_pretrained(args.directory / "weights", dtype=torch.bfloat16)
    model = setting.adapted(base)
    engine, *_ = package.initialize(model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config)

    def step(tokens: Tensor) -> float:
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    found = loop(baton, args, "deepspeed", step)
    del keep
    return found


PEERS: dict[str, Callable[..., dict[str, Any]]] = {"accelerate": accelerate, "airllm": airllm, "deepspeed": deepspeed}
