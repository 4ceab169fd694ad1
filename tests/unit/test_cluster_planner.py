"""AutoHet's equations, groupings, mapping and balancing, on problems small enough to enumerate."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.cluster import Cluster, DeviceType, LayerTimes, Node
from lightning_hetero.ir.cluster_plan import CLUSTER_PLANNERS, ClusterPlan
from lightning_hetero.ir.model import BlockProfile, ModelProfile, Sharding
from lightning_hetero.parallel.planner import PAPER_CLUSTERS, PLANNERS, cluster, load_cluster, plan
from lightning_hetero.parallel.planner.candidates import Candidate, settings_of
from lightning_hetero.parallel.planner.equations import (
    StagePlace,
    Workload,
    bubble,
    effective_power,
    layers_s,
    most_layers,
    pipeline_s,
    stage_bytes,
)
from lightning_hetero.parallel.planner.known_clusters import kinds
from lightning_hetero.parallel.planner.mapping import place
from lightning_hetero.parallel.planner.step_time import one_f_one_b_s
from lightning_hetero.profiling import presets
from lightning_hetero.units import GIB


def block(name: str, *, flop: float = 1e12, params: int = 10**6, pinned: bool = False) -> BlockProfile:
    return BlockProfile(
        name=name,
        num_params=params,
        num_trainable_params=params,
        forward_s=1.0,
        backward_s=2.0,
        forward_flop=flop / 3,
        activation_bytes=34 * 10**6,
        boundary_bytes=10**6,
        transient_bytes=0,
        pinned=pinned,
    )


def small_model(layers: int, **ends: float) -> ModelProfile:
    return ModelProfile(
        name="small",
        tokens=100,
        compute_itemsize=2,
        constant_device_bytes=0,
        constant_host_bytes=0,
        blocks=(
            block("embedding", flop=ends.get("first", 0.0), pinned=True),
            *(block(f"layers.{i}") for i in range(layers)),
            block("head", flop=ends.get("last", 0.0), pinned=True),
        ),
    )


def small_cluster(*nodes: tuple[int, float], memory: int = 10**12, network: float = 1e15) -> Cluster:
    """Nodes of so many devices with so many TFLOP/s; a network that costs nothing unless it is
    said.
    """
    names = {power: f"d{power:g}" for _, power in nodes}
    return Cluster(
        name="small",
        network_bytes_per_s=network,
        nodes=tuple(Node(name=f"n{i}", device=names[power], count=n) for i, (n, power) in enumerate(nodes)),
        devices=tuple(
            DeviceType(name=name, memory_bytes=memory, flop_per_s=power * 1e12, peer_bytes_per_s=1e15)
            for power, name in names.items()
        ),
    )


# ---- equations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [(2.0, 1.0, 4.0), (3.0, 2.0, 1.0), (1.0, 1.0, 1.0)])
def test_measured_times_that_fall_are_planned_with(seconds: tuple[float, ...]) -> None:
    """Noise, or what a run costs however many layers it has: two layers that took less than one."""
    own = small_cluster((2, 1.0), (1, 2.0))
    times = (LayerTimes(tensor_parallel=1, seconds=seconds),)
    own = replace(own, devices=tuple(replace(d, layer_times=times) for d in own.devices))
    found = plan(small_model(7), own, micro_batches=6, tensor_parallel=[1])
    assert {sum(s.layers for s in g.stages) for g in found.groups} == {7}
    assert sum(g.micro_batches for g in found.groups) == 6


def test_the_time_of_a_pipeline_follows_equation_1() -> None:
    assert pipeline_s([1.0, 3.0, 2.0], 4) == 1 + 3 + 2 + 3 * 3
    assert pipeline_s([2.0], 5) == 10


def test_a_slow_early_stage_continues_while_later_ones_compute() -> None:
    # stage 0: F0 0-2, F1 2-4, B0 5-9, B1 9-13; stage 1: F0 2-3, B0 3-5, F1 5-6, B1 6-8
    assert one_f_one_b_s([6.0, 3.0], 2) == pytest.approx(13)
    assert pipeline_s([6.0, 3.0], 2) == 6 + 3 + 6


def test_effective_power_is_power_less_the_bubble() -> None:
    assert bubble(1, 8) == 0
    assert bubble(4, 8) == pytest.approx(3 / 11)
    assert effective_power(22.0, 4, 8) == pytest.approx(16)


@pytest.mark.parametrize(("layers", "seconds"), [(1, 1.0), (2, 1.75), (3, 2.75), (4, 3.0), (7, 5.75), (8, 6.0), (13, 10.0)])
def test_measured_times_add_up_by_powers_of_two(layers: int, seconds: float) -> None:
    work = Workload.of(small_model(16))
    own = small_cluster((1, 1.0))
    own = replace(own, devices=(replace(own.devices[0], layer_times=(LayerTimes(tensor_parallel=1, seconds=(1.0, 1.75, 3.0)),)),))
    (kind,) = kinds(own).values()
    assert layers_s(work, kind, layers) == seconds
    assert layers_s(Workload.of(small_model(16), 2), kind, 4) == pytest.approx(4 / 2)  # nothing was measured for 2: FLOP and power


def test_earlier_stages_hold_more_micro_batches() -> None:
    work = Workload.of(small_model(8))
    assert [StagePlace(stage=s, depth=3).in_flight for s in range(3)] == [3, 2, 1]
    layer = 10**6 * (2 + 2 + 12)
    middle = StagePlace(stage=1, depth=3)
    assert stage_bytes(work, 2, middle) == 2 * layer + 2 * 2 * 34 * 10**6
    assert stage_bytes(work, 2, StagePlace(stage=2, depth=3)) == 3 * layer + 3 * 34 * 10**6  # the head too
    assert stage_bytes(Workload.of(small_model(8), 2), 2, middle) == layer + 2 * 2 * 22 * 10**6  # (10 + 24 / 2) / 34
    for memory in (stage_bytes(work, 3, middle), stage_bytes(work, 3, middle) - 1):
        held = most_layers(work, memory, middle)
        assert stage_bytes(work, held, middle) <= memory < stage_bytes(work, held + 1, middle)
    assert most_layers(work, 10**6, StagePlace(stage=0, depth=1)) == -1


def test_work_that_a_profile_does_not_shard_is_neither_shared_nor_faster() -> None:
    shared = Sharding(
        num_params=600_000, num_trainable_params=600_000, forward_flop=2e11, activation_bytes=20 * 10**6, traffic_bytes=10**6
    )
    model = small_model(8, last=1e12)
    whole = replace(shared, num_params=0, num_trainable_params=0, forward_flop=0.0, activation_bytes=0, traffic_bytes=0)
    blocks = tuple(replace(b, sharding=whole if b.pinned else shared) for b in model.blocks)
    work = Workload.of(replace(model, blocks=blocks), 4)
    assert work.layers[0].flop == pytest.approx(1e12 - 3 * 2e11 * 3 / 4)
    assert work.layers[0].fixed_bytes == (400_000 + 600_000 / 4) * 16
    assert work.layers[0].gradient_bytes == (400_000 + 600_000 / 4) * 2
    assert work.layers[0].activation_bytes == 14 * 10**6 + 5 * 10**6
    assert work.layers[0].sent_bytes == 2 * 3 / 4 * 10**6
    assert work.last == Workload.of(model).last
    assert work.model_flop == pytest.approx(9e12)
    machines = small_cluster((4, 1.0), network=1e9)
    everything = plan(model, machines, micro_batches=1)
    honest = plan(replace(model, blocks=blocks), machines, micro_batches=1)
    assert everything.tensor_parallel == honest.tensor_parallel == 4
    assert everything.iteration_s == pytest.approx(9 / 4, rel=1e-3)
    assert honest.iteration_s == pytest.approx(8 * 0.55 + 1, rel=1e-3)
    assert honest.utilisation == pytest.approx(9 / 5.4 / 4, rel=1e-3)


def test_a_model_of_pinned_blocks_has_no_stages() -> None:
    model = replace(small_model(1), blocks=(block("a", pinned=True),))
    with pytest.raises(ConfigError, match="no repeated layers"):
        Workload.of(model)


# ---- planning ------------------------------------------------------------------------------------


def brute_force(model: ModelProfile, machines: Cluster, micro_batches: int) -> float:
    """The least time of equation 1 over all assignments of devices to groups and stages, cuts and
    micro-batches; without tensor parallelism, and with weaker devices first.
    """
    (setting,) = settings_of(model, machines, micro_batches, [1])
    devices = [i for i, node in enumerate(machines.nodes) for _ in range(node.count)]
    best = float("inf")
    for assignment in itertools.product(range(-1, len(devices)), repeat=len(devices)):
        used = sorted(set(assignment) - {-1})
        if used != list(range(len(used))) or not used:  # groups are numbered without gaps
            continue
        nodes = tuple(
            tuple(
                sorted(
                    (d for d, j in zip(devices, assignment, strict=True) if j == group), key=lambda n: setting.kind(n).flop_per_s
                )
            )
            for group in used
        )
        cuts = [
            [c for c in itertools.product(range(1, len(model.blocks)), repeat=len(group)) if sum(c) == len(model.blocks) - 2]
            for group in nodes
        ]
        for counts in itertools.product(range(1, micro_batches + 1), repeat=len(nodes)):
            if sum(counts) != micro_batches or any(k < len(g) for k, g in zip(counts, nodes, strict=True)):
                continue
            for layers in itertools.product(*cuts):
                candidate = Candidate(name="", setting=setting, nodes=nodes, layers=layers, micro_batches=counts)
                best = min(best, candidate.iteration_s)
    return best


@pytest.mark.parametrize(
    ("nodes", "layers", "micro_batches"),
    [([(1, 1.0), (2, 3.0)], 4, 5), ([(2, 1.0), (1, 2.5)], 3, 4), ([(3, 1.0)], 3, 4), ([(1, 1.0), (1, 1.5), (1, 4.0)], 4, 6)],
)
def test_the_plan_is_the_best_of_all_on_small_clusters(nodes: list[tuple[int, float]], layers: int, micro_batches: int) -> None:
    model, machines = small_model(layers, last=5e11), small_cluster(*nodes)
    found = plan(model, machines, micro_batches=micro_batches, tensor_parallel=[1])
    assert found.iteration_s == pytest.approx(brute_force(model, machines, micro_batches), rel=1e-9)


def test_the_plan_is_never_slower_than_the_others() -> None:
    model = presets.model("llama-7b", batch=1, sequence=2048, hardware=presets.machine(device="a100-80", host_memory="1GiB"))
    for name in ("autohet-5a100-3h800", "autohet-2a100-2h20", "3xa100-80+1xh20"):
        times = {p: plan(model, cluster(name), micro_batches=24, planner=p).iteration_s for p in PLANNERS}
        assert min(times, key=times.__getitem__) == "asymmetric" or times["asymmetric"] == min(times.values())
        assert times["megatron"] >= times["whale"] * (1 - 1e-12)
        assert times["asymmetric"] < times["megatron"]


def test_every_layer_and_micro_batch_is_somebodys_and_everything_fits() -> None:
    model = presets.model("gpt3-6.7b", batch=2, sequence=2048, hardware=presets.machine(device="a100-80", host_memory="1GiB"))
    machines = cluster("5xa100-80+3xh800+2xh20")
    for name in PLANNERS:
        found = plan(model, machines, micro_batches=30, planner=name)
        assert found.micro_batches == 30
        assert found.tokens == 30 * 2 * 2048
        assert all(sum(stage.layers for stage in group.stages) == 32 for group in found.groups)
        memory = {kind.name: kind.memory_bytes for kind in kinds(machines).values()}
        assert all(stage.memory_bytes <= memory[stage.device] for group in found.groups for stage in group.stages)
        used = {
            n.name: found.tensor_parallel * sum(s.node == n.name for g in found.groups for s in g.stages) for n in machines.nodes
        }
        assert {n.name: n.count - used[n.name] for n in machines.nodes if n.count > used[n.name]} == found.idle
        assert 0 < found.utilisation < 1
        assert found.iteration_s == pytest.approx(max(g.seconds for g in found.groups) + found.sync_s)


def test_a_device_that_would_slow_the_others_down_idles() -> None:
    found = plan(small_model(4), small_cluster((2, 100.0), (1, 0.01)), micro_batches=2, tensor_parallel=[1])
    assert found.idle == {"n1": 1}


def test_odd_devices_idle_where_tensor_parallelism_is_worth_it() -> None:
    # One micro-batch: only tensor parallelism spreads its work.
    found = plan(small_model(4), small_cluster((5, 1.0)), micro_batches=1)
    assert (found.tensor_parallel, found.idle) == (4, {"n0": 1})


def test_faster_groups_take_more_micro_batches() -> None:
    found = plan(small_model(1), small_cluster((1, 1.0), (1, 3.0)), micro_batches=8)
    assert sorted(g.micro_batches for g in found.groups) == [2, 6]


def test_weaker_devices_are_earlier_stages() -> None:
    model = presets.model("llama-7b", batch=1, sequence=2048, hardware=presets.machine(device="a100-80", host_memory="1GiB"))
    found = plan(model, cluster("2xh800+2xa100-80+2xh20"), micro_batches=32, planner="autohet", tensor_parallel=[1])
    power = {name: kind.flop_per_s for name, kind in kinds(cluster("2xh800+2xa100-80+2xh20")).items()}
    for group in found.groups:
        powers = [power[stage.device] for stage in group.stages]
        assert powers == sorted(powers)


def test_stages_of_one_turn_share_a_node_where_one_has_room() -> None:
    machines = small_cluster((2, 1.0), (4, 1.0), (3, 2.0))
    (setting,) = settings_of(small_model(8), machines, 8, [1])
    assert place(setting, [(2, 1), (2, 1), (1, 1)]) == ((1, 0, 2), (1, 0, 2), (1, 2))


def test_gradients_that_stay_in_a_node_are_synchronised_faster() -> None:
    machines = replace(small_cluster((2, 1.0), (2, 1.0), network=1e9))
    (setting,) = settings_of(small_model(2), machines, 4, [1])
    inside = Candidate(name="", setting=setting, nodes=((0, 1), (0, 1)), layers=((1, 1),) * 2, micro_batches=(2, 2))
    across = Candidate(name="", setting=setting, nodes=((0, 1), (1, 0)), layers=((1, 1),) * 2, micro_batches=(2, 2))
    assert inside.sync_s == pytest.approx(2 * 2 * 10**6 / 1e15)  # a layer and an end of 2 bytes a parameter, 2 (D - 1) / D = 1
    assert across.sync_s == pytest.approx(2 * 2 * 10**6 / 1e9)


# ---- refusals ------------------------------------------------------------------------------------


def mixed_model(*params: int) -> ModelProfile:
    """Layers of unequal size, as attention and experts are; FLOP as parameters."""
    model = small_model(len(params))
    layers = [
        replace(b, num_params=p, num_trainable_params=p, forward_flop=1e6 * p)
        for b, p in zip(model.blocks[1:-1], params, strict=True)
    ]
    return replace(model, blocks=(model.blocks[0], *layers, model.blocks[-1]))


def test_a_refusal_of_hetero_offload_knows_every_planner_of_clusters() -> None:
    """By name: it says that such a plan is for clusters, without importing their planners."""
    assert tuple(PLANNERS) == CLUSTER_PLANNERS


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("params", [(10**6, 9 * 10**6) * 3, (9 * 10**6,) * 2 + (10**6,) * 6], ids=["in turn", "at the front"])
def test_layers_of_unequal_size_take_their_own_memory_and_time(planner: str, params: tuple[int, ...]) -> None:
    model = mixed_model(*params)
    memory = 7 * 10**8  # two devices hold the model; if all layers were as the largest, they would not
    own = small_cluster((2, 1.0), memory=memory)
    found = plan(model, own, micro_batches=4, planner=planner, tensor_parallel=[1])
    (group,) = found.groups
    assert len(group.stages) == 2
    begin = 0
    layers = model.blocks[1:-1]
    for s, stage in enumerate(group.stages):
        held = [*layers[begin : begin + stage.layers], model.blocks[0 if s == 0 else -1]]
        saved = (2 - s) * sum(b.activation_bytes for b in held)
        assert stage.memory_bytes == 16 * sum(b.num_params for b in held) + saved <= memory
        handed = 0 if s else 2 * 10**6 / 1e15
        assert stage.micro_batch_s == pytest.approx(3 * sum(b.forward_flop for b in held) / 1e12 + handed)
        begin += stage.layers
    assert begin == len(layers)


def test_measured_times_are_shared_out_by_flop_if_layers_differ() -> None:
    own = small_cluster((2, 1.0))
    own = replace(
        own, devices=tuple(replace(d, layer_times=(LayerTimes(tensor_parallel=1, seconds=(2.0, 4.0)),)) for d in own.devices)
    )
    work, (kind,) = Workload.of(mixed_model(10**6, 3 * 10**6)), kinds(own).values()
    assert [layers_s(work, kind, 1, begin) for begin in (0, 1)] == [1.0, 3.0]
    assert layers_s(work, kind, 2) == 4.0


def test_too_little_memory_is_refused_with_bytes_device_and_remedy() -> None:
    model, machines = small_model(8), small_cluster((2, 1.0), memory=15 * 10**7)
    with pytest.raises(PlanError, match=r"lacks .* \([0-9]+ bytes\).*d1 has 143.1 MiB.*Remedy: add at least [0-9]+ d1") as caught:
        plan(model, machines, micro_batches=8)
    assert caught.value.tier == "device"
    number = re.search(r"at least ([0-9]+) d1", str(caught.value))
    assert number is not None
    assert caught.value.shortfall_bytes > 0
    richer = small_cluster((2 + 4 * int(number.group(1)), 1.0), memory=15 * 10**7)
    assert plan(model, richer, micro_batches=8).micro_batches == 8


def test_more_stages_than_layers_are_no_remedy() -> None:
    model = small_model(2)
    with pytest.raises(PlanError, match=r"with 2 stages of 1 devices.*Remedy: tensor parallelism in larger nodes"):
        plan(model, small_cluster((1, 1.0), (1, 1.0), (1, 1.0), memory=9 * 10**7), micro_batches=4)
    assert plan(model, small_cluster((4, 1.0), memory=9 * 10**7), micro_batches=4).tensor_parallel > 1


@pytest.mark.parametrize(
    ("nodes", "options"),
    [([(3, 1.0)], {"planner": "megatron", "tensor_parallel": [2], "micro_batches": 4}), ([(3, 1.0)], {"planner": "whale"})],
)
def test_a_refusal_of_only_a_baseline_is_reported(nodes: list[tuple[int, float]], options: dict[str, Any]) -> None:
    model, machines = small_model(1), small_cluster(*nodes)
    settings = {"micro_batches": 2, "tensor_parallel": [1]} | options
    with pytest.raises(
        PlanError, match=rf"planner '{options['planner']}' has no plan.*memory holds the model.*use the planner 'asymm"
    ):
        plan(model, machines, **settings)
    assert plan(model, machines, micro_batches=2).groups


@pytest.mark.parametrize(("nodes", "count"), [((), 0), ((Node(name="a", device="d1", count=10**9),), 10**9)])
def test_no_devices_and_too_many_are_refused(nodes: tuple[Node, ...], count: int) -> None:
    with pytest.raises(ConfigError, match=rf"has {count} devices; allowed: 1 to 1024"):
        plan(small_model(2), replace(small_cluster((1, 1.0)), nodes=nodes), micro_batches=2)
    with pytest.raises(ConfigError, match="has 999999999 devices"):
        cluster("999999999xa100-80")


def test_a_device_with_less_memory_than_every_device_needs_is_named() -> None:
    model = replace(small_model(2), constant_device_bytes=10**9)
    with pytest.raises(
        PlanError, match=r"lacks .*d1 has 95.4 MiB; context and temporary memory need 953.7 MiB. Remedy: take a smaller"
    ):
        plan(model, small_cluster((2, 1.0), memory=10**8), micro_batches=4)


def test_more_stages_than_micro_batches_are_refused_with_the_remedy() -> None:
    model, machines = small_model(8), small_cluster((1, 1.0), (1, 1.0), (1, 1.0), memory=26 * 10**7)
    with pytest.raises(PlanError, match=r"2 micro-batches a step.*Raise --micro-batches to 3"):
        plan(model, machines, micro_batches=2)
    assert plan(model, machines, micro_batches=3).groups


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"planner": "oracle"}, "planner='oracle'; allowed: asymmetric, autohet"),
        ({"tensor_parallel": [16]}, "allowed: 1 to 3"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        plan(small_model(2), small_cluster((3, 1.0)), **{"micro_batches": 4, **options})  # type: ignore[arg-type]


# ---- clusters ------------------------------------------------------------------------------------

YAML = """
name: lab
network_bytes_per_s: 12.5e9
nodes:
  - {name: a, device: a100-80, count: 4}
  - {name: b, device: tpu, count: 2}
devices:
  - name: a100-80
    price_per_hour: 2
  - name: tpu
    memory_bytes: 17179869184
    flop_per_s: 1e14
    peer_bytes_per_s: 5e10
"""


def test_a_cluster_is_the_same_in_yaml_and_json(tmp_path: Path) -> None:
    (text := tmp_path / "lab.yaml").write_text(YAML)
    from_yaml = load_cluster(text)
    (as_json := tmp_path / "lab.json").write_text(from_yaml.to_json())
    assert load_cluster(as_json) == from_yaml
    found = kinds(from_yaml)
    assert list(found) == ["tpu", "a100-80"]  # weakest first
    assert (found["tpu"].memory_bytes, found["tpu"].flop_per_s) == (16 * GIB, 1e14)
    preset = presets.device("a100-80")
    assert (found["a100-80"].flop_per_s, found["a100-80"].price_per_hour) == (preset.flop_per_s.value, 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("count: 4", "count: 0"), "nodes[0]: count=0"),
        (("count: 4", "count: four"), "nodes[0]: count='four'"),
        (("name: b,", "name: a,"), "node names repeat"),
        (("network_bytes_per_s: 12.5e9\n", ""), "missing keys ['network_bytes_per_s']"),
        (("name: lab", "name: lab\ncolour: red"), "unknown keys ['colour']"),
        (("flop_per_s: 1e14", "flop_per_s: .nan"), "flop_per_s=nan"),
        (("name: lab", "name: [lab"), "is not YAML"),
    ],
)
def test_a_wrong_cluster_file_is_refused_by_name(change: tuple[str, str], reason: str, tmp_path: Path) -> None:
    (path := tmp_path / "lab.yaml").write_text(YAML.replace(*change))
    with pytest.raises(ConfigError, match=re.escape(reason)) as caught:
        load_cluster(path)
    assert "lab.yaml" in str(caught.value)


def test_a_device_without_preset_needs_its_figures() -> None:
    own = small_cluster((1, 1.0))
    with pytest.raises(ConfigError, match=r"device 'd1' lacks \['flop_per_s'\].*no device preset 'd1'"):
        kinds(replace(own, devices=(replace(own.devices[0], flop_per_s=None),)))
    with pytest.raises(ConfigError, match="that no node has"):
        kinds(replace(own, devices=(*own.devices, DeviceType(name="h100"))))


def test_clusters_by_name_and_by_line() -> None:
    assert [(n.device, n.count) for n in cluster("12xa100-80+2x H800").nodes] == [("a100-80", 8), ("a100-80", 4), ("h800", 2)]
    for name in PAPER_CLUSTERS:
        assert kinds(cluster(name))
    with pytest.raises(ConfigError, match=r"no cluster preset 'autohet-4a100-4h80'.*Did you mean"):
        cluster("autohet-4a100-4h80")
    with pytest.raises(ConfigError, match="no device preset 'a1000'"):
        cluster("4xa1000")


def test_a_plan_survives_its_file() -> None:
    found = plan(small_model(4), small_cluster((2, 1.0), (1, 2.0)), micro_batches=6)
    assert ClusterPlan.from_json(found.to_json()) == found
    assert json.loads(found.to_json())["format"] == "lightning-hetero-cluster-plan"
