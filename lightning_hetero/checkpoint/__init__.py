"""Checkpoint files for plain ``torch.load``, written and read one tensor at a time."""

from lightning_hetero.checkpoint.streaming import StreamingIO, load, release_pages, save

__all__ = ["StreamingIO", "load", "release_pages", "save"]
