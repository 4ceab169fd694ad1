"""A store as ``ckpt_path``: reads its last record, and restores Lightning's loops."""

from __future__ import annotations

import logging
import math
import os
import shlex
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lightning_hetero._native import Store
from lightning_hetero.convert import adapter_settings, merges
from lightning_hetero.errors import ConfigError, HeteroError, StoreCorruptError
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor
from lightning_hetero.store.format import record, stored_model, value_shapes
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.format.holders import wait_for_files
from lightning_hetero.store.format.in_place import InPlace
from lightning_hetero.store.format.manifest import MANIFEST, identity_of, layout_of, manifest_at, member_of, read_manifest
from lightning_hetero.store.format.pins import pins
from lightning_hetero.store.format.sets import stores_in
from lightning_hetero.store.format.stored_model import has_lost_records
from lightning_hetero.strategies.data import TrainingData, begin_apart, restore_validation, set_random_state
from lightning_hetero.strategies.namespaces import lightning_of
from lightning_hetero.untyped import Options, Trainer

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import Precision

log = logging.getLogger(__name__)

State = Options  # a training state or a checkpoint: its values are Lightning's and the user's

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def is_store(path: object) -> bool:
    """Whether a ``ckpt_path`` is a store's directory, or one in which ranks have stores."""
    return isinstance(path, str | os.PathLike) and "://" not in os.fspath(path) and bool(stores_in(Path(path)))


def refuse_slice(path: Path) -> None:
    """Refuses a store that has one rank's slices alone.

    Raises:
        ConfigError: It says where all of them are.
    """
    member = member_of(path, manifest_at(path)) if (path / MANIFEST).is_file() else None
    if member is not None and member.ranks > 1:
        raise ConfigError(
            f"ckpt_path {str(path)!r} is the store of rank {member.rank} of {member.ranks}, which has slices of the model. Pass "
            f"the directory above, as ckpt_path and disk_path: any number of devices goes on from there."
        )


def last_kept(path: Path) -> Path:
    """The directory of a store's last kept step: its own, or that of its newest pin.

    It is the pin if the last record is not of a kept step. It is also the pin if no record can be
    read: then the pin is the last step that is certainly whole, and a warning says so.
    """
    found = pins(path)
    if not found:
        return path
    try:
        return path if _last_record(path).state else found[-1]
    except StoreCorruptError as error:
        log.warning(
            "%s. Training goes on from the last step that was pinned, %r; what was kept after it is lost.",
            str(error).rstrip("."), str(found[-1]),
        )  # fmt: skip
        return found[-1]


def read_state(path: Path) -> State:
    """The training state of a store's last step."""
    try:
        last = _last_record(path)
    except StoreCorruptError as error:
        raise StoreCorruptError(
            f"{str(error).rstrip('.')}. The store cannot be resumed from. Bring the file COMMIT back from a copy of it, or go on "
            f"from a checkpoint. To begin anew, leave ckpt_path out and pass new_run=True to the strategy: the store is then "
            f"renamed, and stays."
        ) from error
    return checked_state(last, path)


def read_places(path: Path) -> list[InPlace | None]:
    """Where the last step of a store has the weights of each part; ``None``: in its own files."""
    return [entry.in_place for entry in _last_record(path).parts]


def checked_state(last: record.StepRecord, path: Path) -> State:
    """The training state of a record.

    Raises:
        ConfigError: It stands for no step, or its state cannot be used.
        StoreCorruptError: A state file is missing, or not what the record names.
    """
    state = record.state_of(last, str(path))
    record.check_state(state, path, value_shapes.Fields(record.STATE))
    return state


