"""The plan: where data lives and where its update runs. Time is in the schedule, not here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_hetero.errors import ConfigError, did_you_mean
from lightning_hetero.ir.codec import Rows, check_format, check_keys, number, parse_object, read_text, to_text

FORMAT = "lightning-hetero-plan"
VERSION = 2
VERSIONS = (1, VERSION)
"""Those that are read. Where devices do not gather, version 1 says the same, and is written."""

TRAINED = ":trained"
"""Ends the name of the block of a module's trained parameters, where the rest of it is frozen.

The block of the rest has the module's name.
"""


_TRAINED_BYTES = 16  # of an element with gradient and Adam's state: 4 + 4 + 8, or 2 + 2 + 12 in 16 bits
_FEW = 2  # times as many bytes are frozen at least, where a block becomes two


def is_divided(num_trained: int, frozen_bytes: int) -> bool:
    """Whether a module's trained parameters are a block of their own.

    ``store.partition`` says why.

    Args:
        num_trained: Elements that train.
        frozen_bytes: Bytes of the parameters that do not.
    """
    return 0 < _FEW * _TRAINED_BYTES * num_trained <= frozen_bytes


def matches(pattern: str, name: str) -> bool:
    """Whether a rule applies to a block.

    A rule for a module applies to the block of its trained parameters too.

    Args:
        pattern: The rule's name or shell pattern.
        name: The block's name.
    """
    names = {name, name.removesuffix(TRAINED)}
    return pattern in names or any(fnmatchcase(n, pattern) for n in names)


class Tier(StrEnum):
    """A level of memory, fastest first. On a CPU-only machine the device is the host."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class UpdateLane(StrEnum):
    """The place of an update: on the device after backward, or on CPU threads during backward."""

    DEVICE = "device"
    CPU = "cpu"


class Saved(StrEnum):
    """The treatment of a tensor that forward saves for backward."""

    KEEP = "keep"  # stays on the device
    RECOMPUTE = "recompute"  # dropped, and recomputed in backward
    SWAP_HOST = "swap_host"  # moved to host memory until backward
    SWAP_DISK = "swap_disk"  # moved to disk until backward


class Gather(StrEnum):
    """Where ranks with devices of their own exchange weights and gradients; one rank does not."""

    HOST = "host"  # in host memory, from which each device copies whole weights over its own link
    DEVICE = "device"  # devices copy slices over their own links, and exchange them over those between devices


