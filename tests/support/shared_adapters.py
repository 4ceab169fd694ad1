"""One rank of a test of frozen parts, adapters and weights in files on several devices: a script.

See ``tests/integration/test_shared_options.py`` and ``support.shared_model``, which has the
reference.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import peft
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from lightning_hetero.convert.safetensors import StoredTensor, WeightFiles
from lightning_hetero.nn.causal_lm import ChunkedCausalLMs
from lightning_hetero.optim.reference import MasterWeightOptimizer
from lightning_hetero.runtime import placement
from lightning_hetero.strategies import HeteroOffloadStrategy
from support import llama
from support.shared_model import RANK, batches, model, reference, run_scenarios, same, trainer

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
KINDS = {
    "lora": peft.LoraConfig(**LORA),
    "dora": peft.LoraConfig(use_dora=True, **LORA),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False),
    "embedding": peft.LoraConfig(**LORA | {"target_modules": ["embed_tokens", "q_proj"]}),
}


class Adapted(pl.LightningModule):
    """A Llama, maybe with adapters: in memory, or on the meta device."""

    has_masters = False  # the reference of 16-bit weights has

    def __init__(self, kind: str, *, folder: Path, meta: bool = False) -> None:
        super().__init__()
        self.kind, self.folder, self.meta, self.losses = kind.split(), folder, meta, []
        self.register_buffer("offset", torch.zeros(1))
        self.model: Any = None
        if not meta:
            self.build()

    def build(self) -> None:
        with torch.device("meta" if self.meta else "cpu"):
            base = LlamaForCausalLM(llama.config())
            if not self.meta:
                base = LlamaForCausalLM.from_pretrained(self.folder / "base", dtype=torch.float32)
            adapter = next((word for word in self.kind if word in KINDS), None)
            self.model = base if adapter is None else peft.PeftModel.from_pretrained(base, self.folder / adapter, is_trainable=True)
        self.model.train()

    def configure_model(self) -> None:
        if self.model is None:
            self.build()

    @property
    def layers(self) -> torch.nn.Module:
        """The repeated blocks."""
        return next(module for name, module in self.named_modules() if name.endswith(".layers"))

    def loss(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.loss(batch, index)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        make = partial(torch.optim.AdamW, lr=0.0 if "still" in self.kind else 1e-2, weight_decay=0.0, fused=True)
        return MasterWeightOptimizer(trained, make) if self.has_masters else make(trained)


def _folder(out: Path) -> Path:
    """A pretrained model and adapters, which the first rank writes."""
    if RANK == 0:
        base = llama.save(out / "base")
        for name, config in KINDS.items():
            torch.manual_seed(1)
            peft.get_peft_model(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), config).save_pretrained(out / name)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dist.barrier()
    return out


def _strategy(folder: Path, plan: str = "host", **options: Any) -> Any:
    return HeteroOffloadStrategy(plan, weights={"model": folder / "base"}, update_threads=1, **options)


class Keeps(pl.Callback):
    """After the first batch all ranks save the adapters, and read a frozen weight and state."""

    def __init__(self, out: Path) -> None:
        self.out, self.read = out, list[Tensor]()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, _: Any, __: Any, index: int) -> None:
        if index:
            return
        trained = [p for p in module.parameters() if p.requires_grad]
        frozen = module.model.get_base_model().model.layers[1].mlp.up_proj.weight
        with trainer.strategy.materialize(trained):
            if RANK == 0:
                module.model.save_pretrained(self.out / "saved")
            self.read += [frozen.clone(), *(trainer.optimizers[0].state[p]["exp_avg"].clone() for p in trained[:2])]


def trains_adapters_of_an_embedding(out: Path) -> None:
    """They are in dictionaries of parameters, which have no forward of their own."""
    shared, folder = model("embedding", cls=Adapted, folder=_folder(out), meta=True), out
    trainer(out, _strategy(folder)).fit(shared, batches())
    same(shared, reference("embedding", cls=Adapted, folder=folder))


def trains_adapters(out: Path) -> None:
    """Frozen weights come from files, every byte of which one rank reads; adapters train."""
    folder, read = _folder(out), torch.zeros(1)
    original = StoredTensor._read

    def counted(self: StoredTensor, file: Any, offset: int, target: Tensor) -> None:
        read.add_(target.nbytes)
        original(self, file, offset, target)

    StoredTensor._read = counted
    for kind in ("lora", "dora", "ia3"):
        read.zero_()
        shared, keeps = model(kind, cls=Adapted, folder=folder, meta=True), Keeps(out)
        with mock.patch.object(placement.log, "info") as said:
            trainer(out, _strategy(folder), callbacks=[keeps]).fit(shared, batches())
        assert any("trained weights of" in text and text.endswith(" stay whole on each rank.") for text in _lines(said))
        dist.all_reduce(read)
        assert int(read) == sum(tensor.num_bytes for tensor in WeightFiles.open(folder / "base").tensors.values())
        wanted = reference(kind, cls=Adapted, folder=folder)
        same(shared, wanted)
        first = reference(kind, cls=Adapted, folder=folder, number=1)
        made = first.__dict__["made"].state
        trained = [p for p in first.parameters() if p.requires_grad]
        up_proj = first.model.get_base_model().model.layers[1].mlp.up_proj.weight
        assert all(map(torch.equal, keeps.read, [up_proj, *(made[p]["exp_avg"] for p in trained[:2])]))
        again = peft.PeftModel.from_pretrained(LlamaForCausalLM(llama.config()), out / "saved", is_trainable=True)
        for one, other in zip([p for p in again.parameters() if p.requires_grad], trained, strict=True):
            assert torch.equal(one, other)


def trains_16_bit_adapters_on_disk(out: Path) -> None:
    """Some slices of so few parameters are padding alone; their masters are on disk like others."""
    folder = _folder(out)
    for kind in KINDS:
        shared = model(kind, cls=Adapted, folder=folder, meta=True)
        trainer(out, _strategy(folder, "disk"), precision="bf16-true").fit(shared, batches())
        same(shared, reference(kind, cls=Adapted, folder=folder, dtype=torch.bfloat16))


def _lines(said: mock.Mock) -> list[str]:
    return [call.args[0] % call.args[1:] for call in said.call_args_list]


def saves_adapters_alone(out: Path) -> None:
    """Checkpoints without frozen weights, and a resume from one, which reads the folder again."""
    folder = _folder(out)
    strategy = partial(_strategy, folder, exclude_frozen_parameters=True)
    shared = model("lora", cls=Adapted, folder=folder, meta=True)
    kept = ModelCheckpoint(out, "alone")
    trainer(out, strategy(), callbacks=[kept], enable_checkpointing=True).fit(shared, batches())
    begin, first = torch.load(out / "alone.ckpt", weights_only=False), reference("lora", cls=Adapted, folder=folder)
    assert begin["state_dict"].keys() == {"offset", *(n for n, p in first.named_parameters() if p.requires_grad)}
    again = model("lora", cls=Adapted, folder=folder, meta=True)
    trainer(out, strategy(), max_epochs=2).fit(again, batches(), ckpt_path=out / "alone.ckpt")
    begin["state_dict"] = first.state_dict()
    same(again, reference("lora", cls=Adapted, folder=folder, begin=begin))


def has_a_chunked_head(out: Path) -> None:
    """Logits in chunks, and a model of which files have all weights."""
    folder = _folder(out)
    shared = model("", cls=Adapted, folder=folder, meta=True)
    trainer(out, _strategy(folder, chunked_head=True)).fit(shared, batches())
    same(shared, reference("", cls=Chunked, folder=folder))


def sets_what_files_lack(out: Path) -> None:
    """With strict_loading=False, weights that files lack begin at random, as in one process."""
    folder = _folder(out)
    tensors = load_file(folder / "base" / "model.safetensors")
    for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
        del tensors[name]
    dist.barrier()
    if RANK == 0:
        save_file(tensors, folder / "base" / "model.safetensors", {"format": "pt"})
    dist.barrier()
    torch.manual_seed(7 + RANK)
    module = Adapted("still", folder=folder, meta=True)
    module.strict_loading = False
    trainer(out, _strategy(folder), limit_train_batches=1).fit(module, batches())
    for name, param in module.model.named_parameters():
        if name in tensors:
            assert torch.equal(param, tensors[name]), name
        else:
            theirs = param.detach().clone()
            dist.broadcast(theirs, 0)
            assert torch.equal(param, theirs), name
            assert param.isfinite().all(), name


class Chunked(Adapted):
    def build(self) -> None:
        super().build()
        ChunkedCausalLMs(self)


if __name__ == "__main__":
    run_scenarios(globals())
