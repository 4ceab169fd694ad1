"""One rank of a test of options and optimizers on several devices: a script.

See ``tests/integration/test_shared_options.py`` and ``support.shared_model``, which has the model
and the reference.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision

from lightning_hetero.errors import HeteroError, UnsupportedError
from lightning_hetero.ir.plan import BlockPlan, Plan, UpdateLane
from lightning_hetero.strategies import HeteroOffloadStrategy
from support.several import Together
from support.shared_model import RANK, STEPS, WORLD, Model, batches, model, reference, run_scenarios, same, trainer

_TRUE = {"bf16-true": torch.bfloat16, "16-true": torch.float16}


def trains_16_bit_weights(out: Path) -> None:
    """fp32 masters in slices: the bits of the reference with masters on whole tensors."""
    cases = [
        ("bf16-true", "", 1, None), ("bf16-true", "rare tied", 2, 0.3),
        ("16-true", "frozen", 1, 0.3), ("16-true", "skips", 1, None),
    ]  # fmt: skip
    sgd = {"optimizer": torch.optim.SGD, "momentum": 0.9}
    for (precision, kind, accumulate, clip), options in [*((case, {}) for case in cases), (cases[1], sgd)]:
        shared = model(kind, seed=5 + RANK, **options)
        flags = {"precision": precision, "accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
        trainer(out, **flags).fit(shared, batches())
        assert next(shared.parameters()).dtype is _TRUE[precision]
        same(shared, reference(kind, accumulate, clip, dtype=_TRUE[precision], **options))


def _states(run: Any, path: Path) -> Any:
    run.save_checkpoint(path)
    return torch.load(path)["optimizer_states"]


def _same_states(got: Any, wanted: Any) -> None:
    wanted = {key: state for key, state in wanted.items() if set(state) != {"master_param"}}  # of frozen weights
    assert got.keys() == wanted.keys(), set(got) ^ set(wanted)
    for key, state in wanted.items():
        assert got[key].keys() == state.keys(), (key, got[key].keys(), state.keys())
        for name, value in state.items():
            assert torch.equal(got[key][name], value) if isinstance(value, torch.Tensor) else got[key][name] == value, (key, name)


def _same_when_read(run: Any, shared: Model, wanted: Model) -> None:
    """After the fit all ranks can read optimizer state together."""
    with run.strategy.materialize(shared):
        for mine, other in zip(shared.parameters(), wanted.parameters(), strict=True):
            state = run.optimizers[0].state.get(mine, {})
            for name, value in wanted.__dict__["made"].state[other].items() if state else ():
                assert torch.equal(state[name], value) if isinstance(value, torch.Tensor) else state[name] == value


def goes_on_with_16_bit_weights(out: Path) -> None:
    """Checkpoints have whole masters. If one of plain Lightning has none, they are the weights."""
    shared = model("frozen")
    run = trainer(out, precision="bf16-true", callbacks=[ModelCheckpoint(out, "half")], enable_checkpointing=True)
    run.fit(shared, batches())
    wanted = reference("frozen", dtype=torch.bfloat16)
    _same_when_read(run, shared, wanted)
    for states in (torch.load(out / "half.ckpt")["optimizer_states"], _states(run, out / "after.ckpt")):
        _same_states(states[0]["state"], wanted.__dict__["made"].state_dict()["state"])
    for name in ("half", "after", "bare"):
        begin = torch.load(out / "half.ckpt")
        if name == "bare":
            for state in begin["optimizer_states"][0]["state"].values():
                state.pop("master_param")
            if RANK == 0:
                torch.save(begin, out / "bare.ckpt")
            torch.distributed.barrier() if torch.distributed.is_initialized() else None
        again = model("frozen", seed=9 + RANK)
        trainer(out, precision="bf16-true", max_epochs=2).fit(again, batches(), ckpt_path=out / f"{name}.ckpt")
        same(again, reference("frozen", dtype=torch.bfloat16, begin=begin))


_BY_ELEMENT = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}), (torch.optim.Adadelta, {}), (torch.optim.Adagrad, {}),
    (torch.optim.Adamax, {}), (torch.optim.ASGD, {"t0": 1.0}), (torch.optim.NAdam, {}), (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}), (torch.optim.Rprop, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
]  # fmt: skip


def updates_by_element(out: Path) -> None:
    """Optimizers that update elements one by one run on slices by their own code; their state is
    whole in checkpoints, from which training goes on.
    """
    for number, (kind, options) in enumerate(_BY_ELEMENT):
        options = {"optimizer": kind, "lr": 1e-2, **options}
        words = "frozen tied" if number % 2 else "rare"
        flags = {"gradient_clip_val": 0.3 if number % 3 else None, "accumulate_grad_batches": 1 + (number == 4)}
        shared, path = model(words, seed=5 + RANK, **options), out / f"{kind.__name__}.ckpt"
        run = trainer(out, **flags)
        run.fit(shared, batches())
        wanted = reference(words, flags["accumulate_grad_batches"], flags["gradient_clip_val"], **options)
        same(shared, wanted)
        _same_when_read(run, shared, wanted)
        states = _states(run, path)
        _same_states(states[0]["state"], wanted.__dict__["made"].state_dict()["state"])
        again = model(words, seed=9 + RANK, **options)
        trainer(out, max_epochs=2, **flags).fit(again, batches(), ckpt_path=path)
        clip, begin = flags["gradient_clip_val"], torch.load(path)
        same(again, reference(words, flags["accumulate_grad_batches"], clip, begin=begin, **options))


class Velocities(torch.optim.SGD):
    """An optimizer of the user's, which says that it treats parameters independently."""

    hetero_blockwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        with torch.enable_grad():
            _ = closure and closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["count"] = state.get("count", 0) + 1
                    state["speed"] = state.get("speed", torch.zeros_like(param)) * 0.5 + param.grad / (param.grad.norm() + 1e-3)
                    param.sub_(state["speed"], alpha=group["lr"] / state["count"])


