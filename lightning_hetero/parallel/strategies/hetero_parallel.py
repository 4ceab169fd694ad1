"""``Trainer(strategy="hetero_parallel")``: devices that differ, by uneven batches or pipelines."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.ir.cluster_plan import ClusterPlan
from lightning_hetero.parallel.elastic import Elastic
from lightning_hetero.parallel.pipeline import states
from lightning_hetero.parallel.pipeline.automatic import plan_here
from lightning_hetero.parallel.pipeline.layers import Layers
from lightning_hetero.parallel.pipeline.layout import is_data_parallel
from lightning_hetero.parallel.pipeline.runtime import Pipelines
from lightning_hetero.parallel.stopwatch import Stopwatch
from lightning_hetero.parallel.strategies import hetero_parallel_offload
from lightning_hetero.parallel.strategies.pipelines import (
    PipelineSteps,
    built,
    check_module,
    check_optimizers,
    planned_speeds,
    say_what_runs,
)
from lightning_hetero.parallel.strategies.uneven import UnevenBatches, UnevenOptions, train_batches, whole_numbers_as_reals
from lightning_hetero.strategies.namespaces import Lightning, lightning_of_class
from lightning_hetero.strategies.option_checks import check_names

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy as _Base
    from lightning.pytorch.utilities.types import STEP_OUTPUT
else:
    _Base = object  # the namespace's class comes second among the bases (strategies.namespaces)

log = logging.getLogger(__name__)


@functools.wraps(object.__new__)  # jsonargparse shall read the signature of __init__ instead
def _with_tiers_or_not(cls: type[Any], *args: Any, offload: Any = None, **options: Any) -> Any:
    """With ``offload``, a strategy of another class. DDP wraps models that are in memory."""
    lightning = lightning_of_class(cls)
    if offload in (None, False) or cls is not class_for(lightning):
        return object.__new__(cls)
    return hetero_parallel_offload.class_for(lightning)(*args, offload=offload, **options)


class HeteroParallel(_Base):
    """Trains on devices that differ: batches cut by speed, or pipelines of different depth.

    Without ``plan`` every device holds the model. A step trains on ``batch_size`` samples times the
    number of devices, as with DDP, or on ``global_batch_size``. A rank that is twice as fast gets
    twice as many of them. The gradient is that of the mean over all samples of the step, on
    whichever rank they are. It differs from that of one process with the whole batch only by the
    order of additions. The samples come in the order of one
    :class:`~torch.utils.data.DistributedSampler` over all of them. A last batch that is not full is
    cut like any other, and no sample is repeated. The loss must be a mean over the samples of its
    batch. Validation and testing are DDP's. Under torchrun the number of ranks is torchrun's,
    whatever ``num_nodes`` says.

    With a plan that has pipelines, ranks form groups of different depth, each of which holds the
    model once. The module defines its layers and its loss
    (:class:`~lightning_hetero.parallel.StagedSteps`). Its ``training_step``, ``validation_step``
    and ``test_step`` are not executed. A step trains on ``batch_size`` samples times the plan's
    micro-batches, and its gradient is that of the mean over all items. A last step that is not full
    is left out. ``train_loss``, ``val_loss`` and ``test_loss`` are logged, the same on all ranks.
    Checkpoints are those of one process. With ``LocalFirst`` every rank saves and loads its own
    layers.

    Args:
        plan: A :class:`~lightning_hetero.ir.cluster_plan.ClusterPlan` or its file. With ``"auto"``
            every rank measures its device with 1, 2, 4 and 8 layers as training begins, and a plan
            is made for them.
        micro_batches: With ``plan="auto"``: batches of the loader's size that make one step.
            Default: the number of ranks.
        tensor_parallel: With ``plan="auto"``: how many ranks may compute a stage's layers together,
            such as ``[1]`` or ``[1, 2]``. Default: all powers of two that the nodes have ranks for
            and that divide the layers that the module shards.
        offload: The ranks that keep weights and optimizer state on host or disk as
            ``hetero_offload`` does; the others keep them in memory. Options of
            :class:`~lightning_hetero.strategies.hetero_offload.HeteroOffload` by rank or by the
            name of a node, such as ``{"small": {"plan": "disk", "host_memory": "4GiB"}}``; ``True``
            or the options alone are for all ranks. Makes a
            ``HeteroParallelOffloadStrategy``.
        speeds: Relative speed of each rank, such as ``[1, 1, 3]``, or of each node by its name,
            such as ``{"spot": 3.0}``: the name in the cluster plan that was launched, else the
            host's. Default: equal at first, then as measured.
        rebalance_every: Training batches between two comparisons of speeds; 0: ``speeds`` stay.
        rebalance_drift: By how much, relatively, new shares must shorten a step to be used.
        global_batch_size: Samples of a step, of all ranks. Default: ``batch_size`` times the number
            of ranks; an elastic run keeps the number that it began with.
        elastic: Where steps are committed, or an
            :class:`~lightning_hetero.parallel.elastic.Elastic`. A restart resumes from the newest
            one, with the ranks that are there. Default: the environment variable
            ``LIGHTNING_HETERO_STEPS``.
        ddp: All other options go to :class:`~lightning.pytorch.strategies.DDPStrategy`.
    """

    __new__ = _with_tiers_or_not
    strategy_name = "hetero_parallel"
    saves_own = False  # with LocalFirst every rank saves and loads the layers that it holds

    def __init__(
        self,
        *,
        plan: ClusterPlan | str | Path | None = None,
        micro_batches: int | None = None,
        tensor_parallel: Sequence[int] | None = None,
        offload: bool | dict[int | str, Any] | None = None,
        speeds: Sequence[float] | Mapping[str, float] | None = None,
        rebalance_every: int = 20,
        rebalance_drift: float = 0.05,
        global_batch_size: int | None = None,
        elastic: str | os.PathLike[str] | Elastic | None = None,
        **ddp: Any,
    ) -> None:
        check_names(type(self), ddp, DistributedDataParallel)
        super().__init__(**ddp)
        uneven = UnevenOptions(
            speeds=speeds, rebalance_every=rebalance_every, rebalance_drift=rebalance_drift,
            global_batch_size=global_batch_size, elastic=elastic,
        )  # fmt: skip
        self.uneven = UnevenBatches(self, self.strategy_name, uneven)
        if offload:
            raise ConfigError(
                f"offload={offload!r} for {type(self).__name__}, which has no tiers; make it a subclass of "
                f"HeteroParallelOffloadStrategy."
            )
        self._automatic = plan == "auto"
        self.plan = None if plan is None or self._automatic else plan if isinstance(plan, ClusterPlan) else ClusterPlan.load(plan)
        if plan is not None and speeds is not None:
            raise ConfigError("speeds and plan were given; the plan says what each device takes. Give one of them.")
        if plan is not None and global_batch_size is not None:
            raise ConfigError("global_batch_size and plan were given; a plan says micro-batches of a step. Give one of them.")
        if micro_batches is not None and (not self._automatic or micro_batches < 1):
            raise ConfigError(
                f'micro_batches={micro_batches!r}; allowed: at least 1, with plan="auto". Other plans have their own.'
            )
        if tensor_parallel is not None and not self._automatic:
            raise ConfigError(f'tensor_parallel={tensor_parallel!r}; allowed with plan="auto" only. Other plans have their own.')
        self._step_batches = micro_batches
        self._degrees = tensor_parallel
        self._staged: PipelineSteps | None = None  # if the plan has pipelines, once they are set up

    @property
    def shares(self) -> tuple[int, ...] | None:
        """Samples of each rank in a full batch; ``None`` before training has begun."""
        return self.uneven.shares

    @property
    def stopwatch(self) -> Stopwatch | None:
        """Times training batches, if speeds are measured."""
        return self.uneven.stopwatch

    @property
    def pipelines(self) -> Pipelines | None:
        """The pipelines, if the plan has some and they are set up."""
        return None if self._staged is None else self._staged.pipelines

    # ---- setup and teardown ----------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        """Makes none under torchrun. Lightning's wants as many ranks on every node."""
        if self.cluster_environment is not None and not self.cluster_environment.creates_processes_externally:
            super()._configure_launcher()

    def setup_environment(self) -> None:
        """Exchanges the names of nodes. An elastic fit gets its callback."""
        super().setup_environment()
        self.uneven.ranks_met()

    def setup(self, trainer: pl.Trainer) -> None:
        """Sets up pipelines, or DDP if the plan has none."""
        fits, plan = self.uneven.is_fit(), self.plan
        if self._automatic and plan is None and fits:
            self.plan = plan = self._make_plan(trainer)
        # A rank that the plan leaves out takes part in the steps of pipelines. DDP needs all ranks.
        if plan is not None and not (is_data_parallel(plan) and self.world_size == plan.world_size):
            self._set_up_pipelines(trainer, plan, fits=fits)
            return
        if plan is not None:
            self.uneven.speeds = planned_speeds(plan, self.world_size, named=self._automatic)
            self.uneven.step_batches = plan.micro_batches
        super().setup(trainer)
        if fits:
            self.uneven.fit_set_up()

    def _set_up_pipelines(self, trainer: pl.Trainer, plan: ClusterPlan, *, fits: bool) -> None:
        module, precision = self.uneven.module, self.precision_plugin
        check_module(module, precision)
        if self.accelerator is not None:
            self.accelerator.setup(trainer)
        if self._staged is None or self._staged.pipelines.layers.module is not module:
            self.model = precision.convert_module(module)
            pipelines = built(module, plan, self, named=self._automatic)
            self._staged = PipelineSteps(pipelines, plan, module, self.root_device)
        if fits:
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers)
        self.setup_precision_plugin()
        self._staged.set_up(self.precision_plugin)
        if fits and self.is_global_zero:
            say_what_runs(module)

    def _make_plan(self, trainer: pl.Trainer) -> ClusterPlan:
        """Measures with one micro-batch of the training data. Random numbers stay as they were."""
        precision = self.precision_plugin
        with torch.random.fork_rng():
            data: Any = trainer.fit_loop._data_source.dataloader()
            self.uneven.check(data)
            batch = data.collate_fn([data.dataset[i] for i in range(min(data.batch_size, len(data.dataset)))])
            batch = precision.convert_input(self.batch_to_device(batch, self.root_device))
            found = plan_here(
                Layers(precision.convert_module(self.uneven.module)),
                batch,
                micro_batches=self._step_batches or self.world_size,
                device=self.root_device,
                context=precision.forward_context,
                tensor_parallel=self._degrees,
                timeout=self._timeout,
            )
        if self.is_global_zero:
            log.info("Planned for %d ranks: %s.", self.world_size, "; ".join(found.in_short().groups))
        return found

    def on_exception(self, exception: BaseException) -> None:
        """Ends an elastic fit too: after an exception Lightning calls no other hook."""
        super().on_exception(exception)
        self.uneven.end_elastic()

    def teardown(self) -> None:
        """Takes all hooks off. The layers of a pipeline stay on their device."""
        self.uneven.end()
        if self._staged is None:
            super().teardown()
            return
        self._staged.close()
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator):
            if part is not None:
                part.teardown()

    # ---- data ------------------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """In training and with pipelines one sampler over all samples, equal on all ranks."""
        return self.uneven.sampler_options() if self._staged is None else {"num_replicas": 1, "rank": 0}

    def process_dataloader(self, dataloader: object) -> object:
        """Cuts the batches of the training data by the shares; with pipelines, all by the plan."""
        dataloader = super().process_dataloader(dataloader)
        return self.uneven.cut(dataloader) if self._staged is None else self._staged.cut(dataloader, self.uneven)

    # ---- steps -----------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Continues an epoch where the checkpoint was saved, by whichever plan it was saved."""
        super().on_train_start()
        self.uneven.train_starts()
        if self._staged is not None:
            self._staged.pipelines.share_random_numbers()

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Takes this rank's share of the batch. Pipelines measure no speeds."""
        if self._staged is None:
            super().on_train_batch_start(batch, batch_idx)
            self.uneven.batch_begins()
        else:
            self.uneven.check_order(train_batches(self.uneven.module.trainer))

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Times the step from here on. With pipelines, runs the backward too."""
        if self._staged is not None:
            return self._staged.train(args[0])
        self.uneven.step_begins()
        return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Forward of a batch."""
        if self._staged is None:
            return super().validation_step(*args, **kwargs)
        self._staged.evaluate("val", *args, **kwargs)
        return None

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """The same with test data."""
        if self._staged is None:
            return super().test_step(*args, **kwargs)
        self._staged.evaluate("test", *args, **kwargs)
        return None

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """DDP's.

        Raises:
            UnsupportedError: The plan has pipelines, so no rank has the whole model.
        """
        if self._staged is None:
            return super().predict_step(*args, **kwargs)
        raise UnsupportedError("no rank of a pipeline has the whole model; predict from a checkpoint, with another strategy.")

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Does not round means of whole numbers: uneven batch sizes need not divide evenly."""
        return super().reduce(whole_numbers_as_reals(tensor, reduce_op), group, reduce_op)

    # ---- states ----------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether each rank reads its own layers, which it knows after setup."""
        return self.saves_own and (self._automatic or (self.plan is not None and not is_data_parallel(self.plan)))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's on rank 0, as of one process. With LocalFirst each rank's own part."""
        if self._staged is None:
            return super().lightning_module_state_dict()
        return (states.own_model_state if self.saves_own else states.model_state)(self._staged.pipelines)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's, as :meth:`lightning_module_state_dict`."""
        if self._staged is None:
            return super().optimizer_state(optimizer)
        of = states.own_optimizer_state if self.saves_own else states.optimizer_state
        return of(self._staged.pipelines, getattr(optimizer, "_optimizer", optimizer))

    def places(self) -> Callable[[str, Tensor], Tensor | None] | None:
        """The targets of this rank's saved tensors (``pipeline.states.places``); ``None``: all."""
        return None if self._staged is None else states.places(self._staged.pipelines)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads a whole state dict into the module, or into the layers that this rank holds."""
        if self._staged is None:
            super().load_model_state_dict(checkpoint, strict=strict)
        else:
            states.load_model_state(self._staged.pipelines, checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads this rank's part of a whole optimizer's state."""
        if self._staged is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            states.load_optimizer_state(self._staged.pipelines, optimizer, state)


def class_for(lightning: Lightning) -> type[HeteroParallel]:
    """The class for Trainers of a namespace. Strategies with ``offload`` are its instances, too."""
    made = lightning.subclass(HeteroParallel, "strategies.DDPStrategy", name="HeteroParallelStrategy")
    made.register(hetero_parallel_offload.class_for(lightning))
    return made
