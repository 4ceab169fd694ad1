"""Sources of profiles: measurements, observed training steps, and datasheets or papers."""
