"""One rank of a test of ``hetero_offload`` on several devices: a script.

See ``tests/integration/test_shared_model.py``. The test starts the ranks, as torchrun does, or
Lightning starts all but the first one. The reference is plain torch in one process: each rank's
gradients of each batch, their mean in float64 in the order of the ranks, rounded once, and torch's
own AdamW on whole tensors.
"""

from __future__ import annotations

import io
import logging
import math
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero.errors import ConfigError, HeteroError, OffloadedAccessError, OutOfMemoryBudgetError
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.lanes import EmulatedDevice, EngineOp
from lightning_hetero.optim.adam import MASTERED
from lightning_hetero.optim.reference import MasterWeightOptimizer
from lightning_hetero.runtime import budgets, session, slice_gradients, sum_rooms
from lightning_hetero.runtime.process_memory import Heap
from lightning_hetero.store.live.shared_memory import SharedArena
from lightning_hetero.strategies import HeteroOffloadStrategy

WORLD = int(os.environ.get("WORLD_SIZE", "2"))
SHARDS = int(os.environ.get("LOCAL_WORLD_SIZE", str(WORLD)))  # the ranks of a node
RANK = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))  # Lightning tells its children the second
ACCELERATOR: Any = "cpu"
PLAN: Any = "host"
DEVICE: EmulatedDevice | None = None  # that of this rank, if it has memory of its own
BATCH, STEPS = 2, 4
DATA = torch.randint(0, 13, (BATCH * STEPS * WORLD, 7), generator=torch.Generator().manual_seed(3))


class Layer(nn.Module):
    """A block whose parameters are cut by slices; ``rare`` is used by some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.rare = nn.Linear(30, 67), nn.Linear(67, 30), nn.LayerNorm(30), nn.Linear(30, 30)

    def forward(self, x: Tensor, rarely: bool) -> Tensor:
        x = self.norm(x + self.down(F.gelu(self.up(x))))
        return x + self.rare(x) if rarely else x


class Model(pl.LightningModule):
    """A language model; the words of ``kind`` choose what is special about it."""

    has_masters = False  # it is a reference with 16-bit weights

    def __init__(self, kind: str = "", **options: Any) -> None:
        super().__init__()
        self.kind, self.losses, self.seen = kind.split(), [], []
        self.options = {"optimizer": torch.optim.AdamW, "lr": 1e-2, **options}  # of the optimizer
        self.embed, self.head = nn.Embedding(13, 30), nn.Linear(30, 13)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.register_buffer("offset", torch.full((1,), float(RANK)))
        if "frozen" in self.kind:
            self.layers[1].requires_grad_(False)
            self.layers[2].up.requires_grad_(False)
            self.embed.requires_grad_("tied" in self.kind)
        if "tied" in self.kind:
            self.head.weight = self.embed.weight

    def reset_parameters(self) -> None:
        """Of a model on the meta device: the buffer."""
        self.offset.fill_(RANK)

    def loss(self, batch: Tensor, index: int) -> Tensor:
        """The batch's loss; batches of ranks and steps differ in what they use."""
        if "dies" in self.kind and index == 2 and RANK == WORLD - 1:
            self.layers[3].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        x, rarely = self.embed(batch[:, :-1]) + self.offset, "rare" in self.kind and int(batch.sum()) % 3 == 0
        for number, layer in enumerate(self.layers):
            skips = ("skips" in self.kind and index == 1 and number == 2) or ("apart" in self.kind and RANK == 1 and number == 1)
            x = x if skips else layer(x, rarely)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())
        return (
            loss * torch.inf
            if "overflows" in self.kind and torch.equal(batch, DATA[WORLD - 1 :: WORLD][BATCH : 2 * BATCH])
            else loss
        )

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.loss(batch, index)
        self.losses.append(loss.item())
        if "counts" in self.kind:
            self.offset.add_(RANK)
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("validated", self.loss(batch, index), sync_dist=True)

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() < 2]
        options = dict(self.options)
        kind = options.pop("optimizer")
        fused = {"fused": True} if kind in (torch.optim.Adam, torch.optim.AdamW) else {}
        make = partial(kind, **{**fused, **options})
        decay = {} if kind is torch.optim.Rprop else {"weight_decay": 0.1}  # which has none
        groups = [{"params": decayed, **decay}, {"params": others}]
        return MasterWeightOptimizer(groups, make) if self.has_masters else make(groups)


