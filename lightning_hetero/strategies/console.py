"""What the package says while it trains reaches the screen as Lightning's own lines do.

Lightning gives its logger the level INFO and, where the process has not configured logging, a handler that writes to the standard
error stream; and it says INFO on rank zero only. The logger ``lightning_hetero`` follows: its level is Lightning's on rank zero,
and at least WARNING elsewhere. For each record its handler asks whether another handler gets it, so no line is shown twice,
whenever the process configures logging.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from lightning_hetero.strategies.namespaces import Lightning

_NAME = "lightning_hetero"
_level = logging.NOTSET  # what the logger has got here


class _Console(logging.StreamHandler[TextIO]):
    """Writes a record to the standard error stream of the moment, unless another handler gets it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # there is no stream to keep: it may be replaced, as notebooks do
        self.setFormatter(logging.Formatter("lightning-hetero: %(message)s"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record, if nobody else does."""
        ours = logging.getLogger(_NAME)
        others = [*ours.handlers, *(logging.getLogger().handlers if ours.propagate else ())]
        if not any(handler is not self for handler in others):
            super().emit(record)


def speak(lightning: Lightning) -> None:
    """Lets this process's lines be seen as those of a Lightning are; called once its rank is known.

    A level that the user has given the logger ``lightning_hetero`` stays.

    Args:
        lightning: The Lightning whose Trainer runs.
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
