"""``python -m lightning_hetero.cli``: the command where its script is not on the path."""

from lightning_hetero.cli import main

main()
