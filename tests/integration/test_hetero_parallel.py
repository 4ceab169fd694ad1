"""Three processes with uneven batches train as one process with all of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.ranks import train

RANKS = 3
Results = dict[str, Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, list[Results], Results]:
    """Of one process, of every rank of three, and of one that goes on where the three were after an
    epoch.
    """
    out = tmp_path_factory.mktemp("parallel")
    with ThreadPoolExecutor() as pool:
        for run in [pool.submit(train, "uneven", cwd=out, world=world) for world in (RANKS, 1)]:
            run.result()
    train("uneven", out / "rebalanced-3" / "step=4.ckpt", cwd=out, world=1)

    def load(name: str) -> Results:
        found: Results = torch.load(out / name, weights_only=False)
        return found

    return load("world1-rank0.pt"), [load(f"world3-rank{r}.pt") for r in range(RANKS)], load("resumed.pt")


def assert_close(a: Results, b: Results) -> None:
    assert a["weights"].keys() == b["weights"].keys()
    for name, expected in a["weights"].items():
        torch.testing.assert_close(b["weights"][name], expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(a["state"], b["state"], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scenario", ["clipped", "accumulated", "rebalanced", "sharded"])
def test_uneven_batches_train_as_one_process(scenario: str, results: tuple[Results, list[Results], Results]) -> None:
    alone, ranks, _ = results
    for rank in ranks:
        assert_close(alone[scenario], rank[scenario])
    assert [sum(sizes) for sizes in zip(*(r[scenario]["sizes"] for r in ranks), strict=True)] == alone[scenario]["sizes"]


def test_batches_are_cut_by_speed(results: tuple[Results, list[Results], Results]) -> None:
    _, ranks, _ = results
    assert [r["clipped"]["sizes"] for r in ranks] == [[3] * 3, [5] * 3, [4] * 3]
    assert [r["accumulated"]["sizes"][3] for r in ranks] == [2, 3, 2]  # the last batch of the epoch has 7 samples


def test_batches_are_cut_anew_when_speeds_drift(results: tuple[Results, list[Results], Results]) -> None:
    _, ranks, _ = results
    for rank in ranks:
        changes = list(dict.fromkeys(rank["rebalanced"]["shares"]))
        assert changes == [(4, 4, 4), (2, 5, 5), (6, 5, 1)]
    assert [r["rebalanced"]["sizes"][-2] for r in ranks] == [6, 5, 1]


def test_a_checkpoint_continues_with_another_number_of_ranks(results: tuple[Results, list[Results], Results]) -> None:
    alone, _, resumed = results
    assert len(resumed["resumed"]["sizes"]) == 8  # two of three epochs
    assert_close(alone["rebalanced"], resumed["resumed"])


def test_an_epoch_is_logged_as_the_mean_of_its_samples(results: tuple[Results, list[Results], Results]) -> None:
    alone, ranks, _ = results
    expected = alone["accumulated"]["epoch_loss"]
    torch.testing.assert_close(ranks[0]["accumulated"]["epoch_loss"], expected, rtol=1e-12, atol=1e-12)


def test_ranks_whose_samplers_do_not_agree_are_refused(results: tuple[Results, list[Results], Results]) -> None:
    alone, ranks, _ = results
    assert not alone["refused"]["samplers"]
    assert all("samples of an epoch in different orders" in rank["refused"]["samplers"] for rank in ranks)


def test_one_rank_trains_bit_for_bit_as_plain_lightning(results: tuple[Results, list[Results], Results]) -> None:
    alone, _, _ = results
    for name, expected in alone["one_plain"]["weights"].items():
        assert torch.equal(alone["one_rank"]["weights"][name], expected)
