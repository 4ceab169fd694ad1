"""Models made on the meta device: their own ``reset_parameters`` give them content block by block,
or they are refused by name.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.models import LitModel, Outcome, Recipe, assert_same, outcome, quiet_trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError
from lightning_hetero.strategies import HeteroOffloadStrategy

WIDTH, WORDS = 16, 23


class Rotary(nn.Module):
    """Owns nothing but a buffer, which its constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phases", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.phases.copy_(torch.arange(WIDTH) / WIDTH)


class Layer(nn.Module):
    """A block that changes what its children set, and whose norm has buffers, one of them of
    integers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 0.5)
        nn.init.normal_(self.down.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x.transpose(1, 2)).transpose(1, 2))))


class Lit(pl.LightningModule):
    """Built in ``configure_model``, on ``device``."""

    def __init__(self, device: str, change: Callable[[Lit], None] = lambda module: None) -> None:
        super().__init__()
        self.where, self.change = device, change
        self.losses: list[Tensor] = []
        self.recipe = Recipe()

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            torch.manual_seed(7)
            with torch.device(self.where):
                self.build()
        torch.manual_seed(7)

    def build(self) -> None:
        self.embed, self.rotary = nn.Embedding(WORDS, WIDTH), Rotary()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)
        self.change(self)

    def on_train_start(self) -> None:
        torch.manual_seed(11)

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1]) + self.rotary.phases
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def batches() -> Any:
    words = torch.randint(0, WORDS, (12, 6), generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(words, batch_size=2)


def fit(module: Any, strategy: Any, root: Path, *, steps: int = 3, **options: Any) -> Outcome:
    trainer = quiet_trainer(strategy=strategy, max_steps=steps, default_root_dir=root, limit_val_batches=0)
    trainer.fit(module, batches(), **options)
    return outcome(trainer, module)


def hetero(**options: Any) -> Any:
    return HeteroOffloadStrategy(**{"plan": "disk", **options})


@pytest.mark.parametrize("plan", ["resident", "host", "disk"])
def test_it_starts_as_if_it_had_been_built_in_memory(plan: str, tmp_path: Path) -> None:
    expected = fit(Lit("cpu"), "auto", tmp_path)
    assert_same(fit(Lit("meta"), hetero(plan=plan), tmp_path), expected)


def test_init_module_with_empty_init_makes_it_on_the_meta_device(tmp_path: Path) -> None:
    expected = fit(Lit("cpu"), "auto", tmp_path)
    trainer = quiet_trainer(strategy=hetero(), max_steps=3, default_root_dir=tmp_path, limit_val_batches=0)
    module = Lit("cpu")
    with trainer.init_module(empty_init=True):
        module.build()
    assert all(p.is_meta for p in module.parameters())
    trainer.fit(module, batches())
    assert_same(outcome(trainer, module), expected)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    def tie(module: Lit) -> None:
        module.head.weight = module.embed.weight

    module = Lit("meta", tie)
    fit(module, hetero(), tmp_path)
    assert module.head.weight is module.embed.weight
    assert not any(loss.isnan() for loss in module.losses)


@pytest.mark.parametrize("inside", [True, False])
def test_attention_of_torch_sets_itself(inside: bool, tmp_path: Path) -> None:
    def add_attention(module: Lit) -> None:
        for layer in module.layers if inside else [module]:
            layer.attention = nn.MultiheadAttention(WIDTH, 2)

    module = Lit("meta", add_attention)
    fit(module, hetero(), tmp_path, steps=1)
    attention = module.layers[0].attention if inside else module.attention
    assert attention.in_proj_weight.isfinite().all()
    assert attention.in_proj_weight.std() > 0
    assert not attention.out_proj.bias.any()  # which the attention sets, not its child


def test_parts_with_content_keep_it(tmp_path: Path) -> None:
    adapters = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    before = [a.weight.detach().clone() for a in adapters]

    def add_adapters(module: Lit) -> None:
        for layer, adapter in zip(module.layers, adapters, strict=True):
            layer.adapter = adapter.requires_grad_(False)

    fit(Lit("meta", add_adapters), hetero(), tmp_path, steps=1)
    assert all(torch.equal(a.weight, b) for a, b in zip(adapters, before, strict=True))


# ---- refusals ------------------------------------------------------------------------------------


class Forgetful(nn.Module):
    """Sets its weight, not its bias and not its buffer."""

    def __init__(self, forgets: str) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(3))
        self.register_buffer("count", torch.zeros(3, dtype=torch.long))
        self.forgets = forgets

    def reset_parameters(self) -> None:
        for name in {"weight", "bias", "count"} - {self.forgets}:
            getattr(self, name).data.zero_()


class Mask(nn.Module):
    """A buffer that only the constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(4, 4).tril())


