"""Ranks with unequal numbers of batches, and one that stops alone, end with an error at once."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support import ranks
from support.scripts import output_of, result_of

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.errors import ConfigError

EVALUATED = {  # before the first batch is computed: who has how many, and the remedy
    "validation": (("4", "3"), "or set limit_val_batches."),
    "test": (("4", "3"), "or set limit_test_batches."),
    "test loaders": (("3 + 1", "2 + 2"), "or set limit_test_batches."),
    "prediction": (("4", "3"), "Or set limit_predict_batches,"),
    "prediction sampled": (("2", "1"), "Lightning's sampler repeats no sample in prediction"),
}
SCRIPT = Path(ranks.__file__).with_name("parted_ranks.py")


@pytest.mark.parametrize("value", [5, timedelta(0)])
def test_a_timeout_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"allowed: a datetime\.timedelta above 0"):
        HeteroOffloadStrategy(timeout=value)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_part_say_who_and_how(world: int, tmp_path: Path) -> None:
    report = result_of(output_of(SCRIPT, tmp_path, str(world), cwd=tmp_path))
    assert {"training", "on_train_batch_end"} <= set(report)
    assert report.pop("on_validation_end all", ["4 has no error"] * world) == ["4 has no error"] * world
    for case, count in (("epochs", 4), ("steps", 2)):  # all end there, also the one that stops
        assert report.pop(f"on_train_batch_end {case}", [f"{count} has no error"] * world) == [f"{count} has no error"] * world
    if world == 2:  # the other rank hangs, until this one has ended
        assert report.pop("hangs")[0].startswith("1 HeteroError: rank 0 of 2 cannot go on: another rank has died or hangs")
        first, own = report.pop("raises")
        assert own == "1 RuntimeError: it has had enough."
        assert first.startswith("1 HeteroError: rank 0 of 2 could not decide with the others"), first
        assert first.count("rank 1 has ended with RuntimeError: it has had enough. Start all ranks again") == 1, first
        due, timed = (set(report.pop(f"training {case}")) for case in ("due", "timed"))
        assert len(due) == len(timed) == 1, (due, timed)
        assert due.pop().startswith(
            "1 HeteroError: the ranks part after step 1: rank 0 does not validate, rank 1 validates next. All"
        )
        assert timed.pop().startswith("0 UnsupportedError: val_check_interval as a time of 900 s, which each rank takes by its own")
        for case, (each, remedy) in EVALUATED.items():
            who = ", ".join(f"rank {rank} has {count} batches" for rank, count in enumerate(each))
            text, other = report.pop(case)
            count = 4 if case == "validation" else 0
            assert text == other, case
            assert text.startswith(f"{count} HeteroError: the ranks part as they evaluate: {who}. All have equally many"), text
            assert remedy in text, text
            assert "rank 1 has ended with" not in text, text
    for case, ends in report.items():
        is_stop = case.startswith("on_")
        alone = "rank 1 has trainer.should_stop set" if is_stop else "rank 1 has no more batches"
        others = [f"rank {rank} goes on" for rank in range(world) if rank != 1]
        if case == "on_validation_end":  # the last batch of the epoch
            others = [f"rank {rank} has no more batches" for rank in range(world) if rank != 1]
        who = ", ".join([others[0], alone, *others[1:]])
        assert len(set(ends)) == 1, (case, ends)
        count, text = ends[0].split(" ", 1)
        assert text.startswith("HeteroError: the ranks part "), (case, text)
        assert f": {who}. All of them have equally many batches" in text, (case, text)
        assert ("reduce_boolean_decision" in text) == is_stop, (case, text)
        assert "rank 1 has ended with" not in text, "all have the same error, so it is no news"
        assert count == {"training": "3", "training auto": "3"}.get(case, "1" if "batch_end" in case else "4")
