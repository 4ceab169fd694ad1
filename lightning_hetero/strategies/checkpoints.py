"""Checkpoints of a model beyond memory: written tensor by tensor, or linked to the store."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from lightning_hetero.checkpoint import release_pages
from lightning_hetero.checkpoint.landing import Landing
from lightning_hetero.convert import adapter_settings, merges
from lightning_hetero.errors import ConfigError
from lightning_hetero.planners import BUILTIN_PLANS
from lightning_hetero.runtime.construction import Construction
from lightning_hetero.runtime.options import SessionOptions
from lightning_hetero.runtime.session import Session
from lightning_hetero.store.format.earlier_runs import bring, comes_from, make_way
from lightning_hetero.store.format.pins import roll_back
from lightning_hetero.store.format.sets import has_ranks
from lightning_hetero.store.live.spread_step import SpreadStep
from lightning_hetero.strategies import checkpoint_io, frozen_base, rank_stores, resume
from lightning_hetero.strategies.namespaces import lightning_of
from lightning_hetero.strategies.option_checks import Choices
from lightning_hetero.strategies.resume import State
from lightning_hetero.strategies.training import Training

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.strategies import Strategy

log = logging.getLogger(__name__)

PathLike = str | Path


class _Run(Protocol):
    """What saving and loading needs of a strategy's run (``strategies.offload``)."""

    strategy: Strategy
    choices: Choices
    options: SessionOptions
    session: Session | None
    training: Training | None
    built: Construction | None

    @property
    def module(self) -> pl.LightningModule: ...

    @property
    def trainer(self) -> pl.Trainer | None: ...

    def drop_session(self) -> None: ...

    def change(self, options: SessionOptions) -> None: ...

    def measure_disks(self) -> None: ...

    def reading(self) -> AbstractContextManager[None]: ...


