"""Models that are larger than the budget generate and are evaluated: what is read, and the bits
that come out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from lightning_hetero import BlockPlan, EmulatedDevice, Plan, Tier
from lightning_hetero.errors import OffloadedAccessError, OutOfMemoryBudgetError
from lightning_hetero.ir.schedule import OpKind, StepSignature
from lightning_hetero.lowering import CacheSizes, steady
from lightning_hetero.runtime.residency.device import DeviceResidency
from lightning_hetero.runtime.session import Session
from lightning_hetero.store.live.blocks import Block
from lightning_hetero.strategies import HeteroOffloadStrategy

WORDS, WIDTH, LAYERS, TOKENS = 61, 64, 7, 5
BLOCK_BYTES = 33 * 4096  # whole pages, so that the engine reads exactly these
ON_DEVICE_BYTES = 34 * 4096  # pages of a block for a device, where each parameter begins at a multiple of 512 bytes
PROMPT = torch.tensor([[5, 17, 3]])


def llama(*, tied: bool = False, layers: int = LAYERS) -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=90, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def t5() -> Any:
    torch.manual_seed(1)
    config = T5Config(
        vocab_size=WORDS, d_model=32, d_kv=16, d_ff=48, num_layers=4, num_decoder_layers=4, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def with_lora(*, disabled: bool = False) -> Any:
    model: Any = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    if disabled:
        model.base_model.disable_adapter_layers()
    return model


def generate(model: Any, **options: Any) -> list[Tensor]:
    """Token by token: the tokens, and the scores of each."""
    fixed = {"max_new_tokens": TOKENS, "pad_token_id": 0, "eos_token_id": None, "do_sample": False} | options
    tokens = PROMPT.to(next(model.parameters()).device)
    torch.manual_seed(3)
    found = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), output_scores=True, return_dict_in_generate=True, **fixed
    )
    return [found.sequences, *found.scores]


class Lit(pl.LightningModule):
    """Generates in ``predict_step`` and in validation; trains as a language model."""

    def __init__(self, build: Callable[[], Any], generates: Callable[[Any], list[Tensor]] = generate) -> None:
        super().__init__()
        self.model: Any = build()
        self.generates = generates
        self.found: list[Tensor] = []
        self.reads: list[int] = []  # bytes, of each call

    def generate(self) -> list[Tensor]:
        before = bytes_read(self)
        found = [tensor.cpu() for tensor in self.generates(self.model)]
        self.reads.append(bytes_read(self) - before)
        self.found += found
        return found

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.found.append(self.model(input_ids=batch, labels=batch).loss.cpu())
        self.generate()

    def predict_step(self, batch: Tensor, batch_idx: int) -> list[Tensor]:
        return self.generate()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, fused=True)


def bytes_read(module: pl.LightningModule) -> int:
    """Of the model's store, so far; waits for reads that are under way."""
    session: Session | None = getattr(module.trainer.strategy, "session", None)
    if session is None or session.store is None:
        return 0
    session.drain()
    return session.store.stats().bytes_read


def data() -> Any:
    return DataLoader(torch.randint(0, WORDS, (6, 6), generator=torch.Generator().manual_seed(0)), batch_size=2)


def streams(kept: int, layers: str = "*layers.*", block_bytes: int = BLOCK_BYTES) -> Plan:
    """Layers on disk, with memory for so many of them; all else in memory."""
    rows = (BlockPlan(name=layers, weights=Tier.DISK), BlockPlan(name="*"))
    return Plan(name="streams", blocks=rows, host_cache_bytes=kept * block_bytes)


def predict(root: Path, build: Callable[[], Any], generates: Callable[[Any], list[Tensor]], strategy: Any, **options: Any) -> Lit:
    module = Lit(build, generates)
    trainer = quiet_trainer(strategy=strategy, default_root_dir=root, limit_predict_batches=3, **options)
    trainer.predict(module, data(), return_predictions=False)
    return module


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def per_pass(kept: int) -> int:
    """The bytes that the plan's schedule reads in one pass over the layers, in steady state."""
    module, strategy = Lit(llama), HeteroOffloadStrategy(streams(kept))
    session = Session(module, strategy.options)
    shape, plan = session._placer().model, session.fitting(streams(kept))
    order = StepSignature(order=tuple(range(len(plan.blocks))), training=False)
    sizes = CacheSizes(host_cache_bytes=kept * BLOCK_BYTES, device_cache_bytes=None, staging_bytes=0)
    (schedule,) = steady(plan, shape, [order], sizes=sizes)
    session.abandon()
    return sum(op.num_bytes for op in schedule.ops if op.kind is OpKind.FETCH)


