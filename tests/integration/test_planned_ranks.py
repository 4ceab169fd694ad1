"""Planners on several devices: all ranks measure, one of them plans, and none goes on alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import ranks

SCRIPT = Path(ranks.__file__).with_name("planned_ranks.py")


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_plan_alike_and_train_as_one_process(tmp_path: Path, world: int) -> None:
    scenarios = ["plans_alike", "asks_alone", "moves_blocks", "measures_the_machine"]
    if world == 2:
        scenarios += ["clips_by_value", "refuses_a_machine_of_another_number", "refuses_a_machine_that_some_ranks_have"]
        scenarios += ["refuses_a_budget_by_what_all_need", "refuses_other_plans"]
    outputs = ranks.start(SCRIPT, tmp_path, *scenarios, cwd=tmp_path, world=world)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * world


def test_two_nodes_plan_alike(tmp_path: Path) -> None:
    scenarios = ("plans_alike", "asks_alone", "measures_the_machine", "refuses_a_budget_by_what_all_need")
    outputs = ranks.start(SCRIPT, tmp_path, *scenarios, cwd=tmp_path, world=4, nodes="aabb")
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 4
