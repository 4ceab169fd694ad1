"""Adapters of PEFT train as in plain Lightning, bit for bit: random kinds, plans, precisions, and
ends of processes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.plugins import MixedPrecision
from support.properties import examples

from lightning_hetero import BlockPlan, EmulatedDevice, Plan, Tier, UpdateLane
from lightning_hetero.ir.plan import TRAINED, Saved
from lightning_hetero.optim.reference import MasterWeightOptimizer
from lightning_hetero.strategies import HeteroOffloadStrategy

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft, whose adapters are trained here, is missing")
import peft
from support import llama
from support.models import Outcome, assert_same, outcome, quiet_trainer
from support.resuming import Ends, EndsAt, after

STEPS = 4


def config(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], **options})


def two(model: Any) -> Any:
    wrapped = peft.get_peft_model(model, config())
    wrapped.add_adapter("other", config(r=1, target_modules=["up_proj"]))
    wrapped.set_adapter("other")
    return wrapped


def lora(**options: Any) -> Callable[[Any], Any]:
    return lambda model: peft.get_peft_model(model, config(**options))


def scaled(model: Any) -> Any:
    names = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    return peft.get_peft_model(model, peft.IA3Config(**names))


def prompts(kind: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda model: peft.get_peft_model(model, kind(task_type="CAUSAL_LM", num_virtual_tokens=3, **options))


PROMPTS: dict[str, Callable[[Any], Any]] = {
    "prompt": prompts(peft.PromptTuningConfig),
    "p-tuning": prompts(peft.PromptEncoderConfig, encoder_hidden_size=32),
    "prefix": prompts(peft.PrefixTuningConfig),
}
KINDS: dict[str, Callable[[Any], Any]] = {
    "lora": lora(),
    "dropout": lora(lora_dropout=0.3, bias="lora_only"),
    "dora": lora(use_dora=True),
    "head": lora(modules_to_save=["lm_head"]),
    "ia3": scaled,
    "two": two,
    **PROMPTS,
}


@dataclass(frozen=True)
class Case:
    """A training run."""

    kind: str
    precision: str
    tied: bool
    accumulate: int
    checkpointed: str  # how activations are checkpointed: "", "reentrant", "not reentrant", "prepared" (for quantized training)
    everything: bool  # the optimizer has all parameters, as ``AdamW(self.parameters())``
    frees: bool  # then part of the base is set free later


class Frees(pl.Callback):
    """Sets part of the base free after the second step, and freezes it after the third."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        for name, param in pl_module.named_parameters():
            if "layers.0.mlp" in name and "lora" not in name and "ia3" not in name:
                param.requires_grad_(trainer.global_step == 2)


class Masters(MasterWeightOptimizer):
    """The reference for 16-bit weights. It has a master of each member; the state of those that
    trained counts.
    """

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        return {**found, "state": {number: state for number, state in found["state"].items() if "step" in state}}


class Module(llama.LitLlama):
    """The model in memory, from one seed."""

    def __init__(self, case: Case, optimizer: Callable[[Any], Any]) -> None:
        def build() -> Any:
            torch.manual_seed(3)
            model = llama.LlamaForCausalLM(llama.config(tied=case.tied))
            how = {"use_reentrant": case.checkpointed == "reentrant"}
            if case.kind == "prefix":  # which PEFT refuses with checkpointing
                return KINDS[case.kind](model)
            if case.checkpointed == "prepared":
                model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=how)
            model = KINDS[case.kind](model)
            if case.checkpointed.endswith("reentrant"):
                model.enable_input_require_grads()
                model.gradient_checkpointing_enable(how)
            return model

        super().__init__(build)
        self.optimizer, self.everything = optimizer, case.everything

    def configure_optimizers(self) -> Any:
        return self.optimizer([p for p in self.parameters() if p.requires_grad or self.everything])


def fit(
    case: Case, strategy: Any, folder: Path, *, stop: int | None = None, store: Path | None = None, steps: int = STEPS,
    save: Path | None = None,
) -> Outcome:  # fmt: skip
    adamw = partial(torch.optim.AdamW, lr=1e-2, fused=True)
    plain_16_bit = strategy == "auto" and case.precision in ("bf16-true", "16-true")
    frees = [Frees()] if case.everything and case.frees else []
    module = Module(case, partial(Masters, factory=adamw) if plain_16_bit else adamw)
    torch.manual_seed(11)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaled = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}  # Lightning takes it on a CPU as a plugin only
    trainer = quiet_trainer(
        strategy=strategy, max_steps=steps, accumulate_grad_batches=case.accumulate,
        **scaled if case.precision == "16-mixed" else {"precision": case.precision},
        default_root_dir=folder, callbacks=[*frees, *([] if stop is None else [EndsAt(stop)])],
    )  # fmt: skip
    try:
        trainer.fit(module, llama.batches(), ckpt_path=None if store is None else str(store))
    except Ends:
        return Outcome(module.losses, {}, [])
    if save is not None:
        trainer.save_checkpoint(save)
    return outcome(trainer, module)


def fitting(case: Case, plan: Plan) -> Plan:
    """A plan without rules for trained parts where layers have none: prompts are beside them."""
    rows = (row for row in plan.blocks if case.kind not in PROMPTS or not row.name.endswith(TRAINED))
    return replace(plan, blocks=tuple(rows))


