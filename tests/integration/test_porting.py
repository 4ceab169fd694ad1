"""What `from-deepspeed` and its siblings print runs: as Python, and through LightningCLI."""

from __future__ import annotations

import json
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from support.cli import invoke

import lightning_hetero


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Lit(BoringModel):
    """Blocks, so that there is something to place. It notes the learning rate of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(*[Block() for _ in range(3)], torch.nn.Linear(32, 2))
        self.rates: list[float] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


QUICK = {
    "max_steps": 5, "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu",
    "enable_checkpointing": False, "limit_val_batches": 0,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory; Trainers are short and quiet."""
    monkeypatch.chdir(tmp_path)
    for name, value in QUICK.items():
        monkeypatch.setenv(f"PL_TRAINER_{name.upper()}", str(value))
    return tmp_path


def fit(printed: str) -> tuple[Any, Lit]:
    """Executes what a command has printed, and trains with it."""
    names: dict[str, Any] = {}
    exec(compile(printed, "printed", "exec"), names)
    model, trainer = Lit(), names["trainer"]
    before = [p.detach().clone() for p in model.parameters()]
    if "configure_optimizers" in names:
        model.configure_optimizers = MethodType(names["configure_optimizers"], model)  # type: ignore[method-assign]
    trainer.fit(model)
    assert trainer.global_step == 5
    assert isinstance(trainer.strategy, lightning_hetero.HeteroOffloadStrategy)
    assert any(not torch.equal(p.detach(), b) for p, b in zip(model.parameters(), before, strict=True))
    return trainer, model


def configuration(folder: Path, **sections: Any) -> Path:
    """ZeRO-Infinity's, with further sections."""
    nvme = {"device": "nvme", "nvme_path": str(folder / "nvme"), "pin_memory": True, "buffer_count": 4}
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.04, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme, "sub_group_size": 1e9},
        "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": False, "overlap_events": True},
        **sections,
    }  # fmt: skip
    (folder / "nvme").mkdir(mode=0o700)
    (file := folder / "ds.json").write_text(json.dumps(config))
    return file


LINEAR = {"warmup_num_steps": 2, "total_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 0.02}


@pytest.mark.parametrize(
    ("sections", "rates"),
    [
        ({}, [0.04] * 5),
        ({"bf16": {"enabled": True}, "wall_clock_breakdown": True}, [0.04] * 5),
        ({"scheduler": {"type": "WarmupDecayLR", "params": LINEAR}}, [0.0, 0.0, 0.01, 0.02, 0.01]),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {**LINEAR, "total_num_steps": "auto"}}},  # five
            [0.0, 0.0, 0.01, 0.02, 0.02 * 2 / 3],
        ),
        ({"optimizer": {"type": "Lion", "params": {"lr": 0.01}}}, [0.01] * 5),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}}, [0.01] * 5),
    ],
    ids=["adamw", "bf16", "schedule", "auto", "stand-in", "sgd"],
)
def test_settings_of_deepspeed_train_as_printed(sections: dict[str, Any], rates: list[float], folder: Path) -> None:
    trainer, model = fit(invoke("from-deepspeed", configuration(folder, **sections)).stdout)
    assert model.rates == pytest.approx(rates)
    assert (folder / "nvme" / "lightning-hetero").is_dir()
    assert (trainer.accumulate_grad_batches, trainer.gradient_clip_val) == (2, 1.0)
    assert trainer.precision == ("bf16-true" if "bf16" in sections else "32-true")


@pytest.mark.parametrize(
    "arguments",
    [
        ["from-deepspeed", "DeepSpeedStrategy(stage=2, offload_optimizer=True, exclude_frozen_parameters=True)"],
        ["from-fsdp", "FSDPStrategy(cpu_offload=True, auto_wrap_policy={Block}, mixed_precision=MixedPrecision(torch.bfloat16))"],
        ["from-accelerate", "Accelerator(mixed_precision='bf16', gradient_accumulation_steps=3, cpu=True)"],
    ],
)
def test_calls_of_other_libraries_train_as_printed(arguments: list[str], folder: Path) -> None:
    trainer, _ = fit(invoke(*arguments).stdout)
    assert [p.name for p in trainer.strategy.plan.blocks] == ["layer.0", "layer.1", "layer.2", "layer.3"]


def test_settings_of_deepspeed_train_through_lightning_cli(folder: Path) -> None:
    cli = pytest.importorskip("lightning.pytorch.cli", reason="LightningCLI needs jsonargparse")
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse")
    (file := folder / "cli.yaml").write_text(invoke("from-deepspeed", configuration(folder), "--yaml").stdout)
    quick = [f"--trainer.{name}={str(value).lower()}" for name, value in QUICK.items()]
    run = cli.LightningCLI(Lit, save_config_callback=None, args=["fit", "--config", str(file), *quick])
    assert run.trainer.global_step == 5
    assert run.model.rates == [0.04] * 5
    assert isinstance(run.trainer.optimizers[0], torch.optim.AdamW)
    assert run.trainer.optimizers[0].param_groups[0]["betas"] == (0.9, 0.95)
    assert (folder / "nvme" / "lightning-hetero").is_dir()
