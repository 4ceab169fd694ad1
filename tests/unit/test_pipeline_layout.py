"""Plans laid over ranks and layers, modules cut into layers, losses that are added up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.training.pipelines import Net, cluster_plan
from torch import nn

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.ir.cluster_plan import ClusterPlan
from lightning_hetero.parallel.pipeline.layers import Layers, is_elsewhere
from lightning_hetero.parallel.pipeline.layout import RankLayout, Slot, is_data_parallel
from lightning_hetero.parallel.pipeline.linear_pairs import linear_pairs
from lightning_hetero.parallel.pipeline.sums import Sums, split

PLAN = cluster_plan((3, (1, 2, 3)), (5, (4, 2)), (4, (6,)))


def layout(plan: ClusterPlan = PLAN, nodes: Any = None) -> RankLayout:
    return RankLayout.of(plan, num_layers=8, repeated=range(1, 7), nodes=nodes or [None] * plan.world_size)


def on_nodes(plan: ClusterPlan, *nodes: tuple[str, ...]) -> ClusterPlan:
    """The plan with the stages of each group on other nodes."""
    groups = []
    for group, names in zip(plan.groups, nodes, strict=True):
        stages = tuple(replace(s, node=n) for s, n in zip(group.stages, names, strict=True))
        groups.append(replace(group, stages=stages))
    return replace(plan, groups=tuple(groups))


def test_segments_end_at_every_boundary_of_every_group() -> None:
    found = layout()
    assert found.bounds == ((0, 2, 4, 8), (0, 5, 8), (0, 8))
    assert found.segments == (range(2), range(2, 4), range(4, 5), range(5, 8))
    assert [found.owners(segment.start, 0) for segment in found.segments] == [(0, 3, 5), (1, 3, 5), (2, 3, 5), (2, 4, 5)]
    assert found.pipeline(0, 0) == (0, 1, 2)
    assert not is_data_parallel(PLAN)
    assert is_data_parallel(cluster_plan((1, (6,)), (2, (6,))))


def test_every_rank_meets_its_segments_in_the_order_of_the_model() -> None:
    found = layout()
    for rank in range(6):
        own = [i for i, segment in enumerate(found.segments) if rank in found.owners(segment.start, 0)]
        assert own == list(range(own[0], own[-1] + 1))


def test_ranks_are_numbered_node_by_node() -> None:
    plan = on_nodes(PLAN, ("a", "b", "b"), ("a", "b"), ("a",))
    assert layout(plan).slots == (Slot(0, 0, 0), Slot(1, 0, 0), Slot(2, 0, 0), Slot(0, 1, 0), Slot(0, 2, 0), Slot(1, 1, 0))


def test_ranks_go_where_their_node_is_named() -> None:
    plan = on_nodes(PLAN, ("a", "b", "b"), ("a", "b"), ("a",))
    found = layout(plan, nodes=["b", "b", "b", "a", "a", "a"])
    assert found.slots == (Slot(0, 1, 0), Slot(0, 2, 0), Slot(1, 1, 0), Slot(0, 0, 0), Slot(1, 0, 0), Slot(2, 0, 0))
    assert found.pipeline(0, 0) == (3, 0, 1)
    with pytest.raises(ConfigError, match="LIGHTNING_HETERO_NODE"):
        layout(plan, nodes=["b", "b", "b", "a", "a", None])


def test_devices_that_the_plan_leaves_idle_have_no_place() -> None:
    plan = replace(on_nodes(PLAN, ("a", "b", "b"), ("a", "b"), ("a",)), idle={"a": 1, "c": 1})
    assert layout(plan, nodes=["a", "b", "b", "b", "a", "a", "a", "c"]).slots[6:] == (None, None)
    assert layout(plan, nodes=[None] * 8).slots[3:5] == (None, Slot(0, 1, 0))
    assert None not in layout(plan).slots


def test_ranks_of_one_stage_are_neighbours() -> None:
    plan = cluster_plan((2, (2, 4)), (1, (6,)), tensor_parallel=2)
    found = layout(plan)
    assert found.stage(0, 1) == (2, 3)
    assert found.pipeline(0, 1) == (1, 3)
    assert found.owners(7, 1) == (3, 5)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (cluster_plan((3, (1, 2, 2))), "5 repeated layers"),
        (cluster_plan((2, (1, 2, 3))), "2 micro-batches for 3 stages"),
        (cluster_plan((3, (3, 0, 3))), "a stage without layers"),
    ],
)
def test_plans_that_do_not_match_are_refused(plan: ClusterPlan, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout(plan)


def test_another_number_of_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match="6 working devices, and 4 processes"):
        layout(nodes=[None] * 4)


def test_layers_know_their_parameters() -> None:
    layers = Layers(Net())
    assert layers.tied == {"embedding.tokens.weight": (0, 7)}
    assert layers.repeated() == layers.repeated(6) == range(1, 7)
    assert layers.repeated(8) == range(8)
    assert set(layers.parameters(7)) == {"embedding.tokens.weight", "head.norm.weight", "head.norm.bias"}
    assert set(layers.entries(7)) == set(layers.parameters(7)) | {"head.out.weight"}
    assert "embedding.scale" in layers.entries(0)
    with pytest.raises(ConfigError, match="6 x Block"):
        layers.repeated(5)


def test_layers_that_are_elsewhere_keep_shape_and_identity_but_no_memory() -> None:
    net = Net()
    before = {name: (p, p.shape) for name, p in net.named_parameters()}
    kept = net.blocks[1].up.weight.clone()
    Layers(net).keep(range(2, 4), torch.device("cpu"))
    for name, parameter in net.named_parameters():
        assert before[name][0] is parameter
        assert before[name][1] == parameter.shape
    assert torch.equal(net.blocks[1].up.weight, kept)
    gone = net.blocks[3].up.weight
    assert is_elsewhere(gone)
    assert gone.isnan().all()
    assert gone.untyped_storage().nbytes() == 4
    with pytest.raises(ConfigError, match="are on another rank since an earlier fit"):
        Layers(net)


def test_modules_that_pipelines_cannot_run_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Linear has no stage_layers\(\)"):
        Layers(nn.Linear(1, 1))
    net = Net()
    net.other = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"'other.weight' is in no layer"):
        Layers(net)
    net = Net()
    net.blocks[2].norm = nn.BatchNorm1d(8)
    with pytest.raises(UnsupportedError, match="'block2' has a BatchNorm1d"):
        Layers(net)


def test_sums_are_of_samples_unless_the_loss_counts() -> None:
    batch = {"x": torch.zeros(6, 2), "name": "n"}
    assert Sums.of(torch.tensor(3.0), batch).count == 6
    found = Sums.of((torch.tensor(3.0), torch.tensor(4), {"right": 2}), batch)
    assert found.as_row(["right", "other"]).tolist() == [3.0, 4.0, 2.0, 0.0]
    for wrong in (torch.zeros(2), (), None, (torch.tensor(1.0), 2, 3)):
        with pytest.raises(ConfigError, match="loss_sum"):
            Sums.of(wrong, batch)


def test_batches_are_cut_into_equal_micro_batches() -> None:
    parts = split({"x": torch.arange(6), "name": "n"}, 3)
    assert [p["x"].tolist() for p in parts] == [[0, 1], [2, 3], [4, 5]]
    assert parts[0]["name"] == "n"
    with pytest.raises(ConfigError, match="6 samples cannot be cut into 4"):
        split(torch.arange(6), 4)


def test_linears_that_widen_and_narrow_are_shared() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.o = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8)
            self.mlp = nn.ModuleDict({"gate": nn.Linear(8, 24), "up": nn.Linear(8, 24), "act": nn.GELU(), "down": nn.Linear(24, 8)})

    found = {name: type(style).__name__ for name, style in linear_pairs(Gated()).items()}
    assert found == {"mlp.gate": "ColwiseParallel", "mlp.up": "ColwiseParallel", "mlp.down": "RowwiseParallel"}
    assert linear_pairs(nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 32))) == {}
    assert linear_pairs(nn.Linear(8, 24)) == {}
