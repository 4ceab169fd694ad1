"""The planners' input about a cluster: its nodes, their devices, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.codec import Rows, check_format, check_keys, number, parse_object, to_text

FORMAT = "lightning-hetero-cluster"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Measured times of 1, 2, 4, 8, … consecutive layers on one kind of device (AutoHet, eq. 5).

    Attributes:
        tensor_parallel: Devices that compute one layer together.
        seconds: Forward and backward of one micro-batch through 1, 2, 4, 8, … layers, seconds.
    """

    tensor_parallel: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """One kind of device. A missing figure is taken from the preset of this name.

    Attributes:
        name: The name that nodes use; a preset such as ``"a100-80"``, or any other if all three
            figures are given.
        memory_bytes: Memory of one device that training may use, bytes.
        flop_per_s: FLOP/s that it reaches on this kind of model.
        peer_bytes_per_s: Bandwidth to the other devices of its node, one direction, bytes/s.
        price_per_hour: Price of one device, in any currency.
        layer_times: Measured times; they replace the times computed from FLOP and ``flop_per_s``.
    """

    name: str
    memory_bytes: int | None = None
    flop_per_s: float | None = None
    peer_bytes_per_s: float | None = None
    price_per_hour: float | None = None
    layer_times: tuple[LayerTimes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine with devices of one kind.

    Attributes:
        name: Unique in the cluster.
        device: The kind of its devices.
        count: The number of its devices.
    """

    name: str
    device: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Machines that train one model together.

    Attributes:
        name: A display name.
        network_bytes_per_s: Bandwidth between two devices of different nodes, one direction,
            bytes/s.
        nodes: The machines, in the order in which launchers number them.
        devices: Kinds of devices that differ from their preset.
    """

    name: str
    network_bytes_per_s: float
    nodes: tuple[Node, ...]
    devices: tuple[DeviceType, ...] = ()

    def to_json(self) -> str:
        """The cluster as JSON text, one node per line; missing figures are left out."""
        values: dict[str, Any] = {"format": FORMAT, "version": VERSION, "name": self.name}
        values["network_bytes_per_s"] = self.network_bytes_per_s
        values["nodes"] = Rows({"name": n.name, "device": n.device, "count": n.count} for n in self.nodes)
        if self.devices:
            values["devices"] = Rows(_device_row(d) for d in self.devices)
        return to_text(values)

    @classmethod
    def from_json(cls, text: str, *, source: str = "cluster") -> Cluster:
        """Reads :meth:`to_json`'s text.

        Raises:
            ConfigError: Not JSON, or as :meth:`from_data`.
        """
        return cls.from_data(parse_object(text, what="cluster", source=source), source=source)

    @classmethod
    def from_data(cls, data: dict[str, Any], *, source: str = "cluster") -> Cluster:
        """Reads a parsed file, of JSON or YAML.

        Args:
            data: Its keys and values.
            source: A file name for errors.

        Raises:
            ConfigError: Another format, a missing or unknown key, a value out of range, a node's
                name that repeats.
        """
        data = dict(data)
        check_format(data, FORMAT, VERSION, what="cluster", source=source)
        check_keys(data, required=("name", "network_bytes_per_s", "nodes"), optional=("devices",), where=source)
        nodes = tuple(_node_from(row, where) for row, where in _items(data, "nodes", source))
        if not nodes:
            raise ConfigError(f"{source}: 'nodes' must be a non-empty list of objects, got {data['nodes']!r}.")
        devices = tuple(_device_from(row, where) for row, where in _items(data, "devices", source))
        for what, names in (("node", [n.name for n in nodes]), ("device", [d.name for d in devices])):
            if len(set(names)) < len(names):
                raise ConfigError(f"{source}: {what} names repeat: {names}; every {what} needs its own.")
        network = number(data["network_bytes_per_s"], key="network_bytes_per_s", where=source, positive=True)
        return cls(name=_text(data, "name", source), network_bytes_per_s=network, nodes=nodes, devices=devices)


def _device_row(device: DeviceType) -> dict[str, Any]:
    row: dict[str, Any] = {f.name: getattr(device, f.name) for f in fields(device) if f.name != "layer_times"}
    row = {key: value for key, value in row.items() if value is not None}
    times = [{"tensor_parallel": t.tensor_parallel, "seconds": list(t.seconds)} for t in device.layer_times]
    return row | ({"layer_times": times} if times else {})


def _items(data: dict[str, Any], key: str, where: str) -> list[tuple[dict[str, Any], str]]:
    rows = data.get(key, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{where}: {key!r} must be a list of objects, got {rows!r}.")
    return [(row, f"{where}: {key}[{i}]") for i, row in enumerate(rows)]


def _node_from(row: dict[str, Any], where: str) -> Node:
    check_keys(row, required=("name", "device", "count"), optional=(), where=where)
    count = number(row["count"], key="count", where=where, positive=True, whole=True)
    return Node(name=_text(row, "name", where), device=_text(row, "device", where), count=int(count))


def _device_from(row: dict[str, Any], where: str) -> DeviceType:
    figures = ("memory_bytes", "flop_per_s", "peer_bytes_per_s", "price_per_hour")
    check_keys(row, required=("name",), optional=(*figures, "layer_times"), where=where)
    values: dict[str, Any] = {"name": _text(row, "name", where)}
    for key in figures:
        if row.get(key) is not None:
            positive, whole = key != "price_per_hour", key == "memory_bytes"
            values[key] = number(row[key], key=key, where=where, positive=positive, whole=whole)
    times = tuple(_times_from(item, place) for item, place in _items(row, "layer_times", where))
    if len({t.tensor_parallel for t in times}) < len(times):
        raise ConfigError(f"{where}: tensor_parallel values repeat in layer_times; every one needs its own.")
    return DeviceType(**values, layer_times=times)


def _times_from(row: dict[str, Any], where: str) -> LayerTimes:
    check_keys(row, required=("tensor_parallel", "seconds"), optional=(), where=where)
    degree = number(row["tensor_parallel"], key="tensor_parallel", where=where, positive=True, whole=True)
    if not isinstance(row["seconds"], list) or not row["seconds"]:
        raise ConfigError(f"{where}: seconds={row['seconds']!r}; expected a list of the times of 1, 2, 4, … layers.")
    seconds = tuple(number(value, key="seconds", where=where, positive=True) for value in row["seconds"])
    return LayerTimes(tensor_parallel=int(degree), seconds=seconds)


def _text(data: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(data[key], str) or not data[key]:
        raise ConfigError(f"{where}: {key}={data[key]!r}; expected text.")
    value: str = data[key]
    return value