def for_evaluation(
    path: Path, stores: Sequence[StoreFiles], module: pl.LightningModule, precision: Precision, opened: ExitStack
) -> State:
    """The last kept step of a store as a Lightning checkpoint for evaluation. Nothing is written.

    ``stores`` have it, each rank's a part; they were ``opened`` from ``path``. Weights are lazy
    tensors, which can be read until ``opened`` is closed. Tied weights have the names of the
    module's parameters.

    Raises:
        ConfigError: Its last record is not of a step, or it lacks weights.
        StoreCorruptError: A file differs from its record.
    """
    store = stores[0]
    if store.record is None:
        opened.close()  # the store is opened once more, to say why
        raise _no_record(path)
    state = checked_state(record.parse(store.record.user), store.path)
    weights: dict[str, torch.Tensor] = {w.name: OffloadedTensor(w) for w in stored_model.stored_weights(*stores)}
    first = {parameter: name for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name not in weights and first[parameter] in weights:
            weights[name] = weights[first[parameter]]
    checkpoint = as_checkpoint(state, precision)
    del checkpoint["loops"]  # an evaluation begins with its first batch
    # The record has the callbacks' state at the end of the step's batch. ModelCheckpoint and
    # EarlyStopping may know of a later validation in this process; an older "best" would be wrong.
    trainer = module.trainer
    newer = {callback.state_key for callback in (*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks)}
    callbacks = {key: value for key, value in state["callbacks"].items() if key not in newer}
    return {**checkpoint, "callbacks": callbacks, "state_dict": weights | state["buffers"]}


def _last_record(path: Path) -> record.StepRecord:
    manifest_fd = os.open(path / MANIFEST, _FLAGS)
    try:
        manifest = read_manifest(path, manifest_fd)
    finally:
        os.close(manifest_fd)
    layout = layout_of(path, manifest)
    ring = path / "COMMIT"
    if not ring.exists() or ring.stat().st_size == 0:  # the process died while it made the store, or the file was lost
        raise _no_record(path)
    if (names := ring.stat().st_nlink) > 1:
        old, own = shlex.quote(str(ring)), shlex.quote(f"{path}/COMMIT.own")
        raise ConfigError(
            f"{str(ring)!r} has {names} names; allowed: one. Hard links, as cp -al makes them, would mix the records of two runs. "
            f"Make it a file of its own: cp {old} {own} && mv {own} {old}. Or remove the other name."
        )
    wait_for_files(path, [ring.name])
    with Store(
        path, uuid=identity_of(path, manifest).bytes, create=False, direct_io=False, durability=1, verify_digests=False,
        num_blocks=layout["num_blocks"], user_bytes=layout["user_bytes"],
    ) as store:  # fmt: skip
        try:
            _, blob = store.recover()
        except HeteroError as error:
            if type(error) is HeteroError:  # no record at all
                raise _no_record(path) from error
            raise
    return record.parse(blob)


def _no_record(path: Path) -> HeteroError:
    with StoreFiles(path) as store:
        if has_lost_records(store):
            what = "; ".join(map(str, store.notes))
            return StoreCorruptError(f"store {str(path)!r} has had commit records, and none can be read ({what}).")
    return ConfigError(f"store {str(path)!r} cannot be resumed from: no step has been committed yet. Start without ckpt_path.")


def check_loops(state: State, path: Path, trainer: pl.Trainer) -> None:
    """Refuses progress of loops, or a datamodule's state, of another form than this Trainer's.

    Raises:
        ConfigError: Names the first difference.
    """
    like = {"fit_loop": value_shapes.like(trainer.fit_loop.state_dict())}
    if state["datamodule"] is not None:
        like["datamodule"] = value_shapes.Row((str, dict))
    record.check_state(state, path, value_shapes.Fields(like))


def as_checkpoint(state: State, precision: Precision) -> State:
    """A training state as a Lightning checkpoint, without weights and optimizer state."""
    checkpoint = {
        "epoch": state["epoch"],
        "global_step": state["global_step"],
        "pytorch-lightning_version": state["version"],
        "state_dict": {},
        "loops": {"fit_loop": state["fit_loop"]},
        "callbacks": state["callbacks"],
        "optimizer_states": state["optimizers"],
        "lr_schedulers": state["lr_schedulers"],
        adapter_settings.KEY: state.get(adapter_settings.KEY, {}),
        merges.KEY: state.get(merges.KEY, {}),
        **state["hyper_parameters"],
    }
    if state["precision"]:
        checkpoint[type(precision).__qualname__] = state["precision"]
    if state["datamodule"]:
        name, content = state["datamodule"]
        checkpoint[name] = content
    return checkpoint


def load_buffers(module: pl.LightningModule, buffers: dict[str, torch.Tensor]) -> None:
    """Gives the model its persistent buffers.

    Raises:
        ConfigError: The model has no such buffer.
    """
    for name, value in buffers.items():
        prefix, _, key = name.rpartition(".")
        try:
            owner = module.get_submodule(prefix)
        except AttributeError:
            owner = None
        if owner is None or key not in owner._buffers:
            raise ConfigError(f"the store has a buffer {name!r}; this model has none of that name. Resume with the same model.")
        there = owner._buffers[key]
        if there is not None and there.shape == value.shape and there.dtype == value.dtype:
            there.copy_(value)
        else:
            owner._buffers[key] = value


def go_on(trainer: Trainer, state: State, data: TrainingData) -> None:
    """Restores loops, data and random generators to the end of the last batch.

    Called after all ``on_train_start`` hooks, when Lightning has restored the loops' progress.
    Without this, Lightning would skip a validation that was due, and begin the epoch's data again;
    see [Note: Data].
    """
    loop, random = trainer.fit_loop, state["random"]
    progress, most = loop.epoch_loop.batch_progress, math.inf
    if len(random) != trainer.world_size:
        most = trainer.num_training_batches  # of more ranks each has fewer
    data.go_on(state["data"], progress.current.ready, most)
    if progress.current.ready > most:  # the epoch is over: what is due at its end follows
        progress.current = type(progress.current)(*[int(most)] * len(fields(progress.current)))
        progress.is_last_batch = True
    if state["validation"]:
        restore_validation(trainer, state["validation"])
    _begin_averaging(trainer)
    end_batch(trainer)
    # Lightning does not know that the data is at the right place.
    warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")
    set_random_state(random.get(str(trainer.global_rank)) or next(iter(random.values())))
    if str(trainer.global_rank) not in random:  # there were fewer ranks: this one goes on from another one's, apart from it
        begin_apart(trainer.global_rank)


def _begin_averaging(trainer: Trainer) -> None:
    """Lets callbacks that average weights make their scheduler, as they do when an epoch begins."""
    averaging = lightning_of(trainer).module("callbacks").StochasticWeightAveraging
    if trainer.fit_loop.restarted_mid_epoch:
        for callback in trainer.callbacks:
            if isinstance(callback, averaging):
                callback.on_train_epoch_start(trainer, trainer.lightning_module)


def end_batch(trainer: Trainer) -> None:
    """Makes Lightning's loops continue with what was due after the batch."""
    loop = trainer.fit_loop
    epoch_loop = loop.epoch_loop
    loops = lightning_of(trainer).module("loops.evaluation_loop")
    if epoch_loop._should_check_val_fx(loop._data_fetcher):
        epoch_loop.val_loop._restart_stage = loops.RestartStage.RESTARTED_MID_EVALUATION
        epoch_loop.val_loop.batch_progress.reset_on_run()  # it begins with its first batch
    else:
        epoch_loop._batches_that_stepped += 1
        if epoch_loop._num_ready_batches_reached():
            # A restarting loop fetches a batch before it checks whether the epoch is over, but none
            # is left.
            loop._data_fetcher.reset()
            loop._data_fetcher.done = True
    loop._restarting = False  # a restarting loop skips schedulers that monitor a metric
