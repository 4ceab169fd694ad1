"""Machines that tests plan for."""

from pathlib import Path

from lightning_hetero.ir.hardware import HardwareProfile

MB = 10**6

# What tests say this machine is, so that plans are the same everywhere.
HARDWARE = HardwareProfile.load(Path(__file__).with_name("hardware.json"))

ROOMY = HardwareProfile(
    name="roomy",
    device_memory_bytes=10_000 * MB,
    host_memory_bytes=10_000 * MB,
    disk_capacity_bytes=20_000 * MB,
    device_flop_per_s=1e12,
    link_h2d_bytes_per_s=1e10,
    link_d2h_bytes_per_s=1e10,
    disk_read_bytes_per_s=2e9,
    disk_write_bytes_per_s=1e9,
    disk_duplex=False,
    host_dram_bytes_per_s=1e11,
    cpu_update_params_per_s=1e9,
    device_update_params_per_s=1e10,
    cpu_downcast_params_per_s=1e10,
)
