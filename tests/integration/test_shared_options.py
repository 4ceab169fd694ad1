"""Precisions, optimizers and options of ``hetero_offload`` on several devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import ranks

SCRIPT = Path(ranks.__file__).with_name("shared_options.py")
MANNERS = Path(ranks.__file__).with_name("shared_manners.py")
ADAPTERS = Path(ranks.__file__).with_name("shared_adapters.py")


def test_16_bit_weights_have_masters_in_slices(tmp_path: Path) -> None:
    run(tmp_path, "trains_16_bit_weights", "goes_on_with_16_bit_weights", "skips_steps_that_overflow", world=3)


def test_optimizers_update_slices_by_their_own_code(tmp_path: Path) -> None:
    scenarios = ("updates_by_element", "updates_whole_parameters", "has_several_optimizers", "has_64_bits")
    run(tmp_path, *scenarios, "says_that_steps_are_not_kept", "refuses_by_name", world=3)


def test_optimizers_with_state_of_their_own_go_on_in_one_process(tmp_path: Path) -> None:
    run(tmp_path, "updates_whole_parameters", world=1)


def test_adapters_train_on_frozen_weights_that_one_rank_reads(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft, whose adapters are trained here, is missing")
    scenarios = (
        *("trains_adapters", "trains_16_bit_adapters_on_disk", "has_a_chunked_head"),
        *("saves_adapters_alone", "sets_what_files_lack", "trains_adapters_of_an_embedding"),
    )
    run(tmp_path, *scenarios, script=ADAPTERS)


def test_two_ranks_have_the_manners_of_ddp(tmp_path: Path) -> None:
    scenarios = (
        "has_lightnings_manners",
        "has_batches_of_other_sizes",
        "assigns_weights",
        "looks_at_gradients",
        "goes_on_from_checkpoints_of_ddp",
        "averages_weights",
        "saves_after_errors",
        "refuses_changes",
    )
    run(tmp_path, *scenarios, script=MANNERS)


def test_steps_of_two_ranks_are_verified(tmp_path: Path) -> None:
    run(tmp_path, "is_verified", script=MANNERS)
    run(tmp_path, "finds_what_differs", script=MANNERS)


def run(folder: Path, *scenarios: str, world: int = 2, script: Path = SCRIPT) -> None:
    """Runs scenarios of the script on as many ranks."""
    outputs = ranks.start(script, folder, *scenarios, cwd=folder, world=world)
    assert [output.splitlines()[-1] for output in outputs] == ["ok"] * world
