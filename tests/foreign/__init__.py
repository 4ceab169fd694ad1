"""A device of our own, ``torch.device("foreign")``, with memory that the host cannot touch.

``device.cpp`` is built where a compiler is, once for each version of it and of torch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NAME = "foreign"
SOURCE = Path(__file__).parent / "device.cpp"


def lacking() -> str:
    """Why the device cannot be built here; empty: it can."""
    missing = [program for program in ("g++", "ninja") if shutil.which(program) is None]
    return f"needs {' and '.join(missing)} for the foreign device" if missing else ""


@cache
def native() -> Any:
    """Builds and registers the device; returns the extension's functions."""
    from torch.utils.cpp_extension import load

    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"lightning-hetero-foreign-{os.getuid()}-{key}")
    folder.mkdir(exist_ok=True)
    made = load(
        name="foreign_device", sources=[str(SOURCE)], build_directory=str(folder), extra_cflags=["-O1", "-std=c++20", "-g0"]
    )
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(made))
    torch.utils.generate_methods_for_privateuse1_backend()
    return made


def _module(made: Any) -> ModuleType:
    """What torch and Lightning ask of ``torch.foreign``."""
    module = ModuleType(f"torch.{NAME}")

    def index_of(device: Any = None) -> int:
        found = torch.device(device).index if device is not None and not isinstance(device, int) else device
        return torch.accelerator.current_device_index() if found is None else found

    def manual_seed_all(seed: int) -> None:
        for index in range(torch.accelerator.device_count()):
            made.default_generator(index).manual_seed(seed)

    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda device: torch.accelerator.set_device_index(index_of(device)),
        "synchronize": lambda device=None: torch.accelerator.synchronize(index_of(device)),
        "current_stream": lambda device=None: torch.accelerator.current_stream(index_of(device)),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "get_rng_state": lambda device=None: made.default_generator(index_of(device)).get_state(),
        "set_rng_state": lambda state, device=None: made.default_generator(index_of(device)).set_state(state),
        "manual_seed": lambda seed: made.default_generator(index_of()).manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module
