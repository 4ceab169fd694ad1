"""Blocks during training: their memory, the engine that updates them, their mirrors."""
