"""``HeteroParallelStrategy(offload=...)``: data parallelism in which some ranks offload.

[Note: A rank among others]
Every rank runs the runtime of ``hetero_offload`` with a plan of its own. Ranks that ``offload``
does not name keep everything in memory. A plan never changes a bit, so all ranks stay equal bit for
bit. An update may begin when the gradients of all ranks are known. So the runtime collects
gradients until backward has ended, as for clipping by norm. They are averaged there, before any
hook or plugin sees them. The updates then overlap with the next forward.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.ir.plan import UpdateLane
from lightning_hetero.lowering.needs import Constant
from lightning_hetero.parallel.elastic import Elastic
from lightning_hetero.parallel.replicas import (
    BUCKET_BYTES,
    all_or_none,
    average_gradients,
    broadcast,
    bucket_memory_bytes,
    check_same,
)
from lightning_hetero.parallel.stopwatch import Stopwatch
from lightning_hetero.parallel.strategies.uneven import UnevenBatches, UnevenOptions, whole_numbers_as_reals
from lightning_hetero.runtime.options import StepRules
from lightning_hetero.strategies import hetero_offload
from lightning_hetero.strategies.checkpoints import PathLike
from lightning_hetero.strategies.namespaces import Lightning, lightning_of
from lightning_hetero.strategies.offload import OffloadRun
from lightning_hetero.strategies.offloading import Offloading
from lightning_hetero.strategies.option_checks import Choices, check_names
from lightning_hetero.strategies.resume import State, is_store
from lightning_hetero.units import MIB

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.utilities.types import STEP_OUTPUT

    class _Base(Offloading, DDPStrategy): ...
else:
    _Base = Offloading

log = logging.getLogger(__name__)

_SUMMED = "gradients are averaged over ranks"
# Options of hetero_offload that no rank has: the group has some, and one process alone the others.
_NOT_OF_A_RANK = (
    "accelerator", "checkpoint_io", "precision_plugin", "durability", "keep_every", "link_checkpoints", "exclude_frozen_parameters",
    "verify", "timeout",
)  # fmt: skip
_OF_REDUCER = (  # options of DDP's reducer, which is not used here
    "ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period", "mixed_precision", "process_group",
    "device_mesh", "param_to_hook_all_reduce", "delay_all_reduce_named_params",
)  # fmt: skip

Offload = bool | Mapping[Any, Any]


class _OtherRanks:
    """The other ranks, for the run of one of them.

    Attributes:
        holds_back: Batches only accumulate gradients.
        buffers_differ: A forward may have changed buffers since they were equal on all ranks.
    """

    def __init__(self, strategy: HeteroParallelOffload, *, bucket_bytes: int, shares_buffers: bool) -> None:
        self._strategy, self._bucket_bytes, self._shares_buffers = strategy, bucket_bytes, shares_buffers
        self.holds_back, self.buffers_differ = False, True

    def rules(self, rules: StepRules) -> StepRules:
        """Updates wait for the means of all ranks. The buckets need memory."""
        device, parameters = self._strategy.root_device, self._strategy.run.module.parameters()
        size = bucket_memory_bytes(parameters, device, bucket_bytes=self._bucket_bytes)
        return replace(
            rules, deferred=rules.deferred or _SUMMED, keep_gradients=True, clip_value=None, norms=False, speculates=False,
            buckets=Constant(host_bytes=size) if device.type == "cpu" else Constant(device_bytes=size),
        )  # fmt: skip

    def batch_begins(self, *, training: bool) -> None:
        """As DDP does, copies the first rank's buffers before the first forward of a step."""
        module = self._strategy.lightning_module
        if self.buffers_differ and self._shares_buffers and module is not None:
            broadcast(module.buffers(), self._strategy.root_device)
        self.buffers_differ = training and not self.holds_back

    def gradients_computed(self) -> None:
        """Averages the gradients of a step over all ranks."""
        if self.holds_back:
            return
        run = self._strategy.run
        if run.session is not None:
            run.executor.heap.check(run.session.rules.buckets.host_bytes)
        average_gradients(run.module.named_parameters(), self._strategy.root_device, bucket_bytes=self._bucket_bytes)


