"""The steps of ``hetero_parallel`` with a cluster plan that has pipelines."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.ir.cluster_plan import ClusterPlan
from lightning_hetero.parallel.pipeline.automatic import node_name
from lightning_hetero.parallel.pipeline.layers import Layers
from lightning_hetero.parallel.pipeline.layout import NODE, RankLayout
from lightning_hetero.parallel.pipeline.module import StagedSteps
from lightning_hetero.parallel.pipeline.runtime import Means, Pipelines
from lightning_hetero.parallel.pipeline.synchronise import local
from lightning_hetero.parallel.shares import SharedBatches
from lightning_hetero.parallel.strategies.uneven import UnevenBatches, train_batches, with_batches
from lightning_hetero.runtime.method_patches import Patches
from lightning_hetero.strategies.namespaces import lightning_of

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import Precision


class PipelineSteps:
    """Trains and evaluates one module in the pipelines of a plan, on this rank's device."""

    def __init__(self, pipelines: Pipelines, plan: ClusterPlan, module: pl.LightningModule, device: torch.device) -> None:
        self.pipelines, self._plan, self._module, self._device = pipelines, plan, module, device
        self._patches = Patches()

    def set_up(self, precision: Precision) -> None:
        """Clips by the gradients of all stages until :meth:`close`."""
        self._patches.replace(precision, "clip_grad_by_norm", self._clip_by_norm)
        self._patches.replace(precision, "clip_grad_by_value", self._clip_by_value)

    def close(self) -> None:
        """Gives clipping back to the precision plugin. The layers stay on their device."""
        self._patches.restore()

    # ---- data ------------------------------------------------------------------------------------

    def cut(self, dataloader: Any, uneven: UnevenBatches) -> Any:
        """Gives every group its part of each batch, in proportion to its micro-batches.

        A batch of training has all micro-batches of a step.

        Raises:
            UnsupportedError: The data is an iterable dataset, or its batches are made by the user.
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

    # ---- steps -----------------------------------------------------------------------------------

    def train(self, batch: object) -> Tensor:
        """Forward and backward of the whole step.

        Lightning zeroes gradients later. Its backward of the returned loss puts them back.
        """
        train_batches(self._module.trainer).next_taken()
        means = self.pipelines.train(batch)
        self._log("train", means, prog_bar=True)
        parked: Any = _Parked
        loss: Tensor = parked.apply(torch.zeros((), requires_grad=True), means.loss.to(self._device), self.pipelines.restore)
        return loss

    def evaluate(self, stage: str, batch: object, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Forward of this group's part of a batch; ``stage`` is ``"val"`` or ``"test"``."""
        trainer = self._module.trainer
        loaders = trainer.val_dataloaders if stage == "val" else trainer.test_dataloaders
        batches = torch.utils._pytree.tree_leaves(loaders)[dataloader_idx].batch_sampler
        means = self.pipelines.evaluate(batch, weight=float(batches.next_taken().weight > 0))
        self._log(stage, means, sync_dist=True)  # Lightning warns otherwise; the means are equal

    def _log(self, stage: str, means: Means, *, prog_bar: bool = False, sync_dist: bool = False) -> None:
        for name, value in (("loss", means.loss), *means.further.items()):
            self._module.log(
                f"{stage}_{name}", value.to(self._device), batch_size=int(means.count), prog_bar=prog_bar, sync_dist=sync_dist
            )

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Replaces the precision plugin's: the norm is over all stages."""
        self.pipelines.clip_norm([p for group in optimizer.param_groups for p in group["params"]], float(clip_val))

    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Replaces the plugin's: torch's refuses sharded and whole gradients together, and none."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    local(parameter.grad).clamp_(-clip_val, clip_val)


def built(module: pl.LightningModule, plan: ClusterPlan, strategy: Any, *, named: bool) -> Pipelines:
    """The pipelines of a plan. ``named``: the plan has the nodes' own names."""
    layers = Layers(module)
    repeated = layers.repeated(sum(stage.layers for stage in plan.groups[0].stages))
    layout = RankLayout.of(plan, num_layers=len(layers), repeated=repeated, nodes=_nodes(strategy.world_size, named=named))
    return Pipelines(
        layers,
        layout,
        rank=strategy.global_rank,
        device=strategy.root_device,
        timeout=strategy._timeout,
        context=strategy.precision_plugin.forward_context,
    )


def planned_speeds(plan: ClusterPlan, world_size: int, *, named: bool) -> tuple[float, ...]:
    """The micro-batches that a plan without pipelines gives to each rank."""
    layers = range(plan.groups[0].stages[0].layers)
    layout = RankLayout.of(plan, num_layers=len(layers), repeated=layers, nodes=_nodes(world_size, named=named))
    return tuple(float(layout.micro_batches[slot.group]) for slot in layout.slots if slot is not None)


def _nodes(world_size: int, *, named: bool) -> list[str | None]:
    """The plan's name of each rank's node, if it is known."""
    nodes: list[str | None] = [None] * world_size
    dist.all_gather_object(nodes, node_name() if named else os.environ.get(NODE))
    return nodes


def check_module(module: pl.LightningModule, precision: Precision) -> None:
    """Checks that pipelines can train a module.

    Raises:
        UnsupportedError: The module optimizes by hand, or the precision scales the loss.
    """
    if not module.automatic_optimization:
        raise UnsupportedError("pipelines run one step's forward and backward together; use automatic optimization.")
    if precision.precision == "16-mixed":
        raise UnsupportedError("precision='16-mixed' scales losses by what gradients overflow; use 'bf16-mixed' with pipelines.")


def check_optimizers(optimizers: list[Optimizer]) -> None:
    """Checks that pipelines can step the optimizers.

    Raises:
        UnsupportedError: There is more than one, or it evaluates the loss several times.
    """
    if len(optimizers) != 1:
        raise UnsupportedError(f"configure_optimizers gave {len(optimizers)} optimizers; pipelines train with one.")
    if isinstance(optimizers[0], LBFGS):
        raise UnsupportedError("LBFGS evaluates the loss several times a step; use another optimizer with pipelines.")


def say_what_runs(module: pl.LightningModule) -> None:
    """Warns of the module's own steps, which are not executed."""
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
    """A loss after its backward. Its own backward restores the gradients, scaled as the loss is."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, restore: Any) -> Tensor:
        ctx.restore = restore
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.restore(gradients[0])
        return None, None, None