class Looks(pl.Callback):
    """Looks at what a rank has between two batches."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        blocks, follows = trainer.strategy.session.blocks, trainer.strategy.session.running.schedule is not None
        lanes = trainer.strategy.session.running.lanes
        ops = [op for op in lanes._ops if isinstance(op, EngineOp)]
        assert sum(len(op.behind) for op in ops) <= len(ops), "an op follows its own, not all before it"
        lanes.drain()  # a RELEASE may be under way
        for part in [part for block in blocks for part in block.parts]:
            own = part.run.view(SHARDS, -1)
            if follows and not part.block.spec.pinned and not part.is_whole:
                others = own[[shard for shard in range(SHARDS) if shard != RANK % SHARDS]]
                is_shared, poisoned = isinstance(part.arena, SharedArena), os.environ["LIGHTNING_HETERO_POISON"] == "1"
                assert others.isnan().all() if poisoned else is_shared or not others.count_nonzero(), "they count no more"
                module.seen.append(part.names[0])
            assert part.native is None or part.native.geometry.num_elements == own.shape[1]
        if not blocks[1].parts[0].is_whole:
            with pytest.raises(OffloadedAccessError, match=f"spread over {SHARDS} ranks"):
                module.layers[0].up.weight.sum()


def on_device(plan: Any = None, **options: Any) -> HeteroOffloadStrategy:
    """The strategy on this rank's device."""
    return HeteroOffloadStrategy(plan or PLAN, **{"device": DEVICE, "block_cls": "Layer", "update_threads": 1} | options)


def trainer(out: Path, strategy: Any = None, **flags: Any) -> pl.Trainer:
    """A Trainer on as many devices as there are ranks."""
    strategy = strategy or on_device()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    return pl.Trainer(
        accelerator=ACCELERATOR,
        devices=SHARDS,
        num_nodes=WORLD // SHARDS,
        strategy=strategy,
        default_root_dir=out,
        **quiet | {"max_epochs": 1, "use_distributed_sampler": False} | flags,
    )


def model(kind: str = "", seed: int = 5, cls: Any = Model, **options: Any) -> Any:
    """A model; other seeds give other weights."""
    torch.manual_seed(seed)
    return cls(kind, **options)


def batches(rank: int = RANK) -> DataLoader[Tensor]:
    """A rank's batches of an epoch."""
    return DataLoader(DATA[rank::WORLD], BATCH)


def reference(
    kind: str, accumulate: int = 1, clip: float | None = None, *, by_value: bool = False, mixed: bool = False,
    begin: Mapping[str, Any] | None = None, number: int = STEPS, dtype: torch.dtype = torch.float32,
    scaler: torch.amp.GradScaler | None = None, epochs: int = 1, **options: Any,
) -> Model:  # fmt: skip
    """The model after the first batches of each epoch in one process, also from a checkpoint on."""
    plain = model(kind, **options).to(dtype)
    plain.has_masters = dtype in MASTERED
    plain.offset.zero_()  # the first rank's
    made = plain.configure_optimizers()
    optimizer, *others = made if isinstance(made, list) else [made]
    if begin is not None:
        plain.load_state_dict(begin["state_dict"])
        optimizer.load_state_dict(deepcopy(begin["optimizer_states"][0]))  # which would be its state from then on
    kept: dict[nn.Parameter, Tensor] = {}
    repeated = set((plain if getattr(plain, "reduces_each_batch", False) else plain.layers).parameters())
    outside = [dict[nn.Parameter, Tensor]() for _ in range(WORLD)]
    rows = [*islice(zip(*map(batches, range(WORLD)), strict=True), number)] * epochs
    for step, every in enumerate(rows):
        gradients, ends = [], not (step + 1) % accumulate
        for rank, batch in enumerate(every):
            for param in plain.parameters():
                param.grad = None
            with torch.autocast("cpu", torch.bfloat16 if scaler is None else torch.float16, enabled=mixed):
                loss = plain.loss(batch, step)
            (loss / accumulate if scaler is None else scaler.scale(loss / accumulate)).backward()
            own = {p: p.grad for p in plain.parameters() if p.grad is not None}
            for param in own.keys() - repeated:  # each rank adds up those of the embedding and the head
                outside[rank][param] = own[param] if param not in outside[rank] else outside[rank][param] + own[param]
            gradients.append({p: own[p] for p in own if p in repeated} | (outside[rank] if ends else {}))
            if rank == RANK:
                plain.losses.append(loss.item())
        for param in dict.fromkeys(p for one in gradients for p in one):
            total = sum(one[param].double() if param in one else torch.zeros_like(param, dtype=torch.float64) for one in gradients)
            mean = (total / WORLD).to(param.dtype)
            kept[param] = mean if param not in kept else kept[param] + mean
        if not ends:
            continue
        for param in plain.parameters():
            param.grad = kept.get(param)
        for one in (optimizer, *others):
            _clip_and_step(one, clip, by_value, scaler)
        for sums in (kept, *outside):
            sums.clear()
    plain.__dict__["made"] = optimizer
    return plain