@st.composite
def host_plans(draw: st.DrawFn) -> Plan:
    """Plans whose frozen weights stream, with the adapters' state anywhere."""
    state, update = draw(
        st.sampled_from([(t, UpdateLane.CPU) for t in (Tier.HOST, Tier.DISK)] + [(Tier.DEVICE, UpdateLane.DEVICE)])
    )
    rows = [BlockPlan(name=f"*{TRAINED}", state=state, update=update, weights=Tier.HOST)]
    if draw(st.booleans()):
        rows.append(BlockPlan(name="*.layers.1"))
    rows.append(BlockPlan(name="*", weights=Tier.DISK, state=draw(st.sampled_from([Tier.HOST, Tier.DISK]))))
    depths = {"prefetch_depth": draw(st.integers(1, 2)), "gradient_depth": draw(st.integers(1, 3))}
    cache = draw(st.sampled_from([1, None]))  # 1: room for one block
    return Plan(name="random", blocks=tuple(rows), priority=draw(st.booleans()), host_cache_bytes=cache, **depths)


@st.composite
def device_plans(draw: st.DrawFn) -> Plan:
    places = [
        (Tier.DEVICE, UpdateLane.DEVICE),
        (Tier.HOST, UpdateLane.DEVICE),
        (Tier.HOST, UpdateLane.CPU),
        (Tier.DISK, UpdateLane.CPU),
    ]
    state, update = draw(st.sampled_from(places))
    rows = (
        BlockPlan(name=f"*{TRAINED}", weights=Tier.DEVICE, state=state, update=update),
        BlockPlan(
            name="*", weights=draw(st.sampled_from([Tier.HOST, Tier.DISK])),
            saved=draw(st.sampled_from([*Saved])), boundary=draw(st.sampled_from([Saved.KEEP, Saved.SWAP_HOST])),
        ),
    )  # fmt: skip
    return Plan(name="random", blocks=rows, prefetch_depth=draw(st.integers(1, 2)), priority=draw(st.booleans()))


PRECISIONS = ["32-true", "bf16-mixed", "bf16-true", "16-true", "16-mixed"]
CASES = st.builds(
    Case,
    kind=st.sampled_from([*KINDS]),
    precision=st.sampled_from(PRECISIONS),
    tied=st.booleans(),
    accumulate=st.sampled_from([1, 1, 2]),
    checkpointed=st.sampled_from(["", "", "reentrant", "not reentrant", "prepared"]),
    everything=st.booleans(),
    frees=st.booleans(),
)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_HETERO_POISON", "1")


@examples(6)
@given(case=CASES, plan=host_plans())
def test_plans_do_not_change_a_bit(case: Case, plan: Plan) -> None:
    with tempfile.TemporaryDirectory() as folder:
        strategy = HeteroOffloadStrategy(fitting(case, plan))
        assert_same(fit(case, strategy, Path(folder)), fit(case, "auto", Path(folder)))


@examples(6)
@given(case=CASES, plan=device_plans(), seed=st.none() | st.integers(0, 99))
def test_plans_do_not_change_a_bit_on_a_device(case: Case, plan: Plan, seed: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        strategy = HeteroOffloadStrategy(fitting(case, plan), device=EmulatedDevice(memory="8MiB", seed=seed))
        assert_same(fit(case, strategy, Path(folder)), fit(case, "auto", Path(folder)))


def goes_on(case: Case, stop: int, plan: Plan, device: EmulatedDevice | None = None) -> None:
    """A run that ends as a batch begins, and another one from its store."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        expected = fit(case, "auto", Path(folder))
        strategy = partial(HeteroOffloadStrategy, fitting(case, plan), disk_path=store, device=device)
        fit(case, strategy(), Path(folder), stop=stop)
        got = fit(case, strategy(), Path(folder), store=store)
        assert_same(got, after(expected, len(got.losses)))


@examples(4)
@given(case=CASES, plan=host_plans(), stop=st.integers(1, STEPS - 1))
def test_a_run_that_ended_goes_on(case: Case, plan: Plan, stop: int) -> None:
    goes_on(case, stop, plan)


@examples(4)
@given(case=CASES, plan=device_plans(), stop=st.integers(1, STEPS - 1), seed=st.none() | st.integers(0, 99))
def test_a_run_on_a_device_that_ended_goes_on(case: Case, plan: Plan, stop: int, seed: int | None) -> None:
    goes_on(case, stop, plan, EmulatedDevice(memory="8MiB", seed=seed))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_goes_on_in_fp16(kind: str) -> None:
    """The kinds by turns with each of the two precisions that are rarely used on a CPU."""
    precision = ("16-true", "16-mixed")[[*KINDS].index(kind) % 2]
    case = Case(kind, precision, tied=False, accumulate=1, checkpointed="", everything=False, frees=False)
    rows = (BlockPlan(name=f"*{TRAINED}"), BlockPlan(name="*.layers.*", weights=Tier.DISK), BlockPlan(name="*"))
    goes_on(case, 2, Plan(name="streams", blocks=rows, host_cache_bytes=1))


@examples(4)
@given(case=CASES, plan=host_plans(), stop=st.integers(1, STEPS - 1))
def test_a_run_goes_on_from_a_checkpoint_of_the_adapters_alone(case: Case, plan: Plan, stop: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        alone, whole = Path(folder, "alone.ckpt"), Path(folder, "whole.ckpt")
        strategy = partial(HeteroOffloadStrategy, fitting(case, plan), exclude_frozen_parameters=True)
        fit(case, strategy(), Path(folder), steps=stop, save=alone)
        fit(case, HeteroOffloadStrategy("host"), Path(folder), steps=stop, save=whole)
        assert alone.stat().st_size < whole.stat().st_size or case.frees
        expected = fit(case, HeteroOffloadStrategy("resident"), Path(folder), store=whole)
        assert_same(fit(case, strategy(), Path(folder), store=alone), expected)
