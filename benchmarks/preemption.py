"""The cost of lost and joining nodes: a drill with torchrun's agents, one per node, on one machine.

Three nodes are in the plan, two of them start. During training the node with rank 0 is killed with
``kill -9``, agent and worker at once; a third node joins; and that one is told to leave with
SIGTERM. Every event is timed from its cause to the first step of the remaining nodes. In the end
weights and optimizer state are compared with one undisturbed process, and the samples of every step
with the expected ones.

With ``--pipelines`` no node holds the whole model. All three nodes start, with ``plan="auto"``, and
every node keeps the layers of its rank with ``LocalFirst``. The node with rank 0 is killed, and its
copies are lost; the others plan again; then it comes back empty, and is told to leave.

``python benchmarks/preemption.py`` prints one line of JSON last: seconds of each event, committed
steps that were lost, steps that were trained again, and the largest relative difference; with
``--pipelines`` also the sources of the others' reads after the kill. A drill that fails leaves its
notes and logs in a folder below ``--dir``.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from scratch import FORKS, free_port, scratch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_hetero import LocalFirst
from lightning_hetero.cli.launch import launch_lines
from lightning_hetero.ir.cluster_plan import ClusterPlan, GroupPlan, StagePlan
from lightning_hetero.parallel import StagedSteps
from lightning_hetero.parallel.elastic import CommittedSteps, Elastic, node_name
from lightning_hetero.parallel.pipeline import automatic
from lightning_hetero.strategies import HeteroParallelStrategy

NODES = ("first", "second", "third")
SPEEDS = {"first": 1.0, "second": 2.0, "third": 3.0}  # so that every membership cuts batches otherwise
BATCH, SAMPLES, WIDTH = 12, 150, 8  # an epoch has 12 batches and half of one
LAYERS, MICRO_BATCHES = 6, 6
MEMORY_BYTES = 100_000  # of a node, for pipelines: two hold the model, one does not
STEPS = 150
STEP_S = 0.3  # of a step while something happens: there have to be enough left
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
PATIENCE_S = 300.0  # after which the drill has failed
TOLERANCE = 1e-12  # relative difference: gradients are added in another order

# ---- a worker ------------------------------------------------------------------------------------


class Samples(Dataset[tuple[int, torch.Tensor]]):
    """Random samples that say which they are."""

    def __init__(self) -> None:
        self.values = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.values[index]


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class Model(StagedSteps, pl.LightningModule):
    """A small network that notes which samples it saw in which step.

    Args:
        notes: Where; a line for each batch.
        limit: A file with the step that training may begin: the drill decides what happens in which
            step.
    """

    def __init__(self, notes: Path, limit: Path | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS)).double()
        self.notes, self.limit = notes, limit

    def stage_layers(self) -> nn.ModuleDict:
        return nn.ModuleDict({f"block{i}": block for i, block in enumerate(self.blocks)})

    def stage_inputs(self, batch: Any) -> torch.Tensor:
        return batch[1]

    def loss_sum(self, output: torch.Tensor, batch: Any) -> Any:
        return nn.functional.mse_loss(output, batch[1].flip(-1), reduction="sum"), output.numel()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        while self.limit is not None and self.global_step >= int(self.limit.read_text() or 0):
            time.sleep(0.01)
        pipelines = getattr(self.trainer.strategy, "pipelines", None)
        line = {
            "step": self.global_step,
            "rank": self.trainer.global_rank,
            "ranks": self.trainer.world_size,
            "node": node_name(),
            "part": self.trainer.global_rank if pipelines is None else pipelines.group,  # all ranks of a pipeline have its samples
            "samples": batch[0].tolist(),
            "bytes": getattr(self.trainer.strategy.checkpoint_io, "bytes_read", {}),
        }
        with self.notes.open("a") as file:
            file.write(json.dumps(line | {"time": time.time(), "process": os.getpid()}) + "\n")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), "interval": "step"}]


def train(folder: Path, *, elastic: bool, pipelines: bool) -> None:
    """Trains to the end; every rank saves its trained parameters with their optimizer state."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = Samples()
    strategy: Any = "auto"
    local_first = []
    if elastic and pipelines:
        automatic.memory_bytes = lambda device: MEMORY_BYTES
        strategy = HeteroParallelStrategy(plan="auto", micro_batches=MICRO_BATCHES, elastic=Elastic(folder / "steps", grace_s=10))
        local_first = [LocalFirst(memory=folder / "nodes" / node_name())]
        loader = DataLoader(data, batch_size=BATCH // MICRO_BATCHES, shuffle=True)
    elif elastic:
        strategy = HeteroParallelStrategy(
            speeds=SPEEDS, rebalance_every=0, global_batch_size=BATCH, elastic=Elastic(folder / "steps", grace_s=10)
        )
        loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    else:
        sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=0)
        loader = DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=pipelines)
    model = Model(folder / f"notes-{os.getpid()}.jsonl", folder / "limit" if elastic else None)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        plugins=local_first,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, loader)
    found = {}
    for name, parameter in model.named_parameters():
        if state := trainer.optimizers[0].state.get(parameter):
            found |= {name: parameter.detach().clone(), **{f"{name}.{key}": state[key] for key in ("exp_avg", "exp_avg_sq")}}
    torch.save(found, folder / f"{'drill' if elastic else 'alone'}-{trainer.global_rank}.pt")


