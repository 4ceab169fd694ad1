"""Weights from and to safetensors directories and Lightning checkpoints, one tensor at a time."""