def _clip_and_step(optimizer: Any, clip: float | None, by_value: bool, scaler: torch.amp.GradScaler | None) -> None:
    given = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if scaler is not None and clip is not None:
        scaler.unscale_(optimizer)
    if clip is not None and by_value:
        torch.nn.utils.clip_grad_value_(given, clip)
    elif clip is not None:
        norms = [torch.tensor(math.sqrt(float(p.grad.double().square().sum())), dtype=p.dtype) for p in given]
        torch.nn.utils.clip_grads_with_norm_(given, clip, torch.stack(norms).norm())
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def same(got: Model, wanted: Model) -> None:
    """Both have the same losses and weights, bit for bit."""
    assert got.losses == wanted.losses, (got.kind, got.losses, wanted.losses)
    for (name, param), other in zip(got.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(param, other), (name, (param - other).abs().max())


def is_as_in_one_process(out: Path) -> None:
    """Every kind of batch and model trains as the reference does."""
    for kind, accumulate, clip in [
        ("", 1, None), ("", 2, 0.3), ("frozen", 1, None), ("tied", 1, 0.3), ("rare", 2, None), ("skips", 1, None), ("skips", 1, 0.3)
    ]:  # fmt: skip
        shared = model(kind, seed=5 + RANK)  # the first rank's weights count
        flags = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
        trainer(out, callbacks=[Looks()], **flags).fit(shared, batches())
        same(shared, reference(kind, accumulate, clip))
        assert shared.seen, "a rank has slices"


def is_as_in_one_process_at_random(out: Path, first: int, number: int) -> None:
    """So does any model under any of the plans and options that several ranks have."""
    for seed in range(first, first + number):
        draw = random.Random(seed)
        kind = " ".join(word for word in ("frozen", "tied", "rare", "skips") if draw.random() < 0.4)
        accumulate, mixed, by_value = draw.choice([1, 1, 2]), draw.random() < 0.3, draw.random() < 0.5
        clip = None if mixed else draw.choice([None, 0.01, 0.3])  # Lightning refuses both with fused optimizers
        options = {
            "optimizer": draw.choice([torch.optim.Adam, torch.optim.AdamW]), "lr": draw.choice([1e-2, 1e-3]),
            "betas": draw.choice([(0.9, 0.999), (0.0, 0.5)]), "maximize": draw.random() < 0.2,
        }  # fmt: skip
        tiers = [
            (draw.choice([Tier.HOST, Tier.HOST, Tier.DEVICE, Tier.DISK]), draw.choice([Tier.HOST, Tier.DISK])) for _ in range(4)
        ]
        plan = Plan(
            name=f"random-{seed}", prefetch_depth=draw.choice([1, 2, 5]), gradient_depth=draw.choice([1, 4]),
            priority=draw.random() < 0.7, device_cache_bytes=draw.choice([None, None, 1 << 20]),
            blocks=(*(BlockPlan(name=f"layers.{i}", weights=w, state=s) for i, (w, s) in enumerate(tiers)), BlockPlan(name="*")),
        )  # fmt: skip
        flags = {
            "accumulate_grad_batches": accumulate, "gradient_clip_val": clip, "val_check_interval": draw.choice([1, 2, 4]),
            "gradient_clip_algorithm": "value" if by_value else "norm", "precision": "bf16-mixed" if mixed else "32-true",
        }  # fmt: skip
        strategy = HeteroOffloadStrategy(plan, block_cls="Layer", update_threads=draw.choice([1, 2]))
        shared = model(kind, seed=5 + RANK, **options)
        trainer(out, strategy, **flags).fit(shared, batches(), *[batches()] * draw.choice([0, 1]))
        try:
            same(shared, reference(kind, accumulate, clip, by_value=by_value, mixed=mixed, **options))
        except AssertionError as error:
            error.add_note(f"seed {seed}: {kind!r}, {flags}, {options}, {plan}")
            raise


def least_memory(out: Path) -> int:
    """Of all ranks of a node, for plan ``disk``."""
    strategy = HeteroOffloadStrategy("disk", block_cls="Layer", update_threads=1, host_memory="64KiB")
    with pytest.raises(OutOfMemoryBudgetError, match="plan 'disk' needs") as refused:
        trainer(out, strategy).fit(model(), batches())
    return SHARDS * int(refused.value.needed_bytes)


def is_read_from_disk(out: Path) -> None:
    """In the least memory of plan ``disk`` slices come from the disk before each use of a block."""
    plan, least = {"plan": "disk", "block_cls": "Layer", "update_threads": 1}, least_memory(out)
    for kind, accumulate, clip in [("", 1, None), ("tied frozen", 2, 0.3), ("rare skips", 1, None)]:
        shared, strategy = model(kind, seed=5 + RANK), HeteroOffloadStrategy(**plan, host_memory=least)
        flags = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip, "val_check_interval": 2}
        run = trainer(out, strategy, **flags)
        run.fit(shared, batches(), batches())
        same(shared, reference(kind, accumulate, clip))
        blocks = sum(p.numel() for p in shared.layers.parameters()) * 4 // SHARDS
        assert strategy.memory_report()["bytes_read"] > 3 * STEPS * blocks, "weights twice, and state"
        run.save_checkpoint(out / "read.ckpt")
        saved = torch.load(out / "read.ckpt")["state_dict"]
        assert all(torch.equal(saved[name], param) for name, param in shared.named_parameters())