@pytest.mark.parametrize("kept", [1, 2, 3, 5, 6, LAYERS])
def test_a_token_reads_the_weights_that_do_not_stay(kept: int, tmp_path: Path) -> None:
    """All layers but those that fit beside two, and exactly what the schedule says."""
    module = predict(tmp_path, llama, generate, HeteroOffloadStrategy(streams(kept)))
    streamed = LAYERS if kept <= 2 else 0 if kept == LAYERS else LAYERS - kept + 2
    assert per_pass(kept) == streamed * BLOCK_BYTES
    assert module.reads[1:] == [TOKENS * streamed * BLOCK_BYTES] * 2
    assert module.reads[0] <= (LAYERS + TOKENS * streamed) * BLOCK_BYTES  # the first pass finds no layer, or others


@cache
def plain(build: Callable[[], Any], generates: Callable[[Any], list[Tensor]], precision: Any = "32-true") -> tuple[Tensor, ...]:
    return tuple(predict(Path("/nowhere"), build, generates, "auto", precision=precision).found)


def tied() -> Any:
    return llama(tied=True)


def disabled() -> Any:
    return with_lora(disabled=True)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("build", [tied, with_lora, disabled])
@pytest.mark.parametrize("plan", ["host", "streams"])
def test_generation_has_the_bits_of_plain_lightning(plan: str, build: Callable[[], Any], precision: Any, tmp_path: Path) -> None:
    strategy = HeteroOffloadStrategy(plan if plan == "host" else streams(3))
    module = predict(tmp_path, build, generate, strategy, precision=precision)
    assert same(module.found, list(plain(build, generate, precision)))


def without_cache(model: Any) -> list[Tensor]:
    return generate(model, use_cache=False)


def beams(model: Any) -> list[Tensor]:
    return generate(model, num_beams=3)


def sampling(model: Any) -> list[Tensor]:
    return generate(model, do_sample=True, top_k=5)


def assisted(model: Any) -> list[Tensor]:
    return generate(model, assistant_model=llama(layers=1))


def layers_out_of_order(model: Any) -> list[Tensor]:
    """Ends early, begins late, uses layers twice, and leaves the model between passes."""
    layers, norm = model.model.layers, model.model.norm
    positions = torch.arange(3)[None]
    with torch.no_grad():
        x = model.model.embed_tokens(PROMPT)
        rotary = model.model.rotary_emb(x, positions)
        outputs = []
        for order in ((0, 1, 2), (0, 1, 2, 3, 4, 5, 6), (3, 4, 3, 4), (6, 6, 5), (0, 0, 0), (0, 1, 2, 3, 4, 5, 6), (6, 2)):
            y = x
            for index in order:
                y = layers[index](y, position_embeddings=rotary, position_ids=positions)
            outputs.append(norm(y))
    return outputs


