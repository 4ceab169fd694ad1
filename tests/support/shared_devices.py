"""One rank of a test of ``hetero_offload`` on several devices that have memory of their own: a
script; see ``tests/integration/test_shared_devices.py``, and ``shared_model`` for the reference.

Devices are emulated, or with the word ``streams`` they stand in for GPUs: their ops are late at
random, and memory that is free or not filled yet holds NaN.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader

from lightning_hetero.errors import HeteroError, OutOfMemoryBudgetError, UnsupportedError
from lightning_hetero.ir.plan import BlockPlan, Gather, Plan, Saved, Tier, UpdateLane
from lightning_hetero.lanes import EmulatedDevice
from lightning_hetero.lanes.stream_device import StreamDevice
from lightning_hetero.runtime import kept_steps
from lightning_hetero.runtime.activations import block as activations
from lightning_hetero.strategies import HeteroOffloadStrategy, offload_ranks
from support import planned_ranks, shared_manners, shared_model, shared_options
from support.cuda import OneGpu, StandIn, standing_in
from support.shared_model import RANK, WORLD, batches, model, reference, run_scenarios, same, trainer
from support.streams import FakeCuda

ON_HOST = Plan(name="host", blocks=(BlockPlan(name="*"),))
KEPT, SWAPPED, REPEATED = Saved.KEEP, Saved.SWAP_HOST, Saved.RECOMPUTE
MIXED = Plan(
    name="mixed",
    blocks=(
        BlockPlan(name="layers.0", weights=Tier.DEVICE),
        BlockPlan(name="layers.1", saved=SWAPPED, update=UpdateLane.DEVICE),
        BlockPlan(name="layers.2", saved=REPEATED),
        BlockPlan(name="*"),
    ),
)
THERE = Plan(  # each rank's device updates its slices, of state that lives there, or that visits
    name="there",
    blocks=(
        BlockPlan(name="layers.[01]", weights=Tier.HOST, state=Tier.HOST, update=UpdateLane.DEVICE),
        BlockPlan(name="layers.2", weights=Tier.HOST, state=Tier.DEVICE, update=UpdateLane.DEVICE),
        BlockPlan(name="layers.3", weights=Tier.DEVICE, state=Tier.HOST, update=UpdateLane.DEVICE),
        BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE),
    ),
)
STREAMED = Plan(  # no more than a block of weights is on the host
    name="streamed", blocks=(BlockPlan(name="*", weights=Tier.DISK, state=Tier.DISK),), host_cache_bytes=1, device_cache_bytes=1
)


GATHER = Gather.HOST


def on_device(plan: Any = "host", **options: Any) -> HeteroOffloadStrategy:
    """The strategy on this rank's device."""
    plan = ON_HOST if plan == "host" and GATHER is Gather.DEVICE else plan
    if isinstance(plan, Plan):
        plan = replace(plan, gather=GATHER)
    return shared_model.on_device(plan, **options)


def trains_as_in_one_process(out: Path) -> None:
    """Every kind of batch and model trains as the reference does."""
    for plan in ("host", MIXED, THERE, STREAMED):
        for kind, accumulate, clip in [
            ("", 1, None), ("", 2, 0.3), ("frozen", 1, None), ("tied", 1, 0.3), ("rare", 2, None), ("skips", 1, None),
            ("skips", 1, 0.3),
        ][3 * (plan in (THERE, STREAMED)) :]:  # fmt: skip
            shared = model(kind, seed=5 + RANK)  # the first rank's weights count
            flags = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
            trainer(out, on_device(plan), **flags).fit(shared, batches())
            same(shared, reference(kind, accumulate, clip))


