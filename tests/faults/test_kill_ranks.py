"""``kill -9`` of ranks that share a model: the others end, and all go on from a common step."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import ranks
from support.children import Report, report_of

SCRIPT = Path(ranks.__file__).with_name("shared_stores.py")
CASES = (
    "moved",
    "torchrun",
    "a full disk",
    "keep_every",
    "anew",
    "plain",
    "clipped accumulated",
    "scaled",
    "half devices",
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return report_of(str(SCRIPT), tmp_path_factory)


@pytest.mark.parametrize("case", CASES)
def test_a_killed_rank_loses_no_step_that_all_hold(report: Report, case: str) -> None:
    found = report[case]
    assert found["reached"], "no rank was killed, or refused"
    assert not found["differs"], "losses of the resumed steps"
    assert found["same"], "weights and state at the end"