class Unknown(torch.optim.SGD):
    """An optimizer that may couple parameters."""


def updates_whole_parameters(out: Path) -> None:
    """Other optimizers run on whole parameters, each on the rank that owns it."""
    for kind, words, precision in [
        (torch.optim.Adafactor, "frozen", "32-true"), (Velocities, "rare tied", "32-true"), (Velocities, "", "bf16-true"),
    ]:  # fmt: skip
        options, dtype = {"optimizer": kind, "lr": 1e-2}, _TRUE.get(precision, torch.float32)
        clip = 0.3 if WORLD > 1 else None  # one process has torch's own norm
        flags = {"gradient_clip_val": clip, "precision": precision}
        shared, path = model(words, seed=5 + RANK, **options), out / f"{kind.__name__}-{precision}.ckpt"
        callbacks = [ModelCheckpoint(out, f"in-{path.stem}")]
        run = trainer(out, callbacks=callbacks, enable_checkpointing=True, **flags)
        run.fit(shared, batches())
        wanted = reference(words, clip=clip, dtype=dtype, **options)
        same(shared, wanted)
        _same_when_read(run, shared, wanted)
        for states in (_states(run, path), torch.load(out / f"in-{path.stem}.ckpt")["optimizer_states"]):
            _same_states(states[0]["state"], wanted.__dict__["made"].state_dict()["state"])
        again, begin = model(words, seed=9 + RANK, **options), torch.load(path)
        trainer(out, max_epochs=2, **flags).fit(again, batches(), ckpt_path=path)
        same(again, reference(words, clip=clip, dtype=dtype, begin=begin, **options))

    if WORLD == 1:
        return
    with pytest.raises(UnsupportedError, match=r"Unknown.hetero_blockwise = True. \d ranks share the parameters"):
        trainer(out).fit(model(optimizer=Unknown, lr=0.1), batches())


class Divided(Model):
    """Two optimizers, one for matrices and one for the rest: by hand, or in one optimizer."""

    reduces_each_batch = True  # nobody knows which one is the last before a step

    def __init__(self, kind: str = "", **options: Any) -> None:
        super().__init__(kind, **options)
        self.automatic_optimization = "manual" not in self.kind

    def configure_optimizers(self) -> Any:
        params = list(self.parameters())
        by_adam = torch.optim.AdamW([p for p in params if p.dim() > 1], lr=1e-2, fused=True)
        by_sgd = torch.optim.SGD([p for p in params if p.dim() < 2], lr=1e-2, momentum=0.9)
        return Together(by_adam, by_sgd) if self.automatic_optimization else [by_adam, by_sgd]

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        if self.automatic_optimization:
            return super().training_step(batch, index)
        loss = self.loss(batch, index)
        self.losses.append(loss.item())
        self.manual_backward(loss / 2)
        for optimizer in self.optimizers() if index % 2 else ():
            self.clip_gradients(optimizer, 0.3, "norm")
            optimizer.step()
            optimizer.zero_grad()
        return None


def has_several_optimizers(out: Path) -> None:
    """Optimizers in one optimizer, and two that step by hand every second batch."""
    for kind in ("frozen", "manual", "manual frozen"):
        shared = model(kind, seed=5 + RANK, cls=Divided)
        automatic = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3} if kind == "frozen" else {}
        trainer(out, **automatic).fit(shared, batches())
        same(shared, reference(kind, 2, 0.3, cls=Divided))


