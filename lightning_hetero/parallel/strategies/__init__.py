"""Lightning's side of parallel training: ``HeteroParallelStrategy`` and its relatives, and ``LocalFirst``.

As those of :mod:`lightning_hetero.strategies`, each class is written once and made for a namespace
on demand. Their public names are found there.
"""
