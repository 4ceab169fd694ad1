"""Ranks that vanish, join and are told to leave: training goes on, and ends where it would have
ended without.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
from support.scripts import output_of, result_of
from support.sources import bytes_by_source
from support.training import beginnings, restarts, tiers
from support.training import elastic_pipelines as pipelined
from support.training import shards as sharded
from support.training import stopped as stops

from lightning_hetero.parallel.elastic import CommittedSteps

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A rank that is stopped again and again, plain Lightning without a stop, and runs that go on
    after each step in turn.
    """
    out = tmp_path_factory.mktemp("stopped")
    ranks.train("stopped", cwd=out, world=1)
    found: dict[str, Any] = torch.load(out / "elastic.pt", weights_only=False)
    return found


WHERE = pytest.mark.parametrize("where", ["files", "tiers"])  # ordinary checkpoints, and LocalFirst's


@WHERE
def test_a_run_that_is_stopped_again_and_again_ends_bit_for_bit_like_plain_lightning(where: str, stopped: dict[str, Any]) -> None:
    elastic, plain = stopped[where]["result"], stopped["plain"]
    for name, expected in plain["weights"].items():
        assert torch.equal(elastic["weights"][name], expected), name
    assert all(torch.equal(a, b) for a, b in zip(elastic["state"], plain["state"], strict=True))
    assert elastic["lr"] == plain["lr"]


@WHERE
def test_batches_validations_and_epochs_equal_those_of_one_run(where: str, stopped: dict[str, Any]) -> None:
    notes = {key: value for key, value in stopped[where]["result"]["notes"].items() if key[0] not in ("killed", "told")}
    expected = stopped["plain"]["notes"]
    assert notes.keys() == expected.keys()
    assert len([key for key in notes if key[0] == "val"]) == 2 * stops.EPOCHS
    for key, value in expected.items():
        assert all(
            torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(_flat(notes[key]), _flat(value), strict=True)
        ), key


