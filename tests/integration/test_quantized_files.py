"""Layers of bitsandbytes on the meta device: weights are quantized as they are read from files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import assert_same, outcome, quiet_trainer
from support.resuming import Ends, EndsAt, after
from torch import nn

from lightning_hetero import EmulatedDevice
from lightning_hetero.convert.safetensors import TensorToWrite, write_directory
from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError, UnsupportedError
from lightning_hetero.runtime import quantizing
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.format.record import parse
from lightning_hetero.strategies import HeteroOffloadStrategy

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft, whose adapters are trained here, is missing")
pytest.importorskip("bitsandbytes", reason="bitsandbytes, on whose quantized layers adapters train here, is missing")
import bitsandbytes as bnb
import peft
from support import llama
from support.quantized import KINDS, LATE, Module, base, build, on_meta

STEPS = 4
MADE: dict[str, Any] = {"init_lora_weights": True}  # as PEFT makes adapters by default, also on the meta device


def content(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The weights of the base, not quantized, and of adapters, which all models here begin with."""
    model = peft.get_peft_model(base().to(dtype), peft.LoraConfig(r=1, target_modules=["q_proj", "down_proj"]))
    torch.manual_seed(5)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.1)
    return {name: value.clone() for name, value in model.state_dict().items()}


def written(folder: Path, values: dict[str, torch.Tensor]) -> Path:
    rows = [TensorToWrite(name, value.dtype, value.shape, lambda value=value: value) for name, value in values.items()]
    write_directory(folder, rows, max_shard_bytes=50_000)
    return folder


def in_memory(kind: str, values: dict[str, torch.Tensor], **options: Any) -> Any:
    """As bitsandbytes quantizes a model in memory."""
    model = build(kind, **MADE, **options)
    model.load_state_dict({name: value for name, value in values.items() if "lora_" in name}, strict=False)
    return model


def strategy(plan: str, folder: Path, **options: Any) -> Any:
    if plan == "device":
        plan, options["device"] = "auto", EmulatedDevice(memory="8MiB")
    return HeteroOffloadStrategy(plan, weights={"model": folder}, **options)


def fit(module: Any, strategy: Any, root: Path, *, stop: int | None = None, store: Path | None = None, **options: Any) -> Any:
    torch.manual_seed(11)
    callbacks = [] if stop is None else [EndsAt(stop)]
    trainer = quiet_trainer(max_steps=STEPS, strategy=strategy, default_root_dir=root, callbacks=callbacks, **options)
    try:
        trainer.fit(module, llama.batches(), ckpt_path=None if store is None else str(store))
    except Ends:
        return None
    return outcome(trainer, module)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_HETERO_POISON", "1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", LATE)
