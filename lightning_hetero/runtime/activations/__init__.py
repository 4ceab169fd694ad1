"""Saved tensors of a block's forward: kept, recomputed, or swapped to the host or the disk."""