def _flat(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@WHERE
def test_the_exit_status_says_that_the_rank_was_told_to_leave(where: str, stopped: dict[str, Any]) -> None:
    assert sorted(stopped[where]["codes"]) == [-9] * len(stops.KILLED) + [128 + 15] * len(stops.TOLD)
    assert stopped[where]["signal_restored"]


@WHERE
def test_as_many_steps_are_kept_as_asked_for(where: str, stopped: dict[str, Any]) -> None:
    last, kept = stops.EPOCHS * 5, stopped[where]["kept"]
    assert kept == [last - 2, last - 1, last]
    assert stopped[where]["files"] == [f"step-{s:012}.{end}" for s in kept for end in ("ckpt", "committed")]


@pytest.mark.parametrize("run", restarts.RUNS)
def test_wherever_a_run_continues_it_sees_what_was_left_of_it(run: str, stopped: dict[str, Any]) -> None:
    plain, after = stopped["restarts"][run]["plain"], stopped["restarts"][run]["after"]
    assert sorted(after) == list(range(plain["steps"] + 1))
    for step, found in after.items():
        events = plain["events"]
        if step == restarts.RUNS[run].get("max_steps"):
            events = []  # Lightning does not begin a fit that has its steps
        elif step:
            events = events[next(i for i, event in enumerate(events) if event[0] == "batch ends" and event[2] == step) + 1 :]
        assert found["events"] == events, step
        assert all(torch.equal(found["weights"][name], value) for name, value in plain["weights"].items()), step


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs that begin at a ``ckpt_path``, are killed, and are started again with the same one."""
    out = tmp_path_factory.mktemp("beginnings")
    ranks.train("beginnings", cwd=out, world=1)
    found: dict[str, Any] = torch.load(out / "beginnings.pt", weights_only=False)
    return found


@pytest.mark.parametrize("run", beginnings.RUNS)
def test_a_restart_counts_its_committed_steps_above_the_ckpt_path_that_began_it(run: str, begun: dict[str, Any]) -> None:
    plain, (first, second) = begun["plain"], begun[run]
    assert (first["began"], second["began"]) == (beginnings.BEGIN, beginnings.KILLED)
    assert first["committed"] == list(range(beginnings.BEGIN + 1, beginnings.KILLED + 1))
    seen = [row for row in first["samples"] if row[0] < beginnings.KILLED] + second["samples"]
    assert seen == plain["samples"]
    assert all(torch.equal(second["weights"][name], value) for name, value in plain["weights"].items())
    assert all(torch.equal(a, b) for a, b in zip(second["moments"], plain["moments"], strict=True))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Three ranks that share a model until one is told to leave, and two that go on, are killed,
    and go on.
    """
    out = tmp_path_factory.mktemp("shards")
    for world in (3, 2):
        ranks.train("shards", cwd=out, world=world)
    return {w: [torch.load(out / f"world{w}-rank{r}.pt", weights_only=False) for r in range(w)] for w in (3, 2)}


@WHERE
def test_other_ranks_continue_with_the_shards_of_a_committed_step(where: str, shards: dict[int, list[dict[str, Any]]]) -> None:
    told, went_on = ([rank[where] for rank in shards[world]] for world in (3, 2))
    plain = shards[2][0]["plain"]
    last = sharded.TOLD + 1
    assert [rank["code"] for rank in told] == [75, 128 + 15, 75]
    for rank in went_on:
        assert rank["began"] == [last, sharded.KILLED // sharded.EVERY * sharded.EVERY]
        assert rank["kept"] == [last, 8]
        assert rank["there"] == [f"step-{step:012}.ckpt" for step in rank["kept"]]
        assert rank["lr"] == plain["lr"]
        assert rank["weights"].keys() == plain["weights"].keys()
        for name, value in plain["weights"].items():
            torch.testing.assert_close(rank["weights"][name], value, rtol=1e-12, atol=1e-12)
        for a, b in zip(rank["moments"], plain["moments"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    if where == "tiers":  # in the end each reads what it wrote
        assert all(rank["bytes"]["memory"] > 0 == rank["bytes"]["remote"] for rank in went_on)


@WHERE
def test_ranks_that_share_a_model_see_every_sample_once(where: str, shards: dict[int, list[dict[str, Any]]]) -> None:
    plain = shards[2][0]["plain"]["samples"]
    assert list(plain) == list(range(sharded.STEPS))
    for step, expected in plain.items():
        there = [rank[where]["samples"] for rank in shards[3 if step <= sharded.TOLD else 2]]
        assert sorted(x for rank in there for x in rank[step]) == sorted(expected)
        if len(expected) == sharded.BATCH:
            assert len({len(rank[step]) for rank in there}) == len(there)  # cut by speed


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three ranks left of two runs, of which one lost a rank; what two made of them, and what
    one process makes alone.
    """
    out = tmp_path_factory.mktemp("pipelines")
    for world, killed in ((3, 1), (2, None), (1, None)):
        ranks.train("elastic_pipelines", cwd=out, world=world, killed=killed)
    return out


def assert_goes_on(out: Path, run: str, last: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """After a committed step three ranks become two, no step is lost, and all are as they are
    alone; what the ranks left.
    """
    alone = torch.load(out / "alone.pt", weights_only=False)
    files = [sorted(out.glob(f"{run}-world{world}-rank*.pt")) for world in (3, 2)]
    before, after = ([torch.load(file, weights_only=False) for file in of_world] for of_world in files)
    assert len(after) == 2
    for rank in before:
        assert list(rank["losses"])[:last] == list(range(1, last + 1))
    for rank in after:
        assert list(rank["losses"]) == list(range(last + 1, pipelined.STEPS + 1))
    for step, loss in {**before[0]["losses"], **after[0]["losses"]}.items():
        assert loss == pytest.approx(alone["losses"][step], rel=1e-12)
    found = {name: value for rank in after for name, value in rank["weights"].items()}
    assert found.keys() == alone["weights"].keys()
    for name, expected in alone["weights"].items():
        torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12)
    return before, after


def test_pipelines_continue_by_another_plan_when_one_rank_is_told_to_leave(pipelines: Path) -> None:
    told, went_on = assert_goes_on(pipelines, "told", pipelined.EVENT + 1)  # the step that was under way is committed
    assert [rank["end"] for rank in told] == [75, 128 + 15, 75]
    assert all(len(rank["losses"]) == pipelined.EVENT + 1 for rank in told)
    assert [rank["end"] for rank in went_on] == [0, 0]


def test_pipelines_plan_again_after_a_kill_and_read_missing_layers(pipelines: Path) -> None:
    """Every rank kept its layers on its node; what the lost one alone had comes from the remote
    copy.
    """
    step = pipelined.EVENT
    left, went_on = assert_goes_on(pipelines, "killed", step)
    assert len(left) == 2
    assert all(rank["end"] not in (0, 75) for rank in left)
    assert went_on[0]["plan"] == went_on[1]["plan"] != left[0]["plan"]
    nodes = [pipelines / "nodes" / node for node in pipelined.NODES[2]]
    for number, rank in enumerate(went_on):
        assert len(rank["weights"]) < len(torch.load(pipelines / "alone.pt", weights_only=False)["weights"])
        path = Path(CommittedSteps(pipelines / "killed").checkpoint(step))
        assert rank["bytes"] == bytes_by_source(path, nodes, number, rank["weights"])
    assert sum(rank["bytes"]["memory"] for rank in went_on)


def test_ranks_with_tiers_continue_with_others_when_one_is_killed_one_leaves_and_both_come_back(tmp_path: Path) -> None:
    """Rank 0 is killed, whose files stay; nodes come back as other ranks, with other tiers."""
    for name, nodes in tiers.NODES.items():
        ranks.train("tiers", name, cwd=tmp_path, world=len(nodes), nodes=nodes, killed=0 if name == "killed" else None)
    found = {
        name: [torch.load(file, weights_only=False) for node in nodes if (file := tmp_path / f"{name}-{node}.pt").exists()]
        for name, nodes in tiers.NODES.items()
    }
    alone = tiers.fit(tmp_path, "auto", {})
    assert [rank["end"] for rank in found["told"]] == [75, 128 + 15]
    assert len(found["killed"]) == 2
    assert all(rank["end"] not in (0, 75) for rank in found["killed"])
    began = [{rank["began"] for rank in of_all} for of_all in found.values()]
    assert began == [{0}, {tiers.KILLED // tiers.EVERY * tiers.EVERY}, {tiers.TOLD + 1}]
    assert [rank["plan"] for name in ("told", "ended") for rank in found[name]] == ["host", "disk", "resident", "disk", "host"]
    for of_all in (found["told"], found["ended"]):
        for step in of_all[0]["sizes"]:
            assert sum(rank["sizes"][step] for rank in of_all) == alone["sizes"][step]
    for rank in found["ended"]:
        for what in ("weights", "state"):
            assert rank[what].keys() == alone[what].keys()
            for name, value in alone[what].items():
                if value.is_floating_point():  # buffers that count samples are each rank's own after its last step
                    assert torch.equal(rank[what][name], found["ended"][0][what][name]), name
                    torch.testing.assert_close(rank[what][name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_nodes_are_killed_join_and_leave_while_training_continues(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Batches and pipelines at once: both sleep most of the time."""
    for _ in range(3):  # what else a machine does makes some drills slow; whoever waits for a timeout is slow in each
        runs, in_time = [], True
        with ThreadPoolExecutor() as pool:
            for options in ([], ["--pipelines"]):
                folder = tmp_path_factory.mktemp("drill")
                runs.append(pool.submit(output_of, BENCHMARKS / "preemption.py", "--dir", folder, *options, cwd=folder))
        for run in runs:
            result = result_of(run.result())
            assert result["lost_steps"] == result["wrong_samples"] == 0
            assert result["repeated_steps"] <= 3  # one step was under way whenever something happened
            assert result["max_difference"] <= 1e-12
            # 20 s where the machine has nothing else to do; a loaded one is as slow as it was in
            # starting the very first workers.
            in_time &= max(result["down_s"], result["up_s"], result["sigterm_s"]) <= 20.0 + 3 * result["start_s"]
        if in_time:
            return
    raise AssertionError([result_of(run.result()) for run in runs])
