"""What each backend of torch has of its own: the one module that names backends.

:class:`Backend` is what torch has for all of them. Each subclass is a row of the table: it replaces
what has no neutral counterpart.

[Note: Streams and events of one family]
A stream waits only for events of its own family: either ``torch.Stream`` and ``torch.Event``, or
both of the backend's module. ``torch.cuda.Event.record`` took a ``torch.Stream`` for one of its own
until torch 2.12 (https://github.com/pytorch/pytorch/issues/173792), and ``torch.Stream.wait_event``
reads no more of an event than ``torch.Event`` has.
"""

from __future__ import annotations

import statistics
from contextlib import AbstractContextManager
from functools import cache

import torch

from lightning_hetero.units import MIB
from lightning_hetero.untyped import Value

_TRIED_BYTES, _TIMES = 256 * MIB, 3  # to see whose memory a device takes; more than others take meanwhile
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device


class Backend:
    """What lanes and budgets use of a backend, by torch's neutral interface.

    Args:
        kind: The type of its devices, as torch names it.
    """

    profiler = ""  # the variable that a profiler sets in the environment of a process that it observes
    no_memory: tuple[str, ...] = ()  # in errors of libraries whose own allocation has failed

    def __init__(self, kind: str) -> None:
        self.kind = kind

    # ---- streams and events: [Note: Streams and events of one family] ----------------------------

    def new_stream(self, device: torch.device) -> torch.Stream:
        """A stream of the device."""
        return torch.Stream(device)

    def current_stream(self, device: torch.device) -> torch.Stream:
        """The stream that this thread gives work to."""
        return torch.accelerator.current_stream(device)

    def on(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Inside, this thread gives work to the stream."""
        return stream

    def event(self, *, timed: bool) -> torch.Event:
        """An event for :meth:`torch.Event.record`; only timed ones know the time between them."""
        return torch.Event(self.kind, enable_timing=timed)

    # ---- memory ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Called before a fit takes memory of a device."""

    def share(self, device: torch.device) -> float:
        """The part of the device's memory that torch lets this process take."""
        ask = getattr(torch.get_device_module(device), "get_per_process_memory_fraction", None)
        return 1.0 if ask is None else float(ask(device))

    def is_unified(self, device: torch.device) -> bool:
        """Whether the device takes its memory from the host's."""
        return False

    def page_lock(self, address: int, num_bytes: int) -> int | None:
        """Page-locks host memory that exists.

        Returns:
            0, or the code of the driver's error; ``None`` if torch has no call for it.
        """
        return None

    def page_unlock(self, address: int) -> None:
        """Undoes :meth:`page_lock`."""

    # ---- what people see -------------------------------------------------------------------------

    def range_begins(self, name: str) -> None:
        """A named range of this thread begins, for a profiler of the device."""

    def range_ends(self) -> None:
        """The range that began last ends."""

    def mark(self, name: str) -> None:
        """A named moment, for a profiler of the device."""

    def name_of(self, device: torch.device) -> str:
        """What its maker calls the device."""
        return str(torch.get_device_module(device).get_device_properties(device).name)


class _Cuda(Backend):
    """NVIDIA's GPUs, and AMD's by ROCm, which torch gives the same name."""

    profiler = "NVTX_INJECTION64_PATH"  # Nsight's
    no_memory = ("_STATUS_ALLOC_FAILED",)  # such as cuBLAS's
    _torch: Value = torch.cuda
    _runtime: Value = None

    def new_stream(self, device: torch.device) -> torch.Stream:
        """A stream of the device."""
        made: torch.Stream = self._torch.Stream(device)
        return made

    def current_stream(self, device: torch.device) -> torch.Stream:
        """The stream that this thread gives work to."""
        found: torch.Stream = self._torch.current_stream(device)
        return found

    def on(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Inside, this thread gives work to the stream."""
        entered: AbstractContextManager[object] = self._torch.stream(stream)
        return entered

    def event(self, *, timed: bool) -> torch.Event:
        """An event for which the host waits asleep; ``torch.Event`` ignores ``blocking``."""
        made: torch.Event = self._torch.Event(enable_timing=timed, blocking=True)
        return made

    def begin(self) -> None:
        """Lets pieces of the allocator grow, so that gaps between them are rare.

        The user's choice stays: in ``PYTORCH_ALLOC_CONF``, in code, or of another allocator.
        """
        chosen = torch._C._accelerator_getAllocatorSettings()
        if "expandable_segments" not in chosen and "backend" not in chosen:
            torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (chosen, "expandable_segments:True"))))

    def is_unified(self, device: torch.device) -> bool:
        """Whether the device takes its memory from the host's."""
        return bool(self._torch.get_device_properties(device).is_integrated) and takes_host_memory(device)

    def page_lock(self, address: int, num_bytes: int) -> int | None:
        """Page-locks host memory that exists."""
        self._runtime = self._torch.cudart()
        return int(self._runtime.cudaHostRegister(address, num_bytes, _PORTABLE))

    def page_unlock(self, address: int) -> None:
        """Undoes :meth:`page_lock`."""
        self._runtime.cudaHostUnregister(address)

    def range_begins(self, name: str) -> None:
        """A named range of this thread begins, for a profiler of the device."""
        self._torch.nvtx.range_push(name)

    def range_ends(self) -> None:
        """The range that began last ends."""
        self._torch.nvtx.range_pop()

    def mark(self, name: str) -> None:
        """A named moment, for a profiler of the device."""
        self._torch.nvtx.mark(name)


class _Xpu(Backend):
    """Intel's GPUs. Torch has no call that page-locks memory which exists."""

    profiler = "INTEL_LIBITTNOTIFY64"  # VTune's
    _itt: Value = torch.profiler.itt
    no_memory = ("UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY", "UR_RESULT_ERROR_OUT_OF_RESOURCES")

    def is_unified(self, device: torch.device) -> bool:
        """Whether the device takes its memory from the host's."""
        integrated = bool(getattr(torch.xpu.get_device_properties(device), "is_integrated_gpu", False))
        return integrated and takes_host_memory(device)

    def range_begins(self, name: str) -> None:
        """A named range of this thread begins, for a profiler of the device."""
        if self._itt.is_available():
            self._itt.range_push(name)

    def range_ends(self) -> None:
        """The range that began last ends."""
        if self._itt.is_available():
            self._itt.range_pop()

    def mark(self, name: str) -> None:
        """A named moment, for a profiler of the device."""
        if self._itt.is_available():
            self._itt.mark(name)


BACKENDS: dict[str, Backend] = {row.kind: row for row in (_Cuda("cuda"), _Xpu("xpu"))}
"""The backends whose devices training computes on, by the type of their devices."""


@cache
def takes_host_memory(device: torch.device) -> bool:
    """Whether the host has less memory free once a device has some.

    An integrated device may have memory of its own nevertheless: a part that the firmware keeps for
    it, which the host does not see.
    """
    import psutil  # takes longer to import than all else here, and only GPUs ask

    taken = []
    for _ in range(_TIMES):
        before = psutil.virtual_memory().available
        memory = torch.ones(_TRIED_BYTES, dtype=torch.uint8, device=device)
        torch.accelerator.synchronize(device)
        taken.append(before - psutil.virtual_memory().available)
        del memory
        torch.accelerator.empty_cache()
    return statistics.median(taken) > _TRIED_BYTES // 2


COMPUTES_ON = "the CPU, on a CUDA or ROCm GPU, or on an Intel GPU (xpu)"
CHOICES = 'Trainer(accelerator="cpu") or Trainer(accelerator="cuda"); docs/devices.md says how to choose an Intel GPU'


def versions() -> dict[str, str | None]:
    """The versions of the platforms that torch was built for."""
    return {"cuda": torch.version.cuda, "hip": torch.version.hip, "xpu": torch.version.xpu}


def supported_accelerator() -> torch.device | None:
    """The accelerator of this machine, without its number, if training computes on it."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None and found.type in BACKENDS else None


def is_library_out_of_memory(message: str) -> bool:
    """Whether an error says that a library of a backend got no device memory."""
    return any(text in message for row in BACKENDS.values() for text in row.no_memory)
