"""``Trainer(strategy="hetero_offload", devices=N)``: ranks that share one model on each machine.

[Note: A strategy joins ranks]
Lightning makes a strategy, or gets it from the user, before it says on how many devices it runs. So
``HeteroOffload`` begins as a strategy of one device. If the Trainer gives it several, it becomes
one of this class, whose base is Lightning's for several processes: launcher, samplers, reductions
of metrics and ``rank_zero`` are Lightning's own, without its wrapper of the model. The run inside
stays the same object.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store, default_pg_timeout
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from lightning_hetero.errors import ConfigError, HeteroError, UnsupportedError
from lightning_hetero.lanes import EmulatedDevice
from lightning_hetero.lanes.collectives import Collectives
from lightning_hetero.lanes.decisions import Decisions
from lightning_hetero.lanes.mesh import mesh_of
from lightning_hetero.lanes.network import network_of_environment
from lightning_hetero.lanes.notes import GroupNotes
from lightning_hetero.runtime.method_patches import Patches
from lightning_hetero.runtime.options import StepRules
from lightning_hetero.runtime.quantized import is_to_quantize
from lightning_hetero.runtime.slice_reads import SliceReads
from lightning_hetero.store.format.sets import place_of
from lightning_hetero.store.numa import cpus_of_rank, node_cpus
from lightning_hetero.strategies.averaging import give_weights
from lightning_hetero.strategies.checkpoints import PathLike
from lightning_hetero.strategies.console import speak
from lightning_hetero.strategies.devices import check_kind, peers_of, process_group_of
from lightning_hetero.strategies.namespaces import Lightning, lightning_of
from lightning_hetero.strategies.offload import OffloadRun
from lightning_hetero.strategies.offloading import Offloading
from lightning_hetero.strategies.precision import compute_on
from lightning_hetero.strategies.rank_batches import RankBatches, seconds_between_validations
from lightning_hetero.strategies.resume import State
from lightning_hetero.untyped import Function, Value

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    class _Base(Offloading, DDPStrategy): ...
else:
    _Base = Offloading

log = logging.getLogger(__name__)

_PRECISIONS = ("64-true", "32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class _Ranks:
    """The ranks of a run, as its steps see them."""

    def __init__(self, run: OffloadRun, batches: RankBatches) -> None:
        self._run, self._batches = run, batches
        self._has_trained = False  # in the batch before this one

    def rules(self, rules: StepRules) -> StepRules:
        """Updates that wait for the verdict do not begin before it: they could not be undone."""
        return replace(rules, speculates=False)

    def batch_begins(self, *, training: bool) -> None:
        """All ranks have the first one's buffers in a training batch and after it, as in DDP."""
        if not training:
            self._batches.evaluates(self._run.module.trainer)
        if training or self._has_trained:
            share_buffers(self._run)
        self._has_trained = training

    def gradients_computed(self) -> None:
        """Nothing: REDUCEs are ops of the step."""


