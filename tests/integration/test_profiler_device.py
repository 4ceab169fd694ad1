"""The first batches on a device with memory of its own: what is seen of them, whatever its type and its size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.lane_kinds import answering_as_gpu
from support.models import LitModel, Recipe, Shape, assert_same, run

from lightning_hetero import EmulatedDevice
from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.profiling import operators
from lightning_hetero.profiling.model import check_activations
from lightning_hetero.runtime.lanes.emulated import EmulatedLanes
from lightning_hetero.strategies import HeteroOffloadStrategy

SHAPE = Shape(layers=4, dropout=0.2, counting=False)
BYTES = ("activation_bytes", "boundary_bytes", "transient_bytes", "operators", "forward_flop")


def seen(profile: ModelProfile) -> list[tuple[Any, ...]]:
    """What a profile says beside seconds."""
    return [tuple(getattr(block, key) for key in BYTES) for block in profile.blocks]


def profile_of(recipe: Recipe, folder: Path, *, memory: str | int = "8MiB", module: type[LitModel] = LitModel) -> ModelProfile:
    strategy = HeteroOffloadStrategy("zero_offload", device=EmulatedDevice(memory=memory))
    got = run(recipe, strategy, folder, module_class=module)
    assert_same(got, run(recipe, "auto", folder, module_class=module))
    assert strategy.model_profile is not None
    return strategy.model_profile


@pytest.mark.parametrize("recipe", [Recipe(shape=SHAPE, steps=5), Recipe(shape=SHAPE, steps=5, precision="bf16-mixed")])
def test_a_gpu_s_tensors_are_seen(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the profiler sees does not depend on the type of the device."""
    expected = profile_of(recipe, tmp_path)
    with answering_as_gpu(monkeypatch):
        found = profile_of(recipe, tmp_path)
    assert seen(found) == seen(expected)
    assert all(any(getattr(block, key) for block in found.blocks) for key in BYTES)


class Works(LitModel):
    """One of its blocks runs kernels with workspaces of 3 MiB, in forward only."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model.blocks[2].register_forward_pre_hook(self.work)

    def work(self, *_: Any) -> None:
        WORKSPACE[:] = [3 << 20]


WORKSPACE: list[int] = []


def test_workspaces_of_kernels_are_taken_from_the_allocator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(shape=SHAPE, steps=5)
    monkeypatch.setattr(EmulatedLanes, "take_peak_bytes", lambda lanes: WORKSPACE.pop() if WORKSPACE else 0)
    with answering_as_gpu(monkeypatch):
        before = profile_of(recipe, tmp_path)
        found = profile_of(recipe, tmp_path, module=Works)
    grown = {b.name: b.transient_bytes - a.transient_bytes for a, b in zip(before.blocks, found.blocks, strict=True)}
    largest = grown.pop("model.blocks.2")
    assert 3 << 19 < largest <= 3 << 20  # it takes the place of what storages need in that forward
    assert set(grown.values()) == {0}


class Blind(operators.OperatorRecorder):
    """Sees no storage."""

    def _has_storage(self, leaf: object) -> bool:
        return False


def test_a_blind_profile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hetero.profiling.model.OperatorRecorder", Blind)
    with pytest.raises(ConfigError, match=r"does not show the blocks' inputs.*plan=\"host\""):
        profile_of(Recipe(shape=SHAPE, steps=6), tmp_path)


@pytest.mark.parametrize("kind", ["boundary_bytes", "transient_bytes", "operators"])
def test_each_kind_that_is_missing_is_named(kind: str, tmp_path: Path) -> None:
    profile = profile_of(Recipe(shape=SHAPE, steps=5), tmp_path)
    check_activations(profile)

    def without(block: BlockProfile) -> BlockProfile:
        return replace(block, **{kind: () if kind == "operators" else 0})

    with pytest.raises(ConfigError, match=kind):
        check_activations(replace(profile, blocks=tuple(map(without, profile.blocks))))
