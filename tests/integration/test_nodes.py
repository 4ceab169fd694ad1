"""``hetero_offload`` on several nodes: each holds one model, and all have the bits of one."""

from __future__ import annotations

from pathlib import Path

from support import ranks

SCRIPT = Path(ranks.__file__).with_name("shared_model.py")


def test_two_nodes_train_as_one_process(tmp_path: Path) -> None:
    scenarios = ("is_as_in_one_process", "is_as_in_one_process_at_random:0:2", "is_read_from_disk", "is_made_in_slices")
    outputs = ranks.start(SCRIPT, tmp_path, *scenarios, cwd=tmp_path, world=4, nodes="aabb")
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 4
