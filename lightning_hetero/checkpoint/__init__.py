"""Checkpoint files that plain ``torch.load`` reads, written and read without holding the whole state in memory."""

from lightning_hetero.checkpoint.streaming import StreamingIO, load, release_pages, save

__all__ = ["StreamingIO", "load", "release_pages", "save"]
