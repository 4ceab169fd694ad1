"""A rank that fails alone, and whose process lives on, ends the others at once."""

from pathlib import Path

from support import ranks
from support.children import report_of

SCRIPT = Path(ranks.__file__).with_name("lone_ranks.py")


def test_a_rank_that_fails_alone_ends_the_other_while_it_lives(tmp_path_factory):
    report = report_of(str(SCRIPT), tmp_path_factory)
    other, lone = report.pop("on_validation_batch_end")
    assert lone == "OnlyOne: a reason of its own"
    assert "\nrank 1 has ended with OnlyOne: a reason of its own. Start all ranks again" in other, other
    first, *others = report.pop("on 2 nodes")
    assert first == "OnlyOne: a reason of its own"
    for rank, text in enumerate(others, start=1):
        cause = f"HeteroError: rank {rank} of 4 cannot go on: rank 0 has ended with OnlyOne: a reason of its own."
        assert text.startswith(cause), text
    assert set(report) == {"training_step", "optimizer_step", "on_train_batch_start", "on_before_zero_grad"}
    for case, (other, lone) in report.items():
        assert lone == "OnlyOne: a reason of its own", case
        cannot = "could not decide with the others between two batches" if case == "optimizer_step" else "cannot go on"
        assert other.startswith(f"HeteroError: rank 0 of 2 {cannot}: rank 1 has ended with OnlyOne: a reason of its own."), case
