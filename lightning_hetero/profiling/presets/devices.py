"""Devices by name, and the links that connect them to their hosts.

Peak rates are those of dense 16-bit matrix products with 32-bit accumulation, which training uses:
consumer cards reach only half of their 16-bit accumulation peak that way. On transformers a device
reaches its peak times :attr:`Device.utilisation`, the model FLOP utilisation of one device without
waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetero.profiling.presets.figures import Figure, find
from lightning_hetero.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of device.

    Attributes:
        name: Its name in the table.
        memory_bytes: Its memory.
        peak_flop_per_s: Dense 16-bit matrix products accumulated in 32 bit, FLOP/s.
        utilisation: The share of that peak that training a transformer reaches without waits, 0 to
            1.
        memory_bytes_per_s: Bandwidth of its memory, bytes/s.
        peer_bytes_per_s: Bandwidth to other devices of its kind, one direction, bytes/s; 0: only
            through the host.
        link: The link to its host, a name in :data:`LINKS`.
        host: The host if none is named, a name in ``hosts.HOSTS``.
        in_host_memory: Its memory is the host's own.
    """

    name: str
    memory_bytes: Figure
    peak_flop_per_s: Figure
    utilisation: Figure
    memory_bytes_per_s: Figure
    peer_bytes_per_s: Figure
    link: str
    host: str
    in_host_memory: bool = False

    @property
    def flop_per_s(self) -> Figure:
        """FLOP/s that it reaches on transformers."""
        peak, used = self.peak_flop_per_s, self.utilisation
        how = (
            f"{used.value:g} ({used.source}) of {peak.value / 1e12:g} TFLOP/s dense, 16 bit with fp32 accumulation ({peak.source})"
        )
        return Figure(peak.value * used.value, how)

    @property
    def update_params_per_s(self) -> Figure:
        """Adam on the device, elements/s: 28 bytes each at 0.8 of the memory's bandwidth."""
        return self.memory_bytes_per_s.times(0.8 / 28, "28 bytes a parameter at 0.8 (assumed)")


# Bytes per second in one direction, 16 lanes unless it says so, page-locked memory.
LINKS: dict[str, Figure] = {
    "pcie3": Figure(12e9, "Deep Optimizer States, section 5.4: 3e9 fp32/s on a V100; 15.75 GB/s nominal"),
    "pcie4": Figure(25e9, "Deep Optimizer States, section 4.1: achievable on PCIe 4; 31.5 GB/s nominal"),
    "pcie4x8": Figure(12.5e9, "half of pcie4's, for 8 lanes"),
    "pcie5": Figure(55e9, "Deep Optimizer States, section 5.1: measured on an H100; 63 GB/s nominal"),
    "nvlink-c2c": Figure(360e9, "0.8 (assumed, as PCIe 4 reaches) of 450 GB/s a direction: NVIDIA GH200 datasheet"),
    "lpddr5x-gb10": Figure(109e9, "0.8 (assumed) of 273 GB/s, half of it to read and half to write: NVIDIA DGX Spark datasheet"),
}

# The share of the peak.
_RTX4090 = Figure(0.88, "LoHan, section III-C: 8.69e14 FLOP of the 13B model's forward at batch 32 in 5.96 s")
_CARD = Figure(0.88, "assumed as on the RTX 4090 in LoHan")
_V100 = Figure(0.4, "ZeRO-Infinity (Rajbhandari et al. 2021): up to 49 TFLOP/s on a V100")
_A100 = Figure(0.55, "Korthikanti et al. 2022, table 5: 0.42 to 0.56 on many A100s; 0.55 assumed on one")
_HOPPER = Figure(0.45, "the Llama 3 paper, table 4: 0.38 to 0.43 on thousands of H100s; 0.45 assumed on one")
_H800 = Figure(0.347, "AutoHet, section II-D: twice an A100")
_H20 = Figure(0.8, "assumed: its memory is fast for its FLOP/s")
_GB10 = Figure(0.35, "assumed: no source at hand measures it")
_MI300X = Figure(0.35, "assumed: no source at hand measures it on one device")

# To other devices.
_HOST_ONLY = Figure(0.0, "no NVLink: through the host")
_NVLINK_2 = Figure(150e9, "NVLink 2: half of the 300 GB/s of both directions, NVIDIA V100 datasheet")
_NVLINK_3 = Figure(300e9, "NVLink 3: half of the 600 GB/s of both directions, NVIDIA A100 datasheet")
_NVLINK_4 = Figure(450e9, "NVLink 4: half of the 900 GB/s of both directions, NVIDIA H100 datasheet")
_NVLINK_CUT = Figure(200e9, "NVLink 4: half of the 400 GB/s of both directions, NVIDIA H800 datasheet")
_INFINITY = Figure(448e9, "7 Infinity Fabric links of 64 GB/s a direction, AMD Instinct MI300X datasheet")

