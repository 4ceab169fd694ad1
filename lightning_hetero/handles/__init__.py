"""Handles: tensors and parameters without bytes, which read and write their content where it is."""
