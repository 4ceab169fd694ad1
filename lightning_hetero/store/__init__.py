"""Where blocks live: ``format`` is the format on disk, ``live`` are blocks during training."""
