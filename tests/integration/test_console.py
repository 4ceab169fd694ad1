"""What a user hears: the package's lines reach the screen by Lightning's conventions, once each, on
rank zero.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.models import quiet_trainer
from support.scripts import run_script

from lightning_hetero import EmulatedDevice, HeteroOffloadStrategy

SCRIPT = """
import importlib, logging, sys
{before}
import torch
pl = importlib.import_module("{namespace}")
{after}
from lightning_hetero.strategies import strategy_class

class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(3)))

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

trainer = pl.Trainer(strategy=strategy_class("{namespace}")({options}), accelerator="cpu", max_steps=6, logger=False,
                     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Lit(), torch.utils.data.DataLoader(torch.randn(12, 8), batch_size=2))
"""
DISK = "plan='disk', disk_path='store', allow_tmpfs=True"


def heard(
    folder: Path, *, namespace: str = "lightning.pytorch", options: str = DISK, before: str = "", after: str = "", **env: str
) -> str:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(namespace=namespace, options=options, before=before, after=after))
    done = run_script(script, cwd=folder, env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache")} | env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_where_things_live_is_said_without_any_configuration(namespace: str, tmp_path: Path) -> None:
    shown = heard(tmp_path, namespace=namespace)
    (line,) = [line for line in shown.splitlines() if "plan 'disk'" in line]
    assert line.startswith("lightning-hetero: ")
    assert "weights of 3 blocks on disk" in line
    assert str(tmp_path / "store") in line
    assert "in place after" in line
    (over,) = [line for line in shown.splitlines() if "the fit is over" in line]
    assert "6 steps in" in over
    assert "the last plan was 'disk'" in over
    assert "written" in over


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("logging.basicConfig(level=logging.INFO, format='mine %(name)s %(message)s')", ""),
        ("", "logging.basicConfig(level=logging.INFO, format='mine %(name)s %(message)s')"),
        ("", "logging.getLogger('lightning_hetero').addHandler(logging.StreamHandler())"),
    ],
    ids=["before Lightning", "after Lightning", "a handler of this package's logger"],
)
def test_configured_logging_gets_each_line_once(before: str, after: str, tmp_path: Path) -> None:
    shown = heard(tmp_path, before=before, after=after)
    (line,) = [line for line in shown.splitlines() if "plan 'disk'" in line]
    assert not line.startswith("lightning-hetero: "), "the user's format"


@pytest.mark.parametrize(
    ("after", "env"),
    [
        ("logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)", {}),
        ("logging.getLogger('lightning_hetero').setLevel(logging.ERROR)", {}),
        ("", {"RANK": "1"}),
    ],
    ids=["Lightning's level", "this package's level", "another rank"],
)
def test_silence_by_lightnings_level_and_rank(after: str, env: dict[str, str], tmp_path: Path) -> None:
    rank = "from lightning.fabric.utilities.rank_zero import rank_zero_only; rank_zero_only.rank = 1" if env else ""
    assert "plan 'disk'" not in heard(tmp_path, after=f"{after}\n{rank}", **env)


def test_the_first_batches_and_the_search_are_said(tmp_path: Path) -> None:
    shown = heard(tmp_path, options="plan='auto'")
    expected = ("4 batches are measured", "searching", "plan 'holistic', made in", "in place after", "predicted: a step in")
    assert [text for text in expected if text not in shown] == []


class Wide(pl.LightningModule):
    """24 blocks with 257 KiB of weights each, 24 MiB in all with gradients and state."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(24)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


@pytest.mark.parametrize(
    ("options", "rows", "why"),
    [
        ({"plan": "host"}, ["memory"], "everything fits memory, so offloading has nothing to gain here"),
        ({"plan": "disk"}, ["memory", "disk"], "the plan says so. Everything would fit memory"),
        ({"plan": "disk", "host_memory": "16MiB"}, ["memory", "disk"], r"all of it needs .* of memory, .* more than allowed"),
        ({"plan": "resident", "device": EmulatedDevice("64MiB")}, ["device", "host"], "everything fits the device's memory"),
        ({"plan": "host", "device": EmulatedDevice("64MiB")}, ["device", "host"], "Everything would fit the device's memory"),
        ({"plan": "host", "device": EmulatedDevice("8MiB")}, ["device", "host"], "all of it needs .* of the device's memory"),
    ],
    ids=["fits", "asked for", "too large", "on a device", "below a device", "larger than a device"],
)
def test_a_table_says_what_each_tier_holds_and_why(
    options: dict[str, Any], rows: list[str], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = quiet_trainer(strategy=HeteroOffloadStrategy(**options), max_steps=2, default_root_dir=tmp_path)
    with caplog.at_level(logging.INFO, logger="lightning_hetero"):
        trainer.fit(Wide(), torch.utils.data.DataLoader(torch.randn(4, 256), batch_size=2))
    (said,) = [record.getMessage() for record in caplog.records if "in place after" in record.getMessage()]
    _, table, reason = said.split("\n\n")
    head, *lines = table.splitlines()
    assert head.split("  ")[0] == " tier"
    assert [line.split()[0] for line in lines] == rows
    assert all(len(line) <= 80 for line in (head, *lines))
    assert re.search(why, reason)
