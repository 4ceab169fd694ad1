"""The runtime without Lightning's Trainer: loops of the user's own, and those of other libraries.

:func:`lightning_hetero.loops.plain.offload` follows any loop by hooks on the model and on its
optimizers. What a library needs beyond that is in a file of the library's name.
"""
