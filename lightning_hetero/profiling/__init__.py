"""Where profiles come from: measured on this machine, observed in a training step, or worked out from datasheets and papers."""
