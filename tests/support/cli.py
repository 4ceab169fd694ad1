"""The command ``lightning-hetero`` in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from lightning_hetero.cli.app import app


def invoke(*arguments: object, code: int = 0) -> Result:
    """Runs it; fails unless it ends with ``code``."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def parsed(*arguments: object, code: int = 0) -> Any:
    """What it prints with ``--json``."""
    return json.loads(invoke(*arguments, "--json", code=code).stdout)
