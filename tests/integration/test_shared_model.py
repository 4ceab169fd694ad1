"""``hetero_offload`` on several devices: the ranks hold one model together."""

from __future__ import annotations

from pathlib import Path

from support import ranks

SCRIPT = Path(ranks.__file__).with_name("shared_model.py")


def test_two_ranks_train_as_ddp_and_as_one_process(tmp_path: Path) -> None:
    scenarios = ("is_as_under_ddp", "is_as_in_one_process", "saves_weights")
    outputs = ranks.start(SCRIPT, tmp_path, *scenarios, cwd=tmp_path, world=2)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 2


def test_three_ranks_train_as_one_process(tmp_path: Path) -> None:
    outputs = ranks.start(SCRIPT, tmp_path, "is_as_in_one_process", cwd=tmp_path, world=3)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 3


def test_ranks_that_use_other_blocks_end(tmp_path: Path) -> None:
    for output in ranks.start(SCRIPT, tmp_path, "goes_apart", cwd=tmp_path, world=2):
        assert "different places of a step (rank 0: GATHER of block 3, rank 1: GATHER of block 4)" in output