# ---- the drill -----------------------------------------------------------------------------------


class Drill:
    """Starts, kills and watches nodes.

    Args:
        folder: Where everything is.
        pipelines: No node holds the whole model.
    """

    def __init__(self, folder: Path, *, pipelines: bool) -> None:
        self.folder = folder
        self.steps = CommittedSteps(folder / "steps")
        port = free_port()
        script = [__file__, "--worker", str(folder), *(["--pipelines"] if pipelines else [])]
        least = 2 if pipelines else 1
        self.lines = launch_lines(_plan(), script, rendezvous=f"127.0.0.1:{port}", least_nodes=least, run_id="drill")
        self.processes: dict[str, psutil.Process] = {}
        self._start("store", self.lines["store"]["command"][1:], {})
        self.allow(0)

    def _start(self, name: str, arguments: list[str], environment: dict[str, str]) -> None:
        """What Python does with these arguments."""
        environment = {**os.environ, **ENVIRONMENT, **environment}
        with (self.folder / f"{name}.log").open("ab") as log:
            if FORKS:
                self.processes[name] = psutil.Process(_forked(arguments, environment, log.fileno()))
            else:
                command = [sys.executable, *arguments]
                self.processes[name] = psutil.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def start(self, name: str) -> None:
        """A node appears."""
        line = next(node for node in self.lines["nodes"] if node["node"] == name)
        forks = ["--run-path", "--start-method=fork"] if FORKS else []
        arguments = ["-m", "torch.distributed.run", "--local-addr=127.0.0.1", *forks, *line["command"][1:]]
        self._start(name, arguments, self.lines["environment"] | line["environment"])

    def kill(self, name: str) -> None:
        """Kills a node: its agent and its worker, which may have a session of its own, at once."""
        agent = self.processes.pop(name)
        for process in [agent, *agent.children(recursive=True)]:
            process.kill()
        agent.wait()
        shutil.rmtree(self.folder / "nodes" / name, ignore_errors=True)

    def tell(self, name: str) -> None:
        """A node gets its notice."""
        self.processes[name].send_signal(signal.SIGTERM)

    def allow(self, steps: int) -> None:
        """Training may go as far as this step."""
        part = self.folder / "limit.part"
        part.write_text(str(steps))
        part.replace(self.folder / "limit")

    def notes(self) -> list[dict[str, Any]]:
        """What the workers noted, in the order of time."""
        lines = [line for file in self.folder.glob("notes-*.jsonl") for line in file.read_text().splitlines() if line.endswith("}")]
        return sorted(map(json.loads, lines), key=lambda note: note["time"])

    def committed(self) -> int:
        """The newest committed step."""
        return (self.steps.steps() or [0])[-1]

    def wait(self, what: str, done: Callable[[], bool]) -> None:
        """Waits until it is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > deadline:
                self._stacks()
                logs = "\n".join(f"{p.name}:\n{p.read_text()[-3000:]}" for p in self.folder.glob("*.log"))
                raise TimeoutError(f"{what}: not after {PATIENCE_S:.0f} s. Committed: {self.committed()}.\n{logs}")
            time.sleep(0.02)

    def _stacks(self) -> None:
        """Workers write to their logs what they are at."""
        for agent in self.processes.values():
            for worker in agent.children() if agent.is_running() else ():
                worker.send_signal(signal.SIGUSR1)
        time.sleep(1)

    def changed(self, cause: Callable[[], None], nodes: set[str], what: str) -> dict[str, Any]:
        """From a cause to the first step that is trained by these nodes alone.

        Training may take a step every so often meanwhile: a node that is told to leave finishes its
        own.
        """
        before, begin = self.committed(), time.time()
        cause()
        found: list[dict[str, Any]] = []

        def trained() -> bool:
            self.allow(min(before + 1 + int((time.time() - begin) / STEP_S), STEPS - 10))
            notes = [n for n in self.notes() if n["time"] > begin and n["ranks"] == len(nodes) and n["node"] in nodes]
            for step in {n["step"] for n in notes}:
                there = [n for n in notes if n["step"] == step]
                if {n["node"] for n in there} == nodes and self.committed() > step:
                    found.extend(there)
            return bool(found)

        self.wait(what, trained)
        first = min(found, key=lambda n: n["step"])["step"]
        there = [n for n in found if n["step"] == first]
        read = {source: sum(n["bytes"][source] for n in there) for source in there[0]["bytes"]}
        return {"seconds": max(n["time"] for n in there) - begin, "before": before, "first": first, "read": read}

    def finish(self, ranks: int) -> None:
        """Training goes to its end."""
        self.allow(STEPS)
        self.wait("the end", lambda: len(list(self.folder.glob("drill-*.pt"))) == ranks)


def _plan() -> ClusterPlan:
    stages = [StagePlan(node=n, device="cpu", layers=1, micro_batch_s=1.0, memory_bytes=1) for n in NODES]
    groups = tuple(GroupPlan(micro_batches=1, seconds=1.0, stages=(stage,)) for stage in stages)
    return ClusterPlan(name="drill", tensor_parallel=1, tokens=1, iteration_s=1.0, sync_s=0.0, utilisation=1.0, groups=groups)


def _forked(arguments: list[str], environment: dict[str, str], log: int) -> int:
    """Does what Python does with these arguments, in a fork of this process: its number."""
    import torch.distributed.run
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    sys.stdout.flush()
    if process := os.fork():
        return process
    try:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        os.environ.update(environment)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        dynamic_rendezvous.get_method_name = lambda depth=2: ""  # for a log; seconds of looking through all that is imported here
        option, what, *further = arguments
        if option == "-c":
            exec(what)
        else:
            torch.distributed.run.main(further)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def drill(folder: Path, *, pipelines: bool) -> Iterator[Drill]:
    """Its processes end with it."""
    found = Drill(folder, pipelines=pipelines)
    try:
        yield found
    finally:
        for name, agent in list(found.processes.items()):
            if agent.is_running():
                found.kill(name)


def run(folder: Path, *, pipelines: bool) -> dict[str, Any]:
    """The drill, and what came of it."""
    with drill(folder, pipelines=pipelines) as nodes:
        begin = time.time()
        first = set(NODES if pipelines else NODES[:2])
        for name in sorted(first):
            nodes.start(name)
        started = nodes.changed(lambda: None, first, "the start")["seconds"]
        zero = next(n["node"] for n in nodes.notes() if n["rank"] == 0 and n["ranks"] == len(first))
        left, comes = first - {zero}, zero if pipelines else "third"
        down = nodes.changed(lambda: nodes.kill(zero), left, "after a kill")
        up = nodes.changed(lambda: nodes.start(comes), left | {comes}, "a node joins")
        told = nodes.changed(lambda: nodes.tell(comes), left, "after SIGTERM")
        nodes.finish(len(left))
        notes = nodes.notes()
        events = (down, up, told)
        print(f"the drill took {time.time() - begin:.1f} s")
    train(folder, elastic=False, pipelines=pipelines)
    return {
        "benchmark": "preemption",
        "pipelines": pipelines,
        "start_s": started,
        "down_s": down["seconds"],
        "up_s": up["seconds"],
        "sigterm_s": told["seconds"],
        "lost_steps": sum(max(0, e["before"] - e["first"]) for e in events),
        "repeated_steps": _repeated(notes),
        "wrong_samples": _wrong_samples(notes, drop_last=pipelines),
        "max_difference": _difference(folder),
        **({"bytes_read_after_kill": down["read"]} if pipelines else {}),
    }


def _last_by_step(notes: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Each step's notes of the last time that it was trained: those before were not committed."""
    last: dict[int, list[dict[str, Any]]] = {}
    for note in notes:
        there = last.setdefault(note["step"], [])
        if any(n["process"] == note["process"] or n["node"] == note["node"] or n["ranks"] != note["ranks"] for n in there):
            there.clear()
        there.append(note)
    return last


