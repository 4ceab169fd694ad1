"""Ported settings as text: a Python module, a configuration of LightningCLI, and their notes."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping

import yaml

from lightning_hetero.porting.settings import LrSchedule, NoteKind, Optimizer, Ported

_COLUMNS = 100
_STRATEGY = "lightning_hetero.strategies.HeteroOffloadStrategy"
_HEADS = {
    NoteKind.YOURS: "Set these yourself:",
    NoteKind.NONE: "Without a counterpart, or with a difference:",
    NoteKind.UNKNOWN: "Unknown, and left out:",
}


def python(ported: Ported) -> str:
    """A module that makes the strategy, the Trainer and ``configure_optimizers``."""
    imports = ["import lightning as L"]
    if ported.optimizer is not None:
        imports.append("import torch")
    if ported.schedule is not None:
        imports.insert(0, "import math\n")
    strategy = _call("HeteroOffloadStrategy", ported.strategy)
    trainer = _call("L.Trainer", {"strategy": _Name("strategy"), **ported.trainer})
    parts = [
        _title(ported),
        "\n".join([*imports, "", "from lightning_hetero import HeteroOffloadStrategy"]),
        f"strategy = {strategy}\ntrainer = {trainer}",
    ]
    if ported.optimizer is not None:
        parts.append("\n" + _configure_optimizers(ported.optimizer, ported.schedule))
    text = "\n\n".join(parts)
    if notes := _notes(ported):
        text += ("\n\n\n" if ported.optimizer is not None else "\n\n") + notes
    return text + "\n"


def cli_yaml(ported: Ported) -> str:
    """A configuration of LightningCLI. A schedule is code, and becomes a note."""
    strategy: dict[str, object] = {"class_path": _STRATEGY}
    if ported.strategy:
        strategy["init_args"] = _listed(ported.strategy)
    config: dict[str, object] = {"trainer": {"strategy": strategy, **_listed(ported.trainer)}}
    if ported.optimizer is not None:
        config["optimizer"] = {"class_path": ported.optimizer.class_path, "init_args": _listed(ported.optimizer.arguments)}
    text = f"{_title(ported)}\n{yaml.safe_dump(config, sort_keys=False)}"
    if ported.schedule is not None:
        text += f"\n# {ported.schedule.name} is code: write it in configure_optimizers, as printed without --yaml.\n"
    notes = _notes(ported)
    return f"{text}\n{notes}\n" if notes else text


class _Name(str):
    """A name in Python, not a text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _call(name: str, arguments: Mapping[str, object]) -> str:
    """A call; one argument a line if there are more than two."""
    words = [f"{key}={_literal(value)}" for key, value in arguments.items()]
    if len(words) < 3:
        return f"{name}({', '.join(words)})"
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), ")"])


def _literal(value: object) -> str:
    if isinstance(value, str) and not isinstance(value, _Name):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def _configure_optimizers(optimizer: Optimizer, schedule: LrSchedule | None) -> str:
    arguments = "".join(f", {key}={_literal(value)}" for key, value in optimizer.arguments.items())
    made = f"{optimizer.class_path}(self.parameters(){arguments})"
    comment = f"  # stands for {optimizer.stands_for}" if optimizer.stands_for else ""
    lines = ["def configure_optimizers(self):  # of your LightningModule"]
    if schedule is None:
        return "\n".join([*lines, f"    return {made}{comment}"])
    names, values = ", ".join(schedule.values), ", ".join(schedule.values.values())
    lines += [
        f"    optimizer = {made}{comment}",
        f"    {names} = {values}",
        "",
        f"    def factor(step):  # {schedule.name}: the learning rate of a step over that of the optimizer",
        *(f"        {line}" for line in schedule.body),
        "",
        "    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)",
        '    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}',
    ]
    return "\n".join(lines)


def _listed(table: Mapping[str, object]) -> dict[str, object]:
    """Tuples as lists, which YAML has."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in table.items()}


def _title(ported: Ported) -> str:
    return _filled(ported.source, "# ", "# ")


def _notes(ported: Ported) -> str:
    """All notes as comments; settings with one reason share it."""
    parts = []
    for kind, head in _HEADS.items():
        reasons: dict[str, list[str]] = {}
        for note in ported.notes:
            if note.kind is kind:
                reasons.setdefault(note.why, []).append(note.key)
        if reasons:
            entries = [_filled(f"{', '.join(dict.fromkeys(names))}: {why}", "#   ", "#     ") for why, names in reasons.items()]
            parts.append("\n".join([f"# {head}", *entries]))
    return "\n#\n".join(parts)


def _filled(text: str, first: str, others: str) -> str:
    return textwrap.fill(
        text, _COLUMNS, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )
