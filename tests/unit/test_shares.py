"""Who gets which samples of a global batch, how they are weighted, and how speeds are measured."""

from __future__ import annotations

from typing import Any

import jsonargparse
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler, TensorDataset

from lightning_hetero import strategies
from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.parallel import stopwatch
from lightning_hetero.parallel.shares import SharedBatches, cut
from lightning_hetero.parallel.stopwatch import Stopwatch
from lightning_hetero.strategies import HeteroParallelStrategy


def batches(samples: int, batch: int, seconds: list[float], rank: int, **options: Any) -> SharedBatches:
    sampler = SequentialSampler(range(samples))  # type: ignore[arg-type]
    return SharedBatches(sampler, batch=batch, seconds=seconds, rank=rank, drop_last=False, **options)


def test_samples_go_where_they_are_done_soonest() -> None:
    assert cut(12, [1 / 3, 1 / 5, 1 / 4]) == (3, 5, 4)
    assert cut(3, [1.0, 1.0, 1000.0], least=1) == (1, 1, 1)
    assert cut(2, [1.0, 1.0, 1000.0]) == (1, 1, 0)
    with pytest.raises(ConfigError, match="a batch of 2 samples for 3 ranks; allowed: at least 3"):
        cut(2, [1.0, 1.0, 1.0], least=1)
    with pytest.raises(ConfigError, match="allowed: a positive number"):
        cut(2, [1.0, 0.0])


def test_an_epoch_may_begin_in_its_middle_and_the_next_one_does_not() -> None:
    ranks = [batches(23, 5, [1.0, 0.5], r) for r in range(2)]
    whole = [list(r) for r in ranks]
    for rank, expected in zip(ranks, whole, strict=True):
        rank.begin_at(3)
        iter(rank)  # loaders with workers make one more, and leave it alone
        assert list(rank) == expected[3:]
        assert [rank.next_taken().samples for _ in range(2)] == [len(part) for part in expected[3:]]
        assert list(rank) == expected


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 30), st.integers(4, 12))
def test_every_sample_is_somebodys_once_and_weights_are_exact(speeds: list[int], samples: int, batch: int) -> None:
    ranks = [batches(samples, batch, [1 / s for s in speeds], r) for r in range(len(speeds))]
    handed = [list(r) for r in ranks]
    assert all(len(parts) == len(r) for parts, r in zip(handed, ranks, strict=True))
    seen = []
    for whole in zip(*handed, strict=True):
        taken = [r.next_taken() for r in ranks]
        assert [len(part) for part in whole] == [t.samples for t in taken]
        own = [part for part, t in zip(whole, taken, strict=True) if t.weight]
        seen += [index for part in own for index in part]
        size = sum(map(len, own))
        assert [t.weight for t in taken] == [len(speeds) * (t.samples if t.weight else 0) / size for t in taken]
    assert seen == list(range(samples))


def test_new_shares_begin_at_the_batch_that_all_agreed_on() -> None:
    given_out = batches(40, 10, [1.0, 1.0], 0)
    parts = iter(given_out)
    assert len(next(parts)) == 5
    given_out.change([4.0, 1.0], start=2)
    assert given_out.shares == (2, 8)
    assert [len(part) for part in parts] == [5, 2, 2]
    assert [given_out.next_taken().samples for _ in range(4)] == [5, 5, 2, 2]


def test_an_epoch_that_was_left_early_leaves_nothing_behind() -> None:
    given_out = batches(40, 10, [4.0, 1.0], 0)
    left = iter(given_out)
    next(left), next(left)
    next(iter(given_out))
    assert given_out.next_taken().samples == 2
    with pytest.raises(IndexError):
        given_out.next_taken()


def test_workers_read_ahead_and_sizes_stay_in_order() -> None:
    shared = batches(20, 6, [1.0, 1.0], 1)
    dataset = TensorDataset(torch.arange(20))
    loader = DataLoader(dataset, batch_sampler=shared, num_workers=1, prefetch_factor=2)
    for (batch,) in loader:
        assert shared.next_taken().samples == len(batch)


def test_a_stopwatch_counts_until_the_last_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(stopwatch, "now_s", lambda: float(next(clock)))
    watch, layer = Stopwatch(torch.device("cpu"), window=2), torch.nn.Linear(2, 1)
    watch.watch_gradients(layer.parameters())

    def step(samples: int) -> None:
        watch.start()
        layer(torch.ones(1, 2)).sum().backward()  # two gradients: two ticks
        next(clock)  # waiting for others
        watch.stop(samples)

    for _ in range(3):  # two settle
        step(4)
    assert watch.seconds_per_sample() is None
    step(1)
    assert watch.seconds_per_sample() == pytest.approx((2 / 4 + 2 / 1) / 2)
    watch.reset()
    assert watch.seconds_per_sample() is None
    watch.stop_watching()
    assert not any(p._post_accumulate_grad_hooks for p in layer.parameters())


def test_a_stopwatch_adds_up_forwards_of_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(stopwatch, "now_s", lambda: float(next(clock)))
    watch, layers = Stopwatch(torch.device("cpu"), window=1), [torch.nn.Linear(2, 2) for _ in range(3)]
    watch.watch_forward(layers)
    for _ in range(3):  # two settle
        watch.start()
        hidden = torch.ones(1, 2)
        for layer in layers:
            next(clock)  # waiting for weights
            hidden = layer(hidden)
        watch.stop(2)
        layers[0](hidden)  # validation
    assert watch.seconds_per_sample() == 3 / 2


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


DATASET = TensorDataset(torch.arange(8))


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        ([1, 2], "got list as training data"),
        (DataLoader(Endless(), batch_size=2), "got an IterableDataset"),
        (DataLoader(DATASET, batch_sampler=[[0, 1], [2]]), "got batch_sampler=list"),
        (
            DataLoader(DATASET, sampler=DistributedSampler(DATASET, num_replicas=2, rank=0)),
            "got a sampler for one of several ranks",
        ),
    ],
)
def test_data_that_cannot_be_cut_is_refused(loader: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        HeteroParallelStrategy().uneven.check(loader)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"speeds": [1, 0]}, r"speeds=\[1, 0\]; allowed: a positive number"),
        ({"rebalance_every": -1}, "rebalance_every=-1; allowed"),
        ({"rebalance_drift": -0.1}, "rebalance_drift=-0.1; allowed"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        HeteroParallelStrategy(**options)


@pytest.mark.parametrize("name", ["HeteroParallelFsdpStrategy", "PytorchLightningHeteroParallelFsdpStrategy"])
def test_configurations_see_the_options_of_every_class_of_a_strategy(name: str) -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    own = {key.partition(".")[2] for key in parser.add_class_arguments(getattr(strategies, name), "strategy")}
    assert {"speeds", "rebalance_every", "global_batch_size", "elastic"} <= own  # those of hetero_parallel
    assert {"data_parallel_size", "tensor_parallel_size", "save_distributed_checkpoint", "timeout"} <= own
    options = {"speeds": [1, 2], "elastic": "steps", "tensor_parallel_size": 2, "save_distributed_checkpoint": False}
    made = parser.instantiate(parser.parse_object({"strategy": options})).strategy
    assert (made.uneven.speeds, made.uneven.elastic.path, made._mesh_sizes) == ([1, 2], "steps", ("auto", 2))
    assert not made._save_distributed_checkpoint
    with pytest.raises(jsonargparse.ArgumentError, match="rebalance_every"):
        parser.parse_object({"strategy": {"rebalance_every": "often"}})