def trains_as_in_one_process_at_random(out: Path, first: int, number: int) -> None:
    """So does any model under any of the plans and options that several ranks have."""
    for seed in range(first, first + number):
        draw = random.Random(seed)
        kind = " ".join(word for word in ("frozen", "tied", "rare", "skips") if draw.random() < 0.4)
        accumulate, mixed = draw.choice([1, 1, 2]), draw.random() < 0.3
        clip = None if mixed else draw.choice([None, 0.01, 0.3])  # Lightning refuses both with fused optimizers
        rows = []
        for i in range(4):
            weights, saved = draw.choice([Tier.HOST, Tier.DISK, Tier.DEVICE]), draw.choice(list(Saved))
            there = weights is not Tier.DISK and draw.random() < 0.5
            state = draw.choice([Tier.HOST, Tier.DEVICE] if there else [Tier.HOST, Tier.HOST, Tier.DISK])
            update = UpdateLane.DEVICE if there else UpdateLane.CPU
            rows.append(BlockPlan(name=f"layers.{i}", weights=weights, state=state, update=update, saved=saved))
        plan = Plan(
            name=f"random-{seed}", prefetch_depth=draw.choice([1, 2, 5]), gradient_depth=draw.choice([1, 2, 4]),
            priority=draw.random() < 0.7, device_cache_bytes=draw.choice([None, None, 64 << 10]),
            host_cache_bytes=draw.choice([None, 1, 1]),
            blocks=(*rows, BlockPlan(name="*")),
        )  # fmt: skip
        flags = {
            "accumulate_grad_batches": accumulate, "gradient_clip_val": clip, "val_check_interval": draw.choice([1, 2, 4]),
            "precision": "bf16-mixed" if mixed else "32-true",
        }  # fmt: skip
        shared = model(kind, seed=5 + RANK)
        trainer(out, on_device(plan), **flags).fit(shared, batches(), *[batches()] * draw.choice([0, 1]))
        try:
            same(shared, reference(kind, accumulate, clip, mixed=mixed))
        except AssertionError as error:
            error.add_note(f"seed {seed}: {kind!r}, {flags}, {plan}")
            raise


def reference_on(device: str) -> Any:
    """As ``reference``, with forward and backward on a device, and sums and updates on the CPU."""
    plain = model()
    plain.offset.zero_()  # the first rank's
    optimizer, there = plain.configure_optimizers(), deepcopy(plain).to(device)
    for step, every in enumerate(zip(*map(batches, range(WORLD)), strict=True)):
        totals = [torch.zeros_like(param, dtype=torch.float64) for param in plain.parameters()]
        for rank, batch in enumerate(every):
            there.load_state_dict(plain.state_dict())
            there.zero_grad()
            loss = there.loss(batch.to(device), step)
            loss.backward()
            for total, param in zip(totals, there.parameters(), strict=True):
                total += 0 if param.grad is None else param.grad.double().cpu()
            if rank == RANK:
                plain.losses.append(loss.item())
        for total, param, one in zip(totals, plain.parameters(), there.parameters(), strict=True):
            param.grad = None if one.grad is None else (total / WORLD).to(param.dtype)
        optimizer.step()
    return plain


def trains_as_its_devices_compute(out: Path) -> None:
    """The bits of gradients that one such device has computed, summed and used on the CPU."""
    kind = "cpu" if shared_model.DEVICE is not None else shared_model.ACCELERATOR.kind
    for plan in ("host", MIXED):
        shared = model(seed=5 + RANK)
        memory = {} if shared_model.DEVICE is not None else {"device_memory": "1GiB"}
        trainer(out, on_device(plan, **memory)).fit(shared, batches())
        same(shared, reference_on(kind))


def keeps_steps(out: Path) -> None:
    """With ``disk_path`` a later run goes on from the last step of the first one."""
    for plan in ("host", MIXED, THERE, STREAMED):
        store = out / f"store-{plan if isinstance(plan, str) else plan.name}"
        first = model(seed=5 + RANK)
        with mock.patch.object(kept_steps.log, "info") as said:
            trainer(out, on_device(plan, disk_path=store), max_steps=2).fit(first, batches())
        assert [call.args[2] for call in said.call_args_list if "pass it as ckpt_path" in call.args[0]] == [str(store)]
        same(first, reference("", number=2))
        second = model(seed=9 + RANK)
        trainer(out, on_device(plan, disk_path=store)).fit(second, batches(), ckpt_path=store)
        second.losses = [*first.losses, *second.losses]
        same(second, reference(""))


