"""Ranks that share a model beside one process with the batches of all of them as one."""

from __future__ import annotations

import ast
from pathlib import Path

from support import ranks

SCRIPT = Path(ranks.__file__).with_name("global_batch.py")
PAGE = Path(__file__).parents[2] / "docs" / "several-devices.md"


def test_ranks_train_as_one_process_with_the_global_batch(tmp_path: Path) -> None:
    outputs = ranks.start(SCRIPT, tmp_path, "64-true", "32-true", "bf16-mixed", cwd=tmp_path, world=3)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 3


def test_the_page_has_the_bounds_that_are_tested() -> None:
    """The script is not imported: it takes its rank from the environment."""
    names = (node for node in ast.parse(SCRIPT.read_text()).body if isinstance(node, ast.Assign))
    bounds = next(ast.literal_eval(node.value) for node in names if getattr(node.targets[0], "id", "") == "BOUNDS")
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines()]
    table = {row[0]: tuple(map(float, row[1:])) for row in rows if row[0] in bounds and len(row) == 4}
    assert table == bounds