def is_made_in_slices(out: Path) -> None:
    """A model on the meta device gets weights block by block: those of the first rank's seed.

    A budget counts a rank's slices of what is there, not of what comes.
    """
    counted = []

    class Watched(Heap):
        def __init__(self, host_memory: int | None, *, present_bytes: int, resident_meter: Callable[[], int]) -> None:
            with mock.patch.object(budgets, "resident_bytes", return_value=0):
                counted.append((resident_meter(), present_bytes))
            super().__init__(host_memory, present_bytes=present_bytes, resident_meter=resident_meter)

    with torch.device("meta"):
        shared = Model("frozen")
    torch.manual_seed(5 + RANK)
    with mock.patch.object(session, "Heap", Watched):
        trainer(out).fit(shared, batches())
    same(shared, reference("frozen"))
    assert counted == [(0, 0)]


def is_as_under_ddp(out: Path) -> None:
    """Two ranks: the bits of Lightning's own DDP, with clipping by value, bf16 and validation."""
    for flags in ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {"precision": "bf16-mixed"}):
        runs = []
        for strategy in (None, "ddp_find_unused_parameters_true"):
            one = model("counts")  # buffers differ between the ranks after a batch
            run = trainer(out, strategy, val_check_interval=2, **flags)
            run.fit(one, batches(), batches())
            runs.append((one, run.callback_metrics["validated"]))
        same(runs[0][0], runs[1][0])
        assert torch.equal(runs[0][1], runs[1][1])
        assert torch.equal(runs[0][0].offset, runs[1][0].offset)


def saves_weights(out: Path) -> None:
    """After the fit all ranks have all weights, and can save all state. The log has shares."""
    shared = model()
    plan = Plan(name="some", blocks=(BlockPlan(name="layers.*", state=Tier.DISK), BlockPlan(name="*")))
    run, said = trainer(out, HeteroOffloadStrategy(plan, block_cls="Layer", update_threads=1), max_steps=1), io.StringIO()
    logging.getLogger("lightning_hetero").addHandler(logging.StreamHandler(said))
    run.fit(shared, batches())
    assert ("2 ranks hold the model together" in said.getvalue()) is (RANK == 0), said.getvalue()
    assert "nothing to gain" not in said.getvalue()
    shares = "so they stay whole on each rank", f"a slice of them on each of {WORLD} ranks", "(a rank's share of what is free)"
    assert [words in said.getvalue() for words in (*shares, f"the first of {WORLD} processes had")] == [RANK == 0] * 4
    run.save_checkpoint(out / "weights.ckpt", weights_only=True)
    saved = torch.load(out / "weights.ckpt")["state_dict"]
    assert all(torch.equal(saved[name], param) for name, param in shared.named_parameters())
    run.save_checkpoint(out / "all.ckpt")
    wanted = reference("", number=1).__dict__["made"].state_dict()["state"]
    found = torch.load(out / "all.ckpt")["optimizer_states"][0]["state"]
    assert all(torch.equal(found[key][name], value) for key, state in wanted.items() for name, value in state.items())
    with pytest.raises(OffloadedAccessError, match=f"spread over {SHARDS} ranks. It can be saved"):
        run.optimizers[0].state[shared.layers[0].up.weight]["exp_avg"].sum()


