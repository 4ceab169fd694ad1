"""``hetero_parallel`` with FSDP2: batches cut by speed, everything else sharded."""

from __future__ import annotations

from typing import Any

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.parallel.stopwatch import Stopwatch
from lightning_hetero.strategies.hetero_parallel import HeteroParallel


class HeteroParallelFsdp(HeteroParallel):
    """``hetero_parallel`` with FSDP2: weights, gradients and optimizer state are sharded over the ranks.

    As with Lightning's :class:`~lightning.pytorch.strategies.ModelParallelStrategy`, the module's ``configure_model`` applies
    ``fully_shard`` with ``self.device_mesh["data_parallel"]``; by default all ranks are in that dimension. With tensor parallelism
    the ranks of one data-parallel part have the same samples.

    Speeds are those of forward alone, of the innermost sharded modules: everything else waits for other ranks.

    Args:
        data_parallel_size: Parts; ``"auto"``: all ranks that tensor parallelism leaves.
        tensor_parallel_size: Ranks of one part.
        options: Those of :class:`HeteroParallel`, ``speeds`` one for each part. Everything else is given to Lightning's
            ``ModelParallelStrategy``.
    """

    strategy_name = "hetero_parallel_fsdp"

    def __init__(self, *, data_parallel_size: int | str = "auto", tensor_parallel_size: int = 1, **options: Any) -> None:
        if "offload" in options:
            raise UnsupportedError(
                f"{self.strategy_name!r} got offload={options['offload']!r}; weights that are sharded have no tiers. "
                f"Use HeteroParallelStrategy(offload=...), whose ranks hold the whole model, or leave offload out."
            )
        super().__init__(data_parallel_size=data_parallel_size, tensor_parallel_size=tensor_parallel_size, **options)
        self._mesh_sizes = data_parallel_size, tensor_parallel_size

    def setup_environment(self) -> None:
        """Puts all ranks into the data-parallel dimension where its size is not given."""
        data, tensor = self._mesh_sizes
        assert self.cluster_environment is not None
        ranks = self.cluster_environment.world_size() if self._under_torchrun else self.num_nodes * self.num_processes
        self._data_parallel_size = ranks // tensor if data == "auto" else data
        super().setup_environment()

    @property
    def _parts(self) -> tuple[int, int]:
        of_mesh = super(HeteroParallel, self).distributed_sampler_kwargs  # ModelParallelStrategy's
        return int(of_mesh["num_replicas"]), int(of_mesh["rank"])

    def _part_names(self) -> tuple[str, ...]:
        return self._names[:: self._mesh_sizes[1]]

    def _watch(self, stopwatch: Stopwatch) -> None:
        from torch.distributed.fsdp import FSDPModule

        assert self.lightning_module is not None
        sharded: list[Any] = [m for m in self.lightning_module.modules() if isinstance(m, FSDPModule)]
        stopwatch.watch_forward(m for m in sharded if not any(isinstance(c, FSDPModule) for c in m.modules() if c is not m))
