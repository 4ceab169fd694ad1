"""What a strategy does where its cluster plan has pipelines: its methods call those of :class:`PipelineSteps` then."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.ir.cluster_plan import ClusterPlan
from lightning_hetero.parallel.pipeline import states
from lightning_hetero.parallel.pipeline.automatic import node_name
from lightning_hetero.parallel.pipeline.layers import Layers
from lightning_hetero.parallel.pipeline.layout import NODE, Layout
from lightning_hetero.parallel.pipeline.module import StagedSteps
from lightning_hetero.parallel.pipeline.runtime import Means, Pipelines
from lightning_hetero.parallel.pipeline.synchronise import local
from lightning_hetero.parallel.shares import SharedBatches
from lightning_hetero.parallel.strategies.uneven import UnevenBatches, with_batches
from lightning_hetero.strategies.namespaces import lightning_of
from lightning_hetero.strategies.patches import Patches

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import Precision


class PipelineSteps:
    """Trains and evaluates one module in pipelines.

    Args:
        pipelines: The pipelines, with this rank's stage.
        plan: The plan that they follow.
        module: The LightningModule.
        device: This rank's device.
    """

    def __init__(self, pipelines: Pipelines, plan: ClusterPlan, module: pl.LightningModule, device: torch.device) -> None:
        self.pipelines, self._plan, self._module, self._device = pipelines, plan, module, device
        self._patches = Patches()

    def set_up(self, precision: Precision) -> None:
        """Clipping goes over all stages until :meth:`close`."""
        self._patches.replace(precision, "clip_grad_by_norm", self._clip_by_norm)
        self._patches.replace(precision, "clip_grad_by_value", self._clip_by_value)

    def close(self) -> None:
        """Gives clipping back to the precision plugin. Layers stay on their device: other ranks hold the rest."""
        self._patches.restore()

    # ---- data -------------------------------------------------------------------------------------------------------------

    def cut(self, dataloader: Any, uneven: UnevenBatches) -> Any:
        """Gives every group its part of each batch: in training as many micro-batches as the plan says, else in proportion to them.

        Raises:
            UnsupportedError: The samples cannot be cut: an iterable dataset, batches of the user's own.
            ConfigError: There are not enough samples for one step.
        """
        uneven.check(dataloader)
        layout, training, micro_batches = self.pipelines.layout, uneven.is_training(), self._plan.micro_batches
        batches = SharedBatches(
            dataloader.sampler,
            batch=dataloader.batch_size * (micro_batches if training else layout.num_groups),
            seconds=[1 / count for count in layout.micro_batches],
            rank=self.pipelines.group,
            drop_last=training or dataloader.drop_last,
        )
        if training and not len(batches):
            raise ConfigError(
                f"the training data has {len(dataloader.sampler)} samples; one step takes {batches.batch}: {micro_batches} "
                f"micro-batches of {dataloader.batch_size}. Use a smaller batch_size or a plan with fewer micro-batches."
            )
        return with_batches(dataloader, batches)

    @property
    def train_batches(self) -> SharedBatches:
        """How the training data is cut."""
        loader: Any = self._module.trainer.train_dataloader
        batches: SharedBatches = loader.batch_sampler
        return batches

    # ---- steps ------------------------------------------------------------------------------------------------------------

    def train(self, batch: object) -> Tensor:
        """Forward and backward of the whole step. Lightning's backward, after it has zeroed gradients, gives it theirs."""
        self.train_batches.next_taken()
        means = self.pipelines.train(batch)
        self._log("train", means, prog_bar=True)
        parked: Any = _Parked
        loss: Tensor = parked.apply(torch.zeros((), requires_grad=True), means.loss.to(self._device), self.pipelines.restore)
        return loss

    def evaluate(self, stage: str, batch: object, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Forward of a batch, all groups' parts of it.

        Args:
            stage: ``"val"`` or ``"test"``.
            batch: The batch.
            batch_idx: Its number.
            dataloader_idx: That of its dataloader.
        """
        trainer = self._module.trainer
        loaders = trainer.val_dataloaders if stage == "val" else trainer.test_dataloaders
        batches = torch.utils._pytree.tree_leaves(loaders)[dataloader_idx].batch_sampler
        means = self.pipelines.evaluate(batch, weight=float(batches.next_taken().weight > 0))
        self._log(stage, means, sync_dist=True)  # equal anyway; said so that Lightning does not warn

    def _log(self, stage: str, means: Means, *, prog_bar: bool = False, sync_dist: bool = False) -> None:
        for name, value in (("loss", means.loss), *means.further.items()):
            self._module.log(
                f"{stage}_{name}", value.to(self._device), batch_size=int(means.count), prog_bar=prog_bar, sync_dist=sync_dist
            )

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """In the precision plugin's place: the norm is over all stages."""
        self.pipelines.clip_norm([p for group in optimizer.param_groups for p in group["params"]], float(clip_val))

    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """In its place too: torch's function takes no mixture of sharded and whole gradients, and not none at all."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    local(parameter.grad).clamp_(-clip_val, clip_val)

    # ---- states -----------------------------------------------------------------------------------------------------------

    def model_state(self, *, own: bool) -> dict[str, Tensor]:
        """The whole module's on rank 0, as one process would have it; ``own``: what each rank holds."""
        of: Callable[[Pipelines], dict[str, Tensor]] = states.own_model_state if own else states.model_state
        return of(self.pipelines)

    def optimizer_state(self, optimizer: Optimizer, *, own: bool) -> dict[str, Any]:
        """The same of an optimizer."""
        of = states.own_optimizer_state if own else states.optimizer_state
        return of(self.pipelines, getattr(optimizer, "_optimizer", optimizer))


def built(module: pl.LightningModule, plan: ClusterPlan, strategy: Any, *, named: bool) -> Pipelines:
    """The pipelines of a plan.

    Args:
        module: The LightningModule.
        plan: The plan.
        strategy: The strategy, whose ranks have met.
        named: The plan names nodes as they name themselves.
    """
    layers = Layers(module)
    repeated = layers.repeated(sum(stage.layers for stage in plan.groups[0].stages))
    layout = Layout.of(plan, num_layers=len(layers), repeated=repeated, nodes=_nodes(strategy.world_size, named=named))
    return Pipelines(
        layers,
        layout,
        rank=strategy.global_rank,
        device=strategy.root_device,
        timeout=strategy._timeout,
        context=strategy.precision_plugin.forward_context,
    )


def planned_speeds(plan: ClusterPlan, world_size: int, *, named: bool) -> tuple[float, ...]:
    """For each rank the micro-batches that a plan without pipelines gives it."""
    layers = range(plan.groups[0].stages[0].layers)
    layout = Layout.of(plan, num_layers=len(layers), repeated=layers, nodes=_nodes(world_size, named=named))
    return tuple(float(layout.micro_batches[slot.group]) for slot in layout.slots if slot is not None)


def _nodes(world_size: int, *, named: bool) -> list[str | None]:
    """The plan's name of each rank's node, where it is known."""
    nodes: list[str | None] = [None] * world_size
    dist.all_gather_object(nodes, node_name() if named else os.environ.get(NODE))
    return nodes


def check_module(module: pl.LightningModule, precision: Precision) -> None:
    """Refuses a module that steps by itself, and a precision that pipelines cannot have.

    Raises:
        UnsupportedError: It says which.
    """
    if not module.automatic_optimization:
        raise UnsupportedError("pipelines run one step's forward and backward together; use automatic optimization.")
    if precision.precision == "16-mixed":
        raise UnsupportedError("precision='16-mixed' scales losses by what gradients overflow; use 'bf16-mixed' with pipelines.")


def check_optimizers(optimizers: list[Optimizer]) -> None:
    """Refuses several optimizers, and one that evaluates the loss several times.

    Raises:
        UnsupportedError: It says which.
    """
    if len(optimizers) != 1:
        raise UnsupportedError(f"configure_optimizers gave {len(optimizers)} optimizers; pipelines train with one.")
    if isinstance(optimizers[0], LBFGS):
        raise UnsupportedError("LBFGS evaluates the loss several times a step; use another optimizer with pipelines.")


def say_what_runs(module: pl.LightningModule) -> None:
    """Warns of steps of the module's own, which are not executed."""
    base = lightning_of(module).module().LightningModule
    own = []
    for name in ("training_step", "validation_step", "test_step"):
        written = getattr(type(module), name)
        if written not in (getattr(StagedSteps, name), getattr(base, name)):
            own.append(name)
    if own:
        warnings.warn(
            f"{type(module).__name__}.{', '.join(own)} will NOT be executed: pipelines run stage_layers() and "
            "loss_sum(output, batch), and log train_loss, val_loss and test_loss. "
            "lightning_hetero.parallel.StagedSteps has steps that do the same with every strategy.",
            stacklevel=2,
        )


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