class Saves(pl.Callback):
    """Saves after each batch, also between two that accumulate; and where no file can be."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, _: Any, __: Any, index: int) -> None:
        trainer.save_checkpoint(self.out / f"batch-{index}.ckpt", weights_only=index == 0)
        if index == 1:
            with pytest.raises(HeteroError, match="cannot be written" if RANK == 0 else "the first rank could not write"):
                trainer.save_checkpoint("/dev/null/no.ckpt")


def saves_checkpoints(out: Path) -> None:
    """Checkpoints are whole and ordinary, whenever they are saved; saving changes nothing."""
    shared = model("tied frozen", seed=5 + RANK)
    callbacks = [ModelCheckpoint(out, "last"), Saves(out)]
    trainer(out, accumulate_grad_batches=2, enable_checkpointing=True, callbacks=callbacks).fit(shared, batches())
    same(shared, reference("tied frozen", 2))
    for name, number in [("batch-0", 0), ("batch-1", 2), ("batch-2", 2), ("batch-3", 4), ("last", 4)]:
        wanted, saved = reference("tied frozen", 2, number=number), torch.load(out / f"{name}.ckpt")
        assert saved["state_dict"].keys() == wanted.state_dict().keys()
        assert all(torch.equal(saved["state_dict"][key], value) for key, value in wanted.state_dict().items()), name
        assert ("optimizer_states" in saved) is (number > 0)
        for got, held in zip(saved.get("optimizer_states", ()), [wanted.__dict__["made"].state_dict()], strict=number > 0):
            assert got["param_groups"] == held["param_groups"]
            assert got["state"].keys() == held["state"].keys()
            rows = [(got["state"][key][k], v) for key, state in held["state"].items() for k, v in state.items()]
            assert all(type(one) is Tensor and torch.equal(one, other) for one, other in rows), name


def goes_on_from_a_checkpoint(out: Path) -> None:
    """Any number of ranks goes on where others have saved, with the weights and all later steps of
    the reference; so do one process and plain Lightning.
    """
    begin = torch.load(out / "last.ckpt")
    for strategy in (None, "auto") if WORLD == 1 else (None,):
        shared = model("tied frozen", seed=9 + RANK)
        trainer(out, strategy, max_epochs=2).fit(shared, batches(), ckpt_path=out / "last.ckpt")
        same(shared, reference("tied frozen", begin=begin))
    shared = model("tied frozen", seed=9 + RANK)
    trainer(out).validate(shared, batches(), ckpt_path=out / "last.ckpt", verbose=False)
    assert all(torch.equal(param, begin["state_dict"][name]) for name, param in shared.named_parameters())


def loses_a_rank(out: Path) -> None:
    """The last rank is killed within a batch; the others say so, and end."""
    try:
        trainer(out).fit(model("dies"), batches())
    except HeteroError as error:
        print(str(error))
        os._exit(0)
    raise AssertionError("nothing failed")


def goes_apart(out: Path) -> None:
    """Ranks whose batches use other blocks say so, and do not wait for each other for ever."""
    try:
        trainer(out).fit(model("apart"), batches())
    except HeteroError as error:
        print(str(error))
        os._exit(0)
    raise AssertionError("nothing failed")


def is_refused(out: Path) -> None:
    """A Trainer of two ranks on each of two nodes, which have others."""
    strategy = HeteroOffloadStrategy("host", block_cls="Layer")
    run = pl.Trainer(accelerator="cpu", devices=2, num_nodes=2, strategy=strategy, default_root_dir=out, logger=False)
    with pytest.raises(ConfigError) as refused:
        run.fit(model(), batches())
    print(refused.value)


def run_scenarios(known: Mapping[str, Any], *, poison: bool = WORLD == 3) -> None:
    """Runs the scenarios of the command line, ``name`` or ``name:number:...``."""
    warnings.filterwarnings("error", r"`torch\.distributed\.all_gather", FutureWarning)
    torch.set_num_threads(1)
    os.environ["LIGHTNING_HETERO_POISON"] = str(int(poison))
    if WORLD > 2:
        slice_gradients.EXCHANGE_BYTES = sum_rooms.EXCHANGE_BYTES = 1000  # a block's gradients are exchanged in many pieces
        sum_rooms.PEER_EXCHANGE_BYTES = 1000
    for word in sys.argv[2:]:
        name, *numbers = word.split(":")
        known[name](Path(sys.argv[1]), *map(int, numbers))
    print("ok", flush=True)
    if WORLD > 1:
        dist.barrier()  # whoever waits for the first rank finds the words of all
        dist.destroy_process_group()


if __name__ == "__main__":
    run_scenarios(globals())