def has_64_bits(out: Path) -> None:
    """In float64: ranks have the losses and weights of one process on the whole batch."""
    shared = model(seed=5 + RANK)
    trainer(out, precision="64-true", max_epochs=2).fit(shared, batches())
    plain = model().double()
    plain.offset.zero_()
    optimizer, losses = plain.configure_optimizers(), []
    for index in range(2 * STEPS):
        rows = [list(batches(rank))[index % STEPS] for rank in range(WORLD)]
        losses.append(plain.loss(torch.cat(rows), index))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    mine = torch.tensor(shared.losses, dtype=torch.float64)
    torch.distributed.all_reduce(mine)
    torch.testing.assert_close(mine / WORLD, torch.stack(losses).detach(), rtol=1e-10, atol=0)
    for name, param in shared.named_parameters():
        torch.testing.assert_close(param, dict(plain.named_parameters())[name], rtol=1e-10, atol=1e-12)


def says_that_steps_are_not_kept(out: Path) -> None:
    """With a ``disk_path``, what has no state in the stores of ranks says so, and trains."""
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"optimizer": torch.optim.SGD}, {}, "SGD updates slices by its own code"),
        ({"amsgrad": True}, {}, "AdamW updates slices by its own code"),
        ({}, {"precision": "64-true"}, "AdamW updates slices by its own code"),
    ]
    for number, (options, flags, why) in enumerate(cases):
        said, shared = BufferingHandler(1000), model(seed=5 + RANK, **options)
        logging.getLogger("lightning_hetero").addHandler(said)
        kept = HeteroOffloadStrategy("host", disk_path=out / f"steps-{number}", block_cls="Layer", update_threads=1)
        trainer(out, kept, **flags).fit(shared, batches())
        logging.getLogger("lightning_hetero").removeHandler(said)
        (text,) = (text for record in said.buffer if (text := record.getMessage()).startswith("Steps are not kept"))
        assert why in text
        if not flags:
            same(shared, reference("", **options))


def refuses_by_name(out: Path) -> None:
    """What ranks cannot train is refused before anything trains, with what helps."""
    bounded = model()
    bounded.embed = torch.nn.Embedding(13, 30, max_norm=1.0)
    there = Plan(name="mine", blocks=(BlockPlan(name="*", update=UpdateLane.DEVICE),))
    cases: list[tuple[Model, Any, dict[str, Any], str]] = [
        (bounded, "host", {}, r"max_norm=1\.0.*Leave max_norm out"),
        (model(), there, {}, r"update='device' for block 'embed', which \d ranks share\. Allowed: .* update on 'cpu'"),
        (model(optimizer=torch.optim.SGD), "disk", {}, r'SGD.*plan="host"'),
        (model(), "disk", {"precision": "64-true"}, r'AdamW.*plan="host"'),
    ]
    with suppress(ImportError):
        from bitsandbytes.nn import Linear4bit

        quantized = model()
        quantized.layers[1].up = Linear4bit(30, 67, compute_dtype=torch.float32)
        cases.append((quantized, "host", {}, r"layers\.1\.up\.weight.* of Params4bit.*Or pass devices=1"))
    for module, plan, flags, words in cases:
        before = {name: param.clone() for name, param in module.named_parameters()}
        strategy = HeteroOffloadStrategy(plan, block_cls="Layer", update_threads=1)
        with pytest.raises(HeteroError, match=words):
            trainer(out, strategy, **flags).fit(module, batches())
        assert not module.losses, "nothing has trained"
        assert all(torch.equal(param.float(), before[name]) for name, param in module.named_parameters())


def skips_steps_that_overflow(out: Path) -> None:
    """A loss that overflows on one rank lets all ranks skip the step, and lower the same scale."""
    sgd = {"optimizer": torch.optim.SGD, "momentum": 0.9}
    fused = sgd | {"fused": True}
    for options, given, clip in [({}, {}, None), ({"fused": False}, {}, 0.3), (sgd, sgd, 0.3), (fused, fused, None)]:
        make = partial(torch.amp.GradScaler, "cpu", init_scale=2.0**12, growth_interval=2)
        scalers = [make(), make()]
        shared = model("overflows", **options)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scalers[0])
        trainer(out, plugins=[plugin], gradient_clip_val=clip).fit(shared, batches())
        same(shared, reference("overflows", clip=clip, mixed=True, scaler=scalers[1], **given))
        scales = [scaler.get_scale() for scaler in scalers]
        assert scales == [2.0**12] * 2, scales


if __name__ == "__main__":
    run_scenarios(globals())
