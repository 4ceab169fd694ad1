"""Weights from and to other formats, one tensor at a time: safetensors directories and ordinary Lightning checkpoints."""
