"""``LocalFirst`` under ``Trainer.fit``: what goes on after a restart is what would have gone on
without one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from scratch import free_port
from support.ranks import train
from support.scripts import start_server
from support.training import loader, samples
from support.training.recovery import KINDS, Body, Net

from lightning_hetero import LocalFirst
from lightning_hetero.errors import CheckpointWriteError, UnsupportedError
from lightning_hetero.strategies import PytorchLightningLocalFirst

Results = dict[str, Any]


def _run(out: Path, phase: str, world: int) -> list[Results]:
    train("recovery", phase, cwd=out, world=world)
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


@pytest.mark.parametrize("name", KINDS)
def test_a_restart_continues_bit_for_bit_as_that_of_plain_lightning(name: str, trained: list[Results]) -> None:
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


@pytest.mark.parametrize(
    "names",
    [
        ("ddp to fsdp", "ddp second"),
        ("fsdp to one", "fsdp second"),
        ("tensor to one", "fsdp to tensor"),
        ("hetero_fsdp to hetero", "hetero_fsdp second"),
        ("tiers to offload", "tiers second"),
        ("tiers to ddp", "tiers second"),
    ],
)
def test_other_ranks_and_another_strategy_continue(names: tuple[str, str], trained: list[Results], fewer: list[Results]) -> None:
    assert_equal(fewer[0][names[0]], trained[0][names[1]])


def test_tensor_parallelism_grows(trained: list[Results]) -> None:
    """Each rank reads the columns and rows that are its own now, of rows that were its own and of
    others'.
    """
    for rank in trained:
        found, expected = rank["fsdp to tensor"], rank["fsdp second"]
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-12, atol=1e-12)
        for one, other in zip(found["moments"], expected["moments"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert found["bytes"]["memory"] > 0
        assert found["bytes"]["peer"] > 0 == found["bytes"]["remote"]


def test_missing_pieces_come_from_other_places(fewer: list[Results]) -> None:
    lost, half = fewer[0]["ddp to fsdp"]["bytes"], fewer[0]["fsdp to one"]["bytes"]
    assert [lost[source] for source in ("memory", "disk", "peer")] == [0, 0, 0]
    assert lost["remote"] > 0
    assert half["memory"] > 0
    assert half["remote"] > 0  # the other node's shards


# ---- in one process ------------------------------------------------------------------------------


class TwinNet(Body, pytorch_lightning.LightningModule):
    """For the other namespace."""


def _fit(
    out: Path,
    *plugins: Any,
    epochs: int = 1,
    resume: str | None = None,
    strategy: Any = "auto",
    namespace: Any = pl,
    as_distributed: bool = False,
    **options: Any,
) -> Any:
    torch.manual_seed(0)
    trainer = namespace.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=epochs,
        plugins=list(plugins),
        callbacks=[namespace.callbacks.ModelCheckpoint(dirpath=out / "run", filename="{epoch}", **options)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
    )
    net = Net if namespace is pl else TwinNet
    trainer.fit(net(dropout=0.1), loader(samples(12, 8), 4, alone=as_distributed), ckpt_path=resume)
    return trainer


def _weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: w.clone() for name, w in trainer.lightning_module.state_dict().items()}


@pytest.mark.parametrize(
    ("namespace", "io", "resume"),
    [(pl, LocalFirst, "last"), (pl, LocalFirst, "newest"), (pytorch_lightning, PytorchLightningLocalFirst, "newest")],
)
def test_one_process_continues_bit_for_bit(namespace: Any, io: Any, resume: str, tmp_path: Path) -> None:
    plain = _weights(_fit(tmp_path / "plain", epochs=4, namespace=namespace))
    first = io(tmp_path / "memory", tmp_path / "disk")
    _fit(tmp_path, first, epochs=2, save_last=True, save_top_k=1, namespace=namespace)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["epoch=1.ckpt", "last.ckpt"]  # epoch=0 was removed
    second = io(tmp_path / "memory", tmp_path / "disk")
    resumed = _fit(tmp_path, second, epochs=4, resume=resume, save_last=True, namespace=namespace)
    for name, weight in _weights(resumed).items():
        assert torch.equal(weight, plain[name])
    assert resumed.global_step == 12
    assert resumed.strategy.checkpoint_io.bytes_read["memory"] > 0
    assert type(resumed.strategy).__name__ == "SingleDeviceStrategy"


def test_processes_that_lightning_starts_continue_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    plain = _weights(_fit(tmp_path / "plain", epochs=2, as_distributed=True))
    _fit(tmp_path, LocalFirst(tmp_path / "memory"), epochs=1, as_distributed=True)
    second = LocalFirst(tmp_path / "memory")
    start_server()  # what "ddp_spawn" starts, and sends the same, would import everything anew
    started = DDPStrategy(start_method="forkserver")
    spawned = _fit(tmp_path, second, epochs=2, resume="newest", strategy=started, as_distributed=True)
    for name, weight in _weights(spawned).items():
        assert torch.equal(weight, plain[name])
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["epoch=1.ckpt"]


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


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "XLAStrategy", "XLAFSDPStrategy", "SingleDeviceXLAStrategy"])
def test_strategies_with_formats_of_their_own_are_refused_by_name(name: str) -> None:
    """The last four need packages that are not here; their names are what counts."""
    kind: Any = FSDPStrategy if name == "FSDPStrategy" else type(name, (SingleDeviceStrategy,), {})
    with pytest.raises(UnsupportedError, match=rf"LocalFirst with {name}: .*Use .*, or leave LocalFirst out"):
        (kind() if kind is FSDPStrategy else kind("cpu")).checkpoint_io = LocalFirst()
