"""The lane of collectives, on several ranks."""

from __future__ import annotations

from pathlib import Path

from support import ranks

SCRIPT = Path(ranks.__file__).with_name("rank_lanes.py")


def test_traces_are_those_of_the_simulator_and_collectives_overlap_with_compute(tmp_path: Path) -> None:
    scenarios = (
        "reduces_once_what_stays_whole",
        "waits_for_ranks_that_lack_gradients",
        "sees_what_is_simulated",
        "computes_meanwhile",
        "goes_on_after_an_error",
    )
    outputs = ranks.start(SCRIPT, tmp_path, *scenarios, cwd=tmp_path, world=2)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 2


def test_every_use_of_memory_by_compute_collectives_engine_and_other_ranks_is_ordered(tmp_path: Path) -> None:
    scenarios = ("is_ordered", "is_ordered_on_disk")
    outputs = ranks.start(SCRIPT.with_name("ordered_ranks.py"), tmp_path, *scenarios, cwd=tmp_path, world=2)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 2