def _repeated(notes: list[dict[str, Any]]) -> int:
    """Steps that were begun more than once: under way when something happened."""
    return sum(len({n["process"] for n in notes if n["step"] == step}) > len(there) for step, there in _last_by_step(notes).items())


def _wrong_samples(notes: list[dict[str, Any]], *, drop_last: bool) -> int:
    """Steps whose samples are not those that one process would have had."""
    data, expected = Samples(), []
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=0)
    for epoch in range(STEPS):
        sampler.set_epoch(epoch)
        order = list(sampler)[: SAMPLES // BATCH * BATCH if drop_last else SAMPLES]
        expected += [sorted(order[begin : begin + BATCH]) for begin in range(0, len(order), BATCH)]
    last = _last_by_step(notes)
    parts = [{note["part"]: note["samples"] for note in last.get(step, [])} for step in range(STEPS)]
    seen = [sorted(i for samples in of_step.values() for i in samples) for of_step in parts]
    return sum(a != b for a, b in zip(seen, expected[:STEPS], strict=True))


def _difference(folder: Path) -> float:
    """The largest relative difference of weights and optimizer state.

    Infinite if something is missing.
    """
    alone = torch.load(folder / "alone-0.pt")
    ranks = [torch.load(file) for file in folder.glob("drill-*.pt")]
    if {name for rank in ranks for name in rank} != set(alone):
        return float("inf")
    return max(float((value - alone[name]).abs().max() / alone[name].abs().max()) for rank in ranks for name, value in rank.items())


@contextmanager
def notes_kept(folder: Path, parent: Path) -> Iterator[dict[str, Any]]:
    """Keeps notes and logs of a drill that failed or whose result (the dictionary) is wrong."""
    result: dict[str, Any] = {}
    try:
        yield result
    finally:
        if not result or result["lost_steps"] or result["wrong_samples"] or not result["max_difference"] <= TOLERANCE:
            kept = Path(tempfile.mkdtemp(dir=parent, prefix="preemption-notes-"))
            for file in [*folder.glob("notes-*.jsonl"), *folder.glob("*.log")]:
                shutil.copy(file, kept)
            print(f"the drill failed; its notes are in {kept}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dir", type=Path, default=Path("/tmp"), help="where the drill's files are")
    parser.add_argument("--pipelines", action="store_true", help="no node holds the whole model")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has its agent's
        faulthandler.register(signal.SIGUSR1)
        train(arguments.worker, elastic=True, pipelines=arguments.pipelines)
        return
    with scratch(arguments.dir) as folder, notes_kept(folder, arguments.dir) as result:
        result |= run(folder, pipelines=arguments.pipelines)
        print(json.dumps(result))


if __name__ == "__main__":
    main()
