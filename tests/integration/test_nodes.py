"""``hetero_offload`` on several nodes: each holds one model, and all have the bits of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import ranks
from support.children import report_of

SCRIPT = Path(ranks.__file__).with_name("shared_model.py")


def test_two_nodes_train_as_one_process(tmp_path: Path) -> None:
    scenarios = ("is_as_in_one_process", "is_as_in_one_process_at_random:0:2", "is_read_from_disk", "is_made_in_slices")
    outputs = ranks.start(SCRIPT, tmp_path, *scenarios, "saves_checkpoints", cwd=tmp_path, world=4, nodes="aabb")
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 4


def test_nodes_with_other_numbers_of_ranks_are_refused(tmp_path: Path) -> None:
    for output in ranks.start(SCRIPT, tmp_path, "is_refused", cwd=tmp_path, world=4, nodes="abbb"):
        assert "rank 0: node 0, place 0, rank 1: node 1, place 0, rank 2: node 1, place 1" in output


def test_steps_of_two_nodes_survive_kills_and_go_on_with_other_numbers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each node has a disk, or both have the same directory; no step is lost that all hold."""
    report = report_of(str(SCRIPT.with_name("node_stores.py")), tmp_path_factory)
    assert report["disks_apart"] == {"reached": True, "same": True, "counts": [2]}
    assert report["one_directory"] == {"reached": True, "same": True, "counts": [4, 4, 2, 4]}
