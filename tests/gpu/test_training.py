"""``Trainer(strategy="hetero_offload", accelerator=DEVICE)`` against plain Lightning on the same
GPU, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.device_plans import RESIDENT
from support.gpu import DEVICE, TRAINER, needs_a_device, only_on_a_gpu, ours, plain
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, on_host, outcome, quiet_trainer, run
from support.verdicts import counted_verdicts
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero import BlockPlan, EmulatedDevice, HeteroOffloadStrategy, Plan, Tier, UpdateLane
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.ir.plan import Saved, UpdateOrder
from lightning_hetero.ir.trace import Span
from lightning_hetero.profiling import presets

pytestmark = needs_a_device

same_adam_on_the_cpu = pytest.mark.xfail(
    not torch.__version__.startswith("2.13"), strict=False, reason="the native kernels promise the bits of torch 2.13's Adam"
)
SHAPE = Shape(layers=4, dropout=0.2, counting=False)


def blocks(*rows: BlockPlan) -> Plan:
    """A plan that keeps everything else on the device."""
    return Plan(name="p", blocks=(*rows, RESIDENT))


EVERY = "model.blocks.*"
VISITED = BlockPlan(name=EVERY, weights=Tier.DEVICE, state=Tier.HOST, update=UpdateLane.DEVICE)
BELOW = replace(VISITED, weights=Tier.HOST, saved=Saved.SWAP_HOST, boundary=Saved.SWAP_HOST)
ON_DEVICE = {
    "resident": blocks(),
    "state on the host": blocks(VISITED),
    "state of every second block": blocks(replace(VISITED, name="model.blocks.0"), replace(VISITED, name="model.blocks.2")),
    "recomputed": blocks(replace(RESIDENT, name=EVERY, saved=Saved.RECOMPUTE, boundary=Saved.SWAP_HOST)),
    "swapped to the disk": blocks(replace(RESIDENT, name=EVERY, saved=Saved.SWAP_DISK, boundary=Saved.SWAP_HOST)),
    "weights from the host": blocks(BELOW),
}
ON_CPU = {
    "host": blocks(BlockPlan(name=EVERY)),
    "disk": blocks(BlockPlan(name=EVERY, weights=Tier.DISK, state=Tier.DISK, saved=Saved.RECOMPUTE)),
    "mixed": blocks(
        BlockPlan(name="model.blocks.0", weights=Tier.DISK, state=Tier.DISK, saved=Saved.SWAP_DISK),
        replace(BELOW, name="model.blocks.1"),
        BlockPlan(name="model.blocks.2", weights=Tier.DEVICE, state=Tier.HOST),
    ),
}
RECIPES = {
    "plain": Recipe(shape=SHAPE, steps=4, schedule="step"),
    "clipped": Recipe(shape=SHAPE, accumulate=2, clip=0.3, groups=True),
    "autocast": Recipe(shape=SHAPE, precision="bf16-mixed"),
    "scaled": Recipe(shape=SHAPE, precision="16-mixed"),
}


def trained(recipe: Recipe, strategy: Any, folder: Path, **options: Any) -> Outcome:
    """What a short training ends with."""
    return on_host(run(recipe, strategy, folder, **TRAINER, **options))


@pytest.mark.parametrize(
    ("plan", "recipe"),
    [*((plan, "plain") for plan in ON_DEVICE), *(("weights from the host", recipe) for recipe in RECIPES if recipe != "plain")],
)
def test_updates_on_the_device_have_the_bits_of_plain_lightning(plan: str, recipe: str, tmp_path: Path) -> None:
    expected = trained(RECIPES[recipe], plain(), tmp_path)
    assert_same(trained(RECIPES[recipe], ours(ON_DEVICE[plan]), tmp_path), expected)


@same_adam_on_the_cpu
@pytest.mark.parametrize(
    ("plan", "recipe"),
    [
        *((plan, RECIPES["plain"]) for plan in ON_CPU),
        ("mixed", replace(RECIPES["clipped"], clip_by="value")),
        ("mixed", Recipe(shape=SHAPE, precision="bf16-true")),
    ],
)
def test_updates_on_the_cpu_have_its_bits(plan: str, recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The CPU's Adam contracts other products than the GPU's: the reference updates there what the
    plan has there.
    """
    with caplog.at_level("INFO", logger="lightning_hetero"):
        got = trained(recipe, ours(ON_CPU[plan], verify=recipe.steps), tmp_path)
    assert f"of {recipe.steps} steps are bitwise" in caplog.text
    assert torch.equal(got.losses[0], trained(recipe, plain(), tmp_path).losses[0])


