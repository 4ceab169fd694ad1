"""Where blocks live: ``format`` is what is on disk, ``live`` is what happens to it while a model trains."""
