"""The common step of several ranks' stores: every kill, and what is refused."""

from dataclasses import replace

import pytest
from support.common_steps import Lost, Runs, Start

from lightning_hetero.errors import ConfigError, StoreCorruptError
from lightning_hetero.store import common_steps
from lightning_hetero.store.common_steps import CommonStep, Membership, RankStore, common_step

ALL = 9  # sees the stores of all ranks

RUNS = {
    "two ranks": Runs(starts=(Start(2, ALL),), commits=3, kills=2, early=1),
    "three ranks": Runs(starts=(Start(3, ALL),), commits=2, kills=2),
    "two ranks, then one or two": Runs(starts=(Start(2, ALL), Start(1, ALL)), commits=3, kills=2),
    "two ranks, then two or three": Runs(starts=(Start(2, ALL), Start(3, ALL)), commits=2, kills=1),
    "the third disk comes and goes": Runs(starts=(Start(2, 2), Start(3, 3)), commits=2, kills=1),
}


@pytest.mark.parametrize("name", RUNS)
def test_no_kill_loses_a_step_that_all_ranks_hold(name):
    assert RUNS[name].check() > 1000


def _newest(stores):
    found = common_step(stores)
    return found and replace(found, number=max(store.numbers[-1] for store in stores if store.set_id == found.set_id))


BREAKS = {
    "a rank writes before others hold its last step": (Membership, "may_write", property(lambda self: True)),
    "a rank takes what one rank holds for what all hold": (
        Membership,
        "after_exchange",
        lambda self, recorded: replace(self, held_by_all=max(recorded)),
    ),
    "the first write after a resume waits for nobody": (
        CommonStep,
        "membership",
        lambda self: Membership(recorded=self.number, held_by_all=self.number),
    ),
    "the newest step of any rank is resumed": (common_steps, "common_step", _newest),
    "no record is taken back": (
        common_steps,
        "common_step",
        lambda stores: (found := common_step(stores)) and replace(found, taken_back=frozenset()),
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_without_any_of_its_rules_a_kill_loses_a_step(what, monkeypatch):
    where, name, broken = BREAKS[what]
    monkeypatch.setattr(where, name, broken)
    with pytest.raises((Lost, StoreCorruptError)):
        RUNS["two ranks"].check()


TWO, THREE = Start(2, 2), Start(3, 3)  # the third rank's disk is there or not


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param((TWO, THREE, TWO), id="an earlier set"),
        pytest.param((TWO, THREE, TWO, THREE), id="a later set"),
    ],
)
def test_a_set_that_is_left_behind_does_not_come_back(starts):
    runs = Runs(starts=starts, commits=1, kills=len(starts) - 1, in_turn=True)
    assert runs.check() > 1000
    with pytest.raises(Lost):
        replace(runs, removes_others=False).check()


def store(rank, *numbers, ranks=2, set_id="a", set_number=1):
    return RankStore(set_id=set_id, set_number=set_number, ranks=ranks, rank=rank, numbers=numbers)


def test_the_last_step_that_all_hold_is_resumed():
    found = common_step([store(0, 3, 4, 5), store(1, 3, 4)])
    assert found == CommonStep(set_id="a", set_number=1, ranks=2, number=4, taken_back=frozenset({0}))
    assert not found.membership().may_write


def test_without_stores_there_is_no_step():
    assert common_step([]) is None
    assert common_step([store(0), store(1)]) is None


def test_a_set_counts_once_each_of_its_stores_has_a_record():
    before = [store(0, 7), store(1, 7)]
    after = [store(rank, *numbers, ranks=3, set_id="b", set_number=2) for rank, numbers in enumerate([(7,), (7,), ()])]
    assert common_step([*before, *after]).set_id == "a"
    assert common_step([*before, *after[:2], replace(after[2], numbers=(7,))]).set_id == "b"


def of_nodes(rank, *numbers, **more):
    return RankStore(**{"set_id": "a", "set_number": 1, "ranks": 4, "rank": rank, "numbers": numbers, "nodes": 2} | more)


def test_the_stores_of_one_node_are_enough_to_go_on_from():
    assert common_step([of_nodes(2, 4, 5), of_nodes(3, 3, 4), of_nodes(0, 5)]) == CommonStep(
        set_id="a", set_number=1, ranks=4, number=4, taken_back=frozenset({2}), nodes=2, is_whole=False
    )
    with pytest.raises(ConfigError, match=r"of a run on 4 ranks the stores of ranks 1, 2 are missing"):
        common_step([of_nodes(0, 5), of_nodes(3, 5)])


def test_of_all_nodes_the_step_that_all_hold_counts():
    found = common_step([of_nodes(rank, 4, 5) for rank in (0, 1, 2)] + [of_nodes(3, 3, 4)])
    assert (found.number, found.taken_back, found.is_whole) == (4, frozenset({0, 1, 2}), True)
    with pytest.raises(StoreCorruptError, match=r"rank 2 of 4 has recorded commit 6 last, and rank 0 commit 9.*rank 2 is older"):
        common_step([of_nodes(0, 8, 9), of_nodes(1, 8, 9), of_nodes(2, 5, 6), of_nodes(3, 5, 6)])


def test_a_set_that_one_node_has_made_does_not_count_before_that_of_all():
    before = [store(rank, 7) for rank in range(2)]
    after = [of_nodes(rank, *[7] * (rank < 2), set_id="b", set_number=2) for rank in range(4)]
    assert common_step([*before, *after]).set_id == "a"
    assert common_step(after).set_id == "b"


def test_a_missing_store_is_named():
    with pytest.raises(ConfigError, match=r"of a run on 4 ranks the stores of ranks 1, 3 are missing"):
        common_step([store(0, 5, ranks=4), store(2, 5, ranks=4)])
    with pytest.raises(ConfigError, match=r"the stores of ranks 1 are missing.* The stores of rank 1 of 2 are those of other runs"):
        common_step([store(0, 5), store(1, 5, set_id="b")])


def test_a_store_of_another_moment_is_named():
    with pytest.raises(StoreCorruptError, match=r"rank 1 of 2 has recorded commit 6 last, and rank 0 commit 9.*rank 1 is older"):
        common_step([store(0, 7, 8, 9), store(1, 5, 6)])


def test_a_ring_without_the_common_step_is_refused():
    with pytest.raises(StoreCorruptError, match="rank 1 of 2 has recorded commit 6 last, and rank 0 commit 7"):
        common_step([store(0, 7), store(1, 5, 6)])


def test_a_copy_of_a_store_is_named():
    with pytest.raises(StoreCorruptError, match=r"two stores of rank 1 of 2"):
        common_step([store(0, 5), store(1, 5), store(1, 4)])


@pytest.mark.parametrize(
    ("numbers", "begun"), [([(0,), (0,)], True), ([(0,), ()], False), ([(0,)], False), ([(0, 1)], True), ([], False)]
)
def test_a_set_has_begun_when_a_second_record_is_there_or_all_first_ones(numbers, begun):
    stores = [RankStore(set_id="a", set_number=1, ranks=2, rank=rank, numbers=row) for rank, row in enumerate(numbers)]
    assert common_steps.has_begun(stores) is begun
