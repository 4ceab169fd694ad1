"""Modules that need less memory than those they replace."""

from __future__ import annotations

from lightning_hetero.nn.chunked_head import ChunkedHead, chunked_cross_entropy

__all__ = ["ChunkedHead", "chunked_cross_entropy"]
