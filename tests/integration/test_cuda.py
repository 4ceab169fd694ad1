"""The strategy's way through setup, steps and teardown on a GPU, with streams that are threads;
``tests/gpu`` has a real one.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.cuda import MIXED, RESIDENT, StandIn, stand_in, standing_in
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer, run
from support.streams import FakeCuda
from support.trainings import PLANS, Row, every_row, expected, recipe_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MeanMetric

from lightning_hetero import BlockPlan, EmulatedDevice, Plan
from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError, UnsupportedError
from lightning_hetero.lanes import stream_device
from lightning_hetero.lanes.backends import BACKENDS
from lightning_hetero.lanes.stream_device import StreamDevice
from lightning_hetero.lanes.streams import StreamLanes
from lightning_hetero.planning.autoplan import Autoplan
from lightning_hetero.planning.machine_profile import ENVIRONMENT
from lightning_hetero.profiling import hardware, presets
from lightning_hetero.runtime.device import DeviceWeights, gradients
from lightning_hetero.strategies import HeteroOffloadStrategy, offload
from lightning_hetero.strategies.devices import move_rest
from lightning_hetero.strategies.verification import Verifier

SHAPE = Shape(layers=4, dropout=0.2, counting=False)


def on_gpu(recipe: Recipe, plan: Any, folder: Path, **options: Any) -> tuple[Any, Outcome]:
    strategy = HeteroOffloadStrategy(plan, **options)
    return strategy, run(recipe, strategy, folder, accelerator=StandIn(), devices=1)


@pytest.mark.parametrize(
    ("plan", "recipe"),
    [
        ("resident", Recipe(shape=SHAPE)),
        (MIXED, Recipe(shape=SHAPE)),
    ],
    ids=["resident", "mixed"],
)
def test_training_has_the_bits_of_plain_lightning(plan: Any, recipe: Recipe, fake: FakeCuda, tmp_path: Path) -> None:
    strategy, got = on_gpu(recipe, plan, tmp_path)
    assert_same(got, run(recipe, "auto", tmp_path))
    assert fake.streams, "lanes had streams"
    assert 0 < strategy.memory_report()["device_peak_bytes"] < 4 << 20


@every_row
def test_plans_precisions_clipping_and_accumulation_have_its_bits(row: Row, fake: FakeCuda, tmp_path: Path) -> None:
    _, got = on_gpu(recipe_of(row), PLANS[row[0]], tmp_path)
    assert_same(got, expected(row, torch.device("cpu"), tmp_path))


def test_a_gpu_of_another_backend_has_the_same_lanes(
    fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch has no call that page-locks memory for it, so that stays pageable."""
    other = FakeCuda("xpu", seed=1, refuse=None)
    monkeypatch.setattr(StreamDevice, "of", standing_in(other, 4 << 20))
    recipe = Recipe(shape=SHAPE, steps=2, clip=0.3)
    got = run(recipe, HeteroOffloadStrategy(MIXED), tmp_path, accelerator=stand_in("xpu"), devices=1)
    assert_same(got, run(recipe, "auto", tmp_path))
    assert other.streams
    assert not fake.streams
    assert [r.message for r in caplog.records if "stays pageable" in r.message]
    other.close()


def test_mixed_precision_casts_on_the_device_that_computes(fake: FakeCuda, tmp_path: Path) -> None:
    """Lightning takes the stand-in, which computes on the CPU, for a device of CUDA."""
    recipe = Recipe(shape=SHAPE, steps=2, precision="bf16-mixed")
    _, got = on_gpu(recipe, MIXED, tmp_path)
    assert_same(got, run(recipe, "auto", tmp_path))


def gated(module: LitModel) -> None:
    """Each block gets a weight whose gradient autograd leaves with other strides, as it does of 1 x
    1 convolutions.
    """
    for block in module.model.blocks:
        block.gate = nn.Parameter(torch.rand(1, module.recipe.shape.width))
        block.register_forward_hook(lambda block, args, output: output * block.gate.t().squeeze(1))


