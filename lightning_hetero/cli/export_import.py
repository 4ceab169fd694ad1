"""``lightning-hetero export`` and ``import``: convert weights, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_hetero.checkpoint.files import Place
from lightning_hetero.cli.output import console, print_json, working
from lightning_hetero.errors import ConfigError
from lightning_hetero.units import format_bytes

if TYPE_CHECKING:
    import torch


def export(
    source: str, destination: str, *, module: str, dtype: str | None, max_shard_size: str, merge: str | None, as_json: bool
) -> None:
    """Writes weights as safetensors, or as a Lightning checkpoint.

    Raises:
        ConfigError: The request is wrong, or the source not whole.
    """
    from lightning_hetero.convert.exporting import export_weights

    with working(f"writing {destination}"):
        files = export_weights(
            source, destination, module=module, dtype=_dtype(dtype), max_shard_size=max_shard_size, merge=merge or False
        )
    _print(files, as_json=as_json)


def import_(source: str, destination: str, *, module: str, ties: Iterable[str], dtype: str | None, as_json: bool) -> None:
    """Writes safetensors as a Lightning checkpoint.

    Raises:
        ConfigError: The request is wrong, or the source not whole.
    """
    from lightning_hetero.convert.exporting import import_weights

    pairs = dict(_tie(text) for text in ties)
    with working(f"writing {destination}"):
        file = import_weights(source, destination, module=module, ties=pairs, dtype=_dtype(dtype))
    _print([file], as_json=as_json)


def _tie(text: str) -> tuple[str, str]:
    name, equals, content = text.partition("=")
    if not (name and equals and content):
        raise ConfigError(f"--tie {text!r}; allowed: NAME=OTHER, such as lm_head.weight=model.embed_tokens.weight.")
    return name, content


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    return None if name is None else {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _print(files: Sequence[Path | str], *, as_json: bool) -> None:
    sizes = {file: Place.of(file).num_bytes() for file in files}
    if as_json:
        print_json({"files": [{"path": file, "num_bytes": size} for file, size in sizes.items()]})
        return
    for file, size in sizes.items():
        console().print(f"Wrote {file}, {format_bytes(size)}.", markup=False)
