"""The program that tests start to train in processes of their own: ``train.py SCENARIO OUT
[ARGUMENTS]``.

``SCENARIO`` is a module of :mod:`support.training`. Its ``main`` gets the folder ``OUT`` and the
arguments, trains, and saves there what the test compares. ``WORLD_SIZE`` and ``RANK`` say which of
several ranks this process is.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch


def main() -> None:
    torch.set_num_threads(1)
    scenario, out, *arguments = sys.argv[1:]
    importlib.import_module(f"support.training.{scenario}").main(Path(out), *arguments)


if __name__ == "__main__":
    main()
