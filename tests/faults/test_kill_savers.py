"""What ranks that share a model save counts once it is whole, and any number of ranks goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import ranks
from support.children import Report, report_of

SCRIPT = Path(ranks.__file__).with_name("rank_savers.py")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return report_of(str(SCRIPT), tmp_path_factory)


@pytest.mark.parametrize("case", ["elsewhere", "linked", "local_first"])
def test_any_number_of_ranks_goes_on_from_what_ranks_have_saved(report: Report, case: str) -> None:
    found = report[case]
    assert found["reached"], "no rank was killed"
    assert found["same"], "weights and state at the end"
