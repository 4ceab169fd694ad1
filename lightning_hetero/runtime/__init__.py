"""Executes a schedule around autograd: anchors, residency, updates, offloaded weights."""
