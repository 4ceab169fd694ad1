"""``hetero_offload`` on several nodes: each holds one model, and all have the bits of one."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
from support import ranks
from support.children import report_of

from lightning_hetero.errors import ConfigError

SCRIPT = Path(ranks.__file__).with_name("shared_model.py")


def test_two_nodes_train_as_one_process(tmp_path: Path) -> None:
    scenarios = ("is_as_in_one_process", "is_as_in_one_process_at_random:0:2", "is_read_from_disk", "is_made_in_slices")
    outputs = ranks.start(SCRIPT, tmp_path, *scenarios, "saves_checkpoints", cwd=tmp_path, world=4, nodes="aabb")
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 4


@pytest.mark.parametrize(
    ("script", "scenarios"),
    [
        ("shared_options", ("trains_16_bit_weights", "skips_steps_that_overflow", "updates_whole_parameters")),
        ("shared_manners", ("averages_as_in_one_process", "is_verified")),
        ("shared_devices", ("trains_as_in_one_process_at_random:0:2", "there", "saves_checkpoints", "keeps_steps")),
    ],
)
def test_two_nodes_have_the_options_of_one(tmp_path: Path, script: str, scenarios: tuple[str, ...]) -> None:
    outputs = ranks.start(SCRIPT.with_name(f"{script}.py"), tmp_path, *scenarios, cwd=tmp_path, world=4, nodes="aabb")
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 4


@pytest.mark.parametrize("started", ["1", "3"])
def test_nodes_with_other_numbers_of_ranks_are_refused_before_they_wait(started: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "4", "RANK": started, "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": started}
    for name, value in (env | {"LOCAL_RANK": str(int(started) - 1), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"torchrun has started {started} ranks on this node, and devices=2"):
        pl.Trainer(accelerator="cpu", devices=2, num_nodes=2, strategy="hetero_offload", logger=False)


def test_nodes_whose_ranks_are_in_another_order_are_refused(tmp_path: Path) -> None:
    for output in ranks.start(SCRIPT, tmp_path, "is_refused", cwd=tmp_path, world=4, nodes="abab"):
        assert "rank 0: node 0, place 0, rank 1: node 1, place 0, rank 2: node 0, place 1" in output


def test_steps_of_two_nodes_survive_kills_and_go_on_with_other_numbers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each node has a disk, or both have the same directory; no step is lost that all hold."""
    report = report_of(str(SCRIPT.with_name("node_stores.py")), tmp_path_factory)
    assert report["disks_apart"] == {"reached": True, "same": True, "counts": [2]}
    assert report["one_directory"] == {"reached": True, "same": True, "counts": [4, 4, 2, 4]}
