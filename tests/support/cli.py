"""The command ``lightning-hetero`` in this process."""

from __future__ import annotations

import functools
import json
from typing import Any

import typer.testing
from typer.testing import CliRunner, Result

from lightning_hetero.cli.app import app
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile, OperatorProfile
from lightning_hetero.units import GIB, MIB

# Every run would make the commands from their functions anew, which takes longer than many do.
typer.testing._get_command = functools.cache(typer.testing._get_command)


def invoke(*arguments: object, code: int = 0) -> Result:
    """Runs it; fails unless it ends with ``code``."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def parsed(*arguments: object, code: int = 0) -> Any:
    """What it prints with ``--json``."""
    return json.loads(invoke(*arguments, "--json", code=code).stdout)


PRESET = ["--preset-model", "gpt:layers=6,hidden=2048,heads=16", "--batch", "8", "--sequence", "512"]


MACHINE = ["--device", "rtx3090", "--host-memory", "64GiB", "--disk", "980pro"]


def profile_block(name: str, *, params: int = 20 * 10**6, pinned: bool = False) -> BlockProfile:
    operators = tuple(OperatorProfile(name=f"op{i}", flop=1e9 * (i + 1), bytes=40 * MIB) for i in range(3))
    return BlockProfile(
        name=name,
        num_params=params,
        num_trainable_params=params,
        forward_s=0.010,
        backward_s=0.020,
        forward_flop=1e10,
        activation_bytes=140 * MIB,
        boundary_bytes=20 * MIB,
        transient_bytes=30 * MIB,
        operators=operators,
        pinned=pinned,
    )


MODEL = ModelProfile(
    name="tiny",
    tokens=4096,
    compute_itemsize=2,
    constant_device_bytes=100 * MIB,
    constant_host_bytes=100 * MIB,
    blocks=(profile_block("embed", pinned=True), *(profile_block(f"layers.{i}") for i in range(6))),
)


HARDWARE = HardwareProfile(
    name="bench",
    device_memory_bytes=2 * GIB,
    host_memory_bytes=8 * GIB,
    disk_capacity_bytes=100 * GIB,
    device_flop_per_s=1e13,
    link_h2d_bytes_per_s=10e9,
    link_d2h_bytes_per_s=10e9,
    disk_read_bytes_per_s=2e9,
    disk_write_bytes_per_s=1e9,
    disk_duplex=False,
    host_dram_bytes_per_s=50e9,
    cpu_update_params_per_s=1e9,
    device_update_params_per_s=20e9,
    cpu_downcast_params_per_s=4e9,
    source={"link_h2d_bytes_per_s": "measured on a Tuesday"},
    contention={"compute|update": 1.25},
)
