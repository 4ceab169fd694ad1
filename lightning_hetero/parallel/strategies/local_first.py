"""``Trainer(plugins=[LocalFirst(...)])``: checkpoints in memory, on disk and at their path.

[Note: Every rank]
Lightning calls the checkpoint IO on rank 0 alone, and with sharded weights not at all. Here every
rank writes the state that it holds. So a strategy that gets this checkpoint IO changes its class to
a subclass (:class:`_EveryRank`) that saves and loads on all ranks. A checkpoint IO is not told that
a strategy gets it. So the first ``LocalFirst`` extends the setter of Lightning's
``Strategy.checkpoint_io``. A strategy that otherwise gathers its state reads ``saves_own`` and
returns each rank's part. Its method ``places()`` says where a rank reads its tensors to.

[Note: Names]
As in ``torch.distributed.checkpoint.state_dict``, optimizer state is saved by the names of
parameters, not by their numbers. So strategies that shard and strategies that do not shard read
each other's checkpoints.
"""

from __future__ import annotations

import functools
import io
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_hetero import checkpoint as streaming
from lightning_hetero.checkpoint.files import Place
from lightning_hetero.checkpoint.landing import Landing
from lightning_hetero.errors import CheckpointMissingError, ConfigError, UnsupportedError
from lightning_hetero.parallel.recovery import TieredCheckpoints
from lightning_hetero.parallel.recovery.tiered_checkpoints import Target
from lightning_hetero.store.format import encoding
from lightning_hetero.strategies.data import random_state, set_random_state
from lightning_hetero.strategies.namespaces import Lightning, lightning_of, module_of
from lightning_hetero.strategies.offload import OffloadRun
from lightning_hetero.strategies.resume import is_store
from lightning_hetero.units import MIB, format_bytes

if TYPE_CHECKING:
    from lightning.pytorch.plugins.io import TorchCheckpointIO as _IoBase
    from lightning.pytorch.strategies import Strategy as _StrategyBase
else:
    _IoBase = _StrategyBase = object  # classes of the namespace become bases later

log = logging.getLogger(__name__)

NEWEST = "newest"
_XLA = ("tensors are XLA's, which the background thread cannot read", "Lightning's own checkpoints")
_OWN_FORMATS = {  # strategies that are refused, by name: the reason, and another strategy
    "FSDPStrategy": (
        "FSDP1 cuts a layer's parameters anywhere as one flat tensor, and torch runs it on accelerators only: it was never tried",
        "ModelParallelStrategy with fully_shard (FSDP2)",
    ),
    "DeepSpeedStrategy": ("DeepSpeed's engine saves itself, in files by rank", "ModelParallelStrategy (FSDP2) or hetero_offload"),
    "XLAStrategy": _XLA,
    "XLAFSDPStrategy": _XLA,
    "SingleDeviceXLAStrategy": _XLA,
}