@pytest.mark.parametrize("generates", [without_cache, beams, sampling, assisted, layers_out_of_order])
@pytest.mark.parametrize("kept", [1, 3])
def test_every_order_of_layers_has_the_same_bits(
    kept: int, generates: Callable[[Any], list[Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_HETERO_POISON", "1")  # memory that is free has no weights
    module = predict(tmp_path, llama, generates, HeteroOffloadStrategy(streams(kept)))
    assert same(module.found, list(plain(llama, generates)))


@pytest.mark.parametrize("use_cache", [True, False])
def test_encoder_and_decoder_have_the_same_bits(use_cache: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_HETERO_POISON", "1")
    generates = generate if use_cache else without_cache
    block_bytes = 4 * sum(p.numel() for p in t5().decoder.block[1].parameters())
    module = predict(tmp_path, t5, generates, HeteroOffloadStrategy(streams(4, "*block.?", block_bytes)))
    assert same(module.found, list(plain(t5, generates)))
    passes = 1 + TOKENS
    assert module.reads[2] <= 4 * passes * (block_bytes + 4096)  # the encoder's once, not for each token


@pytest.mark.parametrize("rows", ["host", "disk"])
def test_a_device_generates_with_the_same_bits(rows: str, tmp_path: Path) -> None:
    """Layers that fit stay on the device, and for those below it on the host."""
    everywhere = BlockPlan(name="*layers.*", weights=Tier(rows))
    plan = Plan(
        name="device", blocks=(everywhere, BlockPlan(name="*")), device_cache_bytes=4 * ON_DEVICE_BYTES,
        host_cache_bytes=3 * ON_DEVICE_BYTES if rows == "disk" else None,
    )  # fmt: skip
    module = predict(tmp_path, llama, generate, HeteroOffloadStrategy(plan, device=EmulatedDevice(memory="8MiB", seed=4)))
    assert same(module.found, list(plain(llama, generate)))
    # Two layers stay on the device, one of the rest in host memory.
    assert module.reads[1:] == [TOKENS * (LAYERS - 3) * ON_DEVICE_BYTES * (rows == "disk")] * 2


class Samples(pl.Callback):
    """Generates where no batch is under way."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.generate()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        pl_module.generate()

    on_validation_epoch_end = on_train_epoch_end = on_fit_start


def fit(root: Path, strategy: Any, **options: Any) -> tuple[pl.Trainer, Lit]:
    module = Lit(llama)
    trainer = quiet_trainer(
        strategy=strategy, default_root_dir=root, limit_train_batches=2, limit_val_batches=1, **{"max_epochs": 1, **options}
    )
    torch.manual_seed(2)
    trainer.fit(module, data(), data())
    return trainer, module


@pytest.fixture
def does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the fit the model stays on disk: staging would be larger than a model that is quick to
    test.
    """
    monkeypatch.setattr(Session, "_fits_memory", lambda self: False)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.usefixtures("does_not_fit")
def test_generation_in_callbacks_and_after_the_fit_follows_the_plan(precision: Any, tmp_path: Path) -> None:
    expected = fit(tmp_path / "plain", "auto", precision=precision, callbacks=[Samples()])[1]
    strategy = HeteroOffloadStrategy(streams(4))
    trainer, module = fit(tmp_path / "ours", strategy, precision=precision, callbacks=[Samples()])
    assert same(module.found, expected.found)
    streamed = LAYERS - 4 + 2
    after = module.reads[1:]  # the first one finds what was loaded first
    assert max(after) <= ((TOKENS + 1) * streamed + 2) * BLOCK_BYTES  # layers that stay come back after a step
    with torch.no_grad():
        assert same(module.generate(), expected.generate())
        assert same(module.generate(), expected.generate())
    assert module.reads[-1] == TOKENS * streamed * BLOCK_BYTES
    for (name, ours), (_, theirs) in zip(module.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(ours.detach().clone(), theirs), name
    trainer.fit_loop.max_epochs = expected.trainer.fit_loop.max_epochs = 2
    for one in (module, expected):  # it trains on
        torch.manual_seed(5)
        one.trainer.fit(one, data(), data())
    assert same(module.found, expected.found)


class Scales(pl.Callback):
    """Generates with other weights for a while, set in ways that averaging callbacks use."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.generates = partial(generate, max_new_tokens=2)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        pl_module.generate()
        old = [param.data for param in pl_module.parameters()]
        kept = [value.clone() for value in old]
        for param in pl_module.parameters():
            param.data = param.data * 1.5
        pl_module.generate()
        with torch.no_grad():
            for param in pl_module.model.model.layers[2:5].parameters():
                param.mul_(0.7)
        pl_module.generate()
        for param, value in zip(pl_module.parameters(), kept, strict=True):
            param.data.copy_(value)
        pl_module.generate()


def on_device(weights: str, **options: Any) -> Any:
    """Layers on a tier below the device, with room for some; or all on the device."""
    if weights == "device":
        return HeteroOffloadStrategy("resident", device=EmulatedDevice(memory="8MiB", seed=4), **options)
    rows = (BlockPlan(name="*layers.*", weights=Tier(weights)), BlockPlan(name="*"))
    cache = 4 * ON_DEVICE_BYTES if weights == "disk" else None
    plan = Plan(name="below", blocks=rows, device_cache_bytes=4 * ON_DEVICE_BYTES, host_cache_bytes=cache)
    return HeteroOffloadStrategy(plan, device=EmulatedDevice(memory="8MiB", seed=4), **options)


@pytest.mark.parametrize(
    ("callback", "weights", "options"),
    [
        (Samples, "disk", {}),
        (Scales, "disk", {"gradient_clip_val": 0.5}),
        (Scales, "disk", {"max_epochs": 2, "accumulate_grad_batches": 2}),
        (Scales, "host", {"accumulate_grad_batches": 2}),
        (Scales, "host", {"precision": "bf16-mixed"}),
        (Scales, "device", {}),
    ],
)
def test_callbacks_generate_on_a_device_with_the_same_bits(
    callback: Any, weights: str, options: dict[str, Any], tmp_path: Path
) -> None:
    expected = fit(tmp_path / "plain", "auto", callbacks=[callback()], **options)[1]
    module = fit(tmp_path / "ours", on_device(weights), callbacks=[callback()], **options)[1]
    assert same(module.found, expected.found)
    for (name, ours), (_, theirs) in zip(module.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(ours.detach().clone(), theirs), name


def test_callbacks_on_a_device_generate_by_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights come on demand."""
    on_demand, plain = [0], DeviceResidency.unforeseen

    def counted(residency: DeviceResidency, block: Block) -> bool:
        on_demand[-1] += 1
        return plain(residency, block)

    class Counts(Samples):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            on_demand.append(0)
            super().on_fit_start(trainer, pl_module)
            on_demand.append(0)

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            self.on_fit_start(trainer, pl_module)

        on_validation_epoch_end = on_train_epoch_end = on_fit_start

    monkeypatch.setattr(DeviceResidency, "unforeseen", counted)
    fit(tmp_path, on_device("disk"), callbacks=[Counts()], accumulate_grad_batches=2)
    assert on_demand[1::2] == [0] * 5


def test_without_a_fit_more_layers_stay(tmp_path: Path) -> None:
    """There are no gradients and no optimizer state, under the same budget."""
    with pytest.raises(OutOfMemoryBudgetError) as refused:
        fit(tmp_path, HeteroOffloadStrategy("disk", host_memory="1B"))
    budget = refused.value.needed_bytes
    reads = [
        fit(tmp_path, HeteroOffloadStrategy("disk", host_memory=budget))[1].reads[-1],
        predict(tmp_path, llama, generate, HeteroOffloadStrategy("disk", host_memory=budget)).reads[-1],
    ]
    assert reads[0] >= TOKENS * LAYERS * BLOCK_BYTES > reads[1]


@pytest.mark.usefixtures("does_not_fit")
def test_training_reads_the_same_bytes_after_a_validation(tmp_path: Path) -> None:
    """A validation leaves other layers in memory: only the step after it may read more."""
    steps: list[list[int]] = []

    class Counts(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            self.before = bytes_read(pl_module)

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            steps[-1].append(bytes_read(pl_module) - self.before)

    for limit in (0, 1):
        steps.append([])
        trainer = quiet_trainer(
            strategy=HeteroOffloadStrategy(streams(3)), default_root_dir=tmp_path / str(limit), max_epochs=2, callbacks=[Counts()],
            limit_val_batches=limit, limit_train_batches=3, num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(Lit(llama), data(), data())
    without, validated = steps
    steady = without[-1]
    assert without[2:] == [steady] * 4
    assert validated[2] == validated[4] == validated[5] == steady
    assert validated[3] <= steady + 3 * BLOCK_BYTES


@pytest.mark.usefixtures("does_not_fit")
def test_a_parked_model_still_refuses_to_lose_gradients(tmp_path: Path) -> None:
    _, module = fit(tmp_path, HeteroOffloadStrategy(streams(3)))
    with pytest.raises(OffloadedAccessError, match="gradient would be lost"):
        module.model(input_ids=PROMPT, labels=PROMPT)
    with torch.no_grad():
        module.model(input_ids=PROMPT, labels=PROMPT)


@pytest.mark.usefixtures("does_not_fit")
def test_another_trainer_may_take_a_parked_model(tmp_path: Path) -> None:
    _, expected = fit(tmp_path / "plain", "auto")
    trainer, module = fit(tmp_path / "ours", HeteroOffloadStrategy(streams(3)))
    for one, strategy in ((expected, "auto"), (module, HeteroOffloadStrategy(streams(4)))):
        other = quiet_trainer(strategy=strategy, default_root_dir=tmp_path / "other", limit_predict_batches=2)
        other.predict(one, data(), return_predictions=False)
    assert same(module.found, expected.found)
    assert module.trainer is not trainer


class Branches(nn.Module):
    """Every other forward ends early."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers[: 3 + 3 * (self.calls % 2)]:
            x = torch.tanh(layer(x))
        return x


def test_passes_that_end_early_keep_what_stays(tmp_path: Path) -> None:
    """A short pass between long ones does not change what stays: its layers are a part of
    theirs.
    """

    def build() -> Branches:
        torch.manual_seed(0)
        return Branches()

    def passes(model: Any) -> list[Tensor]:
        return [model(torch.ones(1, 64)) for _ in range(8)]

    page = 64 * 64 * 4
    strategy = HeteroOffloadStrategy(streams(4, block_bytes=page), block_cls=nn.Linear)
    module = predict(tmp_path, build, passes, strategy)
    expected = predict(tmp_path, build, passes, "auto")
    assert same(module.found, expected.found)
    assert module.reads[-1] <= 8 * 4 * page
