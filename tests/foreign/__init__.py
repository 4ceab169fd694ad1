"""A device of our own, ``torch.device("foreign")``, with memory that the host cannot touch.

``device.cpp`` is built where a compiler is, once for each version of it, of torch and of Python.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NAME, EXTENSION = "foreign", "foreign_device"
SOURCE = Path(__file__).parent / "device.cpp"


def lacking() -> str:
    """Why the device cannot be built here; empty: it can."""
    missing = [program for program in ("g++", "ninja") if shutil.which(program) is None]
    return f"needs {' and '.join(missing)} for the foreign device" if missing else ""


@cache
def native() -> Any:
    """Builds the device if that has not been done, and registers it; returns the extension's
    functions.
    """
    found = _place()
    made = _imported(found) if found.is_file() else _built(found)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(made))
    torch.utils.generate_methods_for_privateuse1_backend()
    return made


def _place() -> Path:
    """Where the extension of this source, torch, Python and compiler is, or will be.

    torch's own cache forgets it in each new environment, and in each other folder of tests.
    """
    compiler = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=True).stdout
    parts = (SOURCE.read_text(), torch.__version__, torch.version.git_version, sys.implementation.cache_tag, compiler)
    key = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"lightning-hetero-foreign-{os.getuid()}-{key}")
    folder.mkdir(exist_ok=True)
    return folder / f"{EXTENSION}.so"


def _built(path: Path) -> ModuleType:
    from torch.utils.cpp_extension import load

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        flags = ["-O1", "-std=c++20", "-g0"]
        made: ModuleType = load(name=EXTENSION, sources=[str(SOURCE)], build_directory=folder, extra_cflags=flags)
        os.replace(Path(folder, path.name), path)
    return made


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(EXTENSION, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
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
