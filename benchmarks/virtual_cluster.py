"""Cluster plans against an equal split, on a virtual device clock.

Every device of a cluster is a process on this machine. Strategy, schedule, collectives and traffic
are the real ones; only the compute of a layer is a sleep of FLOP / declared power, and twice that
in backward. So six devices fit two cores, and the declared powers are exact. Declared links cost
nothing, because the traffic here is small: the benchmark measures whether groups, stages and
micro-batches take the predicted time. Plans are ranked by equation 1; the prediction is the
simulated time of 1F1B.

For each cluster the plans of the planner, of the Whale-like and of the Megatron-like baseline (the
equal split) train some steps. ``python benchmarks/virtual_cluster.py`` prints a row per plan and
one line of JSON last: the largest relative error of a measured speed-up over the equal split, and
the number of clusters for which the planned layout is the fastest measured one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
import warnings
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from scratch import free_port, process_context
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.ir.cluster import Cluster, DeviceType, Node
from lightning_hetero.ir.cluster_plan import ClusterPlan
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.parallel import StagedSteps
from lightning_hetero.parallel.planner import plan
from lightning_hetero.parallel.planner.step_time import step_s
from lightning_hetero.strategies import HeteroParallelStrategy

LAYERS, WIDTH, SAMPLES, MICRO_BATCHES = 8, 8, 2, 12  # samples of one micro-batch; micro-batches of one step
PARAMS = 1_000_000  # of a layer, as far as plans know: 16 MB with gradients and Adam
WARM_UP = 1  # steps that are not measured
PLANNERS = ("asymmetric", "whale", "megatron")


@dataclass(frozen=True)
class Devices:
    """One node.

    Attributes:
        count: Its devices.
        power: Relative to the weakest.
        layers: How many layers the memory of one holds.
    """

    count: int
    power: float
    layers: int = 100


CLUSTERS = {
    "1 + 3": (Devices(1, 1), Devices(1, 3)),
    "1 + 2 + 3": (Devices(1, 1), Devices(1, 2), Devices(1, 3)),
    "2x1 + 2x2": (Devices(2, 1), Devices(2, 2)),
    "3x1 + 1x3": (Devices(3, 1), Devices(1, 3)),
    "2x1 (5 layers) + 1x2": (Devices(2, 1, 5), Devices(1, 2)),
    "4x1 (5 layers) + 2x2": (Devices(4, 1, 5), Devices(2, 2)),
    "1x2 (5 layers) + 4x1": (Devices(1, 2, 5), Devices(4, 1)),
    "2x1 + 2x3 (5 layers)": (Devices(2, 1, 5), Devices(2, 3, 5)),
}


def cluster_of(name: str, nodes: tuple[Devices, ...]) -> Cluster:
    """As planners know it: power 1 is 1 FLOP/s, and links are free."""
    devices = [
        DeviceType(
            name=f"power{i}",
            memory_bytes=int((node.layers + 0.5) * 16 * PARAMS),
            flop_per_s=float(node.power),
            peer_bytes_per_s=1e15,
        )
        for i, node in enumerate(nodes)
    ]
    return Cluster(
        name=name,
        network_bytes_per_s=1e15,
        nodes=tuple(Node(name=f"node{i}", device=f"power{i}", count=node.count) for i, node in enumerate(nodes)),
        devices=tuple(devices),
    )


def model_of(layer_s: float) -> ModelProfile:
    """A layer's forward and backward take ``layer_s`` where the power is 1."""
    blocks = tuple(
        BlockProfile(
            name=f"layers.{i}",
            num_params=PARAMS,
            num_trainable_params=PARAMS,
            forward_s=layer_s / 3,
            backward_s=2 * layer_s / 3,
            forward_flop=layer_s / 3,
            activation_bytes=1,
            boundary_bytes=1,
            transient_bytes=0,
        )
        for i in range(LAYERS)
    )
    return ModelProfile(
        name="sleeps", tokens=SAMPLES, compute_itemsize=4, constant_device_bytes=0, constant_host_bytes=0, blocks=blocks
    )


# ---- a device ------------------------------------------------------------------------------------


class Clock:
    """Sleeps for the requested total: if one sleep is too long, the next ones are shorter."""

    def __init__(self) -> None:
        self._owed_s = 0.0

    def take(self, seconds: float) -> None:
        self._owed_s += seconds
        begin = time.monotonic()
        if self._owed_s > 0:
            time.sleep(self._owed_s)
        # A process that had to wait for a core does not make up for it.
        self._owed_s = max(self._owed_s - (time.monotonic() - begin), -0.002)


class Sleep(torch.autograd.Function):
    """Takes its time in forward, and twice that in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Clock, seconds: float) -> torch.Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        clock.take(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.clock.take(2 * ctx.seconds)
        return gradients[0], None, None


class Layer(nn.Module):
    """A Linear that takes as long as the declared device would.

    Args:
        clock: The device's.
        sample_s: Forward of one sample.
    """

    def __init__(self, clock: Clock, sample_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.clock, self.sample_s = clock, sample_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Sleep.apply(x + torch.tanh(self.linear(x)), self.clock, len(x) * self.sample_s)
        return found


class Model(StagedSteps, pl.LightningModule):
    """Layers that sleep; it notes when its steps begin."""

    def __init__(self, sample_s: float) -> None:
        super().__init__()
        clock = Clock()
        self.layers = nn.ModuleList(Layer(clock, sample_s) for _ in range(LAYERS))
        self.begins: list[float] = []

    def stage_layers(self) -> nn.ModuleDict:
        return nn.ModuleDict({f"layer{i}": layer for i, layer in enumerate(self.layers)})

    def loss_sum(self, output: torch.Tensor, batch: Any) -> Any:
        return (output - batch[1]).square().sum()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.begins.append(time.monotonic())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def device(rank: int, environment: dict[str, str], sample_s: float, plans: list[ClusterPlan], steps: int, out: Any) -> None:
    """Trains by every plan, and reports seconds of its steps."""
    os.environ.update(environment)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    data = torch.zeros((WARM_UP + steps + 1) * MICRO_BATCHES * SAMPLES, WIDTH)
    found = []
    for chosen in plans:
        model = Model(sample_s)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=HeteroParallelStrategy(plan=chosen, rebalance_every=0),
            max_steps=WARM_UP + steps + 1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, DataLoader(TensorDataset(data, data), batch_size=SAMPLES))
        between = [b - a for a, b in zip(model.begins, model.begins[1:], strict=False)]
        found.append(between[WARM_UP:])
    out.put((rank, found))


# ---- the comparison ------------------------------------------------------------------------------


def measure(nodes: tuple[Devices, ...], plans: list[ClusterPlan], *, layer_s: float, steps: int) -> list[float]:
    """Seconds of the fastest step under each plan: other work on this machine only adds to it."""
    context = process_context()
    port = free_port()
    ranks = [(i, local, node) for i, node in enumerate(nodes) for local in range(node.count)]
    out = context.Queue()
    processes = []
    for rank, (i, _, node) in enumerate(ranks):
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "WORLD_SIZE": str(len(ranks)),
            "RANK": str(rank),
            "LOCAL_RANK": "0",  # devices=1: every process has one CPU
            "GROUP_RANK": str(rank),
            "TORCHELASTIC_RUN_ID": "virtual",
            "LIGHTNING_HETERO_NODE": f"node{i}",
        }
        sample_s = layer_s / 3 / SAMPLES / node.power
        arguments = (rank, environment, sample_s, plans, steps, out)
        processes.append(context.Process(target=device, args=arguments))
        processes[-1].start()
    try:
        found = dict(out.get(timeout=600) for _ in ranks)
    finally:
        for process in processes:
            process.join(30)
            if process.is_alive():
                process.kill()
    return [min(max(step) for step in zip(*ranks_s, strict=True)) for ranks_s in zip(*found.values(), strict=True)]


def layout(chosen: ClusterPlan) -> str:
    """Groups as ``node:layers > node:layers x micro-batches``."""
    groups = (" > ".join(f"{s.node}:{s.layers}" for s in g.stages) + f" x{g.micro_batches}" for g in chosen.groups)
    return "; ".join(groups)


def compare(name: str, *, layer_s: float, steps: int) -> dict[str, Any]:
    """One cluster: its plans, predicted and measured."""
    nodes, model = CLUSTERS[name], model_of(layer_s)
    cluster = cluster_of(name, nodes)
    plans = [plan(model, cluster, micro_batches=MICRO_BATCHES, planner=p, tensor_parallel=(1,)) for p in PLANNERS]
    distinct = {layout(p): p for p in plans}  # planners agree here and there
    seconds_of = dict(zip(distinct, measure(nodes, list(distinct.values()), layer_s=layer_s, steps=steps), strict=True))
    measured = [seconds_of[layout(p)] for p in plans]
    rows = []
    predicted = [step_s(p) for p in plans]
    for planner, chosen, expected_s, seconds in zip(PLANNERS, plans, predicted, measured, strict=True):
        speedup, expected = measured[-1] / seconds, predicted[-1] / expected_s
        rows.append(
            {
                "planner": planner,
                "layout": layout(chosen),
                "predicted_s": expected_s,
                "equation_1_s": chosen.iteration_s,
                "measured_s": seconds,
                "predicted_speedup": expected,
                "speedup": speedup,
                "error": abs(speedup / expected - 1),
            }
        )
        print(
            f"{name:24} {planner:12} {expected_s:7.3f} s predicted {seconds:7.3f} s measured "
            f"{expected:6.3f}x {speedup:6.3f}x  {layout(chosen)}",
            flush=True,
        )
    # Plans that are predicted to be equal differ by noise.
    best = min(r["measured_s"] for r in rows)
    return {"cluster": name, "plans": rows, "fastest": rows[0]["measured_s"] <= 1.01 * best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layer-s", type=float, default=0.12, help="forward and backward of a layer where the power is 1")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each plan")
    parser.add_argument("--clusters", nargs="*", choices=list(CLUSTERS), default=list(CLUSTERS), metavar="NAME")
    arguments = parser.parse_args()
    found = [compare(name, layer_s=arguments.layer_s, steps=arguments.steps) for name in arguments.clusters]
    result = {
        "benchmark": "virtual_cluster",
        "clusters": len(found),
        "fastest": sum(cluster["fastest"] for cluster in found),
        "within_5_percent": sum(max(row["error"] for row in cluster["plans"]) <= 0.05 for cluster in found),
        "worst_speedup_error": max(row["error"] for cluster in found for row in cluster["plans"]),
        "worst_step_error": max(abs(r["measured_s"] / r["predicted_s"] - 1) for c in found for r in c["plans"]),
        "results": found,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