# Bytes per second in one direction, between devices.
PEERS: dict[str, Figure] = {
    "pcie3": LINKS["pcie3"].times(0.5, "0.5 (assumed: through host memory, there and back)"),
    "pcie4": LINKS["pcie4"].times(0.5, "0.5 (assumed: through host memory, there and back)"),
    "pcie5": LINKS["pcie5"].times(0.5, "0.5 (assumed: through host memory, there and back)"),
    "nvlink2": _NVLINK_2,
    "nvlink3": _NVLINK_3,
    "nvlink4": _NVLINK_4,
}

_SPARK = "NVIDIA DGX Spark datasheet: 128 GB of LPDDR5X; an eighth (assumed) of 1 PFLOP/s in sparse FP4"
_IN_HOST_MEMORY = {"gb10"}
_ADA, _DDR4, _DDR5 = "NVIDIA Ada GPU architecture whitepaper", "server-ddr4", "server-ddr5"
_LAPTOP = "NVIDIA GeForce RTX 4060 Laptop GPU: 3072 cores, 128-bit GDDR6; 1.9 GHz assumed, the middle of its boost clocks"

# Name; GiB; peak TFLOP/s; the share reached; memory GB/s; to peers; link; host; datasheet.
_ROWS: tuple[tuple[str, float, float, Figure, float, Figure, str, str, str], ...] = (
    ("rtx3090", 24, 71, _CARD, 936, _HOST_ONLY, "pcie4", _DDR4, "NVIDIA Ampere GA102 GPU architecture whitepaper"),
    ("rtx4060-laptop", 8, 23.3, _CARD, 256, _HOST_ONLY, "pcie4x8", "desktop-ddr5", _LAPTOP),
    ("rtx4080", 16, 97.5, _CARD, 716.8, _HOST_ONLY, "pcie4", _DDR4, _ADA),
    ("rtx4090", 24, 165.2, _RTX4090, 1008, _HOST_ONLY, "pcie4", _DDR4, _ADA),
    ("rtx5090", 32, 209.5, _CARD, 1792, _HOST_ONLY, "pcie5", _DDR5, "NVIDIA RTX Blackwell GPU architecture whitepaper"),
    ("v100", 32, 125, _V100, 900, _NVLINK_2, "pcie3", _DDR4, "NVIDIA V100 datasheet, SXM2 32 GB"),
    ("a100-40", 40, 312, _A100, 1555, _NVLINK_3, "pcie4", _DDR4, "NVIDIA A100 datasheet, SXM4 40 GB"),
    ("a100-80", 80, 312, _A100, 2039, _NVLINK_3, "pcie4", _DDR4, "NVIDIA A100 datasheet, SXM4 80 GB"),
    ("h100", 80, 989.4, _HOPPER, 3350, _NVLINK_4, "pcie5", _DDR5, "NVIDIA H100 datasheet, SXM5"),
    ("h200", 140, 989.4, _HOPPER, 4800, _NVLINK_4, "pcie5", _DDR5, "NVIDIA H200 datasheet, SXM; the driver reports 143,771 MiB"),
    ("h800", 80, 989.4, _H800, 3350, _NVLINK_CUT, "pcie5", _DDR5, "NVIDIA H800 datasheet, SXM5"),
    ("h20", 96, 148, _H20, 4000, _NVLINK_4, "pcie5", _DDR5, "NVIDIA H20 datasheet"),
    ("mi300x", 192, 1307.4, _MI300X, 5300, _INFINITY, "pcie5", _DDR5, "AMD Instinct MI300X datasheet"),
    ("gb10", 119, 125, _GB10, 273, _HOST_ONLY, "lpddr5x-gb10", "gb10", _SPARK),
    ("gh200", 96, 989.4, _HOPPER, 4000, _NVLINK_4, "nvlink-c2c", "grace", "NVIDIA GH200 datasheet, 96 GB HBM3"),
)

DEVICES: dict[str, Device] = {
    name: Device(
        name=name,
        memory_bytes=Figure(int(gib * GIB), sheet),
        peak_flop_per_s=Figure(peak * 1e12, sheet),
        utilisation=share,
        memory_bytes_per_s=Figure(memory * 1e9, sheet),
        peer_bytes_per_s=peers,
        link=link,
        host=host,
        in_host_memory=name in _IN_HOST_MEMORY,
    )
    for name, gib, peak, share, memory, peers, link, host, sheet in _ROWS
}


def device(name: str) -> Device:
    """The device of that name, such as ``"rtx4090"`` or ``"A100-80GB"``.

    Raises:
        ConfigError: There is no such preset; lists the known ones.
    """
    return find("device", DEVICES, name)
