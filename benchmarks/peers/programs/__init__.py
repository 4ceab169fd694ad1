"""What a user of each library would write: their differences are the lines that the table counts.

A ``train`` with a Trainer gets a LightningModule, a DataLoader and options of the Trainer. One with
a loop of its own gets a module that returns the loss of a batch, the batches, and ``report``, which
wants each loss. ``config`` is what a configuration file would say.
"""
