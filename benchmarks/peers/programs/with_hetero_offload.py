"""Lightning with this library."""

import lightning as L

from lightning_hetero import HeteroOffloadStrategy


def train(module, batches, *, plan, **options):
    trainer = L.Trainer(strategy=HeteroOffloadStrategy(plan=plan), **options)
    trainer.fit(module, batches)