def test_norms_of_two_processors_are_not_compared(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="clipped by norm"):
        trained(RECIPES["clipped"], ours(ON_CPU["mixed"], verify=1), tmp_path)


@pytest.mark.parametrize("plan", ON_CPU)
def test_when_the_cpu_updates_does_not_change_a_bit(plan: str, tmp_path: Path) -> None:
    ways: Iterable[dict[str, Any]] = (
        {"update_order": UpdateOrder.NAIVE},
        {"update_order": UpdateOrder.AFTER_BACKWARD, "prefetch_depth": 1},
        {"priority": False, "gradient_depth": 1},
    )
    expected = trained(RECIPES["plain"], ours(ON_CPU[plan]), tmp_path)
    for way in ways:
        assert_same(trained(RECIPES["plain"], ours(replace(ON_CPU[plan], **way)), tmp_path), expected)


@pytest.mark.parametrize(
    ("recipe", "verdict"),
    [
        (replace(RECIPES["plain"], clip=1e3), "kept"),
        (replace(RECIPES["plain"], clip=1e-2), "again"),
        (replace(RECIPES["plain"], clip=1e3, accumulate=2), "kept"),
        (replace(RECIPES["scaled"], steps=4), "kept"),
    ],
    ids=["kept", "discarded", "accumulated", "scaled"],
)
def test_updates_before_the_verdict_do_not_change_a_bit(
    recipe: Recipe, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = counted_verdicts(monkeypatch)
    waits = replace(ON_CPU["disk"], update_order=UpdateOrder.AFTER_BACKWARD)
    expected = trained(recipe, ours(waits), tmp_path)
    assert not seen["tried"]
    assert_same(trained(recipe, ours(ON_CPU["disk"]), tmp_path), expected)
    assert seen[verdict] > 0


@same_adam_on_the_cpu
def test_a_plan_is_made_after_four_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Profiled with events of the stream, planned, moved: what the CPU updates from then on is
    verified there.
    """
    machine = replace(presets.machine(device="rtx4090", host_memory="64GiB", disk="p5510x12"), shared_memory=False)
    strategy = ours("zero_offload", hardware_profile=machine, verify=7, device_memory="2GiB")
    with caplog.at_level("INFO", logger="lightning_hetero"):
        trained(replace(RECIPES["plain"], steps=7), strategy, tmp_path)
    assert "of 7 steps are bitwise" in caplog.text
    assert strategy.plan is not None
    assert strategy.plan.predicted is not None
    assert strategy.model_profile is not None
    assert all(block.backward_s > 0 for block in strategy.model_profile.blocks if block.num_trainable_params)


class AsksWhere(LitModel):
    """Makes a tensor for its steps where Lightning says that it is needed."""

    def configure_optimizers(self) -> Any:
        assert self.device.type == self.model.blocks[0].calls.device.type == DEVICE
        self.factor = torch.full((), 0.5, device=self.device)
        return super().configure_optimizers()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.factor


def test_modules_know_their_device_as_optimizers_are_made(tmp_path: Path) -> None:
    recipe = RECIPES["plain"]
    expected = trained(recipe, plain(), tmp_path, module_class=AsksWhere)
    assert_same(trained(recipe, ours(ON_DEVICE["state on the host"]), tmp_path, module_class=AsksWhere), expected)


def test_a_fit_is_validated_saved_and_resumed(tmp_path: Path) -> None:
    recipe, path = replace(RECIPES["plain"], steps=2, validate=True), tmp_path / "a.ckpt"
    expected = trained(replace(recipe, steps=3), plain(), tmp_path)
    strategy = ours(ON_DEVICE["weights from the host"])
    torch.manual_seed(7)
    module = LitModel(recipe)
    torch.manual_seed(11)
    options = {**TRAINER, "default_root_dir": tmp_path, "limit_val_batches": 2, "val_check_interval": 1}
    trainer = quiet_trainer(strategy=strategy, max_steps=2, check_val_every_n_epoch=None, **options)
    trainer.fit(module, data(), data(2, seed=1))
    assert torch.equal(module.losses[0].cpu(), expected.losses[0])
    trainer.save_checkpoint(path)
    resumed = LitModel(recipe)
    again = quiet_trainer(strategy=ours("host"), max_steps=3, check_val_every_n_epoch=None, **options)
    again.fit(resumed, data(), data(2, seed=1), ckpt_path=path)
    assert again.global_step == 3
    before, after = (outcome(t, m).weights["model.head.weight"].cpu() for t, m in ((trainer, module), (again, resumed)))
    assert not torch.equal(before, after)


@only_on_a_gpu
def test_the_peak_counts_from_the_beginning_of_the_fit(tmp_path: Path) -> None:
    held = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    del held
    torch.cuda.empty_cache()
    strategy = ours(ON_DEVICE["resident"])
    trained(RECIPES["plain"], strategy, tmp_path)
    peak = strategy.memory_report()["device_peak_bytes"]
    state = 3 * 4 * sum(p.numel() for p in LitModel(RECIPES["plain"]).parameters())
    assert state < peak < 1 << 30
    again = torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE)
    assert strategy.memory_report()["device_peak_bytes"] == peak
    del again


def test_workers_of_a_data_loader_are_forked_beside_page_locked_memory(tmp_path: Path) -> None:
    found = []
    for strategy in (plain(), ours(ON_DEVICE["weights from the host"])):
        torch.manual_seed(7)
        module = LitModel(RECIPES["plain"])
        torch.manual_seed(11)
        trainer = quiet_trainer(strategy=strategy, max_steps=4, default_root_dir=tmp_path, **TRAINER)
        trainer.fit(module, DataLoader(data().dataset, batch_size=2, num_workers=2, multiprocessing_context="fork"))
        found.append(on_host(outcome(trainer, module)))
    assert_same(found[1], found[0])


def by_lane(spans: Iterable[Span]) -> dict[str, list[str]]:
    """The ops of each lane in the order of issue."""
    lanes: dict[str, list[str]] = {}
    for span in sorted(spans, key=lambda s: (s.step, s.order)):
        if span.order >= 0:
            lanes.setdefault(span.lane, []).append(span.name)
    return lanes


def test_ops_equal_those_of_other_lanes_and_have_the_times_of_their_streams(tmp_path: Path) -> None:
    recipe, plan = RECIPES["plain"], replace(ON_CPU["mixed"], device_cache_bytes=1 << 20)
    streams = ours(plan, trace=True)
    trained(recipe, streams, tmp_path)
    emulated = HeteroOffloadStrategy(plan, trace=True, device=EmulatedDevice(memory="64MiB"))
    run(recipe, emulated, tmp_path)
    spans = streams.trace.spans
    assert by_lane(spans) == by_lane(emulated.trace.spans)
    copies = [span for span in spans if span.lane in ("h2d", "d2h") and span.num_bytes]
    assert {span.lane for span in copies} == {"h2d", "d2h"}
    first, last = min(s.start_s for s in spans), max(s.end_s for s in spans)
    assert all(first <= span.start_s < span.end_s <= last for span in copies)
    assert "compute" in {span.lane for span in spans}
    assert len(streams.stall_report().splitlines()) == recipe.steps
