"""Where refused fits run, and the plain run that follows them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models import Outcome, run
from support.refusals import RECIPE


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What plain Lightning makes of the recipe."""
    return run(RECIPE, "auto", tmp_path_factory.mktemp("plain"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path
