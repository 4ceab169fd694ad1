"""By name: ``lightning`` and ``pytorch_lightning``, the Trainer and LightningCLI, code and
configuration.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.scripts import run_script

CLASSES = {"lightning.pytorch": "HeteroOffloadStrategy", "pytorch_lightning": "PytorchLightningHeteroOffloadStrategy"}

FIT = """
import sys, torch, lightning_hetero.strategies
import {namespace} as pl
from {namespace}.demos.boring_classes import BoringModel

class Model(BoringModel):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

def fit(strategy):
    torch.manual_seed(1)
    model = Model()
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[1])
    trainer = pl.Trainer(accelerator="cpu", strategy=strategy, max_epochs=1, limit_train_batches=3, limit_val_batches=1, **quiet)
    trainer.fit(model)
    trainer.save_checkpoint(sys.argv[1] + "/last.ckpt")
    return trainer, model

plain = fit("auto")[1]
for strategy in ("hetero_offload", "hetero", lightning_hetero.strategies.strategy_class("{namespace}")(plan="disk")):
    trainer, ours = fit(strategy)
    assert type(trainer.strategy).__name__ == "{name}"
    assert isinstance(trainer.strategy, pl.strategies.SingleDeviceStrategy)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))
print("same")
"""

CLI = """
import torch, lightning_hetero
from {namespace}.cli import LightningCLI
from {namespace}.demos.boring_classes import BoringModel

class Model(BoringModel):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, width))

    def on_train_end(self) -> None:
        options = self.trainer.strategy.options
        print(type(self.trainer.strategy).__name__, options.host_memory, options.engine.io_backend, options.block_cls)

LightningCLI(Model, save_config_kwargs={{"overwrite": True}})
"""

CONFIG = """
model:
  width: 2
optimizer:
  class_path: torch.optim.AdamW
  init_args:
    lr: 0.01
trainer:
  accelerator: cpu
  max_steps: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  default_root_dir: {root}
  strategy:
    class_path: {class_path}
    init_args:
      plan: disk
      host_memory: 64MiB
      io_backend: pool
      block_cls: Linear
"""


def python(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(code)
    return run_script(script, *arguments, cwd=folder)


@pytest.mark.parametrize(("namespace", "name"), CLASSES.items())
def test_by_name(namespace: str, name: str, tmp_path: Path) -> None:
    """The one of them that no example imports, in an interpreter that begins with nothing."""
    code = FIT.format(namespace=namespace, name=name)
    if namespace == "pytorch_lightning":
        env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-c", code, str(tmp_path)]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    else:
        done = python(code, tmp_path, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("same")


@pytest.mark.parametrize(("namespace", "name"), CLASSES.items())
def test_the_command_line_reads_the_strategy_from_a_configuration(namespace: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG.format(root=tmp_path, class_path=f"lightning_hetero.strategies.{name}"))
    done = python(CLI.format(namespace=namespace), tmp_path, "fit", "--config", "config.yaml")
    assert done.returncode == 0, done.stderr
    assert f"{name} {64 * 2**20} pool Linear" in done.stdout


@pytest.mark.parametrize(("namespace", "name"), CLASSES.items())
def test_the_command_line_takes_the_strategy_by_name(namespace: str, name: str, tmp_path: Path) -> None:
    trainer = {"strategy": "hetero_offload", "max_steps": 2, "accelerator": "cpu", "logger": "false", "num_nodes": 1}
    arguments = [f"--trainer.{option}={value}" for option, value in trainer.items()]
    done = python(CLI.format(namespace=namespace), tmp_path, "fit", *arguments)
    assert done.returncode == 0, done.stderr
    assert f"{name} None auto None" in done.stdout


def test_the_command_line_documents_and_checks_the_options(tmp_path: Path) -> None:
    code = CLI.format(namespace="lightning.pytorch")
    asked = python(code, tmp_path, "fit", "--trainer.strategy.help=lightning_hetero.HeteroOffloadStrategy")
    assert asked.returncode == 0, asked.stderr
    for option in ("plan", "host_memory", "disk_path", "new_run"):
        assert f"--trainer.strategy.{option}" in asked.stdout
    arguments = ["--trainer.strategy=lightning_hetero.HeteroOffloadStrategy", "--trainer.strategy.host_memroy=4GiB"]
    misspelt = python(code, tmp_path, "fit", *arguments)
    assert misspelt.returncode != 0
    assert "host_memroy" in misspelt.stderr