def test_plans_do_not_change_a_bit(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    values = content(dtype)
    folder = written(tmp_path / "weights", values)
    expected = fit(Module(lambda: in_memory(kind, values, dtype=dtype)), "auto", tmp_path)
    for plan in ("host", "disk", "device"):
        module = Module(partial(on_meta, kind, dtype=dtype, **MADE))
        assert_same(fit(module, strategy(plan, folder), tmp_path), expected)
        plain = in_memory(kind, values, dtype=dtype)
        for name, param in module.model.named_parameters():
            assert type(param) is type(plain.get_parameter(name)), name


def test_weights_in_another_dtype_are_converted_before_they_are_quantized(tmp_path: Path) -> None:
    values = content(torch.bfloat16)
    converted = {name: value.float() for name, value in values.items()}
    runs = []
    for number, of_file in enumerate((values, converted)):
        folder = written(tmp_path / str(number), of_file)
        runs.append(fit(Module(partial(on_meta, "nf4 late", **MADE)), strategy("disk", folder), tmp_path))
    assert_same(*runs)


@pytest.mark.parametrize("kind", LATE)
def test_a_run_that_ended_goes_on_with_the_same_files_only(kind: str, tmp_path: Path) -> None:
    values, store = content(), tmp_path / "store"
    folder = written(tmp_path / "weights", values)
    doubled = {name: value * 2 if ".base_layer." in name or ".mlp." in name else value for name, value in values.items()}
    other = written(tmp_path / "other", doubled)  # the codes are the same, the scales are not
    expected = fit(Module(lambda: in_memory(kind, values)), "auto", tmp_path)
    made = partial(on_meta, kind, **MADE)
    fit(Module(made), strategy("disk", folder, disk_path=store), tmp_path, stop=2)
    with pytest.raises(ConfigError, match=r"the scales of the quantized weight 'model.base_model.*weight' are not those"):
        fit(Module(made), strategy("disk", other, disk_path=store), tmp_path, store=store)
    got = fit(Module(made), strategy("host", folder, disk_path=store), tmp_path, store=store)
    assert_same(got, after(expected, len(got.losses)))


@pytest.mark.parametrize("plan", ["disk", "host"])
def test_the_packed_weights_are_written_once_and_explain_says_why(plan: str, tmp_path: Path) -> None:
    folder, store = written(tmp_path / "weights", content()), tmp_path / "store"
    reasons: list[str] = []

    class Looks(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            session: Any = self.trainer.strategy.session  # type: ignore[attr-defined]
            reasons.extend(block.copied for block in session.executor.model.blocks)

    fit(Looks(partial(on_meta, "nf4 late", **MADE)), strategy(plan, folder, disk_path=store), tmp_path)
    assert len([why for why in reasons if "torch.uint8, in the files torch.float32" in why]) == STEPS * 4
    slots = []
    with StoreFiles(store) as files:
        assert files.record is not None
        committed = {block.id: block.step for block in files.record.blocks}
        for names, entry in zip(files.manifest["layout"]["parts"], parse(files.record.user).parts, strict=True):
            geometry = entry.weights or entry.home
            if any("mlp.up_proj" in name for name in names) and geometry is not None:
                number = sum((store / f"block-{geometry.id:05d}.{slot}").exists() for slot in "ab")
                slots.append((number, committed[geometry.id]))
    assert len(slots) == 4
    assert set(slots) == {(1, slots[0][1])}
    assert slots[0][1] <= 1


@pytest.mark.parametrize("kind", ["nf4", "nf4 double", "int8"])
@pytest.mark.parametrize("width", [64, 96, 160])
def test_pieces_are_quantized_to_the_same_bits(kind: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(width, 70, bias=False)
    whole = KINDS[kind](layer).weight
    monkeypatch.setattr(quantizing, "_PIECE", 512)
    with quantizing._Pieces():
        made = KINDS[kind](layer).weight
    assert torch.equal(made.data, whole.data)
    ours, theirs = (getattr(one, "quant_state", None) for one in (made, whole))
    if ours is None:
        assert torch.equal(made.SCB, whole.SCB)
        return
    for key, value in theirs.as_dict(packed=True).items():
        assert torch.equal(ours.as_dict(packed=True)[key], value), key


@pytest.mark.parametrize("kind", LATE)
def test_reading_stays_within_the_budget_or_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "weights", content())
    module = Module(partial(on_meta, kind, **MADE))
    with pytest.raises(OutOfMemoryBudgetError, match="weights that are quantized as they are read") as refusal:
        fit(module, strategy("disk", folder, host_memory="1B"), tmp_path)
    fit(module, strategy("disk", folder, host_memory=refusal.value.needed_bytes), tmp_path)


def test_scales_of_weights_that_are_yet_to_be_read_count(tmp_path: Path) -> None:
    folder, values = written(tmp_path / "weights", content()), content()

    def sizes(module: Any, strategy: Any) -> int:
        fit(module, strategy, tmp_path)
        return int(strategy.needed)

    class Sized(HeteroOffloadStrategy):
        needed = 0

        def teardown(self) -> None:
            if self.session is not None:
                self.needed = self.session.needed_bytes(self.session.running.plan)
            super().teardown()

    for kind in LATE:
        from_files = sizes(Module(partial(on_meta, kind, **MADE)), Sized("disk", weights={"model": folder}))
        assert from_files == sizes(Module(lambda kind=kind: in_memory(kind, values)), Sized("disk"))


def test_what_cannot_be_quantized_is_named(tmp_path: Path) -> None:
    values = content()
    folder = written(tmp_path / "weights", values)
    lacking = "base_model.model.model.layers.1.mlp.up_proj.weight"
    without = written(tmp_path / "without", {name: value for name, value in values.items() if name != lacking})

    class Lenient(Module):
        strict_loading = False

    def stored() -> Any:
        model = on_meta("nf4 late", **MADE)
        for layer in model.modules():
            if isinstance(layer, bnb.nn.Linear4bit):
                layer.weight.quant_storage = torch.bfloat16
        return model

    with pytest.raises(ConfigError, match=r"layers.1.mlp.up_proj.weight"):
        fit(Lenient(partial(on_meta, "nf4 late", **MADE)), strategy("disk", without), tmp_path)
    with pytest.raises(UnsupportedError, match=r"its quant_storage is torch.bfloat16. Allowed there: torch.uint8"):
        fit(Module(stored), strategy("disk", folder), tmp_path)
