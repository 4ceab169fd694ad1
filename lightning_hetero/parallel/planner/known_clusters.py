"""Clusters from files, by name, or from a line of text, and their devices with all figures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.cluster import Cluster, Node
from lightning_hetero.ir.codec import read_text
from lightning_hetero.profiling.presets.devices import LINKS
from lightning_hetero.profiling.presets.devices import device as device_named
from lightning_hetero.profiling.presets.figures import find

MOST_DEVICES = 1024  # of a cluster: planning takes ten seconds for 256, many minutes for 1024
NODE_DEVICES = 8  # of one node, if a line of text gives only their number
NETWORK_BYTES_PER_S = 50e9  # AutoHet, section V: 400 Gbps RoCEv2

_TERM = re.compile(r"\s*([0-9]+)\s*x\s*([A-Za-z0-9 _.-]+?)\s*")

# AutoHet, sections V-A1 and V-A2: a node for each kind of device.
PAPER_CLUSTERS: dict[str, str] = {
    **{f"autohet-{n}a100-{n}h800": f"{n}xa100-80+{n}xh800" for n in (2, 4, 8)},
    **{f"autohet-{n}a100-{n}h20": f"{n}xa100-80+{n}xh20" for n in (2, 4, 8)},
    **{f"autohet-{a}a100-{h}h800": f"{a}xa100-80+{h}xh800" for a, h in ((4, 2), (5, 3), (3, 5))},
    "autohet-1a100-4h20": "1xa100-80+4xh20",
    "autohet-8a100-8h800-8h20": "8xa100-80+8xh800+8xh20",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One kind of device, every figure known.

    Attributes:
        name: The name that nodes use.
        memory_bytes: m_i, memory of one device, bytes.
        flop_per_s: g_i, FLOP/s that it reaches on transformers.
        peer_bytes_per_s: Bandwidth between devices of one node, one direction, bytes/s.
        price_per_hour: Price of one device; ``None``: not known.
        layer_times: T(1), T(2), T(4), … of equation 5 by the degree of tensor parallelism, seconds.
    """

    name: str
    memory_bytes: int
    flop_per_s: float
    peer_bytes_per_s: float
    price_per_hour: float | None
    layer_times: Mapping[int, tuple[float, ...]]


def cluster(text: str, *, network_bytes_per_s: float = NETWORK_BYTES_PER_S) -> Cluster:
    """A cluster by name or from a line of text, devices from presets.

    Args:
        text: A name of :data:`PAPER_CLUSTERS`, or ``"4xa100-80+2xh800"``: a node of four and one of
            two; more than eight of a kind are nodes of eight.
        network_bytes_per_s: Bandwidth between devices of different nodes.

    Raises:
        ConfigError: It is neither, or names an unknown device.
    """
    line = PAPER_CLUSTERS.get(text.strip().lower(), text)
    nodes: list[Node] = []
    for term in line.split("+"):
        match = _TERM.fullmatch(term)
        left, device = (int(match.group(1)), match.group(2)) if match is not None else (0, "")
        if left < 1:
            find("cluster", PAPER_CLUSTERS, text)  # raises, with near names
        kind = device_named(device).name
        check_devices(text, left + sum(node.count for node in nodes))
        while left:
            nodes.append(Node(name=f"node{len(nodes)}", device=kind, count=min(left, NODE_DEVICES)))
            left -= nodes[-1].count
    return Cluster(name=text, network_bytes_per_s=network_bytes_per_s, nodes=tuple(nodes))


def check_devices(name: str, count: int) -> None:
    """Refuses a cluster without devices or with too many to plan for.

    Raises:
        ConfigError: The number is out of range.
    """
    if not 1 <= count <= MOST_DEVICES:
        raise ConfigError(
            f"cluster {name!r} has {count} devices; allowed: 1 to {MOST_DEVICES}. Plan for a part of a larger one that repeats."
        )


def load_cluster(path: str | Path) -> Cluster:
    """Reads a cluster file: YAML by the ending of its name, otherwise JSON.

    Raises:
        ConfigError: It cannot be read or is not a cluster.
    """
    text = read_text(path, what="cluster file")
    if Path(path).suffix.lower() not in (".yaml", ".yml"):
        return Cluster.from_json(text, source=str(path))
    data = _yaml(text, str(path))
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a cluster: got {type(data).__name__}, expected keys and values.")
    return Cluster.from_data(data, source=str(path))


def _yaml(text: str, source: str) -> Any:
    yaml: Any = import_module("yaml")  # has no types

    loader: Any = type("Loader", (yaml.SafeLoader,), {})  # reads 50e9 as a number, as in YAML 1.2 and JSON
    pattern = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+")
    loader.add_implicit_resolver("tag:yaml.org,2002:float", pattern, list("-+0123456789"))
    try:
        return yaml.load(text, Loader=loader)
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # wrong dates, too many digits, too deep
        raise ConfigError(f"{source} is not YAML: {error}.") from error


def kinds(cluster: Cluster) -> dict[str, DeviceKind]:
    """The kinds of devices that its nodes have, weakest first.

    Raises:
        ConfigError: A kind is no preset, and not all of its figures are given; a described kind is
            in no node.
    """
    given = {d.name: d for d in cluster.devices}
    used = dict.fromkeys(n.device for n in cluster.nodes)
    if strangers := sorted(set(given) - set(used)):
        raise ConfigError(f"cluster {cluster.name!r} describes devices that no node has: {strangers}; its nodes have {list(used)}.")
    found = []
    for name in used:
        own = given.get(name)
        figures: dict[str, Any] = {k: getattr(own, k, None) for k in ("memory_bytes", "flop_per_s", "peer_bytes_per_s")}
        if missing := [key for key, value in figures.items() if value is None]:
            try:
                preset = device_named(name)
            except ConfigError as error:
                raise ConfigError(f"cluster {cluster.name!r}: device {name!r} lacks {missing}, and {error}") from error
            peer = preset.peer_bytes_per_s.value or find("link", LINKS, preset.link).value
            known = {
                "memory_bytes": int(preset.memory_bytes.value),
                "flop_per_s": preset.flop_per_s.value,
                "peer_bytes_per_s": peer,
            }
            figures |= {key: known[key] for key in missing}
        times = {t.tensor_parallel: t.seconds for t in own.layer_times} if own else {}
        found.append(DeviceKind(name=name, price_per_hour=own.price_per_hour if own else None, layer_times=times, **figures))
    return {kind.name: kind for kind in sorted(found, key=lambda k: (k.flop_per_s, k.name))}
