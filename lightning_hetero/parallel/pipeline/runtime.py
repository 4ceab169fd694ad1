"""One rank of the pipelines: steps and evaluation by torch's schedules.

Gradients are kept here until Lightning's backward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils import _pytree as pytree

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.parallel.pipeline.layers import Layers
from lightning_hetero.parallel.pipeline.layout import RankLayout
from lightning_hetero.parallel.pipeline.module import run_layers
from lightning_hetero.parallel.pipeline.sums import Sums, joined, num_samples, split
from lightning_hetero.parallel.pipeline.synchronise import Groups, Synchronisation, broadcast, local
from lightning_hetero.parallel.pipeline.tensor import parallelize, same_random_numbers

_SCHEDULES = 8  # cached for batch shapes; each has its own receive buffers
_ADDITIVE = 1e-2  # relative difference allowed between the loss of two micro-batches together and their sum


@dataclass(frozen=True)
class Means:
    """A step's or a batch's sums over all groups, divided by their items; the same on all ranks.

    Attributes:
        loss: The loss, float64, on the CPU.
        count: The number of items.
        further: The other sums of ``loss_sum``.
    """

    loss: Tensor
    count: float
    further: dict[str, Tensor]


class Pipelines:
    """This rank's stage, and its collective work with other ranks.

    All ranks call :meth:`train`, :meth:`evaluate` and :meth:`clip_norm` at the same time. After
    :meth:`train` gradients are kept here; :meth:`restore` gives them to the parameters.

    Attributes:
        layout: The work of all ranks.
        layers: The module's layers.
        rank: This rank.
        own: This rank's layers.
        groups: The process groups.
        synchronisation: Sums gradients over owners.
    """

    def __init__(
        self,
        layers: Layers,
        layout: RankLayout,
        *,
        rank: int,
        device: torch.device,
        timeout: timedelta | None = None,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Makes the groups, gives all ranks rank 0's weights, and keeps only this stage's layers.

        Args:
            layers: The layers of the whole module, in host memory.
            layout: The plan for these ranks and layers.
            rank: This rank in the default process group.
            device: Its device.
            timeout: Timeout of the process groups; they do not inherit the default group's.
            context: Entered around the forward of layers and the loss: autocast, a default dtype.
        """
        self.layers, self.layout, self.rank, self.device = layers, layout, rank, device
        self.slot = layout.slots[rank]
        self.own = own = range(0) if self.slot is None else layout.layers(self.slot.group, self.slot.stage)
        self.groups = Groups(layout, layers, timeout)
        broadcast(layers, device)
        layers.keep(own, device)
        self.synchronisation = Synchronisation(layout, layers, self.groups, rank)
        if self.slot is not None and layout.num_shards > 1:
            stage = self.groups.of(layout.stage(self.slot.group, self.slot.stage))
            parallelize(layers, own, DeviceMesh.from_group(stage, device.type))
        self.share_random_numbers()
        self._context = context
        self._stage = _Stage([layers.modules[i] for i in own], context)
        self._pipeline = () if self.slot is None else layout.pipeline(self.slot.group, self.slot.shard)
        self._schedules: OrderedDict[Any, Any] = OrderedDict()
        self._micro: list[Any] = []
        self._found: dict[int, Sums] = {}
        self._outputs: dict[int, Any] | None = {}  # outputs of the first step, until the loss is known to be additive
        self._names: dict[bool, tuple[str, ...]] = {}  # names of further sums, in training and in evaluation
        self._parked: dict[nn.Parameter, Tensor] = {}
        self._count = 1.0

    def share_random_numbers(self) -> None:
        """Gives the ranks of a stage the random numbers of its first rank; all of them call it."""
        if self.slot is not None and self.layout.num_shards > 1:
            same_random_numbers(self.groups.of(self.layout.stage(self.slot.group, self.slot.stage)), self.device)

    @property
    def is_last(self) -> bool:
        """Whether losses are computed here."""
        return self.slot is not None and self.slot.stage == self.layout.depth(self.slot.group) - 1

    @property
    def group(self) -> int:
        """The group whose batches this rank loads: its own.

        An idle rank loads the first group's.
        """
        return 0 if self.slot is None else self.slot.group

    # ---- steps -----------------------------------------------------------------------------------

    def train(self, batch: Any) -> Means:
        """Forward and backward of this group's part of a step, in the plan's micro-batches.

        Restored gradients of earlier calls do not change.

        Args:
            batch: The group's part, equal on all ranks of the group.
        """
        if self._outputs is not None:
            self._check_samples(batch)
        parameters = self.parameters()
        before = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        self._run(batch, self.layout.micro_batches[self.group], training=True)
        self._parked = self.synchronisation.reduce()
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        additive = self._is_additive()
        means = self._means(1.0, training=True, failed=not additive)
        self._count = means.count
        return means

    @torch.no_grad()
    def restore(self, scale: Tensor) -> None:
        """Adds the kept gradients, divided by the step's items, to those of the parameters.

        Args:
            scale: The gradient of the mean loss, a scalar: 1, or less if several batches form a
                step.
        """
        factor = scale.detach().double() / self._count
        parked, self._parked = self._parked, {}
        for parameter, gradient in parked.items():
            local(gradient).mul_(factor.to(gradient.device))
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)

    @torch.no_grad()
    def evaluate(self, batch: Any, *, weight: float = 1.0) -> Means:
        """Forward of a batch, in as many equal micro-batches as possible.

        Args:
            batch: The group's part.
            weight: 0 for a batch of another group, which is computed because all ranks must take
                part.
        """
        most = self.layout.micro_batches[self.group]
        samples = num_samples(batch)
        self._run(batch, max(k for k in range(1, most + 1) if samples % k == 0), training=False)
        return self._means(weight, training=False)

    def _run(self, batch: Any, count: int, *, training: bool) -> None:
        self._found = {}
        if self.slot is None:
            return
        self._micro = split(batch, count)
        schedule = self._schedule(self.slot.stage, count, training=training)
        arguments: list[Tensor] = []
        if self.slot.stage == 0:  # torch 2.11 accepts no other strides
            arguments = [t.contiguous() for t in self.layers.stage_inputs(batch)]
        options = {"target": torch.arange(count)} if self.is_last else {}
        run = schedule.step if training else schedule.eval
        run(*arguments, **options, return_outputs=False)
        self._micro = []

    def _schedule(self, index: int, count: int, *, training: bool) -> Any:
        """A torch schedule for batches of this shape; all ranks of a group see the same shapes."""
        shapes = [(tuple(t.shape), t.dtype) for t in pytree.tree_leaves(self._micro[0]) if isinstance(t, Tensor)]
        # A stage learns once whether its inputs and outputs need gradients, but layers may be
        # frozen or unfrozen.
        trained = tuple(p.requires_grad for p in self.layers.module.parameters()) if training else ()
        key = (training, torch.is_inference_mode_enabled(), count, tuple(shapes), trained)
        if key not in self._schedules:
            group = self.groups.of(self._pipeline)
            stage = PipelineStage(self._stage, index, len(self._pipeline), self.device, group=group)
            stage.stage_index_to_group_rank = {s: dist.get_group_rank(group, r) for s, r in enumerate(self._pipeline)}
            # Evaluation may have fewer micro-batches than stages; 1F1B does not allow that.
            kind: Any = Schedule1F1B if training else ScheduleGPipe
            self._schedules[key] = kind(stage, count, loss_fn=self._loss, scale_grads=False)
            if len(self._schedules) > _SCHEDULES:
                self._schedules.popitem(last=False)
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _loss(self, output: Any, index: Tensor) -> Tensor:
        """The loss of one micro-batch.

        Torch also calls it to learn shapes; the last call counts.
        """
        number = int(index)
        batch = self._micro[number]
        hooks: Any = self.layers.module
        with self._context():
            sums = Sums.of(hooks.loss_sum(output, batch), batch)
        self._found[number] = sums
        if self._outputs is not None and number < 2:
            self._outputs[number] = pytree.tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, output), batch
        return sums.loss

    def _check_samples(self, batch: Any) -> None:
        """Checks in the first step that all ranks of a group have the same inputs and targets."""
        sums = [float(t.double().sum()) for t in pytree.tree_leaves(batch) if isinstance(t, Tensor)]
        of_all: list[Any] = [None] * len(self.layout.slots)
        dist.all_gather_object(of_all, (self.group, sums))
        if len({(group, repr(found)) for group, found in of_all}) > self.layout.num_groups:
            raise UnsupportedError(
                "ranks of one pipeline loaded different batches: what a dataset gives for a sample must not depend on the rank or "
                "on random numbers. Draw those in a layer, or from a generator that the sample seeds."
            )

    @torch.no_grad()
    def _is_additive(self) -> bool:
        """Checks in the first step that the loss of two micro-batches is the sum of both."""
        kept, self._outputs = self._outputs or {}, None
        if len(kept) < 2:
            return True
        (one, first), (other, second) = kept[0], kept[1]
        batch = joined(first, second)
        hooks: Any = self.layers.module
        with self._context():
            both = Sums.of(hooks.loss_sum(joined(one, other), batch), batch)
        apart = self._found[0].loss + self._found[1].loss
        return bool((both.loss - apart).abs() <= _ADDITIVE * apart.abs() + 1e-6) or not bool(torch.isfinite(both.loss))

    # ---- exchange between groups -----------------------------------------------------------------

    def _means(self, weight: float, *, training: bool, failed: bool = False) -> Means:
        names = self._agreed_names(training=training)
        row = torch.zeros(3 + len(names), dtype=torch.float64)
        if self.slot is not None and self.is_last and self.slot.shard == 0:
            for sums in self._found.values():
                row[:-1] += weight * sums.as_row(names)
            unknown = {name for sums in self._found.values() for name in sums.further} - set(names)
            row[-1] = 1.0 * failed + 1e6 * bool(unknown)
        self._found = {}
        row = row.to(self.device)
        dist.all_reduce(row)
        row = row.cpu()
        if row[-1] >= 1e6:
            raise UnsupportedError(f"loss_sum gave other names than at first, {list(names)}; give the same ones for all batches.")
        if row[-1]:
            raise UnsupportedError(
                "loss_sum is not additive: of two micro-batches together it is not the sum of theirs, so gradients would depend on "
                "how groups cut a step. Sum over items instead of taking the mean (reduction='sum')."
            )
        count = float(row[1])
        return Means(row[0] / count, count, {n: v / count for n, v in zip(names, row[2:-1], strict=True)})

    def _agreed_names(self, *, training: bool) -> tuple[str, ...]:
        if training not in self._names:
            own = sorted({name for sums in self._found.values() for name in sums.further})
            of_all: list[Any] = [None] * len(self.layout.slots)
            dist.all_gather_object(of_all, own)
            self._names[training] = tuple(sorted({name for names in of_all for name in names}))
        return self._names[training]

    # ---- parameters ------------------------------------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters."""
        named = dict(self.layers.module.named_parameters())
        return [named[name] for name in self.synchronisation.names()]

    @torch.no_grad()
    def clip_norm(self, parameters: list[nn.Parameter], most: float) -> Tensor:
        """Scales gradients so that the norm of all of them, of all stages, is at most ``most``.

        The norms of single parameters are added up in the order of ``parameters`` on every rank:
        replicas stay equal bit for bit.

        Args:
            parameters: The parameters of the whole model in its order, on any rank.
            most: The largest norm.

        Returns:
            The norm before.
        """
        counted = set(self._counted_once())
        wide = any(p.dtype == torch.float64 for p in parameters)
        norms = torch.zeros(len(parameters), dtype=torch.float64 if wide else torch.float32, device=self.device)
        for i, parameter in enumerate(parameters):
            if parameter.grad is not None:
                norm: Any = torch.linalg.vector_norm(parameter.grad)
                value = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                if parameter in counted:
                    norms[i] = value
        if self.slot is not None:
            dist.all_reduce(norms, group=self.groups.of(self._pipeline))
        total: Tensor = torch.linalg.vector_norm(norms)
        factor = torch.clamp(most / (total + 1e-6), max=1.0)  # as in torch.nn.utils.clip_grads_with_norm_
        for parameter in parameters:
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor)
        return total

    def _counted_once(self) -> list[nn.Parameter]:
        """This stage's parameters, without tied ones of an earlier stage of the pipeline."""
        if self.slot is None:
            return []
        named, tied = dict(self.layers.module.named_parameters()), self.layers.tied
        begin = self.layout.layers(self.slot.group, self.slot.stage).start
        return [named[name] for name in self.synchronisation.names() if name not in tied or tied[name][0] >= begin]


class _Stage(nn.Module):
    """Layers one after another, inside a context."""

    def __init__(self, layers: list[nn.Module], context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.context = context

    def forward(self, *values: Any) -> Any:
        with self.context():
            return run_layers(self.layers, values if len(values) > 1 else values[0])
