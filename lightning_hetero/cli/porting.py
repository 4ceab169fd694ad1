"""``lightning-hetero from-deepspeed``, ``from-fsdp`` and ``from-accelerate``."""

from __future__ import annotations

import typer

from lightning_hetero.cli.output import print_json
from lightning_hetero.porting.script import cli_yaml, python
from lightning_hetero.porting.settings import Ported


def show(ported: Ported, *, as_yaml: bool, as_json: bool) -> None:
    """Prints ported settings: as Python, as a configuration of LightningCLI, or as JSON."""
    if as_json:
        optimizer = ported.optimizer
        print_json(
            {
                "trainer": ported.trainer,
                "strategy": ported.strategy,
                "optimizer": optimizer and {"class_path": optimizer.class_path, "init_args": optimizer.arguments},
                "scheduler": ported.schedule and ported.schedule.name,
                "notes": ported.notes,
            }
        )
        return
    typer.echo((cli_yaml if as_yaml else python)(ported), nl=False)
