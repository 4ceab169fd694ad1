"""Lightning's side of parallel training: the strategies ``hetero_parallel*``, and ``LocalFirst``.

As in :mod:`lightning_hetero.strategies`, each class is written once and made for a namespace on
demand. The public names are found there.
"""
