"""Short measurements of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_hetero.profiling import hardware, loads
from lightning_hetero.profiling import machine as machine_module
from lightning_hetero.units import MIB


def make_small(patch: pytest.MonkeyPatch, cache_home: Path) -> None:
    """Nothing of the user's cache is read or written; loads are small."""
    patch.setenv("XDG_CACHE_HOME", str(cache_home))
    patch.setattr(hardware, "_LEAST_BYTES", 4 * MIB)
    # Four times the caches are moved otherwise, and some processors have half a gigabyte of them.
    patch.setattr(machine_module, "_cache_bytes", lambda: 0)
    patch.setattr(machine_module, "_HIDDEN_CPU", 64)
    patch.setattr(machine_module, "_COPY_BYTES", MIB)
    patch.setattr(machine_module, "_DEVICE_PARAMS", MIB)
    patch.setattr(loads, "_BLOCK_BYTES", 4 * MIB)


DISK, COMPUTE = frozenset({"read", "write"}), frozenset({"compute"})
