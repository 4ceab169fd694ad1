"""Small models with everything that a partition can trip over, and a run of them under any
strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY = 37


@dataclass(frozen=True)
class Shape:
    """A model's options; the default is a plain stack of blocks."""

    layers: int = 3
    width: int = 24
    dropout: float = 0.0
    tied: bool = False
    frozen: tuple[int, ...] = ()
    half_frozen: bool = False
    few: bool = False  # of the blocks only the norms train: each block becomes two
    shared: bool = False
    recompute: str = ""
    unused: bool = False
    counting: bool = True  # forwards change a buffer, so that they cannot be computed again
    odd: bool = False  # blocks have a scalar, a parameter without elements, and one that is transposed
    early_norm: bool = False  # the norm comes before the blocks, although the model has it behind them
    skips: bool = False  # every other forward leaves out the last block, and the root's positions


class MlpBlock(nn.Module):
    """A residual block whose sizes are not multiples of any vector width."""

    def __init__(self, width: int, dropout: float, *, counting: bool = True, odd: bool = False) -> None:
        super().__init__()
        self.counting, self.odd = counting, odd
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 3)
        self.down = nn.Linear(2 * width + 3, width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        if odd:
            self.gain = nn.Parameter(torch.tensor(0.9))
            self.nothing = nn.Parameter(torch.zeros(0, 3))
            self.mix = nn.Parameter(0.1 * torch.randn(3, width).t())

    def forward(self, x: Tensor) -> Tensor:
        if self.counting:
            self.calls += 1
        if self.odd:
            x = self.gain * x + self.nothing.sum() + x @ self.mix @ self.mix.t()
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Embedding, positions owned by the root, blocks, norm, head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Parameter(0.1 * torch.randn(5, shape.width))
        self.blocks = nn.ModuleList(
            MlpBlock(shape.width, shape.dropout, counting=shape.counting, odd=shape.odd) for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight
        for index in shape.frozen:
            self.blocks[index % shape.layers].requires_grad_(False)
        if shape.half_frozen:
            self.blocks[0].up.requires_grad_(False)
        if shape.few:
            self.blocks.requires_grad_(False)
            for block in self.blocks:
                block.norm.requires_grad_(True)
        if shape.unused:
            self.spare = nn.Linear(3, 3)
        self.forwards = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.forwards += 1
        x = self.embed(tokens)
        if not self.shape.skips or self.forwards % 2:
            x = x + self.position
        if self.shape.early_norm:
            x = self.norm(x)
        for block in self.blocks[: -1 if self.shape.skips and not self.forwards % 2 else None]:
            reentrant = self.shape.recompute == "reentrant"
            x = checkpoint(block, x, use_reentrant=reentrant) if self.shape.recompute else block(x)
        if self.shape.shared:
            x = self.blocks[0](x)
        return self.head(x if self.shape.early_norm else self.norm(x))


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run."""

    shape: Shape = field(default_factory=Shape)
    steps: int = 3
    accumulate: int = 1
    clip: float | None = None
    clip_by: str = "norm"
    groups: bool = False
    schedule: str = ""
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda groups: torch.optim.AdamW(groups, lr=3e-3, fused=True)
    precision: str = "32-true"
    validate: bool = False
    left_out: bool = False  # the optimizer does not have the biases of the blocks, which have gradients all the same


class LitModel(pl.LightningModule):
    """The model as a user writes it."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.model = Model(recipe.shape)
        self.losses: list[Tensor] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.losses.append(self.loss(batch))

    def configure_optimizers(self) -> Any:
        named = ((n, p) for n, p in self.named_parameters() if p.requires_grad)
        params = [p for n, p in named if not (self.recipe.left_out and n.endswith("up.bias"))]
        groups: Any = params
        if self.recipe.groups:
            groups = [
                {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0, "lr": 1e-3},
            ]
        optimizer = self.recipe.optimizer(groups)
        if not self.recipe.schedule:
            return optimizer
        if self.recipe.schedule == "onecycle":
            scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=self.recipe.steps + 1)
        else:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Manual(LitModel):
    """Optimizes by hand, as the documentation of Lightning writes it."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        params = [*self.model.blocks[0].parameters(), self.model.head.weight]  # the block may be frozen, or left out
        self.losses += [loss.detach().clone(), next(p.grad for p in params if p.grad is not None).norm()]
        optimizer.step()


def data(batches: int = 8, *, seed: int = 0) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (2 * batches, 6), generator=generator)
    return DataLoader(TensorDataset(tokens), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(seed))


@dataclass
class Outcome:
    """What a run leaves."""

    losses: list[Tensor]
    weights: dict[str, Tensor]
    state: list[dict[str, Any]]


def quiet_trainer(**options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "num_sanity_val_steps": 0, "max_epochs": 1000, "log_every_n_steps": 1,
    }  # fmt: skip
    return pl.Trainer(**{**defaults, **options})


_plain: dict[Hashable, Outcome] = {}
_MOST_PLAIN = 32  # outcomes; tests of one recipe follow each other


def once(key: Hashable, train: Callable[[], Outcome]) -> Outcome:
    """What plain Lightning leaves, which many plans are compared with: trained once, while the key
    is the same.
    """
    if key not in _plain:
        _plain[key] = train()
        if len(_plain) > _MOST_PLAIN:
            del _plain[next(iter(_plain))]
    found = _plain[key]
    return Outcome([*found.losses], {**found.weights}, [*found.state])


def run(
    recipe: Recipe,
    strategy: Any,
    tmp_path: Any,
    *,
    prepare: Callable[[LitModel], None] | None = None,
    module_class: type[LitModel] = LitModel,
    **options: Any,
) -> Outcome:
    """Trains the recipe's model from one seed; under plain Lightning without further options only
    :func:`once`.
    """
    if strategy == "auto" and prepare is None and not options:
        key = (recipe, module_class, torch.get_num_threads(), torch.get_default_dtype())
        return once(key, partial(_run, recipe, strategy, tmp_path, module_class=module_class))
    return _run(recipe, strategy, tmp_path, prepare, module_class, **options)


def _run(
    recipe: Recipe,
    strategy: Any,
    tmp_path: Any,
    prepare: Callable[[LitModel], None] | None = None,
    module_class: type[LitModel] = LitModel,
    **options: Any,
) -> Outcome:
    torch.manual_seed(7)
    module = module_class(recipe)
    if prepare is not None:
        prepare(module)
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=strategy, max_steps=recipe.steps, accumulate_grad_batches=recipe.accumulate, gradient_clip_val=recipe.clip,
        gradient_clip_algorithm=recipe.clip_by if recipe.clip else None, precision=recipe.precision, default_root_dir=tmp_path,
        limit_val_batches=2 if recipe.validate else 0, val_check_interval=1 if recipe.validate else None,
        check_val_every_n_epoch=None if recipe.validate else 1, **options,
    )  # fmt: skip
    trainer.fit(module, data(), data(2, seed=1) if recipe.validate else None)
    return outcome(trainer, module)


def outcome(trainer: pl.Trainer, module: LitModel) -> Outcome:
    weights = {n: v.clone() for n, v in module.state_dict().items()}
    states = [o.state_dict() for o in trainer.optimizers]
    return Outcome(losses=module.losses, weights=weights, state=[inner for s in states for inner in s.get("inner", [s])])


def on_host(found: Outcome) -> Outcome:
    """With all its tensors in host memory."""
    losses, weights, state = tree_map_only(Tensor, lambda t: t.cpu(), (found.losses, found.weights, found.state))
    return Outcome(losses, weights, state)


def difference(got: Outcome, expected: Outcome) -> str:
    """What :func:`assert_same` says, and nothing where all is the same."""
    try:
        assert_same(got, expected)
    except AssertionError as error:
        return repr(error)
    return ""


def assert_same(got: Outcome, expected: Outcome) -> None:
    """Bit for bit: losses, weights, buffers, optimizer state and groups."""
    assert len(got.losses) == len(expected.losses)
    for i, (a, b) in enumerate(zip(got.losses, expected.losses, strict=True)):
        assert torch.equal(a, b), f"loss {i}: {a} != {b}"
    assert got.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        assert got.weights[name].dtype == value.dtype, name
        assert torch.equal(got.weights[name], value), f"weights of {name} differ"
    for ours, theirs in zip(got.state, expected.state, strict=True):
        assert ours.keys() == theirs.keys()
        if not theirs:
            continue  # Lightning's stand-in where there is no optimizer
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()
        for number, entry in theirs["state"].items():
            assert ours["state"][number].keys() == entry.keys()
            for key, value in entry.items():
                mine = ours["state"][number][key]
                same = torch.equal(mine, value) if isinstance(value, Tensor) else mine == value
                assert same, f"optimizer state {number}.{key} differs"