class UpdateOrder(StrEnum):
    """The order of CPU updates relative to backward and to each other (LoHan section 3.2)."""

    OVERLAPPED = "overlapped"  # during backward; reading, computing and writing of different blocks overlap
    NAIVE = "naive"  # during backward, but one block's read, update and write end before the next block's begin
    AFTER_BACKWARD = "after_backward"  # all of them once backward has ended, as ZeRO-Infinity does


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One step of a plan in steady state, by simulation.

    Attributes:
        iteration_s: Seconds from one step's first forward to the next one's.
        forward_s: Seconds until the first backward begins.
        backward_s: The rest: backward, and the updates that the next forward must wait for.
        device_peak_bytes: Peak of device memory, the constant part included.
        host_peak_bytes: The same for host memory.
        disk_bytes: Space on disk: both slots of all state and weights there, and swapped
            activations.
        bottleneck: The lane that is busy longest in each phase: keys ``"forward"``, ``"backward"``.
    """

    iteration_s: float
    forward_s: float
    backward_s: float
    device_peak_bytes: int
    host_peak_bytes: int
    disk_bytes: int
    bottleneck: Mapping[str, str]

    def bound_by(self, phase: str) -> str:
        """What bounds a phase, for people: its bottleneck; ``"?"`` if that is not known."""
        lane = self.bottleneck.get(phase, "?")
        return _EXCHANGES.get(lane, lane)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """Placement of one block, or of all blocks whose name matches a pattern.

    Attributes:
        name: A block's name, or a shell pattern (``"model.layers.*"``) before the plan is resolved.
        weights: Tier of the weights between uses.
        state: Tier of the optimizer state.
        update: Lane of the optimizer update. A device update of state on the host copies the state
            to the device and back.
        saved: Treatment of the operator outputs that forward saves.
        boundary: Treatment of the block's input, if it is saved: any of ``Saved`` except
            ``RECOMPUTE``.
        operators: Operator outputs with another treatment than ``saved``, by the operator's name.
    """

    name: str
    weights: Tier = Tier.HOST
    state: Tier = Tier.HOST
    update: UpdateLane = UpdateLane.CPU
    saved: Saved = Saved.KEEP
    boundary: Saved = Saved.KEEP
    operators: Mapping[str, Saved] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.update is UpdateLane.DEVICE and Tier.DISK in (self.state, self.weights):
            raise ConfigError(
                f"block {self.name!r}: update 'device' with weights on {self.weights.value!r} and state on "
                f"{self.state.value!r}; a device update needs both in memory. Set update to 'cpu' or move weights and state "
                f"off 'disk'."
            )
        if self.boundary is Saved.RECOMPUTE:
            raise ConfigError(
                f"block {self.name!r}: boundary='recompute'; a block is recomputed from its input, so the input cannot be."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A placement for every block.

    Attributes:
        name: The planner or the author.
        blocks: Rules in order; the first one whose name :func:`matches` a block applies. After
            :meth:`resolve` one per block.
        prefetch_depth: Blocks whose weights are fetched ahead of their use.
        gradient_depth: Blocks whose gradients may wait in host memory for their update before
            backward waits for them.
        update_order: How CPU updates relate to backward.
        priority: The next forward begins as soon as its first blocks are updated, and updates run
            lowest block first (AutoHete); otherwise it waits for all updates of the step.
        micro_batches: Forwards and backwards of one step; their gradients add up.
        device_cache_bytes: Device memory for weights that live on the host or on disk; ``None``:
            the memory that is left.
        host_cache_bytes: Host memory for weights that live on disk; ``None``: the memory that is
            left.
        gather: Where ranks with devices of their own exchange weights and gradients.
        objective_s: Value of the planner's own formula at its optimum, seconds of one step.
        decisions: The planner's own variables at the optimum.
        predicted: The simulator's prediction for the plan.
        origin: Its model and its machine, as the command line names them: keys such as
            ``"preset_model"``, ``"batch"``, ``"device"``; files relative to the plan's own.
    """

    name: str
    blocks: tuple[BlockPlan, ...]
    prefetch_depth: int = 2
    gradient_depth: int = 4
    update_order: UpdateOrder = UpdateOrder.OVERLAPPED
    priority: bool = True
    micro_batches: int = 1
    device_cache_bytes: int | None = None
    host_cache_bytes: int | None = None
    gather: Gather = Gather.HOST
    objective_s: float | None = None
    decisions: Mapping[str, Any] = field(default_factory=dict)
    predicted: Prediction | None = None
    origin: Mapping[str, str | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("prefetch_depth", "gradient_depth", "micro_batches"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1024:
                raise ConfigError(f"plan {self.name!r}: {key}={value!r}; allowed: an integer from 1 to 1024.")

    def resolve(self, names: Iterable[str]) -> Plan:
        """The same plan with one rule per block, in the order of ``names``.

        Raises:
            ConfigError: A block has no rule, a rule matches no block, or a rule is never reached.
        """
        names = tuple(names)
        if names == tuple(r.name for r in self.blocks):
            return self
        used: set[str] = set()
        resolved = []
        for name in names:
            rule = next((r for r in self.blocks if matches(r.name, name)), None)
            if rule is None:
                raise ConfigError(
                    f"plan {self.name!r} has no rule for block {name!r}. The model's blocks are: {', '.join(names)}. "
                    f'Add the block, or a last rule named "*".'
                )
            used.add(rule.name)
            resolved.append(replace(rule, name=name))
        unused = [r.name for r in self.blocks if r.name not in used and r.name != "*"]
        unknown = [rule for rule in unused if not any(matches(rule, name) for name in names)]
        if unknown:
            raise ConfigError(
                f"plan {self.name!r} has rules for blocks that the model lacks: {', '.join(unknown)}. The model's blocks are: "
                f"{', '.join(names)}. Correct the names, or take the model that the plan is for; in training block_cls says "
                f"what its blocks are."
            )
        if unused:
            raise ConfigError(
                f"plan {self.name!r} has rules that are never reached: {', '.join(unused)}. The first rule that matches a block "
                f"counts, and rules before these match all of their blocks. Move these up, or remove them."
            )
        return replace(self, blocks=tuple(resolved))

    def _repr_html_(self) -> str:
        """What a notebook shows. Drawn by a room above this one, which is loaded on demand."""
        shown: str = import_module("lightning_hetero.report").plan_fragment(self)
        return shown

    def require_predicted(self) -> Prediction:
        """The simulator's view of a plan that has been simulated.

        Raises:
            ConfigError: It has not.
        """
        if self.predicted is None:
            raise ConfigError(f"plan {self.name!r} has no prediction: it has not been simulated. Let a planner evaluate it.")
        return self.predicted

    def to_json(self) -> str:
        """The plan as JSON text, one block per line so that plans diff well.

        Defaults are left out.
        """
        version = VERSION if self.gather is Gather.DEVICE else VERSIONS[0]
        head: dict[str, Any] = {"format": FORMAT, "version": version, "name": self.name}
        head |= {"prefetch_depth": self.prefetch_depth, "gradient_depth": self.gradient_depth}
        defaults = {f.name: f.default for f in fields(self)}
        for key in ("update_order", "priority", "micro_batches", "device_cache_bytes", "host_cache_bytes", "gather", "objective_s"):
            if getattr(self, key) != defaults[key]:
                head[key] = getattr(self, key)
        if self.decisions:
            head["decisions"] = dict(self.decisions)
        if self.predicted is not None:
            head["predicted"] = asdict(self.predicted)
        if self.origin:
            head["origin"] = dict(self.origin)
        return to_text({**head, "blocks": Rows(_row(b) for b in self.blocks)})

    @classmethod
    def from_json(cls, text: str, *, source: str = "plan") -> Plan:
        """Reads :meth:`to_json`'s text.

        Args:
            text: The JSON text.
            source: A file name for errors.

        Raises:
            ConfigError: Not JSON, another format or version, an unknown key or value.
        """
        data = parse_object(text, what="plan", source=source)
        if "format" not in data:
            raise ConfigError(f"{source} is not a plan: it has no 'format'; expected {FORMAT!r}, version {VERSION}.")
        check_format(data, FORMAT, *VERSIONS, what="plan", source=source)
        check_keys(data, required=("blocks",), optional=[f.name for f in fields(cls) if f.name != "blocks"], where=source)
        rows = data.pop("blocks")
        if not isinstance(rows, list) or not rows:
            raise ConfigError(f"{source}: 'blocks' must be a non-empty list of objects, got {rows!r}.")
        blocks = tuple(_block_from(row, f"{source}: blocks[{i}]") for i, row in enumerate(rows))
        if not isinstance(data.get("name", source), str):
            raise ConfigError(f"{source}: name={data['name']!r}; expected text.")
        if "update_order" in data:
            data["update_order"] = _member(UpdateOrder, data["update_order"], "update_order", source)
        if "gather" in data:
            data["gather"] = _member(Gather, data["gather"], "gather", source)
        if not isinstance(data.get("priority", True), bool):
            raise ConfigError(f"{source}: priority={data['priority']!r}; allowed: true, false.")
        for key in ("device_cache_bytes", "host_cache_bytes"):
            if data.get(key) is not None:
                data[key] = number(data[key], key=key, where=source, whole=True)
        if data.get("objective_s") is not None:
            data["objective_s"] = number(data["objective_s"], key="objective_s", where=source)
        if not isinstance(data.get("decisions", {}), dict):
            raise ConfigError(f"{source}: decisions={data['decisions']!r}; expected an object.")
        origin = data.get("origin", {})
        if not isinstance(origin, dict) or not all(isinstance(v, str | int) and not isinstance(v, bool) for v in origin.values()):
            raise ConfigError(f"{source}: origin={origin!r}; expected an object of texts and whole numbers.")
        if data.get("predicted") is not None:
            data["predicted"] = _prediction_from(data["predicted"], f"{source}: predicted")
        return cls(**{"name": source, **data, "blocks": blocks})

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan file.

        Raises:
            ConfigError: The file cannot be read or is not a plan.
        """
        return cls.from_json(read_text(path, what="plan file"), source=str(path))


_EXCHANGES = {"net": "the exchange between devices", "peer": "the exchange between devices"}
_KINDS: dict[str, type[StrEnum]] = {"weights": Tier, "state": Tier, "update": UpdateLane, "saved": Saved, "boundary": Saved}


def _row(block: BlockPlan) -> dict[str, Any]:
    """Tiers and lane always, other keys if they are not the default."""
    row: dict[str, Any] = {k: getattr(block, k) for k in ("name", "weights", "state", "update")}
    row |= {k: getattr(block, k) for k in ("saved", "boundary") if getattr(block, k) is not Saved.KEEP}
    return row | ({"operators": dict(block.operators)} if block.operators else {})


def _member(kind: type[StrEnum], value: Any, key: str, where: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        known = [k.value for k in kind]
        raise ConfigError(f"{where}: {key}={value!r}; allowed: {known}.{did_you_mean(value, known)}") from None


def _block_from(row: Any, where: str) -> BlockPlan:
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise ConfigError(f"{where} must be an object with a 'name', got {row!r}.")
    check_keys(row, required=("name",), optional=(*_KINDS, "operators"), where=where)
    values: dict[str, Any] = {"name": row["name"]}
    values |= {key: _member(kind, row[key], key, where) for key, kind in _KINDS.items() if key in row}
    operators = row.get("operators", {})
    if not isinstance(operators, dict):
        raise ConfigError(f"{where}: operators={operators!r}; expected an object of names and policies.")
    values["operators"] = {name: _member(Saved, value, f"operators[{name!r}]", where) for name, value in operators.items()}
    return BlockPlan(**values)


def _prediction_from(row: Any, where: str) -> Prediction:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} must be an object, got {row!r}.")
    check_keys(row, required=[f.name for f in fields(Prediction)], optional=(), where=where)
    values: dict[str, Any] = {k: number(row[k], key=k, where=where) for k in ("iteration_s", "forward_s", "backward_s")}
    sizes = ("device_peak_bytes", "host_peak_bytes", "disk_bytes")
    values |= {k: number(row[k], key=k, where=where, whole=True) for k in sizes}
    if not isinstance(row["bottleneck"], dict) or not all(isinstance(lane, str) for lane in row["bottleneck"].values()):
        raise ConfigError(f"{where}: bottleneck={row['bottleneck']!r}; expected an object of text.")
    return Prediction(**values, bottleneck=row["bottleneck"])
