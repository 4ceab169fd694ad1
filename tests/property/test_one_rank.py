"""One rank's share of a machine and a model, and all of them together."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.profiles import machines, models
from support.simulations import CPU

from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.lowering.rank_rules import rules_of
from lightning_hetero.planners import PLANNERS
from lightning_hetero.planners.lohan import formulas
from lightning_hetero.planners.one_rank import all_ranks, one_rank
from lightning_hetero.profiling import presets

OF_THE_MACHINE = {
    "host_memory_bytes", "device_memory_bytes", "disk_capacity_bytes", "host_dram_bytes_per_s", "cpu_update_params_per_s",
    "cpu_downcast_params_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s", "device_flop_per_s",
    "device_update_params_per_s",
}  # fmt: skip


def _machine(ranks: int) -> HardwareProfile:
    return replace(CPU, world_size=ranks, collective_bytes_per_s=1e9, disk_capacity_bytes=10**12, disk_read_bytes_per_s=1e9)


@given(models(), st.integers(2, 8))
def test_shares_add_up_to_the_machine_and_slices_to_the_model(model: ModelProfile, ranks: int) -> None:
    machine = _machine(ranks)
    part, share = one_rank(model, machine)
    assert (share.world_size, share.ranks) == (1, ranks)
    for f in fields(machine):
        if f.name in OF_THE_MACHINE:
            assert ranks * getattr(share, f.name) == pytest.approx(getattr(machine, f.name), abs=ranks)
        elif f.name not in ("world_size", "ranks"):
            assert getattr(share, f.name) == getattr(machine, f.name)
    for block, piece in zip(model.blocks, part.blocks, strict=True):
        assert 0 <= ranks * model.weight_bytes(piece) - model.weight_bytes(block) <= ranks * 16
        assert piece.activation_bytes == block.activation_bytes, "a rank computes with whole weights"
        assert piece.forward_s == pytest.approx(ranks * block.forward_s), "with its share of the processor"


@given(models(), st.integers(2, 8))
def test_all_ranks_undo_one_rank_and_neither_acts_twice(model: ModelProfile, ranks: int) -> None:
    share = one_rank(model, _machine(ranks))
    assert one_rank(*share) == share
    again = one_rank(*all_ranks(*share))
    assert again[0].shape() == share[0].shape()
    assert again[1].host_memory_bytes == share[1].host_memory_bytes
    whole = all_ranks(*share)
    assert all_ranks(*whole) == whole


@given(models())
def test_one_device_has_all(model: ModelProfile) -> None:
    assert one_rank(model, CPU) == all_ranks(model, CPU) == (model, CPU)


def test_devices_that_hold_a_model_together_share_the_disks_and_bring_whole_weights() -> None:
    """Of four devices each reads and writes a fourth of the model at a fourth of the rate, and all
    slices cross its own link.
    """
    one = presets.paper_machine("lohan-rtx4090")
    four = presets.paper_machine("lohan-rtx4090", count=4)
    profile = presets.model("lohan-13b", batch=8, sequence=1024, hardware=one)
    alone = formulas.quantities(profile, one, host_bytes=0.0)
    share = formulas.quantities(*one_rank(profile, four), host_bytes=0.0)
    ours, theirs = (q.disk_s(q.read_bytes, q.written_bytes) for q in (share, alone))
    assert ours == pytest.approx(theirs)
    assert share.copies * share.weight_bytes == pytest.approx(alone.weight_bytes)
    assert share.copies * share.gradient_bytes / share.download_bytes_per_s == pytest.approx(
        alone.gradient_bytes / alone.download_bytes_per_s
    )


@pytest.mark.parametrize("planner", PLANNERS)
@given(models(), machines(), st.integers(2, 4), st.booleans())
def test_planners_take_only_what_ranks_run(
    planner: str, model: ModelProfile, machine: HardwareProfile, ranks: int, mapped: bool
) -> None:
    """What training refuses is by the same rule (``runtime.placement``)."""
    machine = replace(machine, world_size=ranks, collective_bytes_per_s=1e9, meeting_s=1e-5, gathers_in_place=mapped)
    part, share = one_rank(model, machine)
    try:
        plan = PLANNERS[planner](part, share)
    except (PlanError, ConfigError):
        return
    assert rules_of(share).allows_all(plan, part)