class _LocalFirst(_IoBase):
    """Saves checkpoints on several tiers in the background, and loads each layer from the nearest.

    A checkpoint's own path, such as ``ModelCheckpoint`` gives it, is the remote tier: a path or an
    fsspec URL that all ranks reach. The copy there is an ordinary distributed checkpoint. Each node
    keeps the state of its ranks in ``memory`` and on ``disk``. A save copies the state and returns.
    An error of the background is raised at the next save, or at the end. ``ckpt_path="newest"``
    loads the newest complete save. If there is none yet, training starts afresh.

    Args:
        memory: A folder in memory, such as one in ``/dev/shm``, for this run alone. ``None``: no
            such tier.
        disk: A folder on the local disk, likewise.
        keep: Number of saves that the local tiers keep.
        piece_bytes: Bytes under one checksum, and so the least that is read of a file.
    """

    streams = False  # whether ordinary checkpoints are mapped; a strategy with tiers sets it

    def __init__(self, memory: Any = None, disk: Any = None, *, keep: int = 2, piece_bytes: int = MIB) -> None:
        super().__init__()
        self.checkpoints = TieredCheckpoints(memory=memory, disk=disk, keep=keep, piece_bytes=piece_bytes)
        _tell_checkpoint_ios(lightning_of(self))

    @property
    def bytes_read(self) -> dict[str, int]:
        """Bytes that the latest load read on this rank, by source.

        Sources are ``memory``, ``disk``, ``peer`` and ``remote``.
        """
        return self.checkpoints.bytes_read

    def attach(self, strategy: Any) -> None:
        """Lets a strategy that got this checkpoint IO save and load on all ranks.

        Raises:
            UnsupportedError: The strategy has a checkpoint format of its own.
        """
        if hasattr(strategy, "plain"):
            return
        for name in (c.__name__ for c in type(strategy).__mro__):
            if name in _OWN_FORMATS:
                why, instead = _OWN_FORMATS[name]
                raise UnsupportedError(f"LocalFirst with {name}: {why}. Use {instead}, or leave LocalFirst out.")
        strategy.__class__ = _every_rank_class(strategy.__class__)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Loads an ordinary checkpoint."""
        if self.streams and Place.of(path).is_file():
            return streaming.load(path, map_location, weights_only=weights_only)
        options = {} if map_location is None else {"map_location": map_location}
        return super().load_checkpoint(path, weights_only=weights_only, **options)

    def wait(self) -> None:
        """Waits until everything is written, on this rank.

        Raises:
            CheckpointWriteError: A save failed on some rank.
        """
        self.checkpoints.wait()

    def teardown(self) -> None:
        """Waits, and ends the background thread.

        Raises:
            CheckpointWriteError: A save failed on some rank.
        """
        self.checkpoints.close()
        super().teardown()


def class_for(lightning: Lightning) -> type[_LocalFirst]:
    """The class for Trainers of a namespace."""
    return lightning.subclass(_LocalFirst, "plugins.io.TorchCheckpointIO", name="LocalFirst")


class _NoCheckpoint(dict[str, Any]):
    """A checkpoint that Lightning ignores, because it is false."""

    def __bool__(self) -> bool:
        return False


class _EveryRank(_StrategyBase):
    """A strategy that saves and loads on all ranks ([Note: Every rank]).

    Its methods are copied into a subclass of ``plain`` that has no other base. So an instance of
    ``plain`` can become an instance of that subclass.
    """

    plain: type[_StrategyBase]
    saves_own = True  # read by strategies that otherwise gather

    _random: Any = None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Saves this rank's part of the checkpoint."""
        if storage_options is not None:
            raise UnsupportedError("LocalFirst got storage_options; configure the file system of the URL for fsspec instead.")
        run = _run_of(self)
        rest = dict(checkpoint if run is None else run.checkpoints.labelled(checkpoint))
        state: dict[str, Any] = {"state_dict": dict(rest.pop("state_dict"))}
        for number, optimizer_state in enumerate(rest.pop("optimizer_states", [])):
            names = _names(self, number)
            state[f"optimizer_{number}"] = _by_name(optimizer_state, names)
        arguments: dict[str, Any] = {
            "step": checkpoint["global_step"],
            "rest": _dump(rest),
            "own": encoding.dumps(random_state(), "random numbers").encode(),
        }
        path = self.broadcast(filepath)
        self._io.wait()
        snapshot = None if run is None else run.snapshot_state()
        if snapshot is None:
            self._io.checkpoints.save(state, path, **arguments)
            return
        try:
            state = snapshot.captured(state)
        except BaseException:
            snapshot.close()
            raise
        self._io.checkpoints.save(state, path, **arguments, done=snapshot.close)
        linked, copied = (format_bytes(n) for n in (snapshot.linked_bytes, snapshot.copied_bytes))
        log.info("Step %d is being saved to %s: %s linked, %s copied.", checkpoint["global_step"], path, linked, copied)
        if not snapshot.overlaps:
            log.warning("Training waits until %s is written: the disk has no room for another copy of what lives there.", path)
            self._io.wait()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads this rank's part. If Lightning restores from the result, that is everything."""
        path = self.broadcast(checkpoint_path)
        newest = path == NEWEST
        run = _run_of(self)
        if run is not None:
            run.checkpoints.resumed = None
            if is_store(path):
                return self.plain.load_checkpoint(self, path, weights_only)
        sharded = not self.lightning_restore_optimizer
        state = _own_state(self) if sharded else None
        landing = None if run is None else run.checkpoints.landing()
        try:
            loaded = self._io.checkpoints.load(
                None if newest else path,
                state,
                place=_target(landing, getattr(self, "places", lambda: None)()),
                filled=None if landing is None else landing.filled,
                strict=module_of(self).strict_loading,
                folders=_folders(self) if newest else (),
                required=not newest,
            )
        except CheckpointMissingError:
            if newest or not _is_plain(self, path):
                raise
            return self.plain.load_checkpoint(self, path, weights_only)
        if loaded is None:
            if self.is_global_zero:
                log.info('ckpt_path="newest": there is no checkpoint yet; training starts afresh.')
            return _NoCheckpoint({"pytorch-lightning_version": lightning_of(self).version})
        checkpoint: dict[str, Any] = torch.load(io.BytesIO(loaded.rest), map_location="cpu", weights_only=bool(weights_only))
        if loaded.own is not None and loaded.layer_map.ranks == getattr(self, "world_size", 1):
            self._random = encoding.loads(loaded.own)
        if sharded:
            _restore(self, loaded.state)
            self._restore_random()
            return checkpoint
        state = loaded.state if landing is None else landing.with_private_copies(loaded.state)
        checkpoint["state_dict"] = state["state_dict"]
        optimizers = [key for key in state if key.startswith("optimizer_")]
        if optimizers:
            checkpoint["optimizer_states"] = [state[f"optimizer_{number}"] for number in range(len(optimizers))]
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Names parameters by their numbers again, and restores the random numbers of the save."""
        run = _run_of(self)
        if run is not None and run.checkpoints.resumed is not None:  # a store has the state already, by numbers
            self.plain.load_optimizer_state_dict(self, checkpoint)
            return
        states = [_by_number(state, _names(self, number)) for number, state in enumerate(checkpoint["optimizer_states"])]
        self.plain.load_optimizer_state_dict(self, {**checkpoint, "optimizer_states": states})
        self._restore_random()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a save from all tiers."""
        self._io.checkpoints.remove(self.broadcast(filepath))

    def teardown(self) -> None:
        """Waits for the writer, which may read memory of the strategy, and ends it."""
        try:
            self._io.wait()
        finally:
            self.plain.teardown(self)
            self._io.teardown()

    @property
    def _io(self) -> Any:
        return self._checkpoint_io

    def _restore_random(self) -> None:
        state, self._random = self._random, None
        if state is not None and module_of(self).trainer.training:
            set_random_state(state)

    def __reduce__(self) -> Any:
        return _rebuild, (self.plain, self.__getstate__())


