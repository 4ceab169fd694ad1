"""Facts about this machine without measuring: its parts, and its fingerprint."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import torch

from lightning_hetero import _native
from lightning_hetero.errors import ConfigError
from lightning_hetero.lanes.backends import BACKENDS, COMPUTES_ON, supported_accelerator
from lightning_hetero.profiling import loads
from lightning_hetero.profiling.timing import Load
from lightning_hetero.store.capacity import available_cores, available_memory_bytes, total_memory_bytes
from lightning_hetero.store.live.engine_options import EngineOptions
from lightning_hetero.store.volume import Volume
from lightning_hetero.units import MIB, format_bytes

_HIDDEN_CPU, _HIDDEN_DEVICE = 512, 4096
_TOKENS_OF_TWO_CORES, _TOKENS_DEVICE = 128, 8192
_COPY_BYTES, _DEVICE_PARAMS = 64 * MIB, 64 * MIB  # some milliseconds each


Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachine:
    """The measured parts of this machine.

    Attributes:
        paths: A directory on each of its disks.
        path_given: Whether the user named them; otherwise they need not be disks.
        volumes: The file systems there; none if they cannot be examined.
        device: The device that computes.
        engine: Options of transfers and updates.
        cores: Cores that this process may use.
        torch_threads: Threads of torch's CPU kernels.
        cache_bytes: Total size of the processor's last-level caches.
    """

    paths: tuple[Path, ...]
    path_given: bool
    volumes: tuple[Volume, ...]
    device: torch.device
    engine: EngineOptions
    cores: int
    torch_threads: int
    cache_bytes: int

    @classmethod
    def of(cls, path: Paths | None, *, device: str | None, update_threads: int | None) -> MeasuredMachine:
        """Examines this machine; see ``hardware.measure`` for the arguments.

        Raises:
            ConfigError: There is no such directory or device, or ``update_threads`` is not
                positive.
        """
        if update_threads is not None and (isinstance(update_threads, bool) or update_threads < 1):
            raise ConfigError(f"update_threads={update_threads!r}; allowed: a whole number of at least 1, or None.")
        given = () if path is None else (path,) if isinstance(path, str | Path) else tuple(path)
        places = tuple(Path(one).expanduser().absolute() for one in given) or (Path.cwd(),)
        for place in places:
            if not place.is_dir():
                raise ConfigError(f"path={str(place)!r} is no directory; give one on the disk to measure.")
        try:
            volumes = tuple(map(Volume.of, places))
        except OSError:
            volumes = ()
        return cls(
            paths=places,
            path_given=path is not None,
            volumes=volumes,
            device=device_of(device),
            engine=EngineOptions(update_threads=update_threads or 0, num_disks=len(places)),
            cores=available_cores(),
            torch_threads=torch.get_num_threads(),
            cache_bytes=_cache_bytes(),
        )

    @property
    def shared_memory(self) -> bool:
        """The device is the host's own CPU."""
        return self.device.type == "cpu"

    @property
    def unified_memory(self) -> bool:
        """The device is another processor in the host's memory."""
        return not self.shared_memory and BACKENDS[self.device.type].is_unified(self.device)

    @property
    def update_threads(self) -> int:
        """Threads that run updates."""
        return self.engine.threads()

    @property
    def whole_cpus(self) -> bool:
        """Whether no control group gives this process less time than its CPUs have."""
        return self.cores >= len(os.sched_getaffinity(0))

    def without_disk(self) -> MeasuredMachine:
        """The same machine without its disk."""
        return replace(self, volumes=(), path_given=False)

    def name(self) -> str:
        """A display name."""
        parts = [_processor(), f"{self.cores} cores", format_bytes(total_memory_bytes())]
        return ", ".join([*parts, *([] if self.shared_memory else [self._device_name()]), self.disk_name()])

    def disk_name(self) -> str:
        """The device and the file system under the path."""
        return " and ".join(f"{volume.source} ({volume.filesystem})" for volume in self.volumes) or "no disk"

    def disk_capacity_bytes(self) -> int:
        """Bytes that training may write on all disks together, if each gets an equal part."""
        on = Counter(place.stat().st_dev for place in self.paths)
        rooms = zip(self.paths, self.volumes, strict=True)
        return min((volume.free_bytes * len(self.paths) // on[place.stat().st_dev] for place, volume in rooms), default=0)

    def fingerprint(self) -> dict[str, str | int]:
        """The fingerprint: everything that the measurements depend on."""
        return {
            "package": _package_version(),
            "torch": torch.__version__,
            "kernel": platform.release(),
            "processor": _processor(),
            "isa": _native.isa().name,
            "cores": self.cores,
            "update_threads": self.update_threads,
            "torch_threads": self.torch_threads,
            "memory_bytes": total_memory_bytes(),
            "device": "cpu" if self.shared_memory else self._device_name(),
            "disk": self.disk_name(),
        }

    def device_memory_bytes(self) -> int:
        """Free memory of the accelerator."""
        free, total = torch.accelerator.get_memory_info(self.device)
        return int(min(total, available_memory_bytes()) if self.unified_memory else free)

    def least_bytes(self) -> int:
        """The least host memory of a measurement."""
        dtype, hidden, tokens = self._compute()
        compute = loads.compute_bytes(dtype=dtype, hidden=hidden, tokens=tokens) if self.shared_memory else 2 * _COPY_BYTES
        return compute + loads.engine_bytes() + (loads.disk_memory_bytes(len(self.paths)) if self.volumes else 0)

    def compute(self, most_bytes: int) -> loads.Compute:
        """The load for forward and backward; on the host its blocks take at most ``most_bytes``."""
        dtype, hidden, tokens = self._compute()
        cache_bytes = self.cache_bytes if self.shared_memory else 0
        return loads.Compute(self.device, dtype=dtype, hidden=hidden, tokens=tokens, cache_bytes=cache_bytes, most_bytes=most_bytes)

    def compute_text(self) -> str:
        """A description of :meth:`compute`, for the sources."""
        dtype, hidden, tokens = self._compute()
        where = f"{self.torch_threads} threads" if self.shared_memory else self._device_name()
        return f"hidden {hidden}, {tokens} tokens, {str(dtype).removeprefix('torch.')}, {where}"

    def device_loads(self) -> list[Load]:
        """Copies to and from the accelerator, and updates on it."""
        return [
            loads.Copy(self.device, to_device=True, num_bytes=_COPY_BYTES),
            loads.Copy(self.device, to_device=False, num_bytes=_COPY_BYTES),
            loads.DeviceUpdate(self.device, _DEVICE_PARAMS),
        ]

    def _compute(self) -> tuple[torch.dtype, int, int]:
        if self.shared_memory:
            return torch.float32, _HIDDEN_CPU, _TOKENS_OF_TWO_CORES * -(-self.cores // 2)
        return torch.bfloat16, _HIDDEN_DEVICE, _TOKENS_DEVICE

    def _device_name(self) -> str:
        return f"{self.device.type} {BACKENDS[self.device.type].name_of(self.device)}"


def device_of(name: str | None) -> torch.device:
    """The device of a kind; by default the GPU that training would compute on, if there is one.

    Raises:
        ConfigError: There is no such device here, or training refuses it.
    """
    found = supported_accelerator()
    if name == "cpu" or (name is None and found is None):
        return torch.device("cpu")
    if found is None or (name is not None and name.partition(":")[0] != found.type):
        raise ConfigError(
            f"device={name!r}; allowed here: None, 'cpu'{'' if found is None else f', {found.type!r}'}. Training computes on "
            f"{COMPUTES_ON}."
        )
    return torch.device(found.type, torch.accelerator.current_device_index())


def _package_version() -> str:
    try:
        return metadata.version("lightning-hetero")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "not installed"


def _processor() -> str:
    try:
        rows = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        rows = []
    names = (row.partition(":")[2].strip() for row in rows if row.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _cache_bytes(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of all last-level caches; 0 if the system does not say.

    Source: Linux, Documentation/ABI/testing/sysfs-devices-system-cpu.
    """
    caches: dict[str, int] = {}
    for place in root.glob("cpu[0-9]*/cache/index3"):
        try:
            shared = (place / "shared_cpu_list").read_text(encoding="utf-8").strip()
            size = (place / "size").read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if size.endswith("K") and size[:-1].isdecimal():
            caches[shared] = 1024 * int(size[:-1])
    return sum(caches.values())