class HeteroParallelOffload(_Base):
    """Data parallelism in which ranks that are short of memory offload as ``hetero_offload`` does.

    Batches are cut by speed and gradients weighted by samples, as in ``HeteroParallelStrategy``,
    which makes it of ``offload``.

    Args:
        offload: Which ranks offload, and with which options: see
            :class:`~lightning_hetero.parallel.strategies.hetero_parallel.HeteroParallel`, also for
            the next five.
        speeds: Relative speed of each rank.
        rebalance_every: Training batches between two comparisons of speeds.
        rebalance_drift: By how much, relatively, new shares must shorten a step.
        global_batch_size: Samples of a step, of all ranks.
        elastic: Where steps are committed.
        plan: Refused, as are the next two: pipelines have no tiers.
        micro_batches: Refused.
        tensor_parallel: Refused.
        options: Of DDP's options those for processes, ``broadcast_buffers`` and ``bucket_cap_mb``.
            Parameters that some ranks do not use are always found.

    Raises:
        ConfigError: An offloading rank's options are not those of ``HeteroOffloadStrategy``.
        UnsupportedError: An option that such a group does not have.
    """

    strategy_name = "hetero_parallel"

    def __init__(
        self,
        *,
        offload: Offload,
        speeds: Sequence[float] | Mapping[str, float] | None = None,
        rebalance_every: int = 20,
        rebalance_drift: float = 0.05,
        global_batch_size: int | None = None,
        elastic: str | os.PathLike[str] | Elastic | None = None,
        plan: object = None,
        micro_batches: object = None,
        tensor_parallel: object = None,
        **options: Any,
    ) -> None:
        check_names(type(self), options, DistributedDataParallel)
        of_pipelines = {"plan": plan, "micro_batches": micro_batches, "tensor_parallel": tensor_parallel}
        for name, value in {**of_pipelines, **{name: options.get(name) for name in _OF_REDUCER}}.items():
            if value not in (None, False):
                raise UnsupportedError(
                    f"{name}={value!r} with offload; pipelines have no tiers, and gradients are averaged without DDP. "
                    f"Leave out one of them."
                )
        super(Offloading, self).__init__(**options)
        uneven = UnevenOptions(
            speeds=speeds, rebalance_every=rebalance_every, rebalance_drift=rebalance_drift,
            global_batch_size=global_batch_size, elastic=elastic,
        )  # fmt: skip
        self.uneven = UnevenBatches(self, self.strategy_name, uneven)
        self._everywhere: Choices | None = None
        self._somewhere: dict[int | str, Choices] = {}  # by rank, or by the name of the node
        if isinstance(offload, Mapping) and not is_for_all(offload):
            self._somewhere = {who: self._checked(how) for who, how in offload.items()}
        elif is_for_all(offload):
            self._everywhere = self._checked(offload)
        self._in_memory = {plan: self._checked({"plan": plan}) for plan in ("resident", "host")}
        self._chosen = False
        self._group = _OtherRanks(
            self,
            bucket_bytes=int(MIB * options["bucket_cap_mb"]) if options.get("bucket_cap_mb") else BUCKET_BYTES,
            shares_buffers=options.get("broadcast_buffers") is not False,
        )
        self.run = OffloadRun(self, self._in_memory["resident"], self._group)

    def _checked(self, how: Any) -> Choices:
        given = {} if how is True else how
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"offload={how!r} for a rank; allowed: True, or options of HeteroOffloadStrategy such as {{'plan': 'disk'}}."
            )
        if taken := [name for name in _NOT_OF_A_RANK if name in given]:
            raise UnsupportedError(
                f"offload has {taken[0]}={given[taken[0]]!r}; allowed: options of HeteroOffloadStrategy but "
                f"{', '.join(_NOT_OF_A_RANK)}. Steps of a group are not kept in stores; save checkpoints, or pass elastic."
            )
        alone = hetero_offload.class_for(lightning_of(self))
        try:
            choices = alone(**given).run.choices
        except TypeError as error:
            raise ConfigError(f"offload={dict(given)!r} for a rank: {error}; allowed: options of HeteroOffloadStrategy.") from error
        options = choices.options
        return replace(choices, options=replace(options, engine=replace(options.engine, durability="none")))

    # ---- setup and teardown ----------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        """Makes none under torchrun. Lightning's wants as many ranks on every node."""
        if self.cluster_environment is not None and not self.cluster_environment.creates_processes_externally:
            super(Offloading, self)._configure_launcher()

    def setup_environment(self) -> None:
        """Chooses this rank's plan once the ranks are connected."""
        super(Offloading, self).setup_environment()
        self.uneven.ranks_met()
        if not self._chosen:
            self._check_names()
            self.run.choose(self._own())
            self._chosen = True
            if self.is_global_zero and (advice := held_once(self.uneven.names, self._everywhere, self.root_device)):
                log.warning("%s", advice)
        self.run.use_device(self.root_device)
        if self.run.options.device is not None and self.run.autoplan is not None:
            raise UnsupportedError(
                f"offload with planner {self.run.autoplan.planner!r} on {self.run.options.device!r}: a planner may put updates "
                f'there, and all ranks have to run them on the CPU, to the same bits. Give a plan, such as "host" or "disk".'
            )

    def _check_names(self) -> None:
        names = self.uneven.names
        known = {*range(self.world_size), *names}
        strangers = [who for who in self._somewhere if who not in known]
        if self.uneven.elastic is not None:  # others may still come
            strangers = [who for who in strangers if isinstance(who, int) and who < 0]
        if strangers:
            raise ConfigError(
                f"offload names {strangers}; allowed: ranks from 0 to {self.world_size - 1}, and nodes "
                f"{', '.join(sorted(set(names)))}."
            )

    def _own(self) -> Choices:
        """How this rank trains: by its options, else with everything in memory."""
        rank, names = self.global_rank, self.uneven.names
        node = names[rank] if names else ""
        found = self._everywhere or self._somewhere.get(rank) or self._somewhere.get(node)
        choices = found or self._in_memory["resident" if self.root_device.type == "cpu" else "host"]
        options, sharers = choices.options, names.count(node)
        engine = options.engine
        if not engine.update_threads:
            engine = replace(engine, update_threads=max(1, engine.threads() // sharers))
        own = tuple(path / f"rank-{rank}" for path in options.disk_paths[:1])
        return replace(choices, options=replace(options, engine=engine, disk_paths=own + options.further_disks, sharers=sharers))

    def setup(self, trainer: pl.Trainer) -> None:
        """Places the model by this rank's plan, with the first rank's weights."""
        module = self.run.module
        if not module.automatic_optimization:
            raise UnsupportedError("offload in a group averages gradients as backward ends; use automatic optimization.")
        if self._layer_sync is not None:
            raise UnsupportedError("offload with sync_batchnorm=True; batch norms of blocks that move are not synchronised.")
        check_same(module)
        with all_or_none():
            self.run.setup(trainer)
            if self.uneven.is_fit():
                self.uneven.fit_set_up()
            self._check_updates()
        broadcast(module.parameters(), self.root_device)
        broadcast(module.buffers(), self.root_device)
        if self.run.session is not None:
            self.run.session.commit()
        self._group.buffers_differ = False

    def _check_updates(self) -> None:
        plan = self.run.executor.plan
        if self.run.options.device is not None and any(b.update is UpdateLane.DEVICE for b in plan.blocks):
            raise UnsupportedError(
                f"plan {plan.name!r} runs updates on {self.run.options.device!r}, whose last bits are not the CPU's: ranks "
                f'would drift apart. Use a plan whose updates run on the CPU, such as "host" or "disk".'
            )

    def on_exception(self, exception: BaseException) -> None:
        """Ends an elastic fit too: after an exception Lightning calls no other hook."""
        Offloading.on_exception(self, exception)
        self.uneven.end_elastic()

    def teardown(self) -> None:
        """Gives the model back; then ends the group."""
        self.uneven.end()  # first, because its hooks stand around the run's
        Offloading.teardown(self)
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()

    # ---- steps -----------------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """In training one sampler over all samples, equal on all ranks; else DDP's."""
        return self.uneven.sampler_options()

    def process_dataloader(self, dataloader: object) -> object:
        """Cuts the batches of the training data by the shares."""
        return self.uneven.cut(Offloading.process_dataloader(self, dataloader))

    def on_train_start(self) -> None:
        """Continues an epoch where the checkpoint was saved."""
        Offloading.on_train_start(self)
        self.uneven.train_starts()

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Takes this rank's share of the batch, and compares speeds from time to time."""
        super(Offloading, self).on_train_batch_start(batch, batch_idx)
        self.uneven.batch_begins()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, gradients only accumulate."""
        self._group.holds_back = True
        try:
            yield
        finally:
            self._group.holds_back = False

    def training_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        """Times the step from here on."""
        self.uneven.step_begins()
        return Offloading.training_step(self, *args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Does not round means of whole numbers: uneven batch sizes need not divide evenly."""
        return super(Offloading, self).reduce(whole_numbers_as_reals(tensor, reduce_op), group, reduce_op)

    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: bool | None = None) -> State:
        """Reads a checkpoint file on every rank.

        Raises:
            UnsupportedError: It is a store. The ranks of a group keep no steps in stores.
        """
        if is_store(checkpoint_path):
            raise UnsupportedError(f"ckpt_path {str(checkpoint_path)!r} is a store of one process; pass a checkpoint.")
        return Offloading.load_checkpoint(self, checkpoint_path, weights_only)

    @property
    def shares(self) -> tuple[int, ...] | None:
        """Samples of each rank in a full batch; ``None`` before training has begun."""
        return self.uneven.shares

    @property
    def stopwatch(self) -> Stopwatch | None:
        """Times training batches, if speeds are measured."""
        return self.uneven.stopwatch


def is_for_all(offload: Any) -> bool:
    """Whether ``offload`` is for all ranks: ``True``, or options. Else its keys name ranks."""
    if offload is True:
        return True
    if not isinstance(offload, Mapping) or not offload:
        raise ConfigError(
            f"offload={offload!r}; allowed: True, options of HeteroOffloadStrategy for all ranks, such as {{'plan': 'disk'}}, or "
            f"those by rank or node, such as {{0: {{'plan': 'disk'}}}}."
        )
    named = any(isinstance(who, int) for who in offload) or all(how is True or isinstance(how, Mapping) for how in offload.values())
    return not named


def held_once(nodes: Sequence[str], everywhere: Choices | None, device: torch.device) -> str:
    """What to use so that ranks do not each hold a copy; empty if they have to.

    Args:
        nodes: The node of each rank.
        everywhere: How all ranks train, if all offload by the same options.
        device: That of this rank.
    """
    if everywhere is None or len(nodes) < 2 or len(set(nodes)) > 1 or device.type != "cpu":
        return ""
    return (
        f"{len(nodes)} ranks of one machine hold a copy of the model each. With batches of one size they can hold it together: "
        f'Trainer(strategy="hetero_offload", devices={len(nodes)}).'
    )


def class_for(lightning: Lightning) -> type[HeteroParallelOffload]:
    """The class for Trainers of a namespace."""
    return lightning.subclass(HeteroParallelOffload, "strategies.DDPStrategy", name="HeteroParallelOffloadStrategy")
