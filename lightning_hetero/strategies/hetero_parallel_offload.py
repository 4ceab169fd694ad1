"""``HeteroParallelStrategy(offload=...)``: data parallelism in which some ranks keep the model on the tiers of ``hetero_offload``.

[Note: A rank among others]
Every rank runs the runtime of ``hetero_offload``, each with a plan of its own: those that are not named keep everything in memory.
A plan never changes a bit, so ranks stay equal bit for bit. An update may begin once the gradients of all ranks are known: the
runtime collects gradients until backward has ended, as for clipping by norm; they are averaged there, before any hook or plugin
sees them, and the updates then overlap with the next forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.ir.plan import UpdateLane
from lightning_hetero.lowering.needs import Constant
from lightning_hetero.parallel.replicas import (
    BUCKET_BYTES,
    all_or_none,
    average_gradients,
    broadcast,
    bucket_memory_bytes,
    check_same,
)
from lightning_hetero.runtime.options import StepRules
from lightning_hetero.strategies import factory
from lightning_hetero.strategies.core import Choices
from lightning_hetero.strategies.hetero_pipelines import HeteroPipelines
from lightning_hetero.strategies.lifecycle import Lifecycle
from lightning_hetero.strategies.resume import is_store
from lightning_hetero.units import MIB

_SUMMED = "gradients are averaged over ranks"
_NOT_OURS = ("accelerator", "checkpoint_io", "precision_plugin")  # of an offloading rank's options: the whole group has them
_OF_ONE = ("durability", "keep_every", "link_checkpoints", "verify")  # what only a run of one process does
_OF_PIPELINES = ("plan", "micro_batches", "tensor_parallel")
_OF_REDUCER = (  # of DDP's, which nothing here does
    "ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period", "mixed_precision", "process_group",
    "device_mesh", "param_to_hook_all_reduce", "delay_all_reduce_named_params",
)  # fmt: skip

Offload = bool | Mapping[Any, Any]


class HeteroParallelOffload(HeteroPipelines, Lifecycle):
    """Data parallelism in which ranks that are short of memory keep the model on the tiers of ``hetero_offload``.

    Batches are cut by speed, and gradients weighted by samples, as without tiers. ``HeteroParallelStrategy(offload=...)`` makes it.

    Args:
        offload: Who offloads, and how: see :class:`~lightning_hetero.strategies.hetero_pipelines.HeteroPipelines`.
        options: Those of :class:`~lightning_hetero.strategies.hetero_parallel.HeteroParallel`. Of DDP's own, ``broadcast_buffers``,
            ``bucket_cap_mb`` and what concerns processes count; parameters that some ranks do not use are always found.

    Raises:
        ConfigError: An offloading rank's options are not those of ``HeteroOffloadStrategy``.
        UnsupportedError: An option that such a group does not have.
    """

    _repeats_steps = False  # other ranks would have to repeat them too

    def __init__(self, *, offload: Offload, **options: Any) -> None:
        kinds: tuple[Any, ...] = (*type(self).__mro__, DistributedDataParallel)
        known = {name for kind in kinds for name in signature(kind.__init__).parameters}
        if strangers := sorted(set(options) - known):
            raise ConfigError(f"{strangers[0]}={options[strangers[0]]!r} is no option of {type(self).__name__}.")
        for name in (*_OF_PIPELINES, *_OF_REDUCER):
            if options.get(name) not in (None, False):
                raise UnsupportedError(
                    f"{name}={options[name]!r} with offload; pipelines have no tiers, and gradients are averaged without DDP. "
                    f"Leave out one of them."
                )
        super().__init__(**options)
        self._everywhere: Choices | None = None
        self._somewhere: dict[int | str, Choices] = {}  # by rank, or by the name of the node
        if is_for_all(offload):
            self._everywhere = self._checked(offload)
        else:
            assert isinstance(offload, Mapping)
            self._somewhere = {who: self._checked(how) for who, how in offload.items()}
        self._in_memory = {plan: self._checked({"plan": plan}) for plan in ("resident", "host")}
        self._choose(self._in_memory["resident"])
        self._chosen = False
        self._holds_back = False  # batches that only accumulate
        self._buffers_differ = True
        self._shares_buffers = options.get("broadcast_buffers") is not False
        self._bucket_bytes = int(MIB * options["bucket_cap_mb"]) if options.get("bucket_cap_mb") else BUCKET_BYTES

    def _checked(self, how: Any) -> Choices:
        given = {} if how is True else how
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"offload={how!r} for a rank; allowed: True, or options of HeteroOffloadStrategy such as {{'plan': 'disk'}}."
            )
        if taken := [name for name in (*_NOT_OURS, *_OF_ONE) if name in given]:
            raise UnsupportedError(
                f"offload has {taken[0]}={given[taken[0]]!r}; allowed: options of HeteroOffloadStrategy but "
                f"{', '.join((*_NOT_OURS, *_OF_ONE))}. Steps of a group are not kept in stores; save checkpoints, or pass elastic."
            )
        made = factory.strategy_class(self.namespace)
        try:
            choices: Choices = made(**given)._choices
        except TypeError as error:
            raise ConfigError(f"offload={dict(given)!r} for a rank: {error}; allowed: options of HeteroOffloadStrategy.") from error
        options = choices.options
        return replace(choices, options=replace(options, engine=replace(options.engine, durability="none")))

    # ---- setup --------------------------------------------------------------------------------------------------------------

    @property
    def _node(self) -> str:
        return self._names[self.global_rank] if self._names else ""

    def setup_environment(self) -> None:
        """Once the ranks have met: this one's tiers."""
        super().setup_environment()
        if not self._chosen:
            self._check_names()
            self._choose(self._own())
            self._chosen = True
        self._use_device(self.root_device)
        if self.options.device is not None and self.autoplan is not None:
            raise UnsupportedError(
                f"offload with planner {self.autoplan.planner!r} on {self.options.device!r}: a planner may put updates there, and "
                f'all ranks have to run them on the CPU, to the same bits. Give a plan, such as "host" or "disk".'
            )

    def _check_names(self) -> None:
        known = {*range(self.world_size), *self._names}
        strangers = [who for who in self._somewhere if who not in known]
        if self._elastic is not None:  # others may still come
            strangers = [who for who in strangers if isinstance(who, int) and who < 0]
        if strangers:
            raise ConfigError(
                f"offload names {strangers}; allowed: ranks from 0 to {self.world_size - 1}, and nodes "
                f"{', '.join(sorted(set(self._names)))}."
            )

    def _own(self) -> Choices:
        plan = "resident" if self.root_device.type == "cpu" else "host"
        found = self._everywhere or self._somewhere.get(self.global_rank) or self._somewhere.get(self._node)
        choices = found or self._in_memory[plan]
        options, sharers = choices.options, self._names.count(self._node)
        engine = options.engine
        if not engine.update_threads:
            engine = replace(engine, update_threads=max(1, engine.threads() // sharers))
        path = None if options.disk_path is None else options.disk_path / f"rank-{self.global_rank}"
        return replace(choices, options=replace(options, engine=engine, disk_path=path, sharers=sharers))

    def setup(self, trainer: Any) -> None:
        """Places the model where this rank keeps it, with the first rank's weights."""
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization:
            raise UnsupportedError("offload in a group averages gradients as backward ends; use automatic optimization.")
        if self._layer_sync is not None:
            raise UnsupportedError("offload with sync_batchnorm=True; batch norms of blocks that move are not synchronised.")
        check_same(module)
        with all_or_none():
            super().setup(trainer)
            self._check_updates()
        broadcast(module.parameters(), self.root_device)
        broadcast(module.buffers(), self.root_device)
        if self.session is not None:
            self.session.commit()
        self._buffers_differ = False

    def _check_updates(self) -> None:
        plan = self._running().plan
        if self.options.device is not None and any(b.update is UpdateLane.DEVICE for b in plan.blocks):
            raise UnsupportedError(
                f"plan {plan.name!r} runs updates on {self.options.device!r}, whose last bits are not the CPU's: ranks "
                f'would drift apart. Use a plan whose updates run on the CPU, such as "host" or "disk".'
            )

    def _rules(self, trainer: Any) -> StepRules:
        rules = super()._rules(trainer)
        assert self.lightning_module is not None
        parameters, on_host = self.lightning_module.parameters(), self.root_device.type == "cpu"
        size = bucket_memory_bytes(parameters, self.root_device, bucket_bytes=self._bucket_bytes)
        return replace(
            rules, deferred=rules.deferred or _SUMMED, keep_gradients=True, clip_value=None, norms=False, speculates=False,
            buckets=Constant(host_bytes=size) if on_host else Constant(device_bytes=size),
        )  # fmt: skip

    def teardown(self) -> None:
        """Gives the model back; then ends the group."""
        super().teardown()
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()

    # ---- steps --------------------------------------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, gradients only accumulate."""
        self._holds_back = True
        try:
            yield
        finally:
            self._holds_back = False

    def _begin_step(self, *, training: bool) -> None:
        """As DDP does, buffers become the first rank's before the forward that follows one whose gradients were averaged."""
        if self._buffers_differ and self._shares_buffers and self.lightning_module is not None:
            broadcast(self.lightning_module.buffers(), self.root_device)
        self._buffers_differ = training and not self._holds_back
        super()._begin_step(training=training)

    def _gradients_computed(self) -> None:
        """The last batch of a step: gradients become those of all ranks."""
        if self._holds_back or self.lightning_module is None:
            return
        if self.session is not None:
            self._running().heap.check(self.session.rules.buckets.host_bytes)
        with self._waiting():
            average_gradients(self.lightning_module.named_parameters(), self.root_device, bucket_bytes=self._bucket_bytes)

    # ---- checkpoints --------------------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """A checkpoint file, which every rank reads.

        Raises:
            UnsupportedError: It is a store: no rank of a group keeps its steps in one.
        """
        if is_store(checkpoint_path):
            raise UnsupportedError(f"ckpt_path {str(checkpoint_path)!r} is a store of one process; pass a checkpoint.")
        return super().load_checkpoint(checkpoint_path, weights_only)


def is_for_all(offload: Any) -> bool:
    """Whether ``offload`` speaks of all ranks: ``True``, or options; else its keys are ranks and nodes."""
    if offload is True:
        return True
    if not isinstance(offload, Mapping) or not offload:
        raise ConfigError(
            f"offload={offload!r}; allowed: True, options of HeteroOffloadStrategy for all ranks, such as {{'plan': 'disk'}}, or "
            f"those by rank or node, such as {{0: {{'plan': 'disk'}}}}."
        )
    named = any(isinstance(who, int) for who in offload) or all(how is True or isinstance(how, Mapping) for how in offload.values())
    return not named
