"""Runs the cells of a notebook by IPython: ``notebook.py NOTEBOOK``.

A kernel would begin with nothing, and take three times as long: it imports everything anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config


def main(notebook: Path) -> None:
    sys.path.insert(0, str(notebook.parent))
    shell = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "code":
            shell.run_cell(cell.source).raise_error()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
