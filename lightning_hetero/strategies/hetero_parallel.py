"""``Trainer(strategy="hetero_parallel")``: data parallelism over devices that differ, batches cut by their speed."""

from __future__ import annotations

import copy
import importlib
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.parallel.elastic import Elastic, elastic_from, node_name
from lightning_hetero.parallel.shares import SharedBatches, Taken, cut
from lightning_hetero.parallel.stopwatch import Stopwatch
from lightning_hetero.strategies import elastic as elastic_callback
from lightning_hetero.strategies.console import speak
from lightning_hetero.strategies.data import set_sampler_epoch
from lightning_hetero.strategies.resume import end_batch

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object  # the namespace's class comes second among the bases (strategies.factory)

log = logging.getLogger(__name__)


class HeteroParallel(_Base):
    """Data parallelism for devices of different speed: batches are cut by speed, gradients weighted by samples.

    A step trains on ``batch_size`` samples times the number of devices, as with DDP, or on ``global_batch_size``, but a rank that
    is twice as fast gets twice as many of them. The gradient is that of the mean over all samples of the step, whoever computed
    them: that of one process with the whole batch, but for the order of additions. Samples come in the order of one
    :class:`~torch.utils.data.DistributedSampler` over all of them. A last batch that is not full is cut like any other, nothing is
    repeated. The loss has to be a mean over the samples of its batch.

    Validation and testing are DDP's. Under torchrun there are as many ranks as it starts, whatever ``num_nodes`` says.

    Args:
        speeds: Relative speed of each rank, by rank, such as ``[1, 1, 3]``, or by the name of its node, such as ``{"spot": 3.0}``:
            the name in the cluster plan that was launched, else the host's. Default: equal at first, then as measured.
        rebalance_every: Training batches between two looks at the speeds; 0: ``speeds`` stay.
        rebalance_drift: By how much, relatively, other shares must shorten a step before they come into force.
        global_batch_size: Samples of a step, of all ranks. Default: ``batch_size`` times the number of ranks; an elastic run keeps
            what it began with.
        elastic: Where steps are committed, or an :class:`~lightning_hetero.parallel.elastic.Elastic`: a restart goes on from the
            newest one, with the ranks that are there. Default: the environment variable ``LIGHTNING_HETERO_STEPS``.
        ddp: Everything else is given to :class:`~lightning.pytorch.strategies.DDPStrategy`.
    """

    namespace = "lightning.pytorch"
    strategy_name = "hetero_parallel"

    def __init__(
        self,
        *,
        speeds: Sequence[float] | Mapping[str, float] | None = None,
        rebalance_every: int = 20,
        rebalance_drift: float = 0.05,
        global_batch_size: int | None = None,
        elastic: str | os.PathLike[str] | Elastic | None = None,
        **ddp: Any,
    ) -> None:
        super().__init__(**ddp)
        numbers = speeds.values() if isinstance(speeds, Mapping) else speeds or ()
        if not all(isinstance(s, int | float) and 0 < s < float("inf") for s in numbers):
            raise ConfigError(f"speeds={speeds!r}; allowed: a positive number for each rank, or for each node by its name.")
        whole = isinstance(global_batch_size, int) and not isinstance(global_batch_size, bool) and global_batch_size > 0
        if global_batch_size is not None and not whole:
            raise ConfigError(
                f"global_batch_size={global_batch_size!r}; allowed: a whole number of samples, at least one for each rank."
            )
        if isinstance(rebalance_every, bool) or not isinstance(rebalance_every, int) or rebalance_every < 0:
            raise ConfigError(f"rebalance_every={rebalance_every!r}; allowed: a whole number of batches, 0 for never.")
        if not isinstance(rebalance_drift, int | float) or not 0 <= rebalance_drift < float("inf"):
            raise ConfigError(f"rebalance_drift={rebalance_drift!r}; allowed: a number of at least 0.")
        self._speeds = speeds
        self._global_batch = global_batch_size
        self._elastic = elastic_from(elastic)
        self._elastic_callback: Any = None
        self._names: tuple[str, ...] = ()  # of the ranks' nodes
        self._known: dict[str, float] = {}  # seconds of one sample by node, as measured before a restart
        self._every, self._drift = rebalance_every, float(rebalance_drift)
        self._batches: SharedBatches | None = None
        self._taken = Taken(1, 1.0)
        self._since = 0  # training batches since the last look
        self.stopwatch: Stopwatch | None = None

    @property
    def shares(self) -> tuple[int, ...] | None:
        """Samples of each rank in a full batch; ``None`` before training has begun."""
        return None if self._batches is None else self._batches.shares

    # ---- setup --------------------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        """None where torchrun has started the processes: Lightning's wants as many on every node, and always as many nodes."""
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            super()._configure_launcher()

    @property
    def _under_torchrun(self) -> bool:
        environments = importlib.import_module(f"{self.namespace}.plugins.environments")
        return isinstance(self.cluster_environment, environments.TorchElasticEnvironment)

    def setup_environment(self) -> None:
        """Asks all ranks on which node they are; a fit that is elastic gets its callback."""
        super().setup_environment()
        speak(self.namespace)
        names: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(names, node_name())
        self._names = tuple(names)
        if self._elastic is not None and self._is_fitting():
            self._elastic_callback = elastic_callback.make(self.namespace, self._elastic)
            self._callbacks().append(self._elastic_callback)

    def setup(self, trainer: Any) -> None:
        """Sets up what the base class does, and watches the model to time it."""
        super().setup(trainer)
        if self._is_fitting() and self._every:
            self.stopwatch = Stopwatch(self.root_device, window=max(self._every // 2, 1))
            self._watch(self.stopwatch)

    def _watch(self, stopwatch: Stopwatch) -> None:
        """Has the stopwatch end a batch with the last gradient: DDP reduces behind it."""
        assert self.lightning_module is not None
        stopwatch.watch_gradients(self.lightning_module.parameters())

    def on_exception(self, exception: BaseException) -> None:
        """A fit that has failed gives back the signal: Lightning calls no other hook."""
        super().on_exception(exception)
        self._end_elastic()

    def teardown(self) -> None:
        """Takes the hooks off the parameters."""
        if self.stopwatch is not None:
            self.stopwatch.stop_watching()
        self._end_elastic()
        super().teardown()

    def _end_elastic(self) -> None:
        if self._elastic_callback is None:
            return
        self._elastic_callback.end()
        if self._elastic_callback in self._callbacks():
            self._callbacks().remove(self._elastic_callback)
        self._elastic_callback = None

    def _callbacks(self) -> list[Any]:
        module: Any = self.lightning_module
        return [] if module is None or module._trainer is None else module._trainer.callbacks

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For training one sampler over everything, the same on all ranks; else DDP's."""
        parts, part = self._parts
        return {"num_replicas": 1, "rank": 0} if self._is_training() else {"num_replicas": parts, "rank": part}

    @property
    def _parts(self) -> tuple[int, int]:
        """Into how many parts a batch is cut, and which one is this rank's."""
        return int(self.world_size), int(self.global_rank)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Cuts the batches of the training data by the shares.

        Raises:
            UnsupportedError: Their samples cannot be cut: an iterable dataset, batches of the user's own, several loaders.
            ConfigError: ``speeds`` are not one for each rank.
        """
        dataloader = super().process_dataloader(dataloader)
        if not self._is_training():
            return dataloader
        self._check(dataloader)
        self._batches = SharedBatches(
            dataloader.sampler,
            batch=self._global_batch or dataloader.batch_size * self._micro_batches(),
            seconds=self._seconds(),
            rank=self._parts[1],
            drop_last=dataloader.drop_last,
        )
        return with_batches(dataloader, self._batches)

    def _micro_batches(self) -> int:
        """Batches of the loader's size that make one step."""
        return self._parts[0]

    def _seconds(self) -> tuple[float, ...]:
        """Of one sample on each rank: as measured before, as given, or equal."""
        parts, _ = self._parts
        if self._batches is not None and len(self._batches.seconds) == parts:
            return self._batches.seconds
        nodes = self._part_names()
        if self._known:
            new = sum(self._known.values()) / len(self._known)
            return tuple(self._known.get(name, new) for name in nodes)
        speeds = self._speeds or (1.0,) * parts
        if isinstance(speeds, Mapping):
            if strangers := sorted(set(nodes) - set(speeds)):
                raise ConfigError(f"speeds={dict(speeds)!r} lacks nodes {strangers}; give one for each node that may come.")
            speeds = [speeds[name] for name in nodes]
        if len(speeds) != parts:
            by_name = " Where ranks come and go, give them by the name of the node." if self._elastic is not None else ""
            raise ConfigError(f"speeds has {len(speeds)} numbers for {parts} ranks; give one for each.{by_name}")
        return tuple(1 / s for s in speeds)

    def _part_names(self) -> tuple[str, ...]:
        """The node of each part of a batch."""
        return self._names

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        raise UnsupportedError(f"strategy {self.strategy_name!r} got {what}; its batches cannot be cut by speed. {remedy}")

    def _check(self, dataloader: Any) -> None:
        if not isinstance(dataloader, DataLoader):
            self._refuse(f"{type(dataloader).__name__} as training data", "Pass one torch DataLoader.")
        if isinstance(dataloader.dataset, IterableDataset):
            self._refuse("an IterableDataset", "Use a dataset with __getitem__ and __len__.")
        if type(dataloader.batch_sampler) is not BatchSampler:
            self._refuse(f"batch_sampler={type(dataloader.batch_sampler).__name__}", "Pass batch_size and, if need be, a sampler.")
        sampler = dataloader.sampler
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas != 1:
            self._refuse("a sampler for one of several ranks", "Pass one over all samples, or none.")

    def on_train_start(self) -> None:
        """Refuses several loaders at once: each would have its own shares."""
        super().on_train_start()
        assert self.lightning_module is not None
        data = self.lightning_module.trainer.train_dataloader
        if not isinstance(data, DataLoader):
            self._refuse(f"{type(data).__name__} of loaders as training data", "Pass one torch DataLoader.")
        self._go_on()

    def _go_on(self) -> None:
        """Begins with the first batch that the checkpoint has not seen, if there is one: Lightning would begin the epoch anew."""
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        loop = trainer.fit_loop
        done = loop.epoch_loop.batch_progress.current.processed
        if loop.restarting and 0 < done < trainer.num_training_batches:
            set_sampler_epoch(trainer, self.namespace)
            trainer.train_dataloader.batch_sampler.begin_at(done)
            iter(loop._data_fetcher)
            # Lightning warns that data begins anew; it does not.
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")
        if self._elastic_callback is not None and self._elastic_callback.resumed is not None:
            end_batch(trainer, self.namespace)

    # ---- elastic ------------------------------------------------------------------------------------------------------------

    def elastic_state(self) -> dict[str, Any]:
        """What a restart wants to know: the samples of a step, and how fast the nodes are."""
        if self._batches is None:
            return {"global_batch_size": self._global_batch, "seconds": self._known}
        measured = dict(zip(self._part_names(), self._batches.seconds, strict=True)) if self._every else {}
        return {"global_batch_size": self._batches.batch, "seconds": self._known | measured}

    def load_elastic_state(self, state: dict[str, Any]) -> None:
        """Goes on with what another incarnation knew."""
        if self._global_batch is None:
            self._global_batch = state["global_batch_size"]
        self._known = dict(state["seconds"])

    # ---- steps --------------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Looks up what this rank has of the batch; every so often, looks at the speeds."""
        super().on_train_batch_start(batch, batch_idx)
        assert self._batches is not None
        self._check_order(self._batches)
        self._taken = self._batches.next_taken()
        self._since += 1
        if self._every and self._since > self._every:
            self._since = 0
            self._rebalance()

    def _check_order(self, batches: SharedBatches) -> None:
        """With the first batch of an epoch: a sampler of the user's own may draw other random numbers on each rank."""
        order = batches.take_order()
        if order is None or self.world_size == 1:
            return
        orders: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(orders, order)
        if len(set(orders)) > 1:
            raise UnsupportedError(
                "ranks have the samples of an epoch in different orders: their samplers do not agree, so some samples would be "
                "trained on twice and others never. Leave use_distributed_sampler on, or seed the sampler alike on all ranks."
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Times the step from here on."""
        if self.stopwatch is not None:
            self.stopwatch.start()
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Backward of the loss, weighted by this rank's part of the samples ([Note: Weights] in parallel/shares.py)."""
        weight = self._taken.weight
        out = super().backward(closure_loss if weight == 1 else closure_loss * weight, optimizer, *args, **kwargs)
        if self.stopwatch is not None:
            self.stopwatch.stop(self._taken.samples)
        return out

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Means of whole numbers are not rounded: with uneven batches the ranks' numbers of samples need not divide evenly."""
        if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point() and reduce_op in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def _rebalance(self) -> None:
        """Asks all ranks for their speed, and cuts batches anew where that makes a step faster; all come here at the same batch."""
        assert self.stopwatch is not None
        assert self._batches is not None
        own = self.stopwatch.seconds_per_sample()
        parts, part = self._parts
        report = torch.tensor([own or 0.0, self._batches.given, part], dtype=torch.float64, device=self.root_device)
        reports = [torch.empty_like(report) for _ in range(self.world_size)]
        torch.distributed.all_gather(reports, report)
        if not all(float(r[0]) for r in reports):  # somebody has not measured enough yet
            return
        seconds = [max(float(r[0]) for r in reports if int(r[2]) == p) for p in range(parts)]
        before, batch = self._batches.shares, self._batches.batch
        after = cut(batch, seconds, least=1)
        slowest_before = max(n * s for n, s in zip(before, seconds, strict=True))
        slowest_after = max(n * s for n, s in zip(after, seconds, strict=True))
        if after == before or slowest_after > (1 - self._drift) * slowest_before:
            return
        # Loaders read ahead: the first batch that no rank has begun to load.
        self._batches.change(seconds, start=max(int(r[1]) for r in reports))
        self.stopwatch.reset()
        if self.is_global_zero:
            log.info("Batches of %d samples are shared out anew: %s instead of %s.", batch, after, before)

    # ---- states -------------------------------------------------------------------------------------------------------------

    def _is_fitting(self) -> bool:
        states = importlib.import_module(f"{self.namespace}.trainer.states")
        module = self.lightning_module
        return module is not None and module._trainer is not None and module._trainer.state.fn == states.TrainerFn.FITTING

    def _is_training(self) -> bool:
        assert self.lightning_module is not None
        return self._is_fitting() and bool(self.lightning_module.trainer.training)


def with_batches(dataloader: Any, batches: SharedBatches) -> Any:
    """The same loader with other batches."""
    copied = copy.copy(dataloader)
    # DataLoader forbids to assign it, since workers may run; those of a copy do not.
    vars(copied)["batch_sampler"] = batches
    return copied
