"""``hetero_offload`` on several devices with memory of their own, which hold one model together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import ranks
from support.cuda import OneGpu

from lightning_hetero.errors import ConfigError
from lightning_hetero.strategies import HeteroOffloadStrategy
from lightning_hetero.strategies.devices import process_group_of

SCRIPT = Path(ranks.__file__).with_name("shared_devices.py")


def test_two_ranks_train_as_one_process_and_save_ordinary_checkpoints(tmp_path: Path) -> None:
    scenarios = (
        "trains_as_in_one_process",
        "is_made_in_slices",
        "takes_weights_that_code_changes",
        "gives_slices_back",
        "saves_checkpoints",
        "goes_on_from_a_checkpoint",
    )
    outputs = ranks.start(SCRIPT, tmp_path, *scenarios, cwd=tmp_path, world=2)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 2


def test_three_ranks_train_as_one_process_also_where_devices_have_streams(tmp_path: Path) -> None:
    at_random = "trains_as_in_one_process_at_random"
    outputs = ranks.start(SCRIPT, tmp_path, f"{at_random}:0:4", "streams", f"{at_random}:4:4", cwd=tmp_path, world=3)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 3


def test_devices_update_slices_with_masters_and_checkpoints_have_their_state(tmp_path: Path) -> None:
    with_masters = "goes_on_with_16_bit_weights"
    scenarios = ("there", "saves_checkpoints", "goes_on_from_a_checkpoint", with_masters, "streams", with_masters)
    outputs = ranks.start(SCRIPT, tmp_path, *scenarios, cwd=tmp_path, world=2)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 2


def test_optimizers_update_slices_beside_devices_by_their_own_code(tmp_path: Path) -> None:
    scenarios = (
        *("trains_16_bit_weights", "skips_steps_that_overflow", "updates_by_element", "updates_whole_parameters"),
        *("has_several_optimizers", "has_64_bits", "plans_for_other_optimizers"),
        *("streams", "updates_whole_parameters", "has_several_optimizers"),
    )
    outputs = ranks.start(SCRIPT, tmp_path, *scenarios, cwd=tmp_path, world=2)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 2


def test_averages_and_verification_are_those_of_ranks_on_the_host(tmp_path: Path) -> None:
    scenarios = ("there", "averages_weights", "is_verified", "refuses_averages_without_room")
    outputs = ranks.start(SCRIPT, tmp_path, *scenarios, "on_disk", "averages_as_in_one_process", cwd=tmp_path, world=2)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 2


def test_ranks_plan_alike_change_plans_and_keep_their_steps(tmp_path: Path) -> None:
    scenarios = ("plans_alike", "measures_the_machine", "moves_blocks", "keeps_steps", "streams", "moves_blocks")
    outputs = ranks.start(SCRIPT, tmp_path, *scenarios, cwd=tmp_path, world=2)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 2


def test_devices_exchange_slices_and_the_bits_are_the_same(tmp_path: Path) -> None:
    at_random = "trains_as_in_one_process_at_random"
    scenarios = ("between_devices", f"{at_random}:20:3", "keeps_steps", "moves_blocks", "streams", f"{at_random}:4:2")
    outputs = ranks.start(SCRIPT, tmp_path, *scenarios, cwd=tmp_path, world=3)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 3


def test_devices_that_exchange_update_slices_by_any_rule_and_plan_with_their_links(tmp_path: Path) -> None:
    of_code = ("takes_weights_that_code_changes", "skips_steps_that_overflow", "updates_whole_parameters")
    scenarios = ("plans_with_links", "between_devices", *of_code, "there", "goes_on_with_16_bit_weights")
    outputs = ranks.start(SCRIPT, tmp_path, *scenarios, cwd=tmp_path, world=2)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * 2


def test_all_ranks_end_where_the_memory_of_one_is_too_small(tmp_path: Path) -> None:
    first, last = ranks.start(SCRIPT, tmp_path, "ends_where_memory_is_too_small", cwd=tmp_path, world=2)
    assert "BatchMemoryError the device's memory is too small for this batch in forward, at block 'layers." in last
    assert "it does not begin again where several processes train together" in last
    assert "HeteroError" in first
    assert "has failed" in first


def test_a_block_that_changes_its_weights_is_named(tmp_path: Path) -> None:
    for output in ranks.start(SCRIPT, tmp_path, "ends_where_code_changes_weights", cwd=tmp_path, world=2):
        assert "UnsupportedError code has changed weights of block 'layers.1'" in output


def test_ranks_that_share_a_device_are_told_how_much_memory_each_has(tmp_path: Path) -> None:
    def trainer(**options: Any) -> pl.Trainer:
        strategy = HeteroOffloadStrategy("host", **options)
        return pl.Trainer(accelerator=OneGpu(), devices=2, strategy=strategy, default_root_dir=tmp_path)

    with pytest.raises(ConfigError, match=r"cuda:0, cuda:0: several of them on one.* Pass device_memory"):
        trainer()
    trainer(device_memory="1GiB")


def test_devices_of_their_own_talk_through_their_own_library() -> None:
    devices = [torch.device("cuda", index) for index in range(2)]
    assert process_group_of(devices) == "cpu:gloo,cuda:nccl"
    assert process_group_of(devices[:1] * 2) == process_group_of([torch.device("cpu")] * 2) == "gloo"