def on_one_gpu(_: Path) -> None:
    """From here on all ranks compute on the first GPU."""
    shared_model.ACCELERATOR, shared_model.DEVICE = OneGpu(), None
    torch.use_deterministic_algorithms(True, warn_only=True)


class Holds(pl.Callback):
    """Notes the most bytes of weights that all ranks have in memory while a block computes."""

    most = 0

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        file = trainer.strategy.session.file.descriptor

        def look(*_: Any) -> None:
            self.most = max(self.most, 512 * os.fstat(file).st_blocks)

        for layer in module.layers:
            layer.register_forward_pre_hook(look)


def gives_slices_back(out: Path) -> None:
    """Of weights on disk the ranks have no more in memory than of the blocks under way."""
    os.environ["LIGHTNING_HETERO_POISON"] = "0"  # else memory that was given back is written
    most = []
    for plan in ("host", STREAMED):
        shared, holds = model(seed=5 + RANK), Holds()
        trainer(out, on_device(plan), callbacks=[holds]).fit(shared, batches())
        same(shared, reference(""))
        most.append(holds.most)
    os.environ["LIGHTNING_HETERO_POISON"] = "1"
    layers = sum(p.nbytes for p in shared.layers.parameters())
    every, few = most
    assert every - few >= layers // 2, (most, layers)


def is_made_in_slices(out: Path) -> None:
    """A model on the meta device gets weights block by block: those of the first rank's seed."""
    with torch.device("meta"):
        shared = shared_model.Model("frozen")
    torch.manual_seed(5 + RANK)
    trainer(out, on_device(MIXED)).fit(shared, batches())
    same(shared, reference("frozen"))


@torch.no_grad()
def _halve(up: Any, _: Any) -> None:
    up.weight.mul_(0.5)


class Halves(pl.Callback):
    """Code of the user changes weights between two batches, and in a forward."""

    def __init__(self, *, within: bool = False) -> None:
        self.within = within

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        if rest[-1] == 1 and self.within:
            module.layers[1].up.register_forward_pre_hook(_halve)
        elif rest[-1] == 1:
            with trainer.strategy.materialize([module.embed.weight, *module.layers[1].parameters()]), torch.no_grad():
                for param in (module.embed.weight, module.layers[1].up.weight):
                    param.mul_(0.5)


def takes_weights_that_code_changes(out: Path) -> None:
    """All ranks enter ``materialize``: the same happens as on ranks whose devices are the CPU."""
    trained = []
    for device in (shared_model.DEVICE, None):
        trained.append(model())
        strategy = HeteroOffloadStrategy(MIXED if device else "host", device=device, block_cls="Layer")
        trainer(out, strategy, callbacks=[Halves()]).fit(trained[-1], batches())
    same(*trained)
    for plan, match in (("disk", r"on disk, but optimizer SGD .* Use plan=\"host\""), (THERE, r"'embed', but optimizer SGD")):
        with pytest.raises(UnsupportedError, match=match):
            trainer(out, on_device(plan)).fit(model(optimizer=torch.optim.SGD, lr=0.1), batches())


class Keeps(pl.Callback):
    """Keeps the plan with which training ends."""

    plan: Plan | None = None

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.plan = trainer.strategy.session.running.plan


def plans_with_links(out: Path) -> None:
    """Ranks plan with the rate of the links between devices: with slow ones they do not use these.

    Of fast ones that depends on measured times here; the planners' own tests have it.
    """
    links, every = {"h2d_bytes_per_s": 1e7, "d2h_bytes_per_s": 1e7, "net_bytes_per_s": 1e8}, shared_model.DEVICE
    for rate, allowed in ((1e10, set(Gather)), (1e6, {Gather.HOST})):
        shared_model.DEVICE = EmulatedDevice("1MiB", seed=RANK, peer_bytes_per_s=rate, **links)
        shared, keeps = model(), Keeps()
        planned = planned_ranks.strategy()
        trainer(out, planned, max_epochs=2, callbacks=[keeps]).fit(shared, batches())
        same(shared, reference("", epochs=2))
        assert keeps.plan is not None
        assert keeps.plan.predicted is not None
        assert keeps.plan.gather in allowed
        assert planned.autoplan.machine.peer_bytes_per_s == rate
    shared_model.DEVICE = every