def refused(words: list[str], change: Callable[[Lit], None], root: Path) -> None:
    module = Lit("meta", change)
    with pytest.raises(ConfigError) as caught:
        fit(module, hetero(), root)
    assert not [w for w in words if w not in str(caught.value)], str(caught.value)
    assert all(p.is_meta for p in module.parameters())
    assert not list(root.iterdir())


def test_a_module_that_cannot_set_its_parameters_is_refused(tmp_path: Path) -> None:
    def add(module: Lit) -> None:
        module.temperature = nn.Parameter(torch.ones(1))

    refused(["'(root)'", "Lit has no reset_parameters()", "temperature", "empty_init"], add, tmp_path)


def test_a_module_that_cannot_set_its_buffers_is_refused(tmp_path: Path) -> None:
    def add(module: Lit) -> None:
        module.layers[1].causal = Mask()

    refused(["'layers.1.causal'", "Mask has no reset_parameters()", "set mask", "on the CPU"], add, tmp_path)


@pytest.mark.parametrize("forgets", ["bias", "count"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_reset_that_forgets_something_is_refused(tmp_path: Path, forgets: str, inside: bool) -> None:
    def add(module: Lit) -> None:
        owner = module.layers[2] if inside else module
        owner.extra = Forgetful(forgets)

    name = "layers.2.extra" if inside else "extra"
    refused(["Forgetful.reset_parameters()", f"'{name}'", f"{forgets!r} unset"], add, tmp_path)


def test_a_common_model_without_reset_parameters_is_refused_with_the_reason(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = LitModel(Recipe())
    with pytest.raises(ConfigError, match="has no reset_parameters"):
        fit(module, hetero(), tmp_path)


def test_a_refused_budget_leaves_it_on_the_meta_device_to_try_again(tmp_path: Path) -> None:
    expected, module = fit(Lit("cpu"), "auto", tmp_path), Lit("meta")
    with pytest.raises(OutOfMemoryBudgetError):
        fit(module, hetero(host_memory="1B"), tmp_path)
    assert all(p.is_meta for p in module.parameters())
    assert_same(fit(module, hetero(), tmp_path), expected)


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Outcome]:
    """A plain checkpoint after two steps, with something in it that is not weights, and the run's
    outcome after four.
    """
    path = tmp_path / "plain.ckpt"
    trainer = quiet_trainer(strategy="auto", max_steps=2, default_root_dir=tmp_path, limit_val_batches=0)
    trainer.fit(Lit("cpu"), batches())
    trainer.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=False)
    torch.save({**checkpoint, "notes": Namespace(by="the user")}, path)
    return path, fit(Lit("cpu"), "auto", tmp_path, steps=4, ckpt_path=path, weights_only=False)


@pytest.mark.parametrize("plan", ["host", "disk"])
def test_training_resumes_from_a_checkpoint(plan: str, saved: tuple[Path, Outcome], tmp_path: Path) -> None:
    path, expected = saved
    assert_same(fit(Lit("meta"), hetero(plan=plan), tmp_path, steps=4, ckpt_path=path, weights_only=False), expected)


def test_only_weights_are_loaded_where_that_is_asked_for(saved: tuple[Path, Outcome], tmp_path: Path) -> None:
    with pytest.raises(Exception, match="Weights only load failed"):
        fit(Lit("meta"), hetero(), tmp_path, steps=4, ckpt_path=saved[0], weights_only=True)


def test_validation_reads_a_checkpoint(saved: tuple[Path, Outcome], tmp_path: Path) -> None:
    losses = []
    for strategy, device in (("auto", "cpu"), (hetero(), "meta")):
        module = Lit(device)
        trainer = quiet_trainer(strategy=strategy, default_root_dir=tmp_path, limit_val_batches=2)
        trainer.validate(module, batches(), ckpt_path=saved[0], verbose=False, weights_only=False)
        losses.append(module.losses)
    assert len(losses[0]) == 2
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def test_a_checkpoint_of_another_model_is_refused_as_in_lightning(saved: tuple[Path, Outcome], tmp_path: Path) -> None:
    def add(module: Lit) -> None:
        module.layers[0].more = nn.Linear(2, 2)

    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict"):
        fit(Lit("meta", add), hetero(), tmp_path, steps=4, ckpt_path=saved[0], weights_only=False)
    assert not list(tmp_path.glob("lightning-hetero-*"))
