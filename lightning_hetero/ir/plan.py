"""The plan: *what* lives where and where its update runs. It says nothing of time; the schedule does."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lightning_hetero.errors import ConfigError

FORMAT = "lightning-hetero-plan"
VERSION = 1


class Tier(StrEnum):
    """Where bytes live, fastest first. On a CPU-only machine the device is the host."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class UpdateLane(StrEnum):
    """Where an optimizer update runs: after backward on the device, or on CPU threads that overlap with backward."""

    DEVICE = "device"
    CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """Placement of one block, or of all blocks whose name matches a pattern.

    Attributes:
        name: A block's name, or a shell pattern (``"model.layers.*"``) before the plan is resolved.
        weights: Tier of the weights between uses.
        state: Tier of the optimizer state.
        update: Lane of the optimizer update.
    """

    name: str
    weights: Tier = Tier.HOST
    state: Tier = Tier.HOST
    update: UpdateLane = UpdateLane.CPU

    def __post_init__(self) -> None:
        if self.update is UpdateLane.DEVICE and Tier.DISK in (self.state, self.weights):
            raise ConfigError(
                f"block {self.name!r}: update 'device' with weights on {self.weights.value!r} and state on "
                f"{self.state.value!r}; a device update needs both in memory. Set update to 'cpu' or move weights and state "
                f"off 'disk'."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A placement for every block.

    Attributes:
        name: The planner or the author.
        blocks: Rules in order; the first one whose name matches a block holds. After :meth:`resolve` one per block.
        prefetch_depth: Blocks whose weights are fetched ahead of their use.
        gradient_depth: Blocks whose gradients may wait in host memory for their update before backward waits for them.
    """

    name: str
    blocks: tuple[BlockPlan, ...]
    prefetch_depth: int = 2
    gradient_depth: int = 4

    def __post_init__(self) -> None:
        for field in ("prefetch_depth", "gradient_depth"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1024:
                raise ConfigError(f"plan {self.name!r}: {field}={value!r}; allowed: an integer from 1 to 1024.")

    def resolve(self, names: Iterable[str]) -> Plan:
        """The same plan with one rule per block, in the order of ``names``.

        Raises:
            ConfigError: A block has no rule, or a rule matches no block.
        """
        names = tuple(names)
        used: set[str] = set()
        resolved = []
        for name in names:
            rule = next((r for r in self.blocks if r.name == name or fnmatchcase(name, r.name)), None)
            if rule is None:
                raise ConfigError(
                    f"plan {self.name!r} has no rule for block {name!r}. The model's blocks are: {', '.join(names)}. "
                    f'Add the block, or a last rule named "*".'
                )
            used.add(rule.name)
            resolved.append(replace(rule, name=name))
        unused = [r.name for r in self.blocks if r.name not in used and r.name != "*"]
        if unused:
            raise ConfigError(
                f"plan {self.name!r} has rules for blocks that the model lacks: {', '.join(unused)}. The model's blocks are: "
                f"{', '.join(names)}. Correct the names, or set block_cls so that the blocks match."
            )
        return replace(self, blocks=tuple(resolved))

    def to_json(self) -> str:
        """The plan as JSON text, one block a line so that plans diff well."""
        head = {"format": FORMAT, "version": VERSION, "name": self.name}
        head |= {"prefetch_depth": self.prefetch_depth, "gradient_depth": self.gradient_depth}
        rows = ",\n".join("    " + json.dumps(asdict(b)) for b in self.blocks)
        body = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in head.items())
        return f'{{\n{body},\n  "blocks": [\n{rows}\n  ]\n}}\n'

    @classmethod
    def from_json(cls, text: str, *, source: str = "plan") -> Plan:
        """Reads :meth:`to_json`'s text.

        Args:
            text: The JSON text.
            source: A file name for errors.

        Raises:
            ConfigError: Not JSON, another format or version, an unknown key or value.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{source} is not JSON: {error}.") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
            got = {k: data.get(k) for k in ("format", "version")} if isinstance(data, dict) else type(data).__name__
            raise ConfigError(f"{source} is not a plan: got {got}, expected format {FORMAT!r}, version {VERSION}.")
        known = {f.name for f in fields(cls)}
        rows = data.get("blocks")
        if not isinstance(rows, list) or not rows:
            raise ConfigError(f"{source}: 'blocks' must be a non-empty list of objects, got {rows!r}.")
        blocks = tuple(_block_from(row, f"{source}: blocks[{i}]") for i, row in enumerate(rows))
        rest = {k: v for k, v in data.items() if k not in ("format", "version", "blocks")}
        if unknown := sorted(set(rest) - known):
            raise ConfigError(f"{source}: unknown keys {unknown}; known: {sorted(known)}.")
        return cls(**{"name": source, **rest, "blocks": blocks})

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan file.

        Raises:
            ConfigError: The file cannot be read or is not a plan.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"plan file {str(path)!r} cannot be read: {error}.") from error
        return cls.from_json(text, source=str(path))


def _block_from(row: Any, where: str) -> BlockPlan:
    kinds: dict[str, type[StrEnum]] = {"weights": Tier, "state": Tier, "update": UpdateLane}
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise ConfigError(f"{where} must be an object with a 'name', got {row!r}.")
    if unknown := sorted(set(row) - set(kinds) - {"name"}):
        raise ConfigError(f"{where}: unknown keys {unknown}; known: {['name', *kinds]}.")
    values: dict[str, Any] = {"name": row["name"]}
    for key, kind in kinds.items():
        if key in row:
            try:
                values[key] = kind(row[key])
            except ValueError:
                raise ConfigError(f"{where}: {key}={row[key]!r}; allowed: {[k.value for k in kind]}.") from None
    return BlockPlan(**values)
