"""Who takes part: what each runs, in which environment, with which settings."""

from __future__ import annotations

import difflib
import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """One contestant.

    Attributes:
        title: Its name in tables.
        program: A module of ``programs``, whose ``train`` is run.
        base: The program that a user begins with; the lines of both are compared.
        keeps: Where weights and optimizer state are between two steps.
        plan: Of this library; handed to ``train``, if not empty.
        config: What a file would say, handed to ``train``, if not empty; its values are lines.
        half: Added to ``config`` in 16 bit, for those that cast the weights themselves.
        takes_dtype: ``train`` is told the type to compute in.
        packages: What pip installs for it; empty for those that come with torch and Lightning.
        module: The module by which an installed package is recognized.
        from_source: The package is this repository's.
        environment: Variables of its process.
        alone: It wants a process group of one rank.
    """

    title: str
    program: str
    base: str = "with_torch"
    keeps: str = "memory"
    plan: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    half: dict[str, Any] = field(default_factory=dict)
    takes_dtype: bool = False
    packages: tuple[str, ...] = ()
    module: str = "torch"
    from_source: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    alone: bool = False

    @property
    def lines_changed(self) -> int:
        """Lines of code and configuration that differ from ``base``."""
        before, after = (code(HERE / "programs" / f"{name}.py") for name in (self.base, self.program))
        edits = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        return len(leaves(self.config)) + sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in edits if tag != "equal")

    @property
    def is_installed(self) -> bool:
        """Whether its package can be imported here."""
        return importlib.util.find_spec(self.module) is not None


def code(path: Path) -> list[str]:
    """The lines of a program that a user would write."""
    text = re.sub(r'^""".*?"""', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [line for line in text.splitlines() if line.strip() and not line.strip().startswith(("#", "def train("))]


def leaves(config: dict[str, Any]) -> list[tuple[str, Any]]:
    """Every value of nested settings with its key."""
    return [pair for key, value in config.items() for pair in (leaves(value) if isinstance(value, dict) else [(key, value)])]


# [Note: DeepSpeed's settings]
# The best that were found on two cores and a virtual NVMe disk. Sub-groups of 2e7 parameters, so
# that some are read and written beside the update of another; buffers for three of them (weights,
# both moments, gradients); transfers of 8 MiB. Without them ZeRO-Infinity takes 1.3 to 2 times as
# long. Version 0.19 clips gradients to a norm of 1.0 unless the configuration says otherwise. That
# is another training: 0.0 gives the losses of plain torch.
AIO = {"block_size": 8 << 20, "queue_depth": 16, "single_submit": False, "overlap_events": True, "intra_op_parallelism": 2}
ZERO_OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
ZERO_INFINITY = {
    "stage": 3,
    "sub_group_size": int(2e7),
    "offload_optimizer": {
        "device": "nvme", "nvme_path": "{directory}", "buffer_count": 12, "pipeline_read": True, "pipeline_write": True,
    },
}  # fmt: skip
DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "{batch}",
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
}
_DEEPSPEED: dict[str, Any] = {
    "program": "with_deepspeed", "packages": ("deepspeed==0.19.8", "ninja"), "module": "deepspeed", "alone": True,
    "half": {"bf16": {"enabled": True}},
    "environment": {**HUGE_PAGES, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"},
}  # fmt: skip
_OURS: dict[str, Any] = {
    "program": "with_hetero_offload", "base": "with_lightning", "packages": ("lightning-hetero",), "module": "lightning_hetero",
    "from_source": True,
}  # fmt: skip

ENTRANTS = {
    "plain": Entrant(title="plain Lightning", program="with_lightning", base="with_lightning"),
    "host": Entrant(title="lightning-hetero, `host`", keeps="memory", plan="host", **_OURS),
    "disk": Entrant(title="lightning-hetero, `disk`", keeps="disk", plan="disk", **_OURS),
    "fsdp2": Entrant(title="FSDP2, CPU offload", program="with_fsdp2", alone=True, takes_dtype=True),
    "zero_offload": Entrant(
        title="DeepSpeed ZeRO-Offload", config={**DEEPSPEED, "zero_optimization": ZERO_OFFLOAD}, **_DEEPSPEED
    ),
    "zero_infinity": Entrant(
        title="DeepSpeed ZeRO-Infinity", keeps="weights in memory, state on disk",
        config={**DEEPSPEED, "zero_optimization": ZERO_INFINITY, "aio": AIO}, **_DEEPSPEED,
    ),
    "bitsandbytes": Entrant(
        title="bitsandbytes, paged AdamW", program="with_bitsandbytes", packages=("bitsandbytes",), module="bitsandbytes"
    ),
    "torchao": Entrant(title="torchao, offloaded AdamW", program="with_torchao", packages=("torchao",), module="torchao"),
}  # fmt: skip
