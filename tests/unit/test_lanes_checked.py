"""Programs on lanes whose every use of memory has to be ordered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.checker import UnorderedError
from support.ordered_runs import SCENES, program

BOTH = pytest.mark.parametrize("prompt", [False, True], ids=["polls find nothing", "polls find all"])


KINDS = pytest.mark.parametrize("streams", [True, False], ids=["streams", "emulated"])


@BOTH
@KINDS
@pytest.mark.parametrize("seed", range(3))
def test_programs_order_all_uses(seed: int, streams: bool, prompt: bool) -> None:
    right, checker = program(seed, prompt=prompt, streams=streams)
    assert right
    assert checker.uses > 100


@KINDS
@pytest.mark.parametrize("seed", range(3))
def test_programs_without_their_edges_are_found(seed: int, streams: bool) -> None:
    with pytest.raises(UnorderedError, match="nothing orders the"):
        program(seed, edges=False, streams=streams)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_scenes_order_all_uses(scene: Callable[[], None]) -> None:
    scene()
