"""Presets of machines and models from datasheets and papers.

Every figure has a source text. Unknown names raise ``ConfigError`` with near matches and all known
names.
"""

from lightning_hetero.profiling.presets.adapters import Lora
from lightning_hetero.profiling.presets.configs import from_config, unreadable
from lightning_hetero.profiling.presets.devices import DEVICES, LINKS, Device, device
from lightning_hetero.profiling.presets.disks import DISKS, Disk, disk
from lightning_hetero.profiling.presets.hosts import HOSTS, Host, host
from lightning_hetero.profiling.presets.llama_family import Llama
from lightning_hetero.profiling.presets.machines import BOXES, PAPER_MACHINES, PaperMachine, machine, paper_machine
from lightning_hetero.profiling.presets.models import MODELS, gpt, llama, model
from lightning_hetero.profiling.presets.quantization import Quantization
from lightning_hetero.profiling.presets.transformers import Architecture, Gpt
from lightning_hetero.profiling.presets.tuning import Tuning

__all__ = [
    "BOXES",
    "DEVICES",
    "DISKS",
    "HOSTS",
    "LINKS",
    "MODELS",
    "PAPER_MACHINES",
    "Architecture",
    "Device",
    "Disk",
    "Gpt",
    "Host",
    "Llama",
    "Lora",
    "PaperMachine",
    "Quantization",
    "Tuning",
    "device",
    "disk",
    "from_config",
    "gpt",
    "host",
    "llama",
    "machine",
    "model",
    "paper_machine",
    "unreadable",
]