def test_gradients_that_compute_puts_in_order_first_leave_after_that(
    fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RELEASE and GRAD of a block follow compute from one anchor on, but GRAD gives it more to
    do.
    """
    compute, arranged, late = fake.compute_is_late(), gradients._arranged, [0]

    def arrange(layout: Any, grad: Tensor) -> Tensor:
        whole = arranged(layout, grad)
        late[0] += 1
        arriving = torch.full_like(whole, torch.nan)
        compute.do(lambda: (time.sleep(5e-3), arriving.copy_(whole)))
        return arriving

    monkeypatch.setattr(gradients, "_arranged", arrange)
    recipe = Recipe(shape=SHAPE, steps=2)
    strategy = HeteroOffloadStrategy(Plan(name="below", blocks=(BlockPlan(name="model.blocks.*"), RESIDENT)))
    got = run(recipe, strategy, tmp_path, prepare=gated, accelerator=StandIn(), devices=1)
    assert late[0] == recipe.steps * SHAPE.layers
    assert_same(got, run(recipe, "auto", tmp_path, prepare=gated))


def test_a_plan_made_for_the_gpu_has_room_set_aside(fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiled, planned and moved: the memory for weights and state follows the plan, and nothing
    is left of the old one.
    """
    sizes: list[int] = []
    resize = StreamLanes.resize
    monkeypatch.setattr(StreamLanes, "resize", lambda lanes, size: sizes.append(size) or resize(lanes, size))
    machine = replace(presets.machine(device="rtx4090", host_memory="64GiB", disk="p5510x12"), shared_memory=False)
    recipe = Recipe(shape=Shape(layers=6, counting=False), steps=7)
    strategy, got = on_gpu(recipe, "auto", tmp_path, hardware_profile=machine, device_memory="400KiB")
    assert_same(got, run(recipe, "auto", tmp_path))
    assert strategy.plan.predicted.device_peak_bytes <= 400 << 10
    assert 0 < max(sizes) < 400 << 10
    assert sizes[-1] == 0, "the device's memory is given back"
    with pytest.raises(ConfigError, match="describes the host's own CPU"):
        on_gpu(recipe, "auto", tmp_path, hardware_profile=replace(machine, shared_memory=True))


@pytest.mark.parametrize("cached", [False, True])
def test_the_model_leaves_the_gpu_for_measurements_only_if_there_are_any_and_the_host_has_room(
    cached: bool, fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = replace(presets.machine(device="rtx4090", host_memory="64GiB", disk="p5510x12"), shared_memory=False)
    monkeypatch.delenv(ENVIRONMENT)
    monkeypatch.setattr(hardware, "_known", lambda *_, **__: machine if cached else None)
    monkeypatch.setattr(hardware, "_measured", lambda *_: machine)
    monkeypatch.setattr(hardware, "with_capacities", lambda profile, _: profile)
    left: list[int] = []
    leave = DeviceWeights.withdraw
    monkeypatch.setattr(DeviceWeights, "withdraw", lambda weights, block: left.append(block.index) or leave(weights, block))
    leaves_before_the_end: list[int] = []
    recipe = Recipe(shape=SHAPE, steps=6)

    class Looks(pl.Callback):
        def on_train_end(self, *_: Any) -> None:
            leaves_before_the_end.append(len(left))

    strategy = HeteroOffloadStrategy("auto", host_memory="96KiB", disk_path=None)
    got = run(recipe, strategy, tmp_path, accelerator=StandIn(), devices=1, callbacks=[Looks()])
    assert_same(got, run(recipe, "auto", tmp_path))
    assert strategy.plan.name == ("holistic" if cached else "resident")
    assert leaves_before_the_end == [0]
    refused = [text for text in caplog.messages if "do not fit host memory meanwhile" in text]
    assert bool(refused) != cached


def test_steps_take_the_time_of_the_stream_that_computes(fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host only gives it work, so that its own clock shows less."""
    moments = itertools.count(0.0, 2.5)
    monkeypatch.setattr(StreamLanes, "now", lambda lanes, name="": (lambda at_s: lambda: at_s)(next(moments)))
    found: list[float] = []
    after = Autoplan.after_step
    monkeypatch.setattr(Autoplan, "after_step", lambda plan, session, s: found.append(s) or after(plan, session, s))
    machine = replace(presets.machine(device="rtx4090", host_memory="64GiB", disk="p5510x12"), shared_memory=False)
    on_gpu(Recipe(shape=SHAPE, steps=6), "auto", tmp_path, hardware_profile=machine)
    assert found == [2.5] * 6


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(shape=SHAPE, accumulate=2, clip=0.3, groups=True, schedule="step"),
        Recipe(shape=SHAPE, precision="bf16-true"),
        Recipe(shape=SHAPE, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)),
    ],
    ids=["clipped", "bf16", "sgd"],
)
def test_steps_are_verified_with_every_update_where_the_plan_has_it(
    recipe: Recipe, fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_cpu: list[bool] = []
    place = Verifier._place

    def places(verifier: Verifier, twin: Tensor) -> torch.device:
        on_cpu.append(verifier._originals[id(twin)] in verifier._on_cpu)
        return place(verifier, twin)

    monkeypatch.setattr(Verifier, "_place", places)
    native = recipe.optimizer is Recipe().optimizer
    with caplog.at_level("INFO", logger="lightning_hetero"):
        _, got = on_gpu(recipe, MIXED if native else "resident", tmp_path, verify=2)
    assert "of 2 steps are bitwise" in caplog.text
    if recipe.precision == "32-true":
        assert_same(got, run(recipe, "auto", tmp_path))
    assert set(on_cpu) == ({True, False} if native else set())


class LargeReference(LitModel):
    """Fits once."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.trainer.lightning_module is not self:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return super().training_step(batch, batch_idx)


def test_a_reference_whose_activations_do_not_fit_is_named(fake: FakeCuda, tmp_path: Path) -> None:
    strategy = HeteroOffloadStrategy("resident", verify=1)
    with pytest.raises(OutOfMemoryBudgetError, match=r"step 1 .*activations of the reference.*2\.00 MiB.*smaller batch") as refusal:
        run(Recipe(shape=SHAPE), strategy, tmp_path, module_class=LargeReference, accelerator=StandIn(), devices=1)
    assert refusal.value.tier == "device"


def test_norms_of_two_processors_are_not_compared(fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = Verifier.check

    def checks(verifier: Verifier, *args: Any) -> None:
        verifier._device = torch.device("cuda", 0)
        check(verifier, *args)

    monkeypatch.setattr(Verifier, "check", checks)
    with pytest.raises(UnsupportedError, match=r"clipped by norm.*cuda:0.*gradient_clip_algorithm='value'"):
        on_gpu(Recipe(shape=SHAPE, clip=0.3), MIXED, tmp_path, verify=1)


def test_only_kernels_that_repeat_themselves_can_be_verified() -> None:
    with pytest.raises(ConfigError, match=r"verify=2 compares bits.*cuda:0.*deterministic=True"):
        Verifier(LitModel(Recipe()), 2, device=torch.device("cuda", 0))


def test_memory_for_ops_and_for_torch_does_not_mix(fake: FakeCuda, tmp_path: Path) -> None:
    with pytest.raises(OutOfMemoryBudgetError, match=r"of device memory; .* may be used") as refusal:
        on_gpu(Recipe(shape=SHAPE), "resident", tmp_path, device_memory="256KiB")
    assert refusal.value.tier == "device"
    strategy, _ = on_gpu(Recipe(shape=SHAPE), "resident", tmp_path, device_memory="2MiB")
    assert strategy.memory_report()["device_peak_bytes"] <= refusal.value.needed_bytes


def test_a_fit_is_validated_saved_and_resumed(fake: FakeCuda, tmp_path: Path) -> None:
    recipe, path = Recipe(shape=SHAPE, steps=2, validate=True, schedule="step"), tmp_path / "a.ckpt"
    for strategy, options in (("auto", {}), (HeteroOffloadStrategy(MIXED), {"accelerator": StandIn(), "devices": 1})):
        torch.manual_seed(7)
        module = LitModel(recipe)
        torch.manual_seed(11)
        trainer = quiet_trainer(strategy=strategy, max_steps=2, default_root_dir=tmp_path, limit_val_batches=2, **options)
        trainer.fit(module, data(), data(2, seed=1))
        if strategy == "auto":
            expected = trainer.validate(module, data(2, seed=1), verbose=False), outcome(trainer, module)
            continue
        trainer.save_checkpoint(path)
        found = trainer.validate(module, data(2, seed=1), verbose=False), outcome(trainer, module)
        assert found[0] == expected[0]
        assert_same(found[1], expected[1])
        resumed = LitModel(recipe)
        again = quiet_trainer(strategy=HeteroOffloadStrategy("host"), max_steps=3, default_root_dir=tmp_path, **options)
        again.fit(resumed, data(), ckpt_path=path)
        assert not torch.equal(resumed.model.head.weight, module.model.head.weight)


@pytest.mark.parametrize(
    ("options", "trainer", "error", "text"),
    [
        ({"device": EmulatedDevice(memory="1MiB")}, {}, ConfigError, 'accelerator="cpu", or leave device out'),
        ({"verify": 1, "device_memory": "128KiB"}, {}, OutOfMemoryBudgetError, "verify=1 needs .* of cpu, of which 128.0 KiB"),
    ],
    ids=["emulated", "verify"],
)
def test_unsupported_features_on_a_gpu_are_refused_by_name(
    options: dict[str, Any], trainer: dict[str, Any], error: type[Exception], text: str, fake: FakeCuda, tmp_path: Path
) -> None:
    with pytest.raises(error, match=text):
        run(Recipe(), HeteroOffloadStrategy("host", **options), tmp_path, **({"accelerator": StandIn(), "devices": 1} | trainer))


class AsksWhere(LitModel):
    """Makes tensors for its steps where Lightning says that they are needed."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.where: list[tuple[str, torch.device]] = []
        self.register_buffer("calls", torch.ones(2))

    def setup(self, stage: str) -> None:
        self.where.append(("setup", self.device))

    def configure_optimizers(self) -> Any:
        self.where.append(("configure_optimizers", self.device))
        self.factor = torch.full((), 0.5, device=self.device) * self.calls[0]
        return super().configure_optimizers()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.where.append(("training_step", self.device))
        return super().training_step(batch, batch_idx) * self.factor


def test_modules_know_their_device_as_early_as_under_plain_lightning(
    fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in computes on the CPU, so it goes by another name of the CPU for the module."""
    name = torch.device("cpu", 0)
    monkeypatch.setattr(offload, "move_rest", lambda module, device: move_rest(module, name))
    models: list[Any] = []
    recipe = Recipe(shape=SHAPE, steps=1)
    expected = run(recipe, "auto", tmp_path, module_class=AsksWhere, prepare=models.append)
    strategy = HeteroOffloadStrategy("host")
    options = {"module_class": AsksWhere, "prepare": models.append, "accelerator": StandIn(), "devices": 1}
    assert_same(run(recipe, strategy, tmp_path, **options), expected)
    plain, ours = (dict(model.where) for model in models)
    assert ours.keys() == plain.keys()
    assert ours["setup"] == plain["setup"] == torch.device("cpu")
    assert ours["configure_optimizers"] == ours["training_step"] == name


class Measured(LitModel):
    """A model with a metric, whose state is no buffer."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.mean = MeanMetric()
        self.register_buffer("calls", torch.ones(2))


def test_buffers_and_metrics_move_with_the_model() -> None:
    module = Measured(Recipe())
    elsewhere = torch.device("meta")
    move_rest(module, elsewhere)
    assert module.device == module.mean.device == module.mean.mean_value.device == module.calls.device == elsewhere
    assert all(p.device.type == "cpu" for p in module.parameters())


def test_the_libraries_of_a_backward_have_their_memory_before_free_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take it per thread, and a backward has threads of its own."""

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func is torch.ops.aten.mm.default
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    with torch.no_grad(), Products() as products:
        stream_device._warm_up(torch.device("cpu"))
    assert products.count == 2 * 3


def test_the_gpu_memory_that_plans_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory and what torch keeps in whole pieces, at most the process's share and the budget;
    a part is left alone.
    """
    gib = 1 << 30
    monkeypatch.setattr(stream_device, "_warm_up", lambda device: None)
    monkeypatch.setattr(BACKENDS["cuda"], "begin", lambda: None)
    stats = {"reserved_bytes.all.current": 4 * gib, "allocated_bytes.all.current": gib, "inactive_split_bytes.all.current": gib}
    figures = {"get_memory_info": (10 * gib, 24 * gib), "memory_stats": stats}
    for name, value in figures.items():
        monkeypatch.setattr(torch.accelerator, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share[0])
    share, unified, there = [1.0], [False], torch.device("cuda", 0)
    monkeypatch.setattr(BACKENDS["cuda"], "is_unified", lambda device: unified[0])
    assert StreamDevice.of(there, None).usable_bytes == 12 * gib
    assert StreamDevice.of(there, 2 * gib).usable_bytes == 2 * gib
    share[0] = 0.25
    assert StreamDevice.of(there, None).usable_bytes == 4 * gib
    found = StreamDevice.of(there, None)
    assert found.memory_bytes == 4 * gib - 2 * (16 << 20) - 4 * gib // 32
    share[0] = 2 / 24
    with pytest.raises(OutOfMemoryBudgetError, match="End what else uses the device"):
        StreamDevice.of(there, None)
    # In the host's memory cached files are free, whatever the driver says.
    share[0], unified[0] = 1.0, True
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(stream_device, "available_memory_bytes", lambda: 18 * gib)
    assert StreamDevice.of(there, None).usable_bytes == 20 * gib
