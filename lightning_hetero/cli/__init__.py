"""The command ``lightning-hetero``; ``--help`` lists what it does.

Exit codes: 0 all is well; 1 a problem was found, or something unexpected happened; 2 the request is
wrong or impossible, and standard error says why (with ``--json`` standard output too, as
``{"error": ...}``).
"""

from __future__ import annotations


def main() -> None:
    """Runs the command with the arguments of the process, and exits."""
    from lightning_hetero.cli.app import app

    app(prog_name="lightning-hetero")
