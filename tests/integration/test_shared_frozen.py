"""Frozen weights of ranks that share a model: each reads its slices in place from the files."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import ranks
from support.children import Report, report_of

SCRIPT = Path(ranks.__file__).with_name("shared_frozen.py")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return report_of(str(SCRIPT), tmp_path_factory)


@pytest.mark.parametrize(
    "case",
    [
        "is_read_in_place",
        "is_moved_when_it_changes",
        "goes_on_from_checkpoints",
        "goes_on_with_other_numbers",
        "is_killed",
        "is_refused_by_name",
        "is_read_on_nodes",
    ],
)
def test_frozen_weights_are_read_in_place_by_ranks(report: Report, case: str) -> None:
    assert report[case]
    for name, found in report[case].items():
        assert all(found.values()), (name, found)
