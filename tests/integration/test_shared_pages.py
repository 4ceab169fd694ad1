"""Ranks of one host have the pages of weights once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import ranks

SCRIPT = Path(ranks.__file__).with_name("shared_pages.py")


@pytest.mark.parametrize(
    "scenarios",
    [
        ("pages_exist_once", "holds_one_tensor_as_it_saves", "is_changed_in_materialize", "leaves_a_child_its_own"),
        ("does_without",),
    ],
)
def test_two_ranks(tmp_path: Path, scenarios: tuple[str, ...]) -> None:
    outputs = ranks.start(SCRIPT, tmp_path, *scenarios, cwd=tmp_path, world=2)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 2


def test_weights_that_code_changes_elsewhere_are_refused(tmp_path: Path) -> None:
    outputs = ranks.start(SCRIPT, tmp_path, "refuses_other_changes", cwd=tmp_path, world=2)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 2