class Checkpoints:
    """Saves and loads for a strategy that offloads, around Lightning's own methods.

    A method's argument ``plain`` is the method of Lightning's strategy that it wraps.
    """

    def __init__(self, run: _Run) -> None:
        self._run = run
        # The training state of the store at ``ckpt_path``, from its loading until training starts.
        self.resumed: State | None = None
        self.source: SpreadStep | None = None  # it is of another number of ranks, and this run has a new store
        self.opened = ExitStack()  # the files of a store that is evaluated, until its weights are loaded
        self.tunes = False  # one of Lightning's tuners tries steps, and undoes them
        self._base: frozen_base.FrozenBase | None = None  # of the current model
        self._excluded: dict[str, frozen_base.Excluded] = {}  # what the latest state lacks
        self._waiting: tuple[Mapping[str, Mapping[str, object]], bool] | None = None  # weights to load once there is a session
        # Linked checkpoints to make or remove when the batch has ended: path, action, whether it
        # saves.
        self._links: list[tuple[Path, Callable[[], object], bool]] = []

    # ---- files -------------------------------------------------------------------------------

    def io(self, given: CheckpointIO) -> CheckpointIO:
        """The checkpoint IO: a streaming one instead of Lightning's default, or the user's."""
        lightning = lightning_of(self._run.strategy)
        used = checkpoint_io.instead(given, lightning)
        ours = getattr(used, "checkpoint_io", used)
        if hasattr(ours, "streams"):
            session = self._run.session  # ckpt_path is loaded before setup
            in_memory = (BUILTIN_PLANS["resident"], BUILTIN_PLANS["host"])
            away = self._run.options.plans[-1] not in in_memory if session is None else session.on_disk
            ours.streams = away or self._run.options.collectives is not None  # no rank has room for all of it
        return used

    def attach(self, io: CheckpointIO) -> None:
        """The user has given the strategy a checkpoint IO.

        Raises:
            ConfigError: It saves on all ranks, but checkpoints are links.
        """
        if (attach := getattr(io, "attach", None)) is not None:
            if self._run.choices.link_checkpoints:
                raise ConfigError(
                    "link_checkpoints=True with LocalFirst: a checkpoint's path would have to be a directory of links and a remote "
                    "copy at once. Leave one of them out; the store is kept in either case."
                )
            attach(self._run.strategy)

    def landing(self) -> Landing:
        """Where a checkpoint is loaded, or a model built, that may not fit memory."""
        run = self._run
        if run.session is not None:
            return Landing(run.session.disk_root())
        trainer = run.trainer
        wanted = (run.options.disk_path or (Path.cwd() if trainer is None else local_root(trainer))).expanduser().absolute()
        return Landing(next(path for path in (wanted, *wanted.parents) if path.is_dir()))

    @property
    def base(self) -> frozen_base.FrozenBase:
        """The frozen weights that the model had before a checkpoint was loaded."""
        if self._base is None or not self._base.is_of(self._run.module):
            self._base = frozen_base.FrozenBase(self._run.module)
        return self._base

    def placed(self, session: Session) -> None:
        """The session has placed the model: loads weights that have waited for that."""
        if self._run.choices.exclude_frozen:
            with self._run.reading():
                self.base.remember()
        self._load_waiting()
        self.base.begins(session, resumed=self.resumed is not None)

    # ---- saving ------------------------------------------------------------------------------

    def of_model(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A model's state as checkpoints have it."""
        if not self._run.choices.exclude_frozen:
            return state
        with self._run.reading():
            self._excluded = self.base.excluded(self._run.session)
        return frozen_base.without(state, self._excluded)

    def labelled(self, checkpoint: State) -> State:
        """A checkpoint that also says what its weights do not.

        Which adapters are merged into them, the settings of adapters, and what :meth:`of_model` has
        left out.
        """
        said: State = {frozen_base.KEY: self._excluded} if self._run.choices.exclude_frozen else {}
        if layers := merges.layers_of(self._run.module):
            said[merges.KEY] = merges.merges_of(layers)
        if settings := adapter_settings.settings_of(self._run.module):
            said[adapter_settings.KEY] = settings
        return {**checkpoint, **said}

    def save(self, plain: Callable[[], None], path: PathLike) -> None:
        """Writes a checkpoint file, or with ``link_checkpoints`` links to the store's last step.

        In a batch that ends in a step, the links are made after its last hook.
        """
        self.tunes = _is_of_tuner(path)
        if not self.links(path):
            plain()
            return
        target = Path(self._run.strategy.broadcast(path))
        target.parent.mkdir(parents=True, exist_ok=True)  # a symbolic link may be put beside it before it is made
        self._link_later(partial(self._link, target), target)

    def links(self, path: PathLike) -> bool:
        """Whether the checkpoint that is to be saved at a path is links."""
        session = self._run.session
        keeps = session is not None and session.keeps_steps
        return keeps and self._run.choices.link_checkpoints and not _is_of_tuner(path)

    def _link(self, path: Path) -> None:
        if self._run.session is not None:
            self._run.session.snapshot(path, [gone for gone, _, saves in self._links if not saves])

    def remove(self, plain: Callable[[PathLike], None], path: PathLike) -> None:
        """Removes a checkpoint, after those of the same batch are saved: one exists at any time."""
        if self._run.choices.link_checkpoints:
            self._link_later(partial(self._remove, plain, path), Path(path), saves=False)
        else:
            self._remove(plain, path)

    def _remove(self, plain: Callable[[PathLike], None], path: PathLike) -> None:
        collectives = self._run.options.collectives
        is_first = collectives is None or collectives.shard == 0  # of the ranks of a node, which may have a disk of its own
        if os.path.islink(path):  # of save_last="link": its target is removed by its own name
            if is_first:
                Path(path).unlink(missing_ok=True)
            return
        plain(path)
        if is_first and self._run.choices.link_checkpoints and os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)

    def _link_later(self, action: Callable[[], object], path: Path, *, saves: bool = True) -> None:
        training = self._run.training
        if training is not None and training.step_ended and training.state is not None:
            self._links.append((path, action, saves))
        else:
            action()

    def make_links(self) -> None:
        """The batch's step is kept: makes and removes the checkpoints of this batch."""
        while self._links:
            self._links[0][1]()
            del self._links[0]

    # ---- loading -----------------------------------------------------------------------------

    def load(self, plain: Callable[[], State], path: PathLike) -> State:
        """Loads a checkpoint file, or a store that a fit continues or an evaluation reads."""
        self._forget_resumed()
        self.opened.close()
        self.tunes &= not _is_of_tuner(path)
        if not resume.is_store(path):
            return plain()
        run = self._run
        store, own, module, precision = Path(path).resolve(), run.options.disk_path, run.module, run.strategy.precision_plugin
        if not lightning_of(module.trainer).is_fit(module.trainer):
            rank_stores.find_disks(store, run.options.collectives, run.options.further_disks)
            stores = rank_stores.last_step(store, run.options.collectives, self.opened)
            return resume.for_evaluation(store, stores, module, precision, self.opened)
        if own is None:
            raise ConfigError(
                f"ckpt_path {str(store)!r} is a store, and this run has none of its own to go on in. Pass the same path as "
                f"disk_path, or an empty directory."
            )
        own = own.absolute()
        run.drop_session()  # that of a model left on disk: the store must not be open twice
        resume.refuse_slice(store)
        rank_stores.find_disks(store, run.options.collectives, run.options.further_disks)
        if run.options.own.ranks > 1 or has_ranks(store):
            return resume.as_checkpoint(self._of_ranks(store, own), precision)
        if not own.exists() or not store.samefile(own):
            store = self._brought(store, own)
        elif run.options.new_run:
            log.warning(
                "new_run=True has no effect: ckpt_path is the store at disk_path, %r, and training resumes from its last kept "
                "step. To start a new run, leave ckpt_path out.", str(own),
            )  # fmt: skip
        kept = resume.last_kept(store)
        self.resumed = self._state_of(kept)
        if kept != store:
            roll_back(store, kept)
        return resume.as_checkpoint(self.resumed, precision)

    def _of_ranks(self, store: Path, own: Path) -> State:
        """The training state of what ranks have kept below one directory."""
        run = self._run
        found = rank_stores.go_on(own, run.options.own, run.options.collectives, store, new_run=run.options.new_run)
        if found is None:
            kept = resume.last_kept(own)
            self.resumed = self._state_of(kept)
            if kept != own:
                roll_back(own, kept)
            return self.resumed
        self.source, member = found
        run.change(replace(run.options, member=member))
        self.resumed = resume.checked_state(self.source.record, self.source.path)
        resume.check_loops(self.resumed, self.source.path, run.module.trainer)
        return self.resumed

    def _forget_resumed(self) -> None:
        self.resumed = None
        if self.source is not None:
            self.source.close(removes=False)
            self.source = None

    def _state_of(self, kept: Path) -> State:
        state = resume.read_state(kept)
        resume.check_loops(state, kept, self._run.module.trainer)
        return state

    def _brought(self, path: Path, own: Path) -> Path:
        """Copies another store's last step to the run's own, unless an earlier run has done so."""
        kept = resume.last_kept(path)
        self._state_of(kept)  # refuses an unusable store before anything changes
        new_run = self._run.options.new_run
        if not new_run and comes_from(own, kept):
            log.warning(
                "disk_path %r holds what an earlier run with this ckpt_path has kept: training goes on from there. To begin again "
                "at ckpt_path, pass new_run=True to the strategy.", str(own),
            )  # fmt: skip
        else:
            make_way(own, new_run=new_run, source=path)
            self._run.measure_disks()
            bring(kept, own, self._run.options.further_disks, self._run.options.balance)
        return own

    def load_weights(
        self,
        load: Callable[[bool], tuple[list[str], list[str]]],
        checkpoint: Mapping[str, Mapping[str, object]],
        *,
        strict: bool,
    ) -> None:
        """Writes weights to their tiers, or keeps them until the model has been :meth:`placed`.

        Args:
            load: Loads the state, strictly or not; returns keys that it lacks and that do not fit.
            checkpoint: Lightning's checkpoint.
            strict: Whether to refuse keys that do not fit.
        """
        if self.resumed is not None:
            return
        session, built = self._run.session, self._run.built
        away = (p.is_meta or (built is not None and p in built) for p in self._run.module.parameters())
        if session is None and any(away):
            self._waiting = (checkpoint, strict)
            return
        adapter_settings.check(self._run.module, checkpoint.get(adapter_settings.KEY, {}), strict=strict)
        excluded = frozen_base.excluded_of(checkpoint)
        with self._run.reading():
            if self._run.choices.exclude_frozen:
                self.base.remember()
            if excluded is not None:
                self.base.check(excluded)
        with self._run.reading(), self.base.loading(checkpoint["state_dict"], session):
            keys = load(strict and not excluded)
        if strict and excluded and keys is not None:
            frozen_base.check_keys(*keys, excluded)
        if merges.KEY in checkpoint:
            merges.tell(self._run.module, checkpoint[merges.KEY], self._run.strategy.root_device)
        if session is not None:
            session.commit()
        for value in checkpoint["state_dict"].values():
            if isinstance(value, torch.Tensor):
                release_pages(value)
        self.opened.close()

    def _load_waiting(self) -> None:
        if self._waiting is not None:
            (checkpoint, strict), self._waiting = self._waiting, None
            self._run.strategy.load_model_state_dict(checkpoint, strict)

    def load_optimizers(self, states: list[State]) -> None:
        """Writes optimizer state to the tiers that the plan chose, not to a device."""
        run = self._run
        kept = None if run.training is None else run.training.state
        if self.resumed is not None and run.session is not None and kept is not None:
            kept.changes.restore()
            for binding, one in zip(run.session.bindings, states, strict=True):
                binding.take_over(one)
            return
        for optimizer, state in zip(run.strategy.optimizers, states, strict=False):
            optimizer.load_state_dict(state)

    def end(self, session: Session | None) -> None:
        """The fit, or the evaluation, is over: an unfinished batch's links are not made."""
        for missing in [str(path) for path, _, saves in self._links if saves]:
            log.warning(
                "The checkpoint %r was not made: links are made when a batch has ended, and this one has not. Go on from the "
                "store, which has the last step that was kept.", missing,
            )  # fmt: skip
        self._links = []
        self.base.ends(session)
        self._forget_resumed()
        self.opened.close()

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "opened": ExitStack(), "_base": None}


def _is_of_tuner(path: PathLike) -> bool:
    """Whether Lightning's tuners write the path, to undo the steps that they try."""
    return os.path.basename(str(path)).startswith((".lr_find_", ".scale_batch_size_"))


def local_root(trainer: pl.Trainer) -> Path:
    """Where a Trainer's local files go. A remote root holds checkpoints, but not scratch files."""
    return Path.cwd() if "://" in str(trainer.default_root_dir) else Path(trainer.default_root_dir)
