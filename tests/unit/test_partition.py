"""Blocks in which few parameters train are two: the frozen rest, and the trained part, which stays
in memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier, matches
from lightning_hetero.profiling.operators import Addresses, BoundAddresses
from lightning_hetero.runtime.device.references import BoundWeights
from lightning_hetero.store.live.blocks import bind, modules_of, parts_of
from lightning_hetero.store.partition import partition
from lightning_hetero.store.raw_memory import tensor_at


class Layer(nn.Module):
    """A frozen linear layer and two adapters around it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.zeros(rank, width))
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.up = nn.Parameter(torch.zeros(width, rank))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + x @ self.down.t() @ self.up.t()
        return result


class Net(nn.Module):
    def __init__(self, *, width: int = 64, rank: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, width)
        self.layers = nn.ModuleList(Layer(width, rank) for _ in range(2))
        self.to(dtype)


def test_the_trained_part_comes_before_the_rest() -> None:
    specs = partition(Net())
    assert [(s.name, s.pinned) for s in specs] == [
        ("embed", True), ("layers.0:trained", True), ("layers.0", False), ("layers.1:trained", True), ("layers.1", False),
    ]  # fmt: skip
    trained, rest = specs[1:3]
    assert trained.rest is rest
    assert trained.module is rest.module
    assert [*trained.params] == ["layers.0.down", "layers.0.up"]
    assert [*rest.params] == ["layers.0.base.weight", "layers.0.base.bias"]
    assert rest.order == trained.order == ("layers.0.down", "layers.0.up", "layers.0.base.weight", "layers.0.base.bias")


@pytest.mark.parametrize(("dtype", "rank"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a_block_of_which_more_trains_stays_one(dtype: torch.dtype, rank: int) -> None:
    """With gradients and state, adapters of 2 * 64 * rank elements are half of 64 * 65 frozen
    weights, or more.
    """
    few, many = partition(Net(rank=rank, dtype=dtype)), partition(Net(rank=rank + 1, dtype=dtype))
    assert [s.name for s in few] == ["embed", "layers.0:trained", "layers.0", "layers.1:trained", "layers.1"]
    assert [s.name for s in many] == ["embed", "layers.0", "layers.1"]
    assert not any(s.rest or s.order for s in many)


def _all_frozen(net: Net) -> None:
    net.requires_grad_(False)


def _all_train(net: Net) -> None:
    net.requires_grad_(True)


def _tied(net: Net) -> None:
    for layer in net.layers:
        layer.base.weight = net.layers[0].base.weight  # type: ignore[union-attr, assignment]


@pytest.mark.parametrize("change", [_all_frozen, _all_train, _tied])
def test_other_blocks_stay_whole(change: Any) -> None:
    net = Net()
    change(net)
    specs = partition(net)
    assert not any(s.name == "layers.0:trained" for s in specs)
    assert [*specs[1].params] == ["layers.0.down", "layers.0.up", "layers.0.base.weight", "layers.0.base.bias"]


def test_records_have_parts_in_the_order_of_registration() -> None:
    """So a store of a build that did not divide such blocks has the same parts in the same
    order.
    """
    net = Net()
    for layer in net.layers:
        layer.register_parameter("last", nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)))
    blocks = bind(net, partition(net))
    assert [block.name for block in blocks] == ["embed", "layers.0:trained", "layers.0", "layers.1:trained", "layers.1"]
    assert [[b.name for b in own] for own in modules_of(blocks)][1:] == [
        ["layers.0:trained", "layers.0"], ["layers.1:trained", "layers.1"]
    ]  # fmt: skip
    assert blocks[2].trained is blocks[1]
    assert blocks[1].rest is blocks[2]
    assert [part.names[0] for part in parts_of(blocks)] == [
        "embed.weight",
        "layers.0.down", "layers.0.last", "layers.0.base.weight",
        "layers.1.down", "layers.1.last", "layers.1.base.weight",
    ]  # fmt: skip


