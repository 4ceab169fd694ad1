"""Committed steps, what an elastic run is told, and the notice before a rank leaves."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.scripts import run_script

from lightning_hetero.errors import ConfigError
from lightning_hetero.parallel.elastic import LEFT, CommittedSteps, Elastic, Notice, elastic_from, node_name
from lightning_hetero.strategies import HeteroParallelStrategy


def test_a_step_counts_once_its_record_is_there(tmp_path: Path) -> None:
    steps = CommittedSteps(tmp_path / "steps")
    assert steps.steps() == []
    for step in (9, 10, 100):
        Path(steps.checkpoint(step)).parent.mkdir(exist_ok=True)
        Path(steps.checkpoint(step)).write_bytes(b"")
    steps.commit(10)
    steps.commit(9)
    assert steps.steps() == [9, 10]  # 100 was cut off
    assert CommittedSteps(f"file://{tmp_path}/steps/").steps() == [9, 10]
    steps.forget(9)
    assert steps.steps() == [10]


@pytest.mark.parametrize(
    "options", [{"every_n_steps": 0}, {"every_n_steps": True}, {"keep": 0}, {"grace_s": 0}, {"grace_s": float("inf")}]
)
def test_a_value_out_of_range_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}=.*; allowed: "):
        Elastic("steps", **options)


def test_a_run_is_elastic_by_its_option_or_by_the_environment() -> None:
    environment = {"LIGHTNING_HETERO_STEPS": "s3://bucket/run"}
    assert elastic_from(None, {}) is None
    assert elastic_from(None, environment) == Elastic("s3://bucket/run")
    assert elastic_from("here", environment) == Elastic("here")
    assert elastic_from(Elastic("here", keep=5), environment) == Elastic("here", keep=5)
    assert node_name({"LIGHTNING_HETERO_NODE": "spot"}) == "spot"
    assert node_name({})


NOTICE = """
import os, signal, sys
from lightning_hetero.parallel.elastic import Notice
in_time = sys.argv[1] == "in time"
notice = Notice(grace_s=60 if in_time else 0.2)
notice.begin()
os.kill(os.getpid(), signal.SIGTERM)
assert notice.received and notice.anyone()
if in_time:
    notice.end()
notice._timer.join()  # the grace is over, one way or the other
print("still here")
"""


@pytest.mark.parametrize(("what", "code", "out"), [("in time", 0, "still here\n"), ("too late", LEFT, "")])
def test_the_process_ends_with_its_grace(what: str, code: int, out: str, tmp_path: Path) -> None:
    script = tmp_path / "notice.py"
    script.write_text(NOTICE)
    done = run_script(script, what, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, out), done.stderr


def test_a_notice_gives_the_signal_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    notice = Notice(grace_s=60)
    notice.begin()
    notice.begin()
    assert signal.getsignal(signal.SIGTERM) != before
    os.kill(os.getpid(), signal.SIGTERM)
    assert notice.received
    notice.end()
    assert signal.getsignal(signal.SIGTERM) == before


def test_ranks_that_come_and_go_have_speeds_by_the_name_of_their_node() -> None:
    strategy = HeteroParallelStrategy(speeds={"old": 1.0, "new": 4.0}, elastic="steps")
    strategy.cluster_environment = _Ranks(3)
    strategy.uneven.names = ("new", "old", "new")
    assert strategy.uneven.seconds() == (0.25, 1.0, 0.25)
    strategy.uneven.load_state({"global_batch_size": 12, "seconds": {"old": 0.5, "new": 0.1}})
    strategy.uneven.names = ("old", "new", "unknown")
    assert strategy.uneven.seconds() == pytest.approx((0.5, 0.1, 0.3))  # nobody knows: as fast as the mean
    assert strategy.uneven.state() == {"global_batch_size": 12, "seconds": {"old": 0.5, "new": 0.1}}


def test_a_node_without_a_speed_is_refused_by_name() -> None:
    strategy = HeteroParallelStrategy(speeds={"old": 1.0})
    strategy.cluster_environment = _Ranks(2)
    strategy.uneven.names = ("old", "new")
    with pytest.raises(ConfigError, match=r"lacks nodes \['new'\]"):
        strategy.uneven.seconds()
    strategy = HeteroParallelStrategy(speeds=[1.0], elastic="steps")
    strategy.cluster_environment = _Ranks(2)
    with pytest.raises(ConfigError, match=r"1 numbers for 2 ranks.*by the name of the node"):
        strategy.uneven.seconds()
    with pytest.raises(ConfigError, match="global_batch_size=0; allowed"):
        HeteroParallelStrategy(global_batch_size=0)


class _Ranks:
    """A cluster environment of so many ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def world_size(self) -> int:
        return self._ranks

    def global_rank(self) -> int:
        return 0
