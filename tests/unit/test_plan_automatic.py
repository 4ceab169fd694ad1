"""What of a layer is shared by the ranks of a stage, and which clusters ranks describe: what
``plan="auto"`` plans with.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from lightning_hetero.errors import ConfigError
from lightning_hetero.parallel.pipeline import automatic
from lightning_hetero.parallel.pipeline.automatic import Report, cluster_of
from lightning_hetero.parallel.pipeline.costs import measure
from lightning_hetero.parallel.pipeline.layers import Layers
from lightning_hetero.parallel.pipeline.tensor import most_ways, sharded_modules, sharded_parameters
from lightning_hetero.strategies import HeteroParallelStrategy

ROWS, WIDTH = 6, 8


class Attention(nn.Module):
    """Two heads, and a norm before them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        q, k, v = (proj(hidden).unflatten(-1, (-1, WIDTH // 2)).transpose(0, 1) for proj in (self.q, self.k, self.v))
        return x + self.o((q @ k.transpose(1, 2) @ v).transpose(0, 1).flatten(1))


class Net(nn.Module):
    def __init__(self, *, tied: bool = False, styles: Any = None) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(24, WIDTH), nn.Linear(WIDTH, 24, bias=False)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.styles = styles or {Attention: ATTENTION}
        if tied:
            self.out.weight = self.words.weight

    def stage_layers(self) -> nn.ModuleDict:
        return nn.ModuleDict({"words": self.words, **{f"block{i}": b for i, b in enumerate(self.blocks)}, "out": self.out})

    def loss_sum(self, output: Any, batch: Any) -> Any: ...

    def tensor_parallel(self, layer: nn.Module) -> dict[str, ParallelStyle]:
        found: dict[str, ParallelStyle] = self.styles.get(type(layer), {})
        return found


ATTENTION: dict[str, ParallelStyle] = {"[qkv]": ColwiseParallel(), "o": RowwiseParallel()}


def test_heads_between_columns_and_rows_are_divided_and_inputs_are_not() -> None:
    layer = Attention()
    styles = sharded_modules(layer, ATTENTION)
    assert set(styles) == {layer.q, layer.k, layer.v, layer.o}
    whole = {n for n, p in layer.named_parameters() if p not in {p for m, s in styles.items() for p in sharded_parameters(m, s)}}
    assert whole == {"norm.weight", "norm.bias", "o.bias"}
    cost, found = measure([layer], styles, torch.randn(ROWS, WIDTH), contextlib.nullcontext)
    assert found.shape == (ROWS, WIDTH)
    scores = 2 * 2 * ROWS * ROWS * WIDTH  # q k^T and its product with v
    assert cost.flop == cost.sharded_flop == 4 * 2 * ROWS * WIDTH * WIDTH + scores
    one = ROWS * WIDTH * 4
    assert cost.traffic_bytes == 4 * one  # the output's sum; gradients of what q, k and v take
    plain, _ = measure([layer], {}, torch.randn(ROWS, WIDTH), contextlib.nullcontext)
    assert (plain.flop, plain.saved_bytes) == (cost.flop, cost.saved_bytes)
    assert plain.sharded_flop == plain.sharded_bytes == plain.traffic_bytes == 0
    # Saved whole: x and the norm's output, two figures a row.
    assert cost.saved_bytes - cost.sharded_bytes == 2 * one + 2 * ROWS * 4


def test_a_head_of_gathered_columns_is_divided_alone() -> None:
    head, after = nn.Linear(WIDTH, 24, bias=False), nn.Linear(24, 24, bias=False)
    styles: dict[nn.Module, ParallelStyle] = {head: ColwiseParallel(output_layouts=Replicate())}
    cost, _ = measure([head, after], styles, torch.randn(ROWS, WIDTH), contextlib.nullcontext)
    assert cost.sharded_flop == 2 * ROWS * WIDTH * 24
    assert cost.flop - cost.sharded_flop == 2 * ROWS * 24 * 24
    assert cost.traffic_bytes == ROWS * WIDTH * 4 + ROWS * 24 * 4 // 2  # gathering moves half of what reducing does


@pytest.mark.parametrize(
    ("net", "ways"),
    [
        (Net(), 8),
        (Net(styles={Attention: ATTENTION, nn.Linear: {"": ColwiseParallel()}}), 8),  # 24 and 8
        (Net(styles={Attention: {"q": ColwiseParallel()}, nn.Linear: {"": ColwiseParallel()}}, tied=True), 1),
        (Net(styles={nn.Linear: {"": ColwiseParallel()}}), 1),  # nothing of a repeated layer
        (Net(tied=True), 8),
    ],
)
def test_degrees_divide_all_that_is_sharded(net: Net, ways: int) -> None:
    assert most_ways(Layers(net)) == ways


def test_degrees_are_powers_of_two_that_a_node_has_ranks_for() -> None:
    nodes = ["a"] * 6 + ["b"]
    assert automatic._degrees(nodes, 8, None) == [1, 2, 4]
    assert automatic._degrees(nodes, 6, None) == [1, 2]
    assert automatic._degrees(nodes, 1, None) == [1]
    assert automatic._degrees(nodes, 6, [3]) == [3]
    for wanted in ([4], [8], [0], []):
        with pytest.raises(ConfigError, match=r"tensor_parallel=\[.*allowed: 1 to 6.*divides 6"):
            automatic._degrees(nodes, 6, wanted)
    with pytest.raises(ConfigError, match='plan="auto" only'):
        HeteroParallelStrategy(tensor_parallel=[1])


def test_a_device_measures_as_many_layers_as_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = automatic.layer_times

    def times(layers: Any, *arguments: Any, **options: Any) -> Any:
        if len(layers) > 1:
            raise torch.OutOfMemoryError
        return measured(layers, *arguments, **options)

    batch = torch.randint(0, 24, (ROWS,))
    assert len(automatic.profile_layers(Net(), batch, torch.device("cpu"))[1].seconds) == 2
    monkeypatch.setattr(automatic, "layer_times", times)
    profile, found = automatic.profile_layers(Net(), batch, torch.device("cpu"))
    assert len(found.seconds) == 1
    assert profile.blocks[1].sharding is not None
    assert profile.blocks[1].sharding.ways == 8


def test_a_kind_is_as_slow_as_its_slowest_device_by_degree() -> None:
    def report(node: str, seconds: dict[int, tuple[float, ...]], peer: float | None = None) -> Report:
        return Report(node=node, device="x", memory_bytes=9, seconds=seconds, flop_per_s=1.0, peer_bytes_per_s=peer)

    found = cluster_of(
        [report("a", {1: (1.0, 1.5), 2: (0.7,)}, 5.0), report("a", {1: (3.0,), 2: (0.6,)}, 6.0), report("b", {1: (2.0,)})], 4.0
    )
    (kind,) = found.devices
    assert {t.tensor_parallel: t.seconds for t in kind.layer_times} == {1: (3.0,), 2: (0.7,)}
    assert (kind.peer_bytes_per_s, found.network_bytes_per_s) == (5.0, 4.0)
