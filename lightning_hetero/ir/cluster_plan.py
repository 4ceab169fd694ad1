"""The plan of a cluster: devices and micro-batches of each pipeline, layers of each device."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.codec import Rows, check_format, check_keys, number, parse_object, read_text, to_text

FORMAT = "lightning-hetero-cluster-plan"
VERSION = 1
CLUSTER_PLANNERS = ("asymmetric", "autohet", "balanced", "whale", "megatron")  # names of the planners that make such plans


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage of a pipeline: devices of one node that compute the same layers together.

    Attributes:
        node: The node.
        device: The kind of its devices.
        layers: The number of repeated layers that it holds. The first stage also has all modules
            before them, the last stage all modules after them.
        micro_batch_s: Forward and backward of one micro-batch, seconds.
        memory_bytes: Peak on one of its devices, bytes.
    """

    node: str
    device: str
    layers: int
    micro_batch_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One data-parallel group: a pipeline that holds the whole model.

    Attributes:
        micro_batches: Micro-batches that it computes in one step.
        seconds: The time of its part of a step, without gradient synchronisation, seconds.
        stages: Its stages, in the order of forward.
    """

    micro_batches: int
    seconds: float
    stages: tuple[StagePlan, ...]

    def describe(self) -> str:
        """The group in words, such as ``"2x a100-80 > h800: 3 micro-batches"``."""
        runs = [(name, len(list(run))) for name, run in groupby(stage.device for stage in self.stages)]
        text = " > ".join(name if n == 1 else f"{n}x {name}" for name, n in runs)
        return f"{text}: {self.micro_batches} micro-batch{'es' if self.micro_batches > 1 else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """Another plan that was considered.

    Attributes:
        name: The planner.
        tensor_parallel: Devices that form one stage.
        iteration_s: Seconds of one step.
        groups: Its pipelines, such as ``"2x a100-80 > h800"``, with the number of micro-batches.
    """

    name: str
    tensor_parallel: int
    iteration_s: float
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """Asymmetric 3D parallelism: pipelines of different depth that train one model together.

    Attributes:
        name: The planner.
        tensor_parallel: Devices that form one stage, the same everywhere.
        tokens: Tokens of one step.
        iteration_s: Seconds of one step (AutoHet, equation 1).
        sync_s: Seconds of gradient synchronisation, part of ``iteration_s``.
        utilisation: Used share of the cluster's FLOP/s, idle devices included, 0 to 1.
        groups: The pipelines.
        idle: Devices without work, by node.
        runner_ups: Other plans, fastest first.
        origin: Its model and its cluster, as the command line names them; files relative to the
            plan's own.
    """

    name: str
    tensor_parallel: int
    tokens: int
    iteration_s: float
    sync_s: float
    utilisation: float
    groups: tuple[GroupPlan, ...]
    idle: Mapping[str, int] = field(default_factory=dict)
    runner_ups: tuple[RunnerUp, ...] = ()
    origin: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one step, of all groups together."""
        return sum(g.micro_batches for g in self.groups)

    @property
    def world_size(self) -> int:
        """The number of devices that the plan uses."""
        return self.tensor_parallel * sum(len(g.stages) for g in self.groups)

    def in_short(self) -> RunnerUp:
        """The plan in one line; equal groups are counted."""
        groups = Counter(group.describe() for group in self.groups)
        return RunnerUp(
            name=self.name,
            tensor_parallel=self.tensor_parallel,
            iteration_s=self.iteration_s,
            groups=tuple(f"{n} x ({text})" if n > 1 else text for text, n in groups.items()),
        )

    def to_json(self) -> str:
        """The plan as JSON text, one stage per line."""
        values: dict[str, Any] = {"format": FORMAT, "version": VERSION} | {key: getattr(self, key) for key in _HEAD}
        values["groups"] = Rows(
            {"micro_batches": g.micro_batches, "seconds": g.seconds, "stages": Rows(asdict(stage) for stage in g.stages)}
            for g in self.groups
        )
        if self.idle:
            values["idle"] = dict(self.idle)
        if self.runner_ups:
            values["runner_ups"] = Rows(asdict(r) for r in self.runner_ups)
        if self.origin:
            values["origin"] = dict(self.origin)
        return to_text(values)

    @classmethod
    def from_json(cls, text: str, *, source: str = "cluster plan") -> ClusterPlan:
        """Reads :meth:`to_json`'s text.

        Raises:
            ConfigError: Not JSON, another format or version, a missing or unknown key, a value out
                of range.
        """
        data = parse_object(text, what="cluster plan", source=source)
        check_format(data, FORMAT, VERSION, what="cluster plan", source=source)
        check_keys(data, required=(*_HEAD, "groups"), optional=("idle", "runner_ups", "origin"), where=source)
        values: dict[str, Any] = {"name": _text(data["name"], "name", source)}
        for key in ("tensor_parallel", "tokens"):
            values[key] = number(data[key], key=key, where=source, positive=True, whole=True)
        for key in ("iteration_s", "sync_s", "utilisation"):
            values[key] = number(data[key], key=key, where=source, positive=key == "iteration_s")
        values["groups"] = tuple(
            _group_from(row, f"{source}: groups[{i}]") for i, row in enumerate(_filled(data, "groups", source))
        )
        idle = data.get("idle", {})
        if not isinstance(idle, dict):
            raise ConfigError(f"{source}: idle={idle!r}; expected an object of nodes and counts.")
        values["idle"] = {k: int(number(v, key=f"idle[{k!r}]", where=source, whole=True)) for k, v in idle.items()}
        others = data.get("runner_ups", [])
        if not isinstance(others, list):
            raise ConfigError(f"{source}: runner_ups={others!r}; expected a list of objects.")
        values["runner_ups"] = tuple(_runner_up_from(row, f"{source}: runner_ups[{i}]") for i, row in enumerate(others))
        origin = data.get("origin", {})
        if not isinstance(origin, dict) or not all(isinstance(v, str | int) and not isinstance(v, bool) for v in origin.values()):
            raise ConfigError(f"{source}: origin={origin!r}; expected an object of texts and whole numbers.")
        return cls(**values, origin=origin)

    @classmethod
    def load(cls, path: str | Path) -> ClusterPlan:
        """Reads a plan's file.

        Raises:
            ConfigError: The file cannot be read or is not a cluster plan.
        """
        return cls.from_json(read_text(path, what="cluster plan"), source=str(path))


