"""``OffloadCallback`` in a Trainer of transformers: the bits of the Trainer alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hetero import EmulatedDevice
from lightning_hetero.errors import UnsupportedError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def train(folder: Path, callbacks: list[Any], *, resume: str | None = None, lora: bool = False, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 64, (8,), generator=generator) for _ in range(24)]
    data = [{"input_ids": one, "labels": one} for one in tokens]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True,
        logging_steps=1, learning_rate=1e-2, seed=3, **{"save_strategy": "no", **options},
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return {
        "log": [{k: v for k, v in line.items() if "loss" in k or "norm" in k} for line in trainer.state.log_history],
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
    }


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["log"]
    assert one["log"] == other["log"]
    assert one["weights"].keys() == other["weights"].keys()
    assert all(torch.equal(value, other["weights"][name]) for name, value in one["weights"].items())


def device(**options: Any) -> EmulatedDevice:
    return EmulatedDevice("2MiB", seed=1, **options)


PLANS: dict[str, Callable[[], dict[str, Any]]] = {
    "host": lambda: {"plan": "host"},
    "disk": lambda: {"plan": "disk"},
    "device": lambda: {"plan": "disk", "device": device()},
    "device-auto": lambda: {"plan": "auto", "device": device()},
    "unified": lambda: {"plan": "disk", "device": device(unified=True)},
    "unified-auto": lambda: {"plan": "auto", "device": device(unified=True)},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "clipped": {},
    "accumulated": {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
    "bf16": {"bf16": True, "gradient_checkpointing": True},
    "lora": {"lora": True},
    "unclipped": {"max_grad_norm": 0.0},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_the_trainer_has_the_bits_that_it_has_alone(options: str, tmp_path: Path) -> None:
    from lightning_hetero.loops.hugging_face import OffloadCallback

    given = OPTIONS[options]
    overlap = "none" if options == "lora" else "forward"
    expected = train(tmp_path / "plain", [], **given)
    for name, plan in PLANS.items():
        callback = OffloadCallback(**plan(), overlap=overlap)
        assert_same(expected, train(tmp_path / name, [callback], **given))
        assert callback.loop is not None


def test_checkpoints_of_the_trainer_go_both_ways(tmp_path: Path) -> None:
    from lightning_hetero.loops.hugging_face import OffloadCallback

    options = {"save_strategy": "steps", "save_steps": 3}
    expected = train(tmp_path / "plain", [], **options)
    assert_same(expected, train(tmp_path / "ours", [OffloadCallback("disk")], **options))
    ends = []
    for folder, callbacks in (("plain", [OffloadCallback("disk")]), ("ours", [])):
        ends.append(train(tmp_path / "end", callbacks, resume=str(tmp_path / folder / "checkpoint-3"), **options))
    assert_same(*ends)
    assert all(torch.equal(value, ends[0]["weights"][name]) for name, value in expected["weights"].items())


def test_gradients_that_the_trainer_uses_are_not_overlapped() -> None:
    from lightning_hetero.loops.hugging_face import OffloadCallback

    with pytest.raises(UnsupportedError, match="between backward and step"):
        OffloadCallback("host", overlap="backward")
