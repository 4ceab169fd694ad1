"""Collectives among processes, over gloo."""

from pathlib import Path

import pytest
from support import ranks

SCRIPT = Path(ranks.__file__).with_name("collectives.py")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_gather_reduce_and_agree(world, tmp_path):
    scenarios = ("gathers", "reduces", "reduces_over_nodes", "exchanges_between_devices", "agrees", "runs_on_a_lane")
    outputs = ranks.start(SCRIPT, *scenarios, cwd=tmp_path, world=world)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * world


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_dies_ends_the_others_with_its_collective_named(world, tmp_path):
    outputs = ranks.start(SCRIPT, "loses_a_rank", cwd=tmp_path, world=world, killed=world - 1)
    for rank, output in enumerate(outputs[:-1]):
        assert f"rank {rank} of {world} cannot go on: another rank has died or hangs" in output
        assert f"(GATHER of {16 * world} bytes has failed.)" in output


def test_a_rank_that_does_not_come_ends_the_others(tmp_path):
    outputs = ranks.start(SCRIPT, "waits_for_a_rank", cwd=tmp_path, world=2)
    assert "rank 0 of 2 cannot go on: another rank has died or hangs" in outputs[0]
    assert "(AGREE of 16 bytes has failed.)" in outputs[0]