def plans_for_other_optimizers(out: Path) -> None:
    """Planners leave updates to the CPU where an optimizer runs by its own code."""
    options = {"optimizer": torch.optim.SGD, "lr": 1e-2, "momentum": 0.9}
    shared, keeps = model(**options), Keeps()
    trainer(out, planned_ranks.strategy(), max_epochs=2, callbacks=[keeps]).fit(shared, batches())
    same(shared, reference("", epochs=2, **options))
    assert keeps.plan is not None
    assert keeps.plan.predicted is not None, "a planner made it"
    assert {row.update for row in keeps.plan.blocks} == {UpdateLane.CPU}


def ends_where_memory_is_too_small(out: Path) -> None:
    """The last rank's device has too little memory for a batch. It says so and ends, and so do the
    others.
    """
    if RANK == WORLD - 1:
        shared_model.DEVICE = EmulatedDevice("120KiB")
    _fails(trainer(out, on_device()), DataLoader(shared_model.DATA, 8))


def ends_where_code_changes_weights(out: Path) -> None:
    """A block's own code changes weights in forward, which the ranks have in the same memory."""
    _fails(trainer(out, on_device(), callbacks=[Halves(within=True)]), batches())


def _fails(run: pl.Trainer, data: Any) -> None:
    try:
        run.fit(model(), data)
    except HeteroError as error:
        print(type(error).__name__, error, flush=True)
        os._exit(0)
    raise AssertionError("nothing failed")


def there(_: Path) -> None:
    """From here on devices update slices, where a scenario asks for no other plan."""
    shared_model.PLAN = THERE


def between_devices(_: Path) -> None:
    """From here on devices exchange weights and gradients themselves."""
    global GATHER
    GATHER = Gather.DEVICE
    shared_model.PLAN = replace(ON_HOST if shared_model.PLAN == "host" else shared_model.PLAN, gather=GATHER)


def on_disk(_: Path) -> None:
    """From here on weights and state are on disk, where a scenario asks for no other plan."""
    shared_model.PLAN = replace(STREAMED, host_cache_bytes=None, device_cache_bytes=None)


def refuses_averages_without_room(out: Path) -> None:
    """Averaging needs all weights at a time, also of those on disk."""
    run = trainer(out, on_device(STREAMED), callbacks=[EMAWeightAveraging()])
    with pytest.raises(OutOfMemoryBudgetError, match="Raise host_memory, or the plan's host_cache_bytes"):
        run.fit(model(), batches())


def streams(_: Path) -> None:
    """From here on devices are GPUs with streams, as far as the lanes use them."""
    shared_model.ACCELERATOR, shared_model.DEVICE = StandIn(), None
    if not dist.is_initialized():  # Lightning would name the device, which torch does not find
        dist.init_process_group("gloo")
    StreamDevice.of = standing_in(FakeCuda(seed=RANK), 4 << 20)  # type: ignore[method-assign]
    offload_ranks.process_group_of = lambda devices: "gloo"
    backward = torch.autograd._engine_run_backward

    def elsewhere(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as engine:
            return engine.submit(backward, *args, **kwargs).result()

    torch.autograd._engine_run_backward = elsewhere


if __name__ == "__main__":
    activations.SMALL_BYTES = 64  # what a small model saves leaves the device, too
    shared_model.DEVICE = EmulatedDevice("1MiB", seed=RANK)
    known = {**vars(shared_model), **vars(shared_options), **vars(shared_manners), **vars(planned_ranks)}
    run_scenarios({**known, **globals()}, poison=True)
