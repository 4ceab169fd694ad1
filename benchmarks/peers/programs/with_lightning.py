"""Plain Lightning."""

import lightning as L


def train(module, batches, **options):
    trainer = L.Trainer(**options)
    trainer.fit(module, batches)
