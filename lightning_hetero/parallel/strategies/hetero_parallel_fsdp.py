"""``hetero_parallel`` with FSDP2: batches cut by speed, and a model sharded over the ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.parallel.elastic import Elastic
from lightning_hetero.parallel.stopwatch import Stopwatch
from lightning_hetero.parallel.strategies.uneven import UnevenBatches, UnevenOptions, whole_numbers_as_reals
from lightning_hetero.strategies.namespaces import Lightning, lightning_of
from lightning_hetero.strategies.option_checks import check_names

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy as _Base
    from lightning.pytorch.utilities.types import STEP_OUTPUT
else:
    _Base = object  # the namespace's class comes second among the bases (strategies.namespaces)


class _ShardedBatches(UnevenBatches):
    """Uneven batches of ranks with sharded weights. Several ranks may compute one part together."""

    def __init__(self, strategy: HeteroParallelFsdp, options: UnevenOptions) -> None:
        super().__init__(strategy, strategy.strategy_name, options)
        self._fsdp = strategy

    def parts(self) -> tuple[int, int]:
        """The number of data-parallel parts of the device mesh, and this rank's."""
        return self._fsdp.parts

    def part_names(self) -> tuple[str, ...]:
        """The node of the first rank of each part."""
        return self.names[:: self._fsdp.ranks_per_part]

    def watch(self, stopwatch: Stopwatch) -> None:
        """Times the forward of the innermost sharded modules. All other time has waits in it."""
        from torch.distributed.fsdp import FSDPModule

        sharded: list[nn.Module] = [m for m in self.module.modules() if isinstance(m, FSDPModule)]
        stopwatch.watch_forward(m for m in sharded if not any(isinstance(c, FSDPModule) for c in m.modules() if c is not m))


class HeteroParallelFsdp(_Base):
    """``hetero_parallel`` with FSDP2: weights, gradients and state are sharded over the ranks.

    As with Lightning's :class:`~lightning.pytorch.strategies.ModelParallelStrategy`, the module's
    ``configure_model`` applies ``fully_shard`` with ``self.device_mesh["data_parallel"]``. By
    default all ranks are in that dimension. With tensor parallelism the ranks of one data-parallel
    part have the same samples.

    Speeds are those of the forward of the innermost sharded modules. Everything else waits for
    other ranks.

    Args:
        data_parallel_size: Number of parts; ``"auto"``: all ranks that tensor parallelism leaves.
        tensor_parallel_size: Ranks of one part.
        speeds: Relative speed of each part; as for
            :class:`~lightning_hetero.parallel.strategies.hetero_parallel.HeteroParallel`, likewise
            the next four.
        rebalance_every: Training batches between two comparisons of speeds.
        rebalance_drift: By how much, relatively, new shares must shorten a step.
        global_batch_size: Samples of a step, of all ranks.
        elastic: Where steps are committed.
        options: All other options go to Lightning's ``ModelParallelStrategy``.
    """

    strategy_name = "hetero_parallel_fsdp"

    def __init__(
        self,
        *,
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        speeds: Sequence[float] | Mapping[str, float] | None = None,
        rebalance_every: int = 20,
        rebalance_drift: float = 0.05,
        global_batch_size: int | None = None,
        elastic: str | os.PathLike[str] | Elastic | None = None,
        **options: Any,
    ) -> None:
        if "offload" in options:
            raise UnsupportedError(
                f"{self.strategy_name!r} got offload={options['offload']!r}; weights that are sharded have no tiers. "
                f"Use HeteroParallelStrategy(offload=...), whose ranks hold the whole model, or leave offload out."
            )
        check_names(type(self), options)
        super().__init__(data_parallel_size=data_parallel_size, tensor_parallel_size=tensor_parallel_size, **options)
        self._mesh_sizes = data_parallel_size, tensor_parallel_size
        uneven = UnevenOptions(
            speeds=speeds, rebalance_every=rebalance_every, rebalance_drift=rebalance_drift,
            global_batch_size=global_batch_size, elastic=elastic,
        )  # fmt: skip
        self.uneven = _ShardedBatches(self, uneven)

    @property
    def parts(self) -> tuple[int, int]:
        """The number of data-parallel parts of the device mesh, and this rank's."""
        of_mesh = super().distributed_sampler_kwargs
        return of_mesh["num_replicas"], of_mesh["rank"]

    @property
    def ranks_per_part(self) -> int:
        """The ranks that compute one part together."""
        return self._mesh_sizes[1]

    @property
    def shares(self) -> tuple[int, ...] | None:
        """Samples of each part in a full batch; ``None`` before training has begun."""
        return self.uneven.shares

    @property
    def stopwatch(self) -> Stopwatch | None:
        """Times training batches, if speeds are measured."""
        return self.uneven.stopwatch

    # ---- setup and teardown ----------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        """Makes none under torchrun. Lightning's wants as many ranks on every node."""
        if self.cluster_environment is not None and not self.cluster_environment.creates_processes_externally:
            super()._configure_launcher()

    def setup_environment(self) -> None:
        """Makes the device mesh. By default the ranks that tensor parallelism leaves are parts."""
        data, tensor = self._mesh_sizes
        environment = self.cluster_environment
        torchrun = lightning_of(self).module("plugins.environments").TorchElasticEnvironment
        ranks = environment.world_size() if isinstance(environment, torchrun) else self.num_nodes * self.num_processes
        self._data_parallel_size = ranks // tensor if data == "auto" else data
        super().setup_environment()
        self.uneven.ranks_met()

    def setup(self, trainer: pl.Trainer) -> None:
        """Sets up what the base class does, and watches the model to time it."""
        super().setup(trainer)
        if self.uneven.is_fit():
            self.uneven.fit_set_up()

    def on_exception(self, exception: BaseException) -> None:
        """Ends an elastic fit too: after an exception Lightning calls no other hook."""
        super().on_exception(exception)
        self.uneven.end_elastic()

    def teardown(self) -> None:
        """Takes the hooks off the modules."""
        self.uneven.end()
        super().teardown()

    # ---- training --------------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """In training one sampler over all samples, equal on all ranks; else Lightning's."""
        return self.uneven.sampler_options()

    def process_dataloader(self, dataloader: object) -> object:
        """Cuts the batches of the training data by the shares."""
        return self.uneven.cut(super().process_dataloader(dataloader))

    def on_train_start(self) -> None:
        """Continues an epoch where the checkpoint was saved."""
        super().on_train_start()
        self.uneven.train_starts()

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Takes this rank's share of the batch, and compares speeds from time to time."""
        super().on_train_batch_start(batch, batch_idx)
        self.uneven.batch_begins()

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Times the step from here on."""
        self.uneven.step_begins()
        return super().training_step(*args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Does not round means of whole numbers: uneven batch sizes need not divide evenly."""
        return super().reduce(whole_numbers_as_reals(tensor, reduce_op), group, reduce_op)


def class_for(lightning: Lightning) -> type[HeteroParallelFsdp]:
    """The class for Trainers of a namespace."""
    return lightning.subclass(HeteroParallelFsdp, "strategies.ModelParallelStrategy", name="HeteroParallelFsdpStrategy")
