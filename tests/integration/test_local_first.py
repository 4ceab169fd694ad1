"""``LocalFirst`` under ``Trainer.fit``: what goes on after a restart is what would have gone on without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from support import recovery_train
from support.ranks import start
from support.recovery_train import Net
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroOffloadStrategy, LocalFirst
from lightning_hetero.errors import CheckpointWriteError, UnsupportedError

SCRIPT = Path(str(recovery_train.__file__))
Results = dict[str, Any]


def _run(out: Path, phase: str, world: int) -> list[Results]:
    start(SCRIPT, out, phase, cwd=out, world=world)
    return [torch.load(out / f"{phase}-{number}.pt", weights_only=False) for number in range(world)]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recovery")


@pytest.fixture(scope="module")
def trained(out: Path) -> list[Results]:
    return _run(out, "train", 2)


@pytest.fixture(scope="module")
def fewer(out: Path, trained: list[Results]) -> list[Results]:
    return _run(out, "fewer", 1)


def assert_equal(a: Results, b: Results) -> None:
    assert a["weights"].keys() == b["weights"].keys()
    for name, weight in a["weights"].items():
        assert torch.equal(weight, b["weights"][name]), name
    for one, other in zip(a["moments"], b["moments"], strict=True):
        assert torch.equal(one, other)
    assert (a["lr"], a["step"], a["batches"]) == (b["lr"], b["step"], b["batches"])


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_restart_goes_on_bit_for_bit_as_that_of_plain_lightning(name: str, trained: list[Results]) -> None:
    """With FSDP2, plain Lightning reads the very checkpoint: its remote copy is an ordinary one."""
    for rank in trained:
        assert_equal(rank[f"{name} plain"], rank[f"{name} second"])
        assert rank[f"{name} first"]["step"] == 4
        assert rank[f"{name} second"]["bytes"]["memory"] > 0
        assert [rank[f"{name} second"]["bytes"][source] for source in ("disk", "peer", "remote")] == [0, 0, 0]


def test_every_node_keeps_a_replica(out: Path, trained: list[Results]) -> None:
    kept = [{p.name: p.read_bytes() for p in (out / "ddp" / f"node{n}" / "disk").glob("*8-*/*.distcp")} for n in range(2)]
    assert kept[0] == kept[1]
    assert "body.0.0.distcp" in kept[0]
    assert [p.name for p in (out / "ddp").glob("*.ckpt")] == ["epoch=1.ckpt"]  # Lightning removed the one before


@pytest.mark.parametrize("names", [("ddp to fsdp", "ddp second"), ("fsdp to one", "fsdp second")])
def test_other_ranks_and_another_strategy_go_on(names: tuple[str, str], trained: list[Results], fewer: list[Results]) -> None:
    assert_equal(fewer[0][names[0]], trained[0][names[1]])


def test_what_is_not_local_comes_from_elsewhere(fewer: list[Results]) -> None:
    lost, half = fewer[0]["ddp to fsdp"]["bytes"], fewer[0]["fsdp to one"]["bytes"]
    assert [lost[source] for source in ("memory", "disk", "peer")] == [0, 0, 0]
    assert lost["remote"] > 0
    assert half["memory"] > 0
    assert half["remote"] > 0  # the other node's shards


# ---- in one process --------------------------------------------------------------------------------------------------------------


def _fit(out: Path, *plugins: Any, epochs: int = 1, resume: str | None = None, **options: Any) -> pl.Trainer:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(12, 5, generator=generator).double(), torch.randn(12, 8, generator=generator).double())
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        plugins=list(plugins),
        callbacks=[ModelCheckpoint(dirpath=out / "run", filename="{epoch}", **options)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
    )
    trainer.fit(Net(dropout=0.1), DataLoader(data, batch_size=4, shuffle=True), ckpt_path=resume)
    return trainer


def _weights(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    return {name: w.clone() for name, w in trainer.lightning_module.state_dict().items()}


@pytest.mark.parametrize("resume", ["last", "newest"])
def test_one_process_goes_on_bit_for_bit(resume: str, tmp_path: Path) -> None:
    plain = _weights(_fit(tmp_path / "plain", epochs=4))
    first = LocalFirst(tmp_path / "memory", tmp_path / "disk")
    _fit(tmp_path, first, epochs=2, save_last=True, save_top_k=1)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["epoch=1.ckpt", "last.ckpt"]  # epoch=0 was removed
    resumed = _fit(tmp_path, LocalFirst(tmp_path / "memory", tmp_path / "disk"), epochs=4, resume=resume, save_last=True)
    for name, weight in _weights(resumed).items():
        assert torch.equal(weight, plain[name])
    assert resumed.global_step == 12
    assert resumed.strategy.checkpoint_io.bytes_read["memory"] > 0
    assert type(resumed.strategy).__name__ == "SingleDeviceStrategy"


def test_an_ordinary_checkpoint_is_read_as_well(tmp_path: Path) -> None:
    _fit(tmp_path, epochs=1)
    resumed = _fit(tmp_path, LocalFirst(disk=tmp_path / "disk"), epochs=2, resume=str(tmp_path / "run" / "epoch=0.ckpt"))
    assert resumed.global_step == 6


def test_the_end_of_training_waits_for_the_writer_and_raises_its_error(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "epoch=0.ckpt").mkdir()
    (tmp_path / "run" / "epoch=0.ckpt" / "meta.pt").mkdir()  # a file cannot be put there
    with pytest.raises(CheckpointWriteError, match=r"step 3 to remote .*epoch=0"):
        _fit(tmp_path, LocalFirst(disk=tmp_path / "disk"), enable_version_counter=False)


@pytest.mark.parametrize("strategy", [FSDPStrategy, HeteroOffloadStrategy])
def test_strategies_with_ways_of_their_own_are_refused(strategy: Any) -> None:
    with pytest.raises(UnsupportedError, match=rf"{strategy.__name__.removesuffix('Strategy')}.*ModelParallelStrategy"):
        strategy().checkpoint_io = LocalFirst()
