"""Executes a schedule around autograd: anchors, residency, updates, the door to offloaded weights."""