_HEAD = ("name", "tensor_parallel", "tokens", "iteration_s", "sync_s", "utilisation")


def is_cluster_plan(text: str | bytes) -> bool:
    """Whether a file's content is a cluster plan, by its format field."""
    try:
        data = json.loads(text)
    except ValueError:  # not JSON, or not even text
        return False
    return isinstance(data, dict) and data.get("format") == FORMAT


def _filled(data: dict[str, Any], key: str, where: str) -> list[Any]:
    if not isinstance(data[key], list) or not data[key]:
        raise ConfigError(f"{where}: {key!r} must be a non-empty list of objects, got {data[key]!r}.")
    rows: list[Any] = data[key]
    return rows


def _object(row: Any, kind: type, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} must be an object, got {row!r}.")
    check_keys(row, required=[f.name for f in fields(kind)], optional=(), where=where)
    return row


def _group_from(row: Any, where: str) -> GroupPlan:
    data = _object(row, GroupPlan, where)
    return GroupPlan(
        micro_batches=int(number(data["micro_batches"], key="micro_batches", where=where, positive=True, whole=True)),
        seconds=number(data["seconds"], key="seconds", where=where),
        stages=tuple(_stage_from(s, f"{where}: stages[{i}]") for i, s in enumerate(_filled(data, "stages", where))),
    )


def _stage_from(row: Any, where: str) -> StagePlan:
    data = _object(row, StagePlan, where)
    return StagePlan(
        node=_text(data["node"], "node", where),
        device=_text(data["device"], "device", where),
        layers=int(number(data["layers"], key="layers", where=where, whole=True)),
        micro_batch_s=number(data["micro_batch_s"], key="micro_batch_s", where=where),
        memory_bytes=int(number(data["memory_bytes"], key="memory_bytes", where=where, whole=True)),
    )


def _runner_up_from(row: Any, where: str) -> RunnerUp:
    data = _object(row, RunnerUp, where)
    groups = data["groups"]
    if not isinstance(groups, list) or not all(isinstance(g, str) for g in groups):
        raise ConfigError(f"{where}: groups={groups!r}; expected a list of texts.")
    return RunnerUp(
        name=_text(data["name"], "name", where),
        tensor_parallel=int(number(data["tensor_parallel"], key="tensor_parallel", where=where, positive=True, whole=True)),
        iteration_s=number(data["iteration_s"], key="iteration_s", where=where, positive=True),
        groups=tuple(groups),
    )


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: {key}={value!r}; expected text.")
    return value
