"""Programs on lanes whose every use of memory has to be ordered."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.checker import UnorderedError
from support.lanes import doing, op
from support.lanes_contract import LanesContract
from support.ordered_runs import SCENES, checked_emulated_lanes, checked_lanes, program

from lightning_hetero.ir.schedule import Lane
from lightning_hetero.lanes import Lanes

BOTH = pytest.mark.parametrize("prompt", [False, True], ids=["polls find nothing", "polls find all"])
KINDS = pytest.mark.parametrize("streams", [True, False], ids=["streams", "emulated"])


class TestCheckedStreams(LanesContract):
    """The tests that all lanes pass order all uses of memory, too."""

    on_host = False

    @pytest.fixture
    def lanes(self) -> Iterator[Lanes]:
        with checked_lanes() as (lanes, _):
            yield lanes


class TestCheckedEmulatedLanes(LanesContract):
    """The same without streams."""

    @pytest.fixture
    def lanes(self) -> Iterator[Lanes]:
        with checked_emulated_lanes(prompt=True) as (lanes, _):
            yield lanes


def copy_into_taken_memory(*, ordered: bool) -> None:
    with checked_lanes() as (lanes, _):
        memory, source = lanes.memory().take(4096, "weights"), lanes.host_buffer(4096).fill_(7)
        taken = [lanes.mark()] if ordered else []
        lanes.submit(op(0, Lane.H2D), doing(lambda: lanes.copy(memory, source)), taken).wait()


def test_who_takes_memory_writes_it() -> None:
    copy_into_taken_memory(ordered=True)
    with pytest.raises(
        UnorderedError, match="on the stream of h2d after the write by taking memory for weights on compute's stream"
    ):
        copy_into_taken_memory(ordered=False)


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
