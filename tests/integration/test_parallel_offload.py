"""Ranks that keep the model on tiers train with others that keep it in memory, to the same bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.ranks import train
from support.training import groups as group

Results = dict[str, Any]


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Results], list[Results]]:
    """Of every rank: of two, and of three."""
    out = tmp_path_factory.mktemp("groups")
    folders = {world: out / str(world) for world in (2, 3)}
    for folder in folders.values():
        folder.mkdir()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda world: train("groups", cwd=folders[world], world=world), folders))

    def load(world: int) -> list[Results]:
        return [torch.load(folders[world] / f"rank{r}.pt", weights_only=False) for r in range(world)]

    return load(2), load(3)


def assert_equal(one: Results, other: Results) -> None:
    for what in ("weights", "state"):
        assert one[what].keys() == other[what].keys()
        for name, value in one[what].items():
            assert torch.equal(value, other[what][name]), name


def test_two_ranks_with_tiers_have_the_bits_of_ddp(groups: tuple[list[Results], list[Results]]) -> None:
    for rank in groups[0]:
        assert_equal(rank["tiers"], rank["ddp"])
        assert torch.equal(torch.stack(rank["tiers"]["norms"]), torch.stack(rank["ddp"]["norms"])), "what hooks see"
        assert rank["tiers"]["metrics"] == rank["ddp"]["metrics"]
        assert rank["tiers"]["evaluated"] == rank["ddp"]["evaluated"]


def test_a_rank_that_cannot_begin_says_so_on_all(groups: tuple[list[Results], list[Results]]) -> None:
    first, second = (rank["refused"]["error"] for rank in groups[0])
    assert second.startswith("OutOfMemoryBudgetError: plan 'disk' needs")
    assert first == f"ConfigError: rank 1 of 2 cannot begin, nor can the others without it. {second}"


def test_ranks_agree_on_a_step_that_overflows(groups: tuple[list[Results], list[Results]]) -> None:
    for rank in groups[0]:
        assert_equal(rank["scaled_tiers"], rank["scaled_ddp"])
        assert rank["scaled_tiers"]["scale"] == rank["scaled_ddp"]["scale"] < 2.0**18


@pytest.mark.parametrize("scenario", ["tiers", "gone_on", "resumed", "double"])
def test_all_ranks_have_the_same_weights_and_state_wherever_they_keep_them(
    scenario: str, groups: tuple[list[Results], list[Results]]
) -> None:
    first, *others = (rank[scenario] for rank in groups[1])
    for other in others:
        assert_equal(first, other)


@pytest.mark.parametrize("scenario", ["gone_on", "resumed"])
def test_tiers_change_no_bit_and_a_checkpoint_continues_with_others(
    scenario: str, groups: tuple[list[Results], list[Results]]
) -> None:
    ranks = groups[1]
    assert_equal(ranks[0]["tiers"], ranks[0][scenario])
    assert [r["tiers"]["plan"] for r in ranks] == ["disk", "host", "resident"]
    assert [r["gone_on"]["plan"] for r in ranks] == ["resident"] * 3
    assert [r["resumed"]["plan"] for r in ranks] == ["host", "host", "disk"]  # the second one on a device with its own memory
    assert len(ranks[0][scenario]["sizes"]) == 4  # one of two epochs
    for rank in ranks[1:]:
        assert rank[scenario]["metrics"] == ranks[0][scenario]["metrics"]


def test_three_ranks_train_as_one_process_and_follow_their_speeds(groups: tuple[list[Results], list[Results]]) -> None:
    ranks = groups[1]
    alone, changes = ranks[2]["alone"], list(dict.fromkeys(ranks[0]["double"]["shares"]))
    assert changes == [(4, 4, 4), (2, 5, 5), (6, 5, 1)]
    assert [r["double"]["plan"] for r in ranks] == ["resident", "disk", "holistic"]
    assert [sum(sizes) for sizes in zip(*(r["double"]["sizes"] for r in ranks), strict=True)] == alone["sizes"]
    for what in ("weights", "state"):
        found = ranks[0]["double"][what]
        assert found.keys() == alone[what].keys()
        for name, expected in alone[what].items():
            if expected.is_floating_point():
                torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12)


def test_batches_are_cut_by_speed_and_only_some_ranks_hold_the_weights(groups: tuple[list[Results], list[Results]]) -> None:
    ranks = [rank["tiers"] for rank in groups[1]]
    assert [r["sizes"][:4] for r in ranks] == [[3, 3, 3, 2], [5, 5, 5, 3], [4, 4, 4, 2]]
    in_memory = [max(r["in_memory"]) for r in ranks]
    assert in_memory == [1 / group.LAYERS, 1, 1]  # of the blocks, as a batch begins
    assert ranks[0]["report"]["bytes_read"] > 0
    assert ranks[0]["report"]["disk_bytes"] > 0
    assert [r["report"]["disk_bytes"] for r in ranks[1:]] == [0, 0]


def test_a_parameter_that_one_rank_uses_is_updated_on_all_and_one_that_none_uses_on_none(
    groups: tuple[list[Results], list[Results]],
) -> None:
    rank = groups[1][0]["tiers"]
    names = [name for name, value in rank["weights"].items() if value.is_floating_point()]
    updated = {names[index] for index in rank["state"]}
    assert set(names) - updated == {"never.weight", "never.bias"}
    buffers = {name: int(value) for name, value in rank["weights"].items() if name.endswith("seen")}
    assert set(buffers.values()) == {2 * sum(rank["sizes"][:4])}  # the first rank's samples
