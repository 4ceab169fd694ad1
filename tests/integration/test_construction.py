"""A model that ``configure_model`` or ``init_module`` builds without the meta device, bit for bit
as plain Lightning.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.models import LitModel as Base
from support.models import Outcome, Recipe, assert_same, data, outcome, quiet_trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack

from lightning_hetero.runtime import construction
from lightning_hetero.strategies import HeteroOffloadStrategy, offload

SHARE = 2048


@pytest.fixture(autouse=True)
def small_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """All parameters count, and few of them fit."""
    monkeypatch.setattr(construction, "_SMALL_BYTES", 1)
    monkeypatch.setattr(offload, "host_budget", lambda *_: 2 * SHARE)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[nn.Parameter]:
    """The parameters that went to the file."""
    found: list[nn.Parameter] = []
    move = construction.Construction._move

    def note(self: Any, param: nn.Parameter) -> None:
        move(self, param)
        found.append(param)
        assert param in self
        resident = self._waiting_bytes + self._touched_bytes
        assert resident <= 2 * SHARE + max(p.nbytes for p in found) or not self._touched

    monkeypatch.setattr(construction.Construction, "_move", note)
    return found


def initialize_all(module: nn.Module) -> None:
    """As ``post_init`` of Hugging Face does it: once everything is there."""

    def init(part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            part.weight.data.normal_(std=0.3)
        elif isinstance(part, nn.Embedding):
            nn.init.uniform_(part.weight, -0.5, 0.5)

    module.apply(init)


def resize_embedding(module: Any) -> None:
    old = module.model.embed
    new = nn.Embedding(old.num_embeddings + 5, old.embedding_dim)
    with torch.no_grad():
        new.weight[: old.num_embeddings] = old.weight
    module.model.embed = new


def tie(module: Any) -> None:
    module.model.head.weight = module.model.embed.weight
    nn.init.normal_(module.model.head.weight, std=0.1)


def add_copies(module: Any) -> None:
    module.model.blocks = nn.ModuleList([copy.deepcopy(module.model.blocks[0]) for _ in range(5)])
    with torch.no_grad():
        for index, block in enumerate(module.model.blocks):
            block.up.weight += index


def change_through_views(module: Any) -> None:
    """Other tensors see the same memory, and what is written through them counts."""
    values = torch.randn(module.model.head.weight.shape)
    module.model.head.weight = nn.Parameter(values)
    view, row = module.model.blocks[1].up.weight.data, module.model.blocks[2].down.weight.detach()[0]
    more = [nn.Parameter(torch.randn(64, 64)) for _ in range(4)]  # everything that can has left by now
    values.mul_(0.5)
    view.add_(1)
    row.zero_()
    array = torch.randn(37, 24).numpy()
    module.model.embed.weight = nn.Parameter(torch.from_numpy(array))
    more.append(nn.Parameter(torch.randn(64, 64)))
    array += 1


def transpose(module: Any) -> None:
    module.model.head.weight = nn.Parameter(torch.randn(24, 37).t())


def convert(module: Any) -> None:
    module.model.head = nn.Linear(24, 37, bias=False, dtype=torch.float64).to(torch.get_default_dtype())
    module.model.blocks[0].up.double().to(torch.get_default_dtype())


CHANGES: dict[str, Callable[[Any], None]] = {
    f.__name__: f for f in (initialize_all, resize_embedding, tie, add_copies, change_through_views, transpose, convert)
}


class Lit(Base):
    """Builds in ``configure_model``."""

    def __init__(self, change: Callable[[Any], None] = lambda _: None) -> None:
        pl.LightningModule.__init__(self)
        self.recipe, self.change = Recipe(), change
        self.losses: list[Tensor] = []
        self.random: Tensor | None = None
        self.built = False

    def configure_model(self) -> None:
        if not self.built:
            self.build()

    def build(self) -> None:
        self.built = True
        torch.manual_seed(5)
        made = Base(self.recipe)
        self.model = made.model
        self.change(self)
        self.random = torch.get_rng_state()

    def on_train_start(self) -> None:
        torch.manual_seed(11)


def fit(module: Lit, strategy: Any, root: Path, **options: Any) -> Outcome:
    trainer = quiet_trainer(strategy=strategy, max_steps=3, default_root_dir=root, limit_val_batches=0, **options)
    trainer.fit(module, data())
    return outcome(trainer, module)


@pytest.mark.parametrize(("change", "precision"), [*((name, "32-true") for name in CHANGES), ("convert", "64-true")])
def test_it_is_built_bit_for_bit_as_without_the_strategy(
    change: str, precision: Any, tmp_path: Path, moved: list[nn.Parameter]
) -> None:
    plain, module = Lit(CHANGES[change]), Lit(CHANGES[change])
    expected = fit(plain, "auto", tmp_path, precision=precision)
    assert not moved
    assert_same(fit(module, HeteroOffloadStrategy(plan="disk"), tmp_path, precision=precision), expected)
    assert len(moved) > 8
    assert module.random is not None
    assert torch.equal(module.random, plain.random)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("plan", ["resident", "host", "disk"])
def test_init_module_and_every_plan_do_the_same(plan: str, tmp_path: Path, moved: list[nn.Parameter]) -> None:
    expected = fit(Lit(initialize_all), "auto", tmp_path)
    module = Lit(initialize_all)
    trainer = quiet_trainer(
        strategy=HeteroOffloadStrategy(plan=plan, disk_path=None), max_steps=3, default_root_dir=tmp_path, limit_val_batches=0
    )
    with trainer.init_module():
        module.build()
    assert moved
    trainer.fit(module, data())
    assert_same(outcome(trainer, module), expected)


def placed(module: Lit, strategy: Any, root: Path, precision: Any) -> dict[str, Tensor]:
    """The weights as a fit places them, without a step."""
    trainer = quiet_trainer(strategy=strategy, max_steps=0, default_root_dir=root, limit_val_batches=0, precision=precision)
    trainer.fit(module, data())
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("change", "precision"),
    # NumPy, through which one of them writes, has no bfloat16.
    [(c, p) for c in CHANGES for p in ("bf16-true", "16-true") if (c, p) != ("change_through_views", "bf16-true")],
)
def test_16_bit_weights_begin_as_without_the_strategy(
    change: str, precision: Any, tmp_path: Path, moved: list[nn.Parameter]
) -> None:
    plain, module = Lit(CHANGES[change]), Lit(CHANGES[change])
    expected = placed(plain, "auto", tmp_path, precision)
    assert not moved
    got = placed(module, HeteroOffloadStrategy(plan="disk"), tmp_path, precision)
    assert len(moved) > 3
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name
    assert module.random is not None
    assert torch.equal(module.random, plain.random)
    assert not list(tmp_path.iterdir())


def test_16_bit_weights_are_converted_within_the_share(tmp_path: Path, moved: list[nn.Parameter]) -> None:
    """``convert_module`` gives parameters of another dtype new memory; from there they go to the
    file again.
    """

    def keep_wide(module: Any) -> None:
        module.model.blocks[0].up = nn.Linear(24, 51, dtype=torch.float32)

    weights = [placed(Lit(keep_wide), s, tmp_path, "bf16-true") for s in ("auto", HeteroOffloadStrategy(plan="disk"))]
    assert weights[0]["model.blocks.0.up.weight"].dtype is torch.bfloat16
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert sum(p.shape == (51, 24) for p in moved) == 5, "three, the wide one that takes the place of one, and that one again"


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_context_stays(fails: bool, tmp_path: Path) -> None:
    made = nn.Parameter.__dict__["__new__"]
    modes = len(_get_current_function_mode_stack())
    trainer = quiet_trainer(strategy=HeteroOffloadStrategy(plan="disk"), default_root_dir=tmp_path)

    def build() -> None:
        with trainer.init_module():
            assert nn.Parameter.__dict__["__new__"] is not made
            Lit().build()
            if fails:
                raise ValueError("from the constructor")

    if fails:
        with pytest.raises(ValueError, match="from the constructor"):
            build()
    else:
        build()
    assert nn.Parameter.__dict__["__new__"] is made
    assert len(_get_current_function_mode_stack()) == modes


def test_a_model_that_fits_stays_in_memory(tmp_path: Path, moved: list[nn.Parameter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "host_budget", lambda *_: 2**30)
    fit(Lit(), HeteroOffloadStrategy(plan="disk"), tmp_path)
    assert not moved


def test_a_built_model_computes_before_it_is_placed(tmp_path: Path, moved: list[nn.Parameter]) -> None:
    trainer = quiet_trainer(strategy=HeteroOffloadStrategy(plan="disk"), default_root_dir=tmp_path)
    module, plain = Lit(), Lit()
    with trainer.init_module():
        module.build()
    plain.build()
    tokens = torch.arange(6).view(1, 6)
    for model in (module.model, plain.model):
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    assert moved
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(copy.deepcopy(module).parameters(), plain.parameters(), strict=True))
