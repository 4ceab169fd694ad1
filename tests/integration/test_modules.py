"""Modules of every kind under the plans: attention, recurrence, convolution, other dtypes and
memory formats, compiled models.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.models import LitModel, Outcome, Recipe, Shape, data, once, outcome, quiet_trainer, run
from support.strategies import assert_same_as_plain, make_strategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

KINDS = ["host", "disk", "tight"]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True)
        self.embed, self.encoder, self.head = nn.Embedding(37, 16), nn.TransformerEncoder(layer, 3), nn.Linear(16, 37)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)))


class Attention(nn.Module):
    """Attention whose keys have another width, which gives it separate projections, and attention
    as usual.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(37, 16), nn.Linear(16, 37)
        self.layers = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(3))
        self.across = nn.MultiheadAttention(16, 4, kdim=8, vdim=8, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return self.head(self.across(x, x[..., :8], x[..., 8:])[0])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(37, 16), nn.Linear(16, 37)
        self.layers = nn.ModuleList(nn.LSTM(16, 16, batch_first=True) for _ in range(2))
        self.gru = nn.GRU(16, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.join = nn.Linear(32, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(self.join(self.gru(x)[0]))


class Convolutional(nn.Module):
    """Convolutions in channels-last order, batch norm with running statistics, a transposed
    convolution.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(37, 8), nn.Linear(8, 37)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)))
        self.up = nn.ConvTranspose2d(8, 8, 1)
        self.to(memory_format=torch.channels_last)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(1, 2)[..., None].to(memory_format=torch.channels_last)
        return self.head(self.up(self.blocks(x)).squeeze(-1).transpose(1, 2))


class Parametrized(nn.Module):
    """Weights computed from other weights: weight and spectral norm, a module shared by two names,
    a sequence of scalars.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(37, 16), nn.Linear(16, 37)
        self.blocks = nn.ModuleList(parametrizations.weight_norm(nn.Linear(16, 16)) for _ in range(3))
        self.spectral = parametrizations.spectral_norm(nn.Linear(16, 16))
        self.alias = self.spectral
        self.scales = nn.ParameterList([nn.Parameter(torch.tensor(1.0 + i)) for i in range(3)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = x + scale * block(x).tanh()
        return self.head(self.alias(x))


class Nested(nn.Module):
    """Blocks inside blocks, a block without parameters, a parameter without elements, keyword
    arguments, a dict as output.
    """

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
            self.empty = nn.Parameter(torch.zeros(0, 4))

        def forward(self, x: Tensor, *, scale: float) -> dict[str, Any]:
            for layer in self.inner:
                x = x + scale * layer(x).relu()
            return {"x": x + self.empty.sum(), "nothing": None}

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(37, 16), nn.Linear(16, 37)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = self.drop(block(x, scale=0.5 + i)["x"])
        return self.head(x)


class Lit(LitModel):
    def __init__(self, model: nn.Module, compiled: bool = False) -> None:
        super().__init__(Recipe())
        self.model = model
        if compiled:
            self.model.compile(backend="aot_eager")

    def loss(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def fit(strategy: Any, folder: Path, kind_of_model: Any, dtype: torch.dtype = torch.float32, *, compiled: bool = False) -> Outcome:
    def train() -> Outcome:
        torch.manual_seed(7)
        module = Lit(kind_of_model().to(dtype), compiled)
        trainer = quiet_trainer(strategy=strategy, max_epochs=2, default_root_dir=folder)
        trainer.fit(module, data(3), data(1, seed=1))
        return outcome(trainer, module)

    return once((fit, kind_of_model, dtype, compiled), train) if strategy == "auto" else train()


MODELS = [Encoder, Attention, Recurrent, Convolutional, Parametrized, Nested]


@pytest.mark.parametrize(
    ("kind", "kind_of_model"), [*product(KINDS, MODELS), *(("device", m) for m in (Recurrent, Convolutional, Parametrized, Nested))]
)
def test_modules(kind: str, kind_of_model: Any, tmp_path: Path) -> None:
    assert_same_as_plain(kind, lambda strategy: fit(strategy, tmp_path, kind_of_model))


class Reading(pl.Callback):
    """Looks at all weights and state between batches, and changes the weights."""

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        states = sorted(trainer.optimizers[0].state_dict()["state"].items())
        module.losses += [state["exp_avg"].sum() for _, state in states] + [p.sum() for p in module.parameters()]
        for p in module.parameters():
            p.mul_(0.999)


@pytest.mark.parametrize("kind", [*KINDS, "device"])
def test_parameters_of_any_shape_are_read_and_written(kind: str, tmp_path: Path) -> None:
    recipe = Recipe(shape=Shape(odd=True))
    assert_same_as_plain(kind, lambda strategy: run(recipe, strategy, tmp_path, callbacks=[Reading()]))


@pytest.mark.parametrize("kind", KINDS)
def test_strides_are_kept(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    module = Lit(Convolutional())
    strategy = make_strategy(kind, lambda s: fit(s, tmp_path, Convolutional))
    quiet_trainer(strategy=strategy, max_epochs=1, default_root_dir=tmp_path).fit(module, data(2))
    assert module.model.blocks[0][0].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", KINDS)
def test_double_precision(kind: str, tmp_path: Path) -> None:
    """The native kernels are for 32 and 16 bits; torch's own code updates 64."""
    assert_same_as_plain(kind, lambda strategy: fit(strategy, tmp_path, Encoder, torch.float64))


@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_compiled_model(kind: str, tmp_path: Path) -> None:
    assert_same_as_plain(kind, lambda strategy: fit(strategy, tmp_path, Nested, compiled=True))


@pytest.mark.parametrize("kind", ["disk", "device"])
def test_a_compiled_lightning_module(kind: str, tmp_path: Path) -> None:
    """``torch.compile(lightning_module)``, as Lightning unpacks it."""

    def train(strategy: Any) -> Outcome:
        def trains() -> Outcome:
            torch.manual_seed(7)
            torch._dynamo.reset()
            module = Lit(Nested())
            trainer = quiet_trainer(strategy=strategy, max_epochs=1, default_root_dir=tmp_path)
            trainer.fit(torch.compile(module, backend="aot_eager"), data(3))
            return outcome(trainer, module)

        return once(test_a_compiled_lightning_module, trains) if strategy == "auto" else trains()

    assert_same_as_plain(kind, train)