class HeteroOffloadRanks(_Base):
    """One of several processes that hold a model, its gradients and its state once.

    Each owns a slice of every block. Whole weights come before a block is used, and gradients are
    summed to slices when its backward has ended. ``HeteroOffloadStrategy`` becomes this if the
    Trainer has several devices, and has the options.
    """

    strategy_name = "hetero_offload"
    _averaging: Patches | None = None  # hooks of callbacks that average weights, during a fit
    _decisions: Decisions | None = None  # once the ranks are connected
    _batches: RankBatches | None = None

    def _configure_launcher(self) -> None:
        """Makes the launcher, unless something is asked for that several ranks do not have.

        It runs the script again for each rank. In a notebook there is none, and it forks.
        """
        self._check_options()
        if lightning_of(self).fabric("utilities.imports")._IS_INTERACTIVE:
            self._start_method = "fork"
        super(Offloading, self)._configure_launcher()

    def setup_environment(self) -> None:
        """Connects the ranks."""
        super(Offloading, self).setup_environment()
        self._check_places()
        if self.is_global_zero:
            speak(lightning_of(self))
        device = self.run.choices.options.device
        network = device.network if isinstance(device, EmulatedDevice) else network_of_environment()
        devices, backend = list(self.parallel_devices or ()), self._get_process_group_backend()
        devices[self.local_rank] = self.run.use_device(self.root_device)
        self.parallel_devices = devices
        compute_on(self.precision_plugin, self.root_device, self.run.module.trainer)
        options, group = self.run.options, dist.new_group(timeout=self._timeout, backend="gloo")
        engine = options.engine
        if not engine.update_threads:
            engine = replace(engine, update_threads=max(1, engine.threads() // self.num_processes))
        own_cpus = cpus_of_rank(node_cpus(), frozenset(os.sched_getaffinity(0)), self.local_rank, self.num_processes)
        engine = replace(engine, cpus=own_cpus)
        peers = peers_of(options.device, backend, self.num_nodes, self._timeout)
        collectives = Collectives(group, network, mesh_of(self.num_nodes, self._timeout), peers)
        talk, plans = dist.new_group(timeout=self._timeout, backend="gloo"), self.run.autoplan is not None
        mesh = mesh_of(self.num_nodes, self._timeout) if plans else None  # which planning measures, and the links of devices
        measured = peers_of(options.device, backend, self.num_nodes, self._timeout) if plans else None
        if self.num_nodes > 1:
            collectives.notes.add(GroupNotes(_own_store()))
        self._decisions = Decisions(talk, network, mesh, collectives.notes, measured)
        self._batches = RankBatches(self._decisions)
        self.run.join(_Ranks(self.run, self._batches))
        if self.run.autoplan is not None:
            self.run.autoplan.join(self._decisions)
        disks = self.run.choices.options.disk_paths
        own = tuple(place_of(root.absolute(), collectives.rank, collectives.ranks, collectives.nodes) for root in disks[:1])
        self.run.change(replace(options, engine=engine, collectives=collectives, disk_paths=own + disks[1:]))

    def setup_distributed(self) -> None:
        """Connects the ranks. Those that torchrun starts again do not look for the dead ones."""
        if _finds_dead_ranks() and self.num_nodes == 1 and not dist.is_initialized():
            store, rank, number = next(rendezvous("env://", timeout=self._timeout or default_pg_timeout))
            dist.init_process_group(
                self._get_process_group_backend(),
                store=PrefixStore(f"start-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store),
                rank=rank,
                world_size=number,
                timeout=self._timeout,
                device_id=None if self.root_device.type == "cpu" else self.root_device,
            )
        super(Offloading, self).setup_distributed()

    def _check_places(self) -> None:
        """Refuses nodes that do not have equally many ranks, in their order.

        Raises:
            ConfigError: Says which place on which node each rank has.
        """
        places: list[tuple[int, int]] = [(0, 0)] * self.world_size
        dist.all_gather_object(places, (self.node_rank, self.local_rank))
        if places != [divmod(rank, self.num_processes) for rank in range(self.world_size)]:
            where = ", ".join(f"rank {rank}: node {node}, place {place}" for rank, (node, place) in enumerate(places))
            raise ConfigError(
                f"nodes have other places for ranks than num_nodes={self.num_nodes}, devices={self.num_processes} ({where}). Start "
                f"equally many ranks on each node, node by node: torchrun --nnodes={self.num_nodes} --nproc-per-node="
                f"{self.num_processes}."
            )

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or process_group_of(self.parallel_devices or [])

    def _check_options(self) -> None:
        """Refuses what several ranks do not have yet.

        Raises:
            ConfigError: Ranks have no device each, or torchrun has started other ones here than
                ``devices``. Without this each of them would wait for ranks that never come.
            UnsupportedError: Names the option and what is allowed.
        """
        choices, number = self.run.choices, self.num_processes
        started = os.environ.get("LOCAL_WORLD_SIZE", number)
        if isinstance(self.cluster_environment, lightning_of(self).fabric("plugins.environments").TorchElasticEnvironment) and (
            int(started) != number
        ):
            raise ConfigError(
                f"torchrun has started {started} ranks on this node, and devices={number}. Start equally many on each node: "
                f"torchrun --nnodes={self.num_nodes} --nproc-per-node={number}."
            )
        devices = self.parallel_devices or []
        for device in devices:
            check_kind(device, self.accelerator, self.strategy_name)
        if self.root_device.type != "cpu" and len(set(devices)) < number and choices.options.device_memory is None:
            raise ConfigError(
                f"ranks compute on {', '.join(map(str, devices))}: several of them on one, and each would take all of its memory. "
                f"Pass device_memory, which is what each of them may have."
            )
        if self._layer_sync is not None:
            why = ", which torch's SyncBatchNorm does not do on a CPU," if self.root_device.type == "cpu" else ""
            raise self._refusal(f"sync_batchnorm=True{why}", "Leave it out.")
        if (precision := str(self.precision_plugin.precision)) not in _PRECISIONS:
            raise self._refusal(f"precision={precision!r}", f"Allowed: {', '.join(map(repr, _PRECISIONS))}.")

    def _refusal(self, what: str, remedy: str) -> UnsupportedError:
        return UnsupportedError(
            f"{what} does not work with devices={self.num_processes} yet, where several devices hold one model together. "
            f"{remedy} Or pass devices=1."
        )

    def setup(self, trainer: pl.Trainer) -> None:
        """Places this rank's slices of the first rank's weights."""
        if refused := _unshared(self.run.module):
            raise self._refusal(*refused)
        if lightning_of(self).is_fit(trainer) and (every := seconds_between_validations(trainer)) is not None:
            what = f"val_check_interval as a time of {every:g} s, which each rank takes by its own clock,"
            raise self._refusal(what, "Pass a number of training batches, or a fraction of them.")
        Offloading.setup(self, trainer)
        share_buffers(self.run)
        if lightning_of(self).is_fit(trainer):
            self._averaging = give_weights(trainer, partial(self.materialize, self.run.module))

    def on_train_start(self) -> None:
        """Continues where the last step ended; from now on ranks that part are found."""
        Offloading.on_train_start(self)
        if self._batches is not None:
            self._batches.follow(self.run.module.trainer)

    def on_exception(self, exception: BaseException) -> None:
        """Tells the other ranks why this one ends, and leaves them: they do not wait for it."""
        collectives = self.run.options.collectives
        if collectives is not None and not collectives.has_failed:
            collectives.notes.note(f"rank {collectives.rank} has ended with {type(exception).__name__}: {exception}")
            first = collectives.notes.noted()
            told, own = first.rstrip("."), f"{type(exception).__name__}: {exception}"
            has_same = own.startswith(first.partition(" has ended with ")[2])  # notes have the beginning of a long text
            if not (first.startswith(f"rank {collectives.rank} ") or told in own or has_same):  # Lightning's collective failed
                exception.add_note(f"{told}. Start all ranks again; their logs say which was the first.")
        Offloading.on_exception(self, exception)  # teardown must not rely on the engine
        if collectives is not None:
            collectives.close()
        if self._decisions is not None:
            self._decisions.close()

    def teardown(self) -> None:
        """Gives all ranks the whole model back; optimizers keep their slices of state."""
        if self._batches is not None:
            self._batches.leave()
        if self._averaging is not None:
            self._averaging.restore()
            self._averaging = None
        Offloading.teardown(self)
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()

    def save_checkpoint(self, checkpoint: State, filepath: PathLike, storage_options: object | None = None) -> None:
        """Writes an ordinary checkpoint, on the first rank, or each rank's links; all call it.

        After an error, which callbacks may save after, there is none unless all ranks have had an
        error at the same place of a step: the log says so, and the error goes on.
        """
        reads = self._reads()
        try:
            with nullcontext() if reads is None or self.run.checkpoints.links(filepath) else reads.by_first():
                Offloading.save_checkpoint(self, checkpoint, filepath, storage_options)
        except HeteroError as error:
            if not (self.run.module.trainer.interrupted and self._have_parted):
                raise
            log.error(  # callbacks save as another error is being handled, which is raised
                "The checkpoint %r was not saved after the error: each rank has slices of the model, and not all have ended at the "
                "same place of a step. Go on from an earlier one. %s", str(filepath), error,
            )  # fmt: skip

    @property
    def _have_parted(self) -> bool:
        """Whether the ranks cannot meet any more."""
        collectives = self.run.options.collectives
        return collectives is not None and collectives.has_failed

    def barrier(self, *args: Value, **kwargs: Value) -> None:
        """Waits for the other ranks, unless one of them is elsewhere or has died."""
        if not self._have_parted:
            super(Offloading, self).barrier(*args, **kwargs)

    def _reads(self) -> SliceReads | None:
        session = self.session
        slices = None if session is None else session.running.slices
        return self.run.kept if slices is None else slices.reads  # after the fit, or before the ranks are connected

    @contextmanager
    def materialize(self, params: nn.Module | Sequence[nn.Parameter]) -> Iterator[None]:
        """Access to weights outside their block's forward; all ranks enter the context.

        In it all ranks can read other weights and optimizer state, too, the same ones in the same
        order: each is whole while code holds it.
        """
        reads = self._reads()
        with Offloading.materialize(self, params), nullcontext() if reads is None else reads.by_all():
            yield

    def load_model_state_dict(self, checkpoint: Mapping[str, State], strict: bool = True) -> None:
        """Gives the model a checkpoint's weights; all ranks call it with the same ones."""
        executor = None if self.session is None else self.session.executor
        slices = None if executor is None else executor.slices
        with nullcontext() if executor is None or slices is None else slices.alike(executor.store, executor.blocks):
            Offloading.load_model_state_dict(self, checkpoint, strict)


_fits = itertools.count()


def _own_store() -> Store:
    """A part of the ranks' common store that no fit before has written to."""
    return PrefixStore(f"lightning_hetero/{next(_fits)}", _get_default_store())


def _finds_dead_ranks() -> bool:
    """Whether ranks that torchrun has started again have the store with the addresses of the dead.

    Its agents on several nodes may count starts differently.
    """
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return again and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def join_ranks(strategy: Offloading, devices: Sequence[torch.device]) -> None:
    """Makes a strategy of one device one of several; see [Note: A strategy joins ranks]."""
    parts = vars(strategy)
    kept = {name: parts[f"_{name}"] for name in ("accelerator", "checkpoint_io", "precision_plugin")}
    run, environment = strategy.run, parts.get("cluster_environment")
    parts.clear()
    strategy.__class__ = class_for(lightning_of(strategy))
    begin: Function = super(Offloading, strategy).__init__
    timeout = {} if run.choices.timeout is None else {"timeout": run.choices.timeout}
    begin(parallel_devices=list(devices), cluster_environment=environment, **timeout, **kept)
    strategy.run = run
    if kept["checkpoint_io"] is not None:
        strategy.checkpoint_io = kept["checkpoint_io"]  # one that saves on all ranks changes the class


def share_buffers(run: OffloadRun) -> None:
    """Gives all ranks the first one's buffers."""
    session = run.session
    if session is not None and session.options.collectives is not None:
        for buffer in run.module.buffers():
            here = buffer.cpu()  # itself, if it is there
            session.options.collectives.broadcast(here)
            if here is not buffer:
                buffer.copy_(here)


def _unshared(module: nn.Module) -> tuple[str, str] | None:
    """What weights ranks cannot share, and the remedy; ``None`` if they can share all."""
    ordinary = "Allowed: ordinary parameters of torch.float64, float32, float16 and bfloat16."
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            return f"parameter {name!r}, a DTensor that other ranks have parts of already,", ordinary
        if param.dtype not in _DTYPES or is_to_quantize(param):
            return f"parameter {name!r} of {type(param).__name__} with {param.dtype}", ordinary
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            return f"{name!r}, whose forward changes its weights for max_norm={part.max_norm},", "Leave max_norm out."
        if "lora_A" in part._modules and "parameter_name" in (own := vars(part)):  # PEFT's ParamWrapper
            return (
                f"the LoRA adapter of PEFT at {name!r}, which replaces the weight {own['parameter_name']!r} in every forward,",
                "Leave target_parameters out of its LoraConfig: adapters of modules (target_modules) train there.",
            )
    return None


def class_for(lightning: Lightning) -> type[HeteroOffloadRanks]:
    """The class for Trainers of a namespace."""
    return lightning.subclass(HeteroOffloadRanks, "strategies.DDPStrategy", name="HeteroOffloadRanksStrategy")
