"""Reads a store's files with nothing but the native library: what a run would recover after a
crash.
"""

from __future__ import annotations

import json
import math
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_hetero import _native
from lightning_hetero._native import Arena, Engine, NativePart, PartGeometry, Patch, Store

STATE = ("exp_avg", "exp_avg_sq")


def read_store(path: Path, on_disk: tuple[str, ...]) -> tuple[int, dict[str, Tensor]]:
    """The last committed step and what it holds, of a model that trains all its fp32 parameters
    with Adam and state on disk.

    Args:
        path: The store's directory; nobody uses it.
        on_disk: Prefixes of the blocks whose weights are on disk.

    Returns:
        The step, and fp32 weights and Adam state by name (``"layer.weight"``,
        ``"layer.weight.exp_avg"``).
    """
    manifest = json.loads((path / "MANIFEST").read_text())
    rows, layout = manifest["geometry"]["blocks"], manifest["layout"]
    chunk_bytes = max(_chunk(_elements(row)) for row in rows) * 12 + 16384
    with (
        Store(
            str(path), uuid=uuid.UUID(manifest["uuid"]).bytes, create=False, direct_io=True, durability=1,
            verify_digests=True, num_blocks=layout["num_blocks"], user_bytes=layout["user_bytes"],
        ) as store,
        Engine(io_backend="pool", staging_bytes=3 * chunk_bytes, chunk_bytes_max=chunk_bytes) as engine,
    ):  # fmt: skip
        opened = []
        for number, row in enumerate(rows):
            weights = row["block"].startswith(on_disk)
            geometry = PartGeometry(
                id=number, weight_dtype=_native.F32, num_elements=_elements(row), num_state=len(STATE),
                weights_on_disk_file=weights, state_on_disk_file=True, chunk_elements=_chunk(_elements(row)),
            )  # fmt: skip
            arena = Arena(4 * _elements(row))
            opened.append((row, weights, NativePart(store, geometry, arena.address, keep=arena)))
        step, user = store.recover()
        assert json.loads(user).keys() >= {"parts", "state"} or json.loads(user)["step"] == step
        content: dict[str, Tensor] = {}
        for row, weights, block in opened:
            offset = 0
            unwritten = block.committed_slot() is None  # the first update writes state on disk; before it, state is zeros
            if unwritten and (weights or step > 1):
                raise AssertionError(f"record {step} names no slot of block {row['block']!r}")
            for name, (_, shape) in row["params"].items():
                for array in range(-1 if weights else 0, len(STATE)):
                    value = torch.zeros(shape)
                    patch = Patch(offset=offset, numel=value.numel(), data=value.data_ptr(), array=array)
                    if not unwritten:
                        engine.read(block, [patch], keep=[value]).wait()
                    content[name if array < 0 else f"{name}.{STATE[array]}"] = value
                offset += _padded(value.numel())
        engine.close()
        for *_, block in opened:
            block.close()
    return step, content


def _padded(numel: int) -> int:
    return -(-numel // 16) * 16


def _elements(row: dict[str, Any]) -> int:
    return sum(_padded(math.prod(shape)) for _, shape in row["params"].values())


def _chunk(elements: int) -> int:
    return min(2**18, -(-elements // 4096) * 4096)
