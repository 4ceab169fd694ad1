"""A recorded stretch of a run: what each step took, and which tensors the blocks have.

``TraceOnDemand`` writes it as ``run.json``, beside the trace, the plan and the profiles.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.codec import check_format, check_keys, number, parse_object, read_text

FORMAT = "lightning-hetero-run"
VERSION = 1
FILE = "run.json"  # in the folder of a recorded run
TRACE, PLAN, MODEL, HARDWARE = "trace.json", "plan.json", "model.json", "hardware.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One optimizer step.

    Attributes:
        step: The Trainer's ``global_step`` after it.
        seconds: Its batches' time; 0: not known.
        host_bytes: Memory of the process as it ended.
        device_bytes: The peak of a device with memory of its own so far; 0 without one.
        disk_bytes: Files of the run.
        read_bytes: Bytes read from disk since the run began.
        written_bytes: Bytes written to it.
    """

    step: int
    seconds: float
    host_bytes: int
    device_bytes: int
    disk_bytes: int
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTensor:
    """One parameter.

    Attributes:
        name: Its name in the module.
        block: The block that it belongs to.
        shape: Its shape.
        dtype: Its dtype, such as ``"float32"``.
        num_bytes: Its size.
        trains: Whether it gets gradients.
    """

    name: str
    block: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    trains: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What was recorded.

    Attributes:
        model: The class of the LightningModule.
        steps: The recorded steps.
        tensors: All parameters.
        tokens: Tokens of a step; 0: not known.
        drive: The drive under the run's files; empty: not known.
        rated_bytes: Bytes that may be written to it within its warranty; 0: not known.
        worn_bytes: Bytes that had been written to it; 0: not known.
        rated_by: Where the rating is from.
    """

    model: str
    steps: tuple[RecordedStep, ...]
    tensors: tuple[RecordedTensor, ...]
    tokens: int = 0
    drive: str = ""
    rated_bytes: float = 0.0
    worn_bytes: float = 0.0
    rated_by: str = ""

    def to_json(self) -> str:
        """The record as JSON text."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def load(cls, path: str | Path) -> RunRecord:
        """Reads a file with :meth:`to_json`'s text.

        Raises:
            ConfigError: It cannot be read, or is not a record of this version.
        """
        where = str(path)
        data = parse_object(read_text(path, what="record of a run"), what="record of a run", source=where)
        check_format(data, FORMAT, VERSION, what="record of a run", source=where)
        numbers, texts = ("tokens", "rated_bytes", "worn_bytes"), ("drive", "rated_by")
        check_keys(data, required=("model", "steps", "tensors"), optional=(*numbers, *texts), where=where)
        try:
            steps = tuple(_step(RecordedStep(**row), where) for row in data["steps"])
            tensors = tuple(_tensor(RecordedTensor(**{**row, "shape": tuple(row["shape"])}), where) for row in data["tensors"])
        except (TypeError, KeyError) as error:
            raise ConfigError(f"{where}: its steps or tensors are not those of a run ({error}). Record the run anew.") from None
        given = [key for key in numbers if key in data]
        rest: dict[str, Any] = {key: number(data[key], key=key, where=where, whole=key == "tokens") for key in given}
        rest |= {key: str(data[key]) for key in texts if key in data}
        return cls(model=str(data["model"]), steps=steps, tensors=tensors, **rest)


def _step(row: RecordedStep, where: str) -> RecordedStep:
    for key, value in asdict(row).items():
        number(value, key=key, where=where, whole=key != "seconds")
    return row


def _tensor(row: RecordedTensor, where: str) -> RecordedTensor:
    for size in (*row.shape, row.num_bytes):
        number(size, key=f"a size of {row.name!r}", where=where, whole=True)
    if not all(isinstance(text, str) for text in (row.name, row.block, row.dtype)):
        raise TypeError(f"a tensor is named {row.name!r}, of {row.dtype!r} in {row.block!r}")
    return row
