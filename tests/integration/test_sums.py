"""Gradients that autograd adds up: counted before they come, and cached weights give way to
them.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from support.models import data, quiet_trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.runtime import gradient_room
from lightning_hetero.runtime.gradient_room import GradientRoom, add_in_place, gradients_added, sums_of
from lightning_hetero.runtime.process_memory import Heap
from lightning_hetero.strategies import HeteroOffloadStrategy
from lightning_hetero.units import MIB


class Tied(nn.Module):
    """The embedding is also the head."""

    def __init__(self, width: int = 8, words: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.Linear(2 * width, width)) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = x + layer(x)
        return F.linear(self.norm(x), self.embed.weight)


def test_gradients_of_a_parameter_that_is_used_twice_are_counted() -> None:
    model = Tied()
    words = torch.arange(6).view(1, 6)
    tied = model(words).sum()
    assert [node.name() for node in gradients_added(tied)[id(model.embed.weight)]] == ["TBackward0", "EmbeddingBackward0"]
    assert len(gradients_added(tied)[id(model.norm.weight)]) == 1
    assert list(sums_of(tied, model.parameters())) == [model.embed.weight]
    assert not sums_of(model.embed(words).sum(), model.parameters())
    assert not sums_of(torch.ones(()), model.parameters())


def test_large_gradients_of_one_parameter_are_added_in_place() -> None:
    """The sum is in the memory of the head's gradient, and has the bits of plain torch."""
    torch.manual_seed(0)
    model, words, first = Tied(), torch.arange(6).view(1, 6), list[int]()
    plain = torch.autograd.grad(model(words).square().sum(), model.embed.weight)[0]
    loss = model(words).square().sum()
    ((param, nodes),) = sums_of(loss, model.parameters()).items()
    nodes[0].register_hook(lambda made, _: first.append(made[0].data_ptr()))
    add_in_place(nodes)
    loss.backward()
    assert param.grad is not None
    assert first == [param.grad.data_ptr()]
    assert torch.equal(param.grad, plain)


def test_gradients_with_a_graph_keep_it() -> None:
    model, words = Tied(), torch.arange(6).view(1, 6)
    loss = model(words).square().sum()
    for nodes in sums_of(loss, model.parameters()).values():
        add_in_place(nodes)
    (grad,) = torch.autograd.grad(loss, model.embed.weight, create_graph=True)
    grad.square().sum().backward()
    assert model.norm.weight.grad is not None
    assert model.norm.weight.grad.count_nonzero()


def test_a_rank_makes_room_for_whole_gradients_and_for_sums_of_them() -> None:
    checked = list[int]()
    heap = SimpleNamespace(check=checked.append, missing=lambda coming: 0)
    blocks = [SimpleNamespace(index=i, spec=SimpleNamespace(pinned=i == 0), rest=None, trained=None) for i in range(2)]
    slices = SimpleNamespace(collectives=SimpleNamespace(shards=4))
    sizes = SimpleNamespace(blocks=[SimpleNamespace(gradient_bytes=size) for size in (16 * MIB, MIB)])
    run: Any = SimpleNamespace(blocks=blocks, heap=heap, side=None, slices=slices)
    room = GradientRoom(run, cast(Any, SimpleNamespace(model=sizes)))
    room._sum_bytes = 64 * MIB
    room.make_room(cast(Any, blocks[1]))
    room.give_way(cast(Any, blocks[1]))
    assert checked == [4 * 17 * MIB, 4 * 17 * MIB + 64 * MIB]


class LitTied(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Tied()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        words = torch.arange(6).view(1, 6) + batch_idx
        loss = F.cross_entropy(self.model(words).flatten(0, 1), (words.flatten() + 1) % 16)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


@pytest.mark.parametrize("clip", [None, 0.05], ids=["in-backward", "tried"])
def test_cached_weights_give_way_to_gradients_that_are_added_up(
    clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as are lacking, before the last block's backward; and the bits are those of plain
    Lightning.
    """
    asked: list[int] = []
    left: list[list[int]] = []
    monkeypatch.setattr(gradient_room, "WORTH_IT", 1)
    monkeypatch.setattr(Heap, "lacking", lambda heap, coming: asked.append(coming) or 10**9)
    give_way = gradient_room.GradientRoom.give_way

    def looked_at(self: Any, block: Any) -> None:
        before = [b.index for b in self._blocks if b.resident and b.weights_on_disk]
        give_way(self, block)
        after = [b.index for b in self._blocks if b.resident and b.weights_on_disk]
        left.append([block.index, len(before), len(after), self._sum_bytes])

    monkeypatch.setattr(gradient_room.GradientRoom, "give_way", looked_at)

    def trained(strategy: Any) -> tuple[list[float], dict[str, Tensor]]:
        module = LitTied()
        trainer = quiet_trainer(strategy=strategy, max_steps=4, default_root_dir=tmp_path, gradient_clip_val=clip)
        trainer.fit(module, data())
        return module.losses, {k: v.detach().clone() for k, v in module.state_dict().items()}

    plain_losses, plain = trained("auto")
    losses, weights = trained(HeteroOffloadStrategy("disk", host_memory="64MiB"))
    assert losses == plain_losses
    assert all(torch.equal(weights[k], v) for k, v in plain.items())
    tied = LitTied().model.embed.weight.nbytes
    block = sum(p.nbytes for p in LitTied().model.layers[0].parameters())
    assert {index for index, *_ in left} == {1}, "the lowest block that is not pinned"
    gone = {before - after for _, before, after, _ in left}
    assert gone == {min(3, -(-tied // block))}, "no more than the gradient that the budget does not count"
    assert all(coming >= 2 * tied + block for coming in asked)
