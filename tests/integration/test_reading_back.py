"""What lives on disk comes back at the end of a fit, and goes into a checkpoint, with several reads
under way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from support.models import LitModel, Recipe, Shape, data, quiet_trainer

from lightning_hetero._native import Engine, Ticket
from lightning_hetero.runtime.optimizers import OptimizerBinding
from lightning_hetero.strategies import HeteroOffloadStrategy

LAYERS = 3


class Begun:
    """Reads from the disk that were begun, and that nobody has waited for yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most, self._tickets = 0, set[Any]()
        for name in ("fetch", "read"):
            monkeypatch.setattr(Engine, name, self._counted(getattr(Engine, name)))
        wait = Ticket.wait

        def waited(ticket: Ticket, *args: Any, **options: Any) -> None:
            self._tickets.discard(ticket)
            wait(ticket, *args, **options)

        monkeypatch.setattr(Ticket, "wait", waited)

    def _counted(self, submit: Any) -> Any:
        def call(*args: Any, **options: Any) -> Ticket:
            ticket: Ticket = submit(*args, **options)
            self._tickets.add(ticket)
            self.most = max(self.most, len(self._tickets))
            return ticket

        return call

    def forget(self) -> None:
        self.most = 0
        self._tickets.clear()


class Ends(pl.Callback):
    """Saves a checkpoint at the end of training, before the model is given back."""

    def __init__(self, begun: Begun, path: Path) -> None:
        self.begun, self.path = begun, path
        self.while_saving = 0

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        session: Any = trainer.strategy.session
        session.drain()
        for block in session.blocks:
            session.executor.residency.weights.release(block)  # as if there were no memory for them
        self.begun.forget()
        trainer.save_checkpoint(self.path)
        self.while_saving = self.begun.most
        self.begun.forget()


def test_weights_and_state_come_back_with_several_reads_under_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun, bytes_read, in_files = Begun(monkeypatch), list[int](), list[int]()
    unbind = OptimizerBinding.unbind

    def counted(binding: OptimizerBinding, *, read: bool) -> None:
        assert begun.most >= LAYERS  # weights are there by now
        begun.forget()
        store = binding._store
        assert store is not None
        before = store.stats().bytes_read
        unbind(binding, read=read)
        bytes_read.append(store.stats().bytes_read - before)
        in_files.append(sum(file.stat().st_size for file in (tmp_path / "store").glob("block-*.a")))

    monkeypatch.setattr(OptimizerBinding, "unbind", counted)
    ends = Ends(begun, tmp_path / "last.ckpt")
    strategy = HeteroOffloadStrategy("disk", disk_path=tmp_path / "store", durability="none")
    trainer = quiet_trainer(
        strategy=strategy, max_steps=2, limit_val_batches=0, default_root_dir=tmp_path, callbacks=[ends], enable_checkpointing=False
    )
    trainer.fit(LitModel(Recipe(shape=Shape(layers=LAYERS))), data())
    assert ends.while_saving > 1
    assert begun.most >= LAYERS
    assert 0 < bytes_read[0] < in_files[0]  # every chunk once, though several tensors lie in it
