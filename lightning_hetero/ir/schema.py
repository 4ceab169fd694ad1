"""JSON Schemas of profiles and plans, generated from the dataclasses that read these files.

``python -m lightning_hetero.ir.schema docs/schemas`` writes the published ones. They accept the
same files as the readers. Only conditions between keys, such as that a device update needs its
state in memory, are left to the readers.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from lightning_hetero.ir import cluster, cluster_plan, hardware, model, plan

DIALECT = "https://json-schema.org/draft/2020-12/schema"

# Published files: the class, and the module with its format and version.
PUBLISHED: dict[str, tuple[type, Any]] = {
    "hardware-profile.schema.json": (hardware.HardwareProfile, hardware),
    "model-profile.schema.json": (model.ModelProfile, model),
    "plan.schema.json": (plan.Plan, plan),
    "cluster.schema.json": (cluster.Cluster, cluster),
    "cluster-plan.schema.json": (cluster_plan.ClusterPlan, cluster_plan),
}

_DEPTH = {"minimum": 1, "maximum": 1024}
_POSITIVE = {"exclusiveMinimum": 0}
_NAMED = {"minLength": 1}

# Requirements of the readers beyond the type, by class and key.
_RULES: dict[tuple[type, str], dict[str, Any]] = {
    **{(hardware.HardwareProfile, key): _POSITIVE for key in hardware._POSITIVE},
    (model.ModelProfile, "name"): _NAMED,
    (model.ModelProfile, "tokens"): _POSITIVE,
    (model.ModelProfile, "compute_itemsize"): {"enum": [2, 4]},
    (model.ModelProfile, "blocks"): {"minItems": 1},
    (model.BlockProfile, "name"): _NAMED,
    (model.OperatorProfile, "name"): _NAMED,
    (model.BackwardOperator, "name"): _NAMED,
    (plan.Plan, "blocks"): {"minItems": 1},
    **{(plan.Plan, key): _DEPTH for key in ("prefetch_depth", "gradient_depth", "micro_batches")},
    **{(kind, "name"): _NAMED for kind in (cluster.Cluster, cluster.Node, cluster.DeviceType)},
    (cluster.Cluster, "network_bytes_per_s"): _POSITIVE,
    (cluster.Cluster, "nodes"): {"minItems": 1},
    (cluster.Node, "device"): _NAMED,
    (cluster.Node, "count"): _POSITIVE,
    (cluster.LayerTimes, "tensor_parallel"): _POSITIVE,
    (cluster.LayerTimes, "seconds"): {"minItems": 1, "items": {"type": "number"} | _POSITIVE},
    **{
        (cluster.DeviceType, key): {"anyOf": [{"type": kind} | _POSITIVE, {"type": "null"}]}
        for key, kind in (("memory_bytes", "integer"), ("flop_per_s", "number"), ("peer_bytes_per_s", "number"))
    },
    **{(kind, "name"): _NAMED for kind in (cluster_plan.ClusterPlan, cluster_plan.RunnerUp)},
    **{(kind, "tensor_parallel"): _POSITIVE for kind in (cluster_plan.ClusterPlan, cluster_plan.RunnerUp)},
    **{(kind, "iteration_s"): _POSITIVE for kind in (cluster_plan.ClusterPlan, cluster_plan.RunnerUp)},
    (cluster_plan.ClusterPlan, "tokens"): _POSITIVE,
    (cluster_plan.ClusterPlan, "groups"): {"minItems": 1},
    (cluster_plan.GroupPlan, "micro_batches"): _POSITIVE,
    (cluster_plan.GroupPlan, "stages"): {"minItems": 1},
    (cluster_plan.StagePlan, "node"): _NAMED,
    (cluster_plan.StagePlan, "device"): _NAMED,
    (plan.BlockPlan, "boundary"): {"enum": [kind.value for kind in plan.Saved if kind is not plan.Saved.RECOMPUTE]},
}
_FREE_NUMBERS = {
    (hardware.HardwareProfile, "contention"),
    (plan.Plan, "origin"),
    (cluster_plan.ClusterPlan, "origin"),
}  # readers do not check their range
# Keys that only files of earlier versions have.
_FORMER: dict[type, dict[str, Any]] = {
    hardware.HardwareProfile: {
        hardware.FORMER: {"description": "Only in files of earlier versions; nothing uses it.", "type": "number", "minimum": 0}
    }
}
_VERSIONS = {"description": "Any of these is read; without the key, the newest."}
_NEEDED: dict[type, list[str]] = {plan.Plan: ["format", "blocks"]}  # a plan without a name is named after its file


def schema(kind: type, module: Any) -> dict[str, Any]:
    """The JSON Schema of one file format.

    Args:
        kind: The frozen dataclass that reads the file.
        module: Its module, with ``FORMAT`` and ``VERSION``.
    """
    definitions: dict[str, Any] = {}
    body = _object(kind, definitions)
    versions = getattr(module, "VERSIONS", (module.VERSION,))
    head = {
        "format": {"const": module.FORMAT},
        "version": {"const": versions[0]} if len(versions) == 1 else dict(_VERSIONS, enum=versions),
    }
    body["properties"] = head | body["properties"]
    title = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower()
    out = {"$schema": DIALECT, "title": f"lightning-hetero {title}", **body}
    return out | ({"$defs": definitions} if definitions else {})


def text(name: str) -> str:
    """The text of one published file, such as ``"plan.schema.json"``."""
    return json.dumps(schema(*PUBLISHED[name]), indent=2) + "\n"


def write(folder: Path) -> None:
    """Writes all published files into a folder."""
    for name in PUBLISHED:
        (folder / name).write_text(text(name), encoding="utf-8")


def _object(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints, described = get_type_hints(kind), _attributes(kind)
    properties = {}
    for f in fields(kind):
        value = _value(hints[f.name], definitions, bounded=(kind, f.name) not in _FREE_NUMBERS)
        rules = _RULES.get((kind, f.name), {})
        value = {k: v for k, v in value.items() if not (k == "minimum" and "exclusiveMinimum" in rules)}
        # A restricted enumeration replaces the reference to all of its values.
        value = rules if "enum" in rules and "$ref" in value else value | rules
        properties[f.name] = {"description": described[f.name]} | value if f.name in described else value
    return {
        "description": _sentence(inspect.getdoc(kind) or ""),
        "type": "object",
        "properties": properties | _FORMER.get(kind, {}),
        "required": _NEEDED.get(kind) or [f.name for f in fields(kind) if not _has_default(f)],
        "additionalProperties": False,
    }


def _value(hint: Any, definitions: dict[str, Any], *, bounded: bool = True) -> dict[str, Any]:
    """The schema of one value; numbers are at least 0 if ``bounded``."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if origin in (Union, types.UnionType):
        kinds = [{"type": "null"} if a is type(None) else _value(a, definitions, bounded=bounded) for a in arguments]
        return {"anyOf": kinds}
    if origin is tuple:
        return {"type": "array", "items": _value(arguments[0], definitions, bounded=bounded)}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _value(arguments[1], definitions, bounded=bounded)}
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        definitions[hint.__name__] = {"description": _sentence(inspect.getdoc(hint) or ""), "enum": [m.value for m in hint]}
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if is_dataclass(hint) and isinstance(hint, type):
        definitions[hint.__name__] = _object(hint, definitions)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    plain: dict[Any, dict[str, Any]] = {str: {"type": "string"}, bool: {"type": "boolean"}}
    least = {"minimum": 0} if bounded else {}
    plain |= {int: {"type": "integer"} | least, float: {"type": "number"} | least}
    return plain[hint]


def _has_default(f: Field[Any]) -> bool:
    return f.default is not MISSING or f.default_factory is not MISSING


def _attributes(kind: type) -> dict[str, str]:
    """The texts of a docstring's ``Attributes`` section by name."""
    _, _, section = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, flags=re.MULTILINE)
    return {name: _plain(entry) for name, entry in entries}


def _sentence(documentation: str) -> str:
    return _plain(documentation.partition("\n\n")[0])


def _plain(markup: str) -> str:
    """Docstring markup as text on one line."""
    flat = re.sub(r"\s+", " ", markup).strip()
    return re.sub(r":\w+:`([^`]*)`", r"\1", flat).replace("``", "`")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/schemas"))
