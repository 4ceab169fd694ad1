"""``Trainer(strategy=HeteroParallelStrategy(plan=...))``: asymmetric pipelines, or data parallelism where the plan is that."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim import LBFGS, Optimizer

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.ir.cluster_plan import ClusterPlan
from lightning_hetero.parallel.pipeline import states
from lightning_hetero.parallel.pipeline.automatic import node_name, plan_here
from lightning_hetero.parallel.pipeline.layers import Layers
from lightning_hetero.parallel.pipeline.layout import NODE, Layout, is_data_parallel
from lightning_hetero.parallel.pipeline.module import StagedSteps
from lightning_hetero.parallel.pipeline.runtime import Means, Pipelines
from lightning_hetero.parallel.pipeline.synchronise import local
from lightning_hetero.parallel.shares import SharedBatches
from lightning_hetero.strategies.hetero_parallel import HeteroParallel, with_batches

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


class HeteroPipelines(HeteroParallel):
    """Trains on devices that differ: batches cut by speed, or, by a cluster plan, pipelines of different depth.

    Without ``plan`` every device holds the model, as :class:`~lightning_hetero.strategies.hetero_parallel.HeteroParallel` says.

    With a plan that has pipelines, ranks form groups of different depth, each of which holds the model once. The module says its
    layers and its loss (:class:`~lightning_hetero.parallel.StagedSteps`); its ``training_step``, ``validation_step`` and
    ``test_step`` are not executed. A step trains on ``batch_size`` samples times the plan's micro-batches; its gradient is that of
    the mean over all items. A last step that is not full is left out. ``train_loss``, ``val_loss`` and ``test_loss`` are logged,
    the same on all ranks. Checkpoints are those of one process; with ``LocalFirst`` every rank saves and loads its own layers.

    Args:
        plan: A :class:`~lightning_hetero.ir.cluster_plan.ClusterPlan` or its file; ``"auto"``: as training begins, every rank
            measures its device with 1, 2, 4 and 8 layers, and a plan is made for them.
        micro_batches: With ``plan="auto"``: batches of the loader's size that make one step. Default: as many as ranks.
        tensor_parallel: With ``plan="auto"``: how many ranks may compute a stage's layers together, such as ``[1]`` or ``[1, 2]``.
            Default: all powers of two that nodes have ranks for, and that divide what the module shards.
        offload: Who keeps weights and optimizer state on host or disk as ``hetero_offload`` does, while the others keep them in
            memory: options of :class:`~lightning_hetero.strategies.hetero_offload.HeteroOffload` by rank or by the name of a node,
            such as ``{"small": {"plan": "disk", "host_memory": "4GiB"}}``; ``True`` or options themselves: all ranks. Makes a
            :class:`~lightning_hetero.strategies.hetero_parallel_offload.HeteroParallelOffload`.
        options: Those of ``HeteroParallel``.
    """

    saves_own = False  # LocalFirst: every rank saves and loads what it holds, nothing is gathered

    def __init__(
        self,
        *,
        plan: ClusterPlan | str | Path | None = None,
        micro_batches: int | None = None,
        tensor_parallel: Sequence[int] | None = None,
        offload: bool | dict[int | str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if offload:
            raise ConfigError(
                f"offload={offload!r} for {type(self).__name__}, which has no tiers; make it a subclass of "
                f"HeteroParallelOffloadStrategy."
            )
        self._automatic = plan == "auto"
        self.plan = None if plan is None or self._automatic else plan if isinstance(plan, ClusterPlan) else ClusterPlan.load(plan)
        if plan is not None and self._speeds is not None:
            raise ConfigError("speeds and plan were given; the plan says what each device takes. Give one of them.")
        if plan is not None and self._global_batch is not None:
            raise ConfigError("global_batch_size and plan were given; a plan says micro-batches of a step. Give one of them.")
        if micro_batches is not None and (not self._automatic or micro_batches < 1):
            raise ConfigError(
                f'micro_batches={micro_batches!r}; allowed: at least 1, with plan="auto". Other plans have their own.'
            )
        if tensor_parallel is not None and not self._automatic:
            raise ConfigError(f'tensor_parallel={tensor_parallel!r}; allowed with plan="auto" only. Other plans have their own.')
        self._step_batches = micro_batches
        self._degrees = tensor_parallel
        self.pipelines: Pipelines | None = None

    # ---- setup --------------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Sets up pipelines, or what the base class does where the plan has none."""
        if self._automatic and self.plan is None and self._is_fitting():
            self.plan = self._make_plan(trainer)
        # Ranks that idle take part in pipelines' steps, but DDP has no place for them.
        if self.plan is None or (is_data_parallel(self.plan) and self.world_size == self.plan.world_size):
            if self.plan is not None:
                self._speeds = self._planned_speeds(self.plan)
            super().setup(trainer)
            return
        fitting = self._is_fitting()
        self._check_module()
        module, accelerator, precision = self.lightning_module, self.accelerator, self.precision_plugin
        assert module is not None
        assert accelerator is not None
        accelerator.setup(trainer)
        if self.pipelines is None or self.pipelines.layers.module is not module:
            self.model = precision.convert_module(module)
            self.pipelines = self._build(module, self.plan)
        if fitting:
            self.setup_optimizers(trainer)
            self._check_optimizers()
        self.setup_precision_plugin()
        vars(self.precision_plugin).update(clip_grad_by_norm=self._clip_by_norm, clip_grad_by_value=self._clip_by_value)
        if fitting:
            self._say_what_runs()

    def _make_plan(self, trainer: Any) -> ClusterPlan:
        """Measures with one micro-batch of the training data; what is random stays as it was."""
        module: Any = self.lightning_module
        with torch.random.fork_rng():
            data = trainer.fit_loop._data_source.dataloader()
            self._check(data)
            batch = data.collate_fn([data.dataset[i] for i in range(min(data.batch_size, len(data.dataset)))])
            batch = self.precision_plugin.convert_input(self.batch_to_device(batch, self.root_device))
            found = plan_here(
                Layers(self.precision_plugin.convert_module(module)),
                batch,
                micro_batches=self._step_batches or self.world_size,
                device=self.root_device,
                context=self.precision_plugin.forward_context,
                tensor_parallel=self._degrees,
                timeout=self._timeout,
            )
        if self.is_global_zero:
            log.info("Planned for %d ranks: %s.", self.world_size, "; ".join(found.in_short().groups))
        return found

    def _nodes(self) -> list[str | None]:
        """The plan's name of each rank's node, where it is known."""
        nodes: list[Any] = [None] * self.world_size
        dist.all_gather_object(nodes, node_name() if self._automatic else os.environ.get(NODE))
        return nodes

    def _planned_speeds(self, plan: ClusterPlan) -> tuple[float, ...]:
        """For each rank the micro-batches that the plan gives it."""
        layers = range(plan.groups[0].stages[0].layers)
        layout = Layout.of(plan, num_layers=len(layers), repeated=layers, nodes=self._nodes())
        return tuple(float(layout.micro_batches[slot.group]) for slot in layout.slots if slot is not None)

    def _build(self, module: torch.nn.Module, plan: ClusterPlan) -> Pipelines:
        layers = Layers(module)
        repeated = layers.repeated(sum(stage.layers for stage in plan.groups[0].stages))
        layout = Layout.of(plan, num_layers=len(layers), repeated=repeated, nodes=self._nodes())
        return Pipelines(
            layers,
            layout,
            rank=self.global_rank,
            device=self.root_device,
            timeout=self._timeout,
            context=self.precision_plugin.forward_context,
        )

    def _check_module(self) -> None:
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization:
            raise UnsupportedError("pipelines run one step's forward and backward together; use automatic optimization.")
        if self.precision_plugin.precision == "16-mixed":
            raise UnsupportedError(
                "precision='16-mixed' scales losses by what gradients overflow; use 'bf16-mixed' with pipelines."
            )

    def _check_optimizers(self) -> None:
        if len(self.optimizers) != 1:
            raise UnsupportedError(f"configure_optimizers gave {len(self.optimizers)} optimizers; pipelines train with one.")
        if isinstance(self.optimizers[0], LBFGS):
            raise UnsupportedError("LBFGS evaluates the loss several times a step; use another optimizer with pipelines.")

    def _say_what_runs(self) -> None:
        module: Any = self.lightning_module
        base = importlib.import_module(self.namespace).LightningModule
        own = []
        for name in ("training_step", "validation_step", "test_step"):
            written = getattr(type(module), name)
            if written not in (getattr(StagedSteps, name), getattr(base, name)):
                own.append(name)
        if own and self.is_global_zero:
            warnings.warn(
                f"{type(module).__name__}.{', '.join(own)} will NOT be executed: pipelines run stage_layers() and "
                "loss_sum(output, batch), and log train_loss, val_loss and test_loss. "
                "lightning_hetero.parallel.StagedSteps has steps that do the same with every strategy.",
                stacklevel=2,
            )

    # ---- data ---------------------------------------------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """With pipelines one sampler over everything, the same on all ranks."""
        if self.pipelines or self._is_training():
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _micro_batches(self) -> int:
        """Batches of the loader's size that make one step."""
        return super()._micro_batches() if self.plan is None else self.plan.micro_batches

    def process_dataloader(self, dataloader: Any) -> Any:
        """Gives every group its part of each batch: in training as many micro-batches as the plan says, else in proportion to them.

        Raises:
            UnsupportedError: The samples cannot be cut: an iterable dataset, batches of the user's own.
            ConfigError: There are not enough samples for one step.
        """
        if self.pipelines is None:
            return super().process_dataloader(dataloader)
        self._check(dataloader)
        layout, training = self.pipelines.layout, self._is_training()
        batches = SharedBatches(
            dataloader.sampler,
            batch=dataloader.batch_size * (self._micro_batches() if training else layout.num_groups),
            seconds=[1 / count for count in layout.micro_batches],
            rank=self.pipelines.group,
            drop_last=training or dataloader.drop_last,
        )
        if training and not len(batches):
            raise ConfigError(
                f"the training data has {len(dataloader.sampler)} samples; one step takes {batches.batch}: {self._micro_batches()} "
                f"micro-batches of {dataloader.batch_size}. Use a smaller batch_size or a plan with fewer micro-batches."
            )
        return with_batches(dataloader, batches)

    # ---- steps --------------------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Ranks of a stage go on with the same random numbers, whichever a checkpoint of another plan has given them."""
        super().on_train_start()
        if self.pipelines is not None:
            self.pipelines.share_random_numbers()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Pipelines measure nothing."""
        if self.pipelines is None:
            super().on_train_batch_start(batch, batch_idx)
            return
        module: Any = self.lightning_module
        self._check_order(module.trainer.train_dataloader.batch_sampler)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of the whole step. Lightning's backward, after it has zeroed gradients, gives it theirs."""
        if self.pipelines is None:
            return super().training_step(*args, **kwargs)
        module: Any = self.lightning_module
        module.trainer.train_dataloader.batch_sampler.next_taken()
        means = self.pipelines.train(args[0])
        self._log("train", means, prog_bar=True)
        parked: Any = _Parked
        return parked.apply(torch.zeros((), requires_grad=True), means.loss.to(self.root_device), self.pipelines.restore)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of a batch, all groups' parts of it."""
        return super().validation_step(*args, **kwargs) if self.pipelines is None else self._evaluate("val", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The same with test data."""
        return super().test_step(*args, **kwargs) if self.pipelines is None else self._evaluate("test", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """DDP's; with pipelines no rank has the whole model.

        Raises:
            UnsupportedError: The plan has pipelines.
        """
        if self.pipelines is None:
            return super().predict_step(*args, **kwargs)
        raise UnsupportedError("no rank of a pipeline has the whole model; predict from a checkpoint, with another strategy.")

    def _evaluate(self, stage: str, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        assert self.pipelines is not None
        module: Any = self.lightning_module
        loaders = module.trainer.val_dataloaders if stage == "val" else module.trainer.test_dataloaders
        batches = torch.utils._pytree.tree_leaves(loaders)[dataloader_idx].batch_sampler
        means = self.pipelines.evaluate(batch, weight=float(batches.next_taken().weight > 0))
        self._log(stage, means, sync_dist=True)  # equal anyway; said so that Lightning does not warn

    def _log(self, stage: str, means: Means, **options: Any) -> None:
        module: Any = self.lightning_module
        for name, value in (("loss", means.loss), *means.further.items()):
            module.log(f"{stage}_{name}", value.to(self.root_device), batch_size=int(means.count), **options)

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """In the precision plugin's place: the norm is over all stages."""
        assert self.pipelines is not None
        self.pipelines.clip_norm([p for group in optimizer.param_groups for p in group["params"]], float(clip_val))

    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """In its place too: torch's function takes no mixture of sharded and whole gradients, and not none at all."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    local(parameter.grad).clamp_(-clip_val, clip_val)

    # ---- states -------------------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Where each rank reads its own layers: it knows them once it is set up."""
        return self.saves_own and (self._automatic or (self.plan is not None and not is_data_parallel(self.plan)))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's on rank 0, as one process would have it; with LocalFirst what each rank holds."""
        if self.pipelines is None:
            return super().lightning_module_state_dict()
        return states.own_model_state(self.pipelines) if self.saves_own else states.model_state(self.pipelines)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer's on rank 0, as one process would have it; with LocalFirst what each rank holds."""
        if self.pipelines is None:
            return super().optimizer_state(optimizer)
        of = states.own_optimizer_state if self.saves_own else states.optimizer_state
        return of(self.pipelines, getattr(optimizer, "_optimizer", optimizer))

    def places(self) -> Callable[[str, Tensor], Tensor | None] | None:
        """Where this rank reads saved tensors to (:func:`~lightning_hetero.parallel.pipeline.states.places`); ``None``: all."""
        return None if self.pipelines is None else states.places(self.pipelines)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Loads a whole state dict: into the whole module, or, once it is cut, what this rank holds."""
        if self.pipelines is None:
            super().load_model_state_dict(checkpoint, strict=strict)
        else:
            states.load_model_state(self.pipelines, checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Loads what this rank holds of a whole optimizer's state."""
        if self.pipelines is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            states.load_optimizer_state(self.pipelines, optimizer, state)

    def teardown(self) -> None:
        """Gives clipping back to the precision plugin. A pipeline's layers stay on their device: other ranks hold the rest."""
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            vars(self.precision_plugin).pop(name, None)
        if self.pipelines is None:
            super().teardown()
            return
        self._end_elastic()
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator):
            assert part is not None
            part.teardown()


class _Parked(torch.autograd.Function):
    """A loss whose backward has been run: its own backward restores the parked gradients, scaled as the loss was."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, restore: Any) -> Tensor:
        ctx.restore = restore
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.restore(gradients[0])
        return None, None, None
