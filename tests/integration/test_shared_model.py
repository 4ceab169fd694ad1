"""``hetero_offload`` on several devices: the ranks hold one model together."""

from __future__ import annotations

import os
from pathlib import Path

from support import ranks
from support.scripts import output_of

SCRIPT = Path(ranks.__file__).with_name("shared_model.py")


def test_two_ranks_train_as_ddp_and_as_one_process(tmp_path: Path) -> None:
    scenarios = ("is_as_under_ddp", "is_as_in_one_process", "is_made_in_slices", "saves_weights")
    outputs = ranks.start(SCRIPT, tmp_path, *scenarios, cwd=tmp_path, world=2)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 2


def test_three_ranks_of_torchrun_train_as_one_process(tmp_path: Path) -> None:
    scenarios = ("is_as_in_one_process", "is_as_in_one_process_at_random:0:4", "is_read_from_disk")
    outputs = ranks.start(SCRIPT, tmp_path, *scenarios, cwd=tmp_path, world=3, nodes="aaa")
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 3


def test_checkpoints_are_ordinary_and_go_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    goes_on = "goes_on_from_a_checkpoint"
    for world, scenarios in {3: ("saves_checkpoints", goes_on), 2: (goes_on,), 1: (goes_on,)}.items():
        outputs = ranks.start(SCRIPT, tmp_path, *scenarios, cwd=tmp_path, world=world)
        assert [output.splitlines()[-1] for output in outputs] == ["ok"] * world


def test_ranks_that_lightning_starts_train_as_one_process(tmp_path: Path) -> None:
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONSAFEPATH": "1"}
    output = output_of(SCRIPT, tmp_path, "is_as_in_one_process_at_random:4:1", "saves_weights", cwd=tmp_path, env=env)
    assert output.splitlines().count("ok") == 2


def test_ranks_of_a_notebook_are_forks_and_train_as_under_ddp(tmp_path: Path) -> None:
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    assert output_of(SCRIPT.with_name("notebook_ranks.py"), tmp_path, cwd=tmp_path, env=env).splitlines()[-1] == "ok"


def test_ranks_that_use_other_blocks_end(tmp_path: Path) -> None:
    for output in ranks.start(SCRIPT, tmp_path, "goes_apart", cwd=tmp_path, world=2):
        assert "different places of a step (rank 0: GATHER of block 3 ('layers.1')" in output
        assert "rank 1: GATHER of block 4 ('layers.2')). All of them have to use the same blocks" in output


def test_ranks_end_when_one_is_killed(tmp_path: Path) -> None:
    for rank, output in enumerate(ranks.start(SCRIPT, tmp_path, "loses_a_rank", cwd=tmp_path, world=3, killed=2)[:2]):
        assert f"rank {rank} of 3 cannot go on: another rank has died or hangs" in output
    assert not [name for name in os.listdir("/dev/shm") if "hetero" in name], "the memory that they shared is gone"