@functools.cache
def _every_rank_class(strategy: Any) -> Any:
    methods = {name: value for name, value in vars(_EveryRank).items() if name not in ("__dict__", "__weakref__")}
    names = {"__module__": strategy.__module__, "__qualname__": strategy.__qualname__, "__doc__": strategy.__doc__}
    return type(strategy.__name__, (strategy,), {**methods, **names, "plain": strategy})


def _rebuild(strategy: Any, fields: dict[str, Any]) -> Any:
    cls = _every_rank_class(strategy)
    rebuilt = cls.__new__(cls)
    rebuilt.__dict__.update(fields)
    return rebuilt


def _run_of(strategy: Any) -> OffloadRun | None:
    """The run of a strategy that offloads; ``None`` for other strategies."""
    run = getattr(strategy, "run", None)
    return run if isinstance(run, OffloadRun) else None


def _tell_checkpoint_ios(lightning: Lightning) -> None:
    base: Any = lightning.module("strategies").Strategy
    plain = base.checkpoint_io
    if getattr(plain.fset, "tells", False):
        return

    @functools.wraps(plain.fset)
    def set_and_tell(strategy: Any, checkpoint_io: Any) -> None:
        plain.fset(strategy, checkpoint_io)
        if isinstance(checkpoint_io, _LocalFirst):
            checkpoint_io.attach(strategy)

    vars(set_and_tell)["tells"] = True
    base.checkpoint_io = plain.setter(set_and_tell)


