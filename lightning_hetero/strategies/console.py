"""Shows the package's log lines on the screen in the same way as Lightning's own.

Lightning gives its logger the level INFO. If the process has not configured logging, it adds a
handler that writes to standard error, and it logs INFO on rank zero only. The logger
``lightning_hetero`` follows: its level is Lightning's on rank zero, and at least WARNING on other
ranks. Its handler checks for each record whether another handler gets it, so no line appears twice,
whenever the process configures logging.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from lightning_hetero.strategies.namespaces import Lightning

_NAME = "lightning_hetero"
_level = logging.NOTSET  # the level that `speak` has set


class _Console(logging.StreamHandler[TextIO]):
    """Writes a record to the present standard error stream, unless another handler gets it."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("lightning-hetero: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record, if no other handler does."""
        self.stream = sys.stderr  # notebooks replace it
        ours = logging.getLogger(_NAME)
        others = [*ours.handlers, *(logging.getLogger().handlers if ours.propagate else ())]
        if not any(handler is not self for handler in others):
            super().emit(record)


def speak(lightning: Lightning) -> None:
    """Sets up the package's logger like that of a Lightning namespace.

    Called once the rank is known.

    If the user has given the logger ``lightning_hetero`` a level, it stays.
    """
    global _level
    logger = logging.getLogger(_NAME)
    if not any(isinstance(handler, _Console) for handler in logger.handlers):
        logger.addHandler(_Console())
    if logger.level not in (logging.NOTSET, _level):
        return
    rank_zero = lightning.module("utilities.rank_zero").rank_zero_only
    level = logging.getLogger(lightning.name).getEffectiveLevel()
    _level = level if rank_zero.rank == 0 else max(level, logging.WARNING)
    logger.setLevel(_level)
