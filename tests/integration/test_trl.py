"""``OffloadCallback`` in TRL's ``SFTTrainer``: the bits of the trainer alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hetero import EmulatedDevice

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
VOCABULARY = 64


def rows() -> Any:
    """Sequences of several lengths, as a data set that is tokenized already."""
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable

    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 12, (16,), generator=generator).tolist()
    tokens = [{"input_ids": torch.randint(0, VOCABULARY - 2, (n,), generator=generator).tolist()} for n in lengths]
    return Dataset(InMemoryTable(pyarrow.Table.from_pylist(tokens)), fingerprint="rows")


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    words = {f"w{number}": number for number in range(VOCABULARY - 2)} | {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    words_only = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words_only, pad_token="<pad>", eos_token="<eos>")


def train(folder: Path, callbacks: list[Any], *, lora: bool = False, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    adapters = None
    if lora:
        from peft import LoraConfig

        adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    arguments = trl.SFTConfig(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True,
        logging_steps=1, learning_rate=1e-2, seed=3, save_strategy="no", max_length=16,
        dataset_kwargs={"skip_prepare_dataset": True}, **options,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        transformers.LlamaForCausalLM(config), args=arguments, train_dataset=rows(), eval_dataset=rows(),
        processing_class=tokenizer(), callbacks=callbacks, peft_config=adapters,
    )  # fmt: skip
    trainer.train()
    wanted = ("loss", "norm", "entropy", "accuracy")
    return {
        "log": [{k: v for k, v in line.items() if any(word in k for word in wanted)} for line in trainer.state.log_history],
        "weights": {name: value.clone() for name, value in trainer.model.state_dict().items()},
    }


PLANS: dict[str, dict[str, Any]] = {
    "host": {"plan": "host"},
    "disk": {"plan": "disk"},
    "device": {"plan": "disk", "device": EmulatedDevice("4MiB", seed=1)},
    "device-auto": {"plan": "auto", "device": EmulatedDevice("4MiB", seed=1)},
}


@pytest.mark.parametrize("options", [
    {},
    {"bf16": False, "gradient_checkpointing": False},
    {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
    {"neftune_noise_alpha": 5.0},
    {"lora": True},
], ids=["default", "fp32", "accumulated", "noise", "lora"])  # fmt: skip
def test_trl_has_the_bits_that_it_has_alone(options: dict[str, Any], tmp_path: Path) -> None:
    from lightning_hetero.loops.hugging_face import OffloadCallback

    expected = train(tmp_path / "plain", [], **options)
    assert expected["log"]
    for name, plan in PLANS.items():
        callback = OffloadCallback(**plan)
        ours = train(tmp_path / name, [callback], **options)
        assert callback.loop is not None, name
        assert ours["log"] == expected["log"], name
        assert ours["weights"].keys() == expected["weights"].keys(), name
        assert all(torch.equal(value, ours["weights"][key]) for key, value in expected["weights"].items()), name