# ---- states --------------------------------------------------------------------------------------


def _names(strategy: Any, number: int) -> list[list[str]]:
    """The names of an optimizer's parameters by group; numbers for parameters of no module."""
    of = {id(p): name for name, p in strategy.lightning_module.named_parameters()}
    groups = strategy.optimizers[number].param_groups
    return [[of.get(id(p), f"{g}.{i}") for i, p in enumerate(group["params"])] for g, group in enumerate(groups)]


def _by_name(state: dict[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """An optimizer's state by the names of parameters. State that has names already stays."""
    groups = state.get("param_groups", [])  # none on ranks that leave it to rank 0
    if not groups or not all(isinstance(p, int) for group in groups for p in group["params"]):
        return state
    of = {p: name for group, known in zip(groups, names, strict=True) for p, name in zip(group["params"], known, strict=True)}
    named = [{**group, "params": known} for group, known in zip(groups, names, strict=True)]
    return {"state": {of[p]: s for p, s in state["state"].items()}, "param_groups": named}


def _by_number(state: dict[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """An optimizer's state by the numbers of parameters, for an optimizer with these names."""
    groups = state["param_groups"]
    if all(isinstance(p, int) for group in groups for p in group["params"]) and any(group["params"] for group in groups):
        return state
    if len(groups) != len(names):
        raise ConfigError(f"the checkpoint has {len(groups)} parameter groups, the optimizer {len(names)}; allowed: as many.")
    numbers: dict[str, int] = {}
    for group in names:
        for name in group:
            numbers[name] = len(numbers)
    saved = state.get("state", {})
    numbered = [{**group, "params": [numbers[n] for n in known]} for group, known in zip(groups, names, strict=True)]
    return {"state": {number: saved[name] for name, number in numbers.items() if name in saved}, "param_groups": numbered}


def _target(landing: Landing | None, places: Callable[[str, torch.Tensor], torch.Tensor | None] | None) -> Target | None:
    """Where saved tensors are read to; ``places`` is of a rank that holds some of them."""
    if landing is not None:
        return lambda path, saved: landing.place(saved)
    if places is None:
        return None

    def place(path: tuple[Any, ...], saved: torch.Tensor) -> torch.Tensor | None:
        if path[0] == "state_dict":
            return places(path[1], saved)
        return places(path[2], saved) if path[1] == "state" else torch.empty_like(saved, device="cpu")

    return place


def _own_state(strategy: Any) -> dict[str, Any]:
    """The tensors to load into, of a strategy that restores by itself."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    state: dict[str, Any] = {"state_dict": get_model_state_dict(strategy.model)}
    for number, optimizer in enumerate(strategy.optimizers):
        state[f"optimizer_{number}"] = get_optimizer_state_dict(strategy.model, optimizer)
    return state


def _restore(strategy: Any, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    strategy.model.load_state_dict(state["state_dict"], strict=strategy.lightning_module.strict_loading)
    for number, optimizer in enumerate(strategy.optimizers):
        options = StateDictOptions(cpu_offload=True)
        set_optimizer_state_dict(strategy.model, optimizer, optim_state_dict=state[f"optimizer_{number}"], options=options)


def _dump(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _folders(strategy: Any) -> list[Any]:
    """The folders that Lightning's callbacks save checkpoints to."""
    callbacks = strategy.lightning_module.trainer.checkpoint_callbacks
    return [folder for callback in callbacks if (folder := getattr(callback, "dirpath", None))]


def _is_plain(strategy: Any, path: Any) -> bool:
    """Whether another checkpoint IO wrote the checkpoint at a path."""
    from fsspec.core import url_to_fs

    fs, root = url_to_fs(str(path))
    return bool(fs.isfile(root) or fs.isfile(f"{root.rstrip('/')}/.metadata"))
