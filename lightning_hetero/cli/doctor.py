"""``lightning-hetero doctor``: describes this machine and finds its problems."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from lightning_hetero import __version__
from lightning_hetero.cli import system
from lightning_hetero.cli.output import console, print_json, table
from lightning_hetero.errors import HeteroError
from lightning_hetero.units import format_bytes

_PACKAGES = ("torch", "lightning", "pytorch-lightning", "torchmetrics", "cvxpy", "psutil", "fsspec", "transformers")


@dataclass(slots=True)
class DoctorReport:
    """The result of an examination.

    Attributes:
        facts: Per topic, names and values; bytes, elements/s and so on without units.
        problems: Conditions under which training fails, each with its remedy.
        notes: Other useful facts.
    """

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def examine(path: Path) -> DoctorReport:
    """Examines the machine; ``path`` is the directory for the disk tier."""
    report = DoctorReport()
    for look in (_versions, _processor, _native, _memory, _torch):
        look(report)
    _disk(report, path)
    return report


def run(path: Path, *, as_json: bool) -> bool:
    """Prints the report; True if there are problems."""
    report = examine(path)
    if as_json:
        print_json({"ok": not report.problems, "problems": report.problems, "notes": report.notes, **report.facts})
        return bool(report.problems)
    out = console()
    rows = [
        [topic.replace("_", " ") if index == 0 else "", name.removesuffix("_bytes").replace("_", " "), _text(name, value)]
        for topic, facts in report.facts.items()
        for index, (name, value) in enumerate(facts.items())
    ]
    out.print(table("This machine", ["", "", ""], rows))
    for note in report.notes:
        out.print(f"[yellow]note[/]     {note}")
    for problem in report.problems:
        out.print(f"[red]problem[/]  {problem}")
    if not report.problems:
        out.print("[green]No problem found.[/]")
    return bool(report.problems)


def _text(name: str, value: Any) -> str:
    if value is None:
        return "no limit" if name.endswith("limit_bytes") or name == "lockable_bytes" else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_bytes(value) if name.endswith("_bytes") else str(value)


def _versions(report: DoctorReport) -> None:
    found: dict[str, Any] = {"lightning-hetero": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    report.facts["versions"] = found
    try:
        wanted = metadata.requires("lightning-hetero") or []
    except metadata.PackageNotFoundError:
        report.notes.append("lightning-hetero runs from its source folder, not installed: needed versions are not checked.")
        return
    from packaging.requirements import Requirement

    for requirement in map(Requirement, wanted):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            got = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            got = "none"
        if got == "none" or not requirement.specifier.contains(got, prereleases=True):
            report.problems.append(f"{requirement.name} {got} is installed; needed: {requirement.specifier}. Install it with pip.")


def _processor(report: DoctorReport) -> None:
    from lightning_hetero.store.capacity import available_cores

    report.facts["processor"] = {
        "name": system.cpu_name(),
        "cores": os.cpu_count(),
        "cores_usable": available_cores(),
        "kernel": f"{platform.system()} {platform.release()}",
    }


def _native(report: DoctorReport) -> None:
    """The library, its instruction set, and the back end of its disk I/O with the reason."""
    from lightning_hetero import _native
    from lightning_hetero._native.library import library_path

    facts: dict[str, Any] = {"library": str(library_path())}
    report.facts["native_library"] = facts
    try:
        facts["instruction_set"] = {"BASE": "baseline", "V3": "x86-64-v3 (AVX2)", "V4": "x86-64-v4 (AVX-512)"}[_native.isa().name]
        facts["disk_io"] = _io_backend("auto")
    except HeteroError as error:
        facts["disk_io"] = "unavailable"
        report.problems.append(str(error))
        return
    facts["disk_io_reason"] = "the kernel allows it"
    if facts["disk_io"] != "io_uring":
        try:
            _io_backend("io_uring")
        except HeteroError as error:
            facts["disk_io_reason"] = str(error)
            report.notes.append(f"Disk I/O goes through threads instead of io_uring: {error}")


def _io_backend(wanted: str) -> str:
    from lightning_hetero._native import Engine

    engine = Engine(io_backend=wanted, staging_bytes=3 * 4096, chunk_bytes_max=4096)
    try:
        return engine.io_backend
    finally:
        engine.close()


def _memory(report: DoctorReport) -> None:
    import psutil

    from lightning_hetero.store.capacity import available_memory_bytes, total_memory_bytes

    machine, limit, usable = psutil.virtual_memory(), total_memory_bytes(), available_memory_bytes()
    report.facts["memory"] = {
        "total_bytes": machine.total,
        "available_bytes": machine.available,
        "control_group_limit_bytes": limit if limit < machine.total else None,
        "usable_bytes": usable,
        "swap_bytes": psutil.swap_memory().total,
        "lockable_bytes": system.memlock_bytes(),
    }
    report.facts["huge_pages"] = system.huge_pages()
    if usable < machine.available and limit < machine.total:  # without a limit, both are readings of one amount
        report.notes.append(
            f"A control group leaves {format_bytes(usable)} of the {format_bytes(machine.available)} that are available. Beyond it "
            f"the process is killed; set host_memory below it."
        )


def _torch(report: DoctorReport) -> None:
    try:
        import torch
    except ImportError as error:
        report.problems.append(f"torch cannot be imported: {error}. Install it with pip.")
        return
    from lightning_hetero.lanes import backends

    libraries = [name for name, has in (("MKL", torch.backends.mkl), ("oneDNN", torch.backends.mkldnn)) if has.is_available()]
    report.facts["torch"] = {
        "version": torch.__version__,
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
        "libraries": ", ".join(libraries) or "none",
        "threads": torch.get_num_threads(),
        **backends.versions(),
    }
    report.facts["device"] = _device(report, torch)


def _device(report: DoctorReport, torch: Any) -> dict[str, Any]:
    """The accelerator: its memory, and the rates of its link where `profile` has measured them."""
    from lightning_hetero.lanes.backends import BACKENDS, COMPUTES_ON
    from lightning_hetero.profiling.hardware import known

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return {"kind": "cpu"}
    facts: dict[str, Any] = {"kind": device.type, "count": torch.accelerator.device_count()}
    if device.type not in BACKENDS:
        report.notes.append(f"There is a {device.type} device; training computes on {COMPUTES_ON}.")
        return facts
    free, total = torch.accelerator.get_memory_info(device)
    facts |= {"name": BACKENDS[device.type].name_of(device), "memory_bytes": total, "free_bytes": free}
    measured = known(None, device=device.type)
    for key, name in (("host_to_device", "link_h2d_bytes_per_s"), ("device_to_host", "link_d2h_bytes_per_s")):
        rate = None if measured is None else getattr(measured, name)
        facts[key] = "not measured: run `lightning-hetero profile`" if rate is None else f"{format_bytes(rate)}/s"
    if facts["count"] > 1:
        report.notes.append(
            "hetero_offload computes on as many of them as `Trainer(devices=)` says; docs/several-devices.md has how."
        )
    return facts


def _disk(report: DoctorReport, path: Path) -> None:
    from lightning_hetero.store.volume import MEMORY_FILESYSTEMS, Volume

    facts: dict[str, Any] = {"path": str(path.absolute())}
    report.facts["disk"] = facts
    try:
        volume = Volume.of(path)
    except OSError as error:
        report.problems.append(f"disk path {str(path)!r} cannot be looked at: {error}. Choose a directory that exists.")
        return
    in_memory = volume.filesystem in MEMORY_FILESYSTEMS
    writable = path.is_dir() and os.access(path, os.W_OK | os.X_OK)
    refusal = system.direct_io_error(path) if writable else ""
    facts |= {
        "file_system": volume.filesystem or "unknown",
        "source": volume.source or "unknown",
        "in_memory": in_memory,
        "rotational": volume.rotational,
        "writable": writable,
        "direct_io": writable and not refusal,
        "free_bytes": volume.free_bytes,
    }
    if not writable:
        report.problems.append(f"disk path {str(path)!r} is not a directory that can be written. Choose another one.")
    if in_memory:
        report.problems.append(f"disk path {str(path)!r} is on {volume.filesystem}, which is host memory. Choose one on an SSD.")
    elif refusal:
        report.problems.append(f"disk path {str(path)!r}: the file system refuses O_DIRECT ({refusal}). Choose one on ext4 or xfs.")
    if volume.rotational:
        report.problems.append(
            f"disk path {str(path)!r} is on a rotating disk: every step would wait for it. Choose one on an SSD."
        )