def test_operators_are_named_inside_the_module() -> None:
    """As the runtime names them, so that a plan's rules for operators apply."""
    net = Net()
    blocks = bind(net, partition(net))
    bound: Any = BoundWeights(torch.device("cpu"), lambda part, index: torch.empty(0))
    for part in parts_of(blocks):
        bound.add(part, tensor_at(part.arena, part.arena.address, part.num_elements * part.dtype.itemsize, torch.uint8))
    for addresses in (Addresses(blocks), BoundAddresses(bound)):
        found = [addresses.first([param]) for param in net.layers[1].parameters()]
        assert found == ["down", "up", "base.weight", "base.bias"]


# ---- rules of plans -----------------------------------------------------------------------------

NAMES = ("embed", "layers.0:trained", "layers.0", "layers.1:trained", "layers.1")


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("layers.0", ["layers.0:trained", "layers.0"]),
        ("layers.?", ["layers.0:trained", "layers.0", "layers.1:trained", "layers.1"]),
        ("layers.1:trained", ["layers.1:trained"]),
        ("*:trained", ["layers.0:trained", "layers.1:trained"]),
        ("embed", ["embed"]),
    ],
)
def test_a_rule_for_a_module_applies_to_its_trained_part(pattern: str, found: list[str]) -> None:
    assert [name for name in NAMES if matches(pattern, name)] == found


def _plan(*names: str) -> Plan:
    return Plan(name="p", blocks=tuple(BlockPlan(name=name, state=tier) for name, tier in zip(names, [*Tier], strict=False)))


def test_a_plan_of_undivided_blocks_places_both_parts() -> None:
    rows = _plan("embed", "layers.0", "layers.1").resolve(NAMES).blocks
    assert [row.name for row in rows] == [*NAMES]
    assert [row.state for row in rows] == [Tier.DEVICE, Tier.HOST, Tier.HOST, Tier.DISK, Tier.DISK]


def test_a_rule_for_trained_parts_comes_first() -> None:
    rows = _plan("*:trained", "layers.*", "*").resolve(NAMES).blocks
    assert [row.state for row in rows] == [Tier.DISK, Tier.DEVICE, Tier.HOST, Tier.DEVICE, Tier.HOST]
    with pytest.raises(ConfigError, match=r"never reached: \*:trained"):
        _plan("layers.*", "*:trained", "*").resolve(NAMES)


def test_a_rule_for_trained_parts_is_refused_where_a_model_has_none() -> None:
    with pytest.raises(ConfigError, match=r"blocks that the model lacks: \*:trained"):
        _plan("*:trained", "*").resolve(["embed", "layers.0", "layers.1"])


def viewing(kind: str) -> nn.Module:
    """A head that has the memory of the embedding, but is not it."""
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    weight = model["embedding"].weight
    if kind == "meta":
        model.to("meta")
        weight = model["embedding"].weight
    values = {"copy": weight.data.clone(), "turned": weight.data.t()}.get(kind, weight.data)
    model["head"].weight = nn.Parameter(values)
    if kind in ("half", "halves"):
        model["head"].weight.data = weight.data[2:]
        model["embedding"].weight.data = weight.data[: 3 if kind == "half" else 2]
    if kind == "buffer":
        del model["head"]
        model.register_buffer("last", weight.data[-1])
    return model


@pytest.mark.parametrize("kind", ["same", "turned", "half", "meta", "buffer"])
def test_a_trained_view_of_another_parameter_is_refused(kind: str) -> None:
    model, other = viewing(kind), "last" if kind == "buffer" else "head.weight"
    with pytest.raises(UnsupportedError, match=f"'embedding.weight' and '{other}' are views of the same memory"):
        partition(model)
    partition(model.requires_grad_(False))  # nothing writes into either


@pytest.mark.parametrize("kind", ["copy", "halves"])
def test_parameters_side_by_side_in_memory_are_no_views_of_each_other(kind: str) -> None:
    partition(viewing(kind))


def test_parameters_of_a_list_have_the_anchor_of_the_module_around_it() -> None:
    """A list or dictionary of parameters has no forward, so nothing says when they are used."""
    inner = nn.Module()
    inner.lists = nn.ModuleDict({"a": nn.ParameterList([nn.Parameter(torch.ones(2))])})
    inner.named = nn.ParameterDict({"b": nn.Parameter(torch.ones(2))})
    root = nn.Module()
    root.inner = inner
    assert [(s.name, s.module) for s in partition(root)] == [("inner.lists.a", inner), ("inner.named", inner)]
