"""The strategy's callback: profiles batches, plans between them, compares steps with the plan."""

from __future__ import annotations

import io
import logging
from contextlib import nullcontext
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_hetero.ir.plan import BlockPlan, Plan, Prediction, Saved, Tier, UpdateLane
from lightning_hetero.planning.autoplan import Autoplan, BatchSize
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.runtime.session import Session
from lightning_hetero.strategies.namespaces import Lightning, lightning_of, public_names
from lightning_hetero.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import lightning.pytorch as pl
    from lightning.pytorch import Callback as _Base
    from lightning.pytorch.strategies import Strategy
    from torchmetrics import Metric
else:
    _Base = object  # the namespace's class is the second base

log = logging.getLogger(__name__)

_COLUMNS, _ROWS, _NAME = 80, 8, 36  # of the logged table; the longest name in it


_NAME_OF_CLASS = "ModelProfiler"  # a Trainer that is pickled has it


class _Run(Protocol):
    """What planning needs of a strategy's run (``strategies.offload``)."""

    strategy: Strategy
    session: Session | None

    @property
    def executor(self) -> Executor: ...

    def take_step_seconds(self) -> float | None: ...

    def forget_step_seconds(self) -> None: ...


def make(run: _Run, autoplan: Autoplan) -> PlanningCallback:
    """The callback for one fit.

    Args:
        run: The strategy's state, with a session.
        autoplan: Decides when to profile and to plan.
    """
    return _callback_class(lightning_of(run.strategy))(run, autoplan)


def _callback_class(lightning: Lightning) -> type[PlanningCallback]:
    made = lightning.subclass(PlanningCallback, "callbacks.Callback", name=_NAME_OF_CLASS, home=__name__)
    if not issubclass(made, PlanningCallback):
        raise TypeError(f"{made} does not derive from {PlanningCallback}")
    return made


def __getattr__(name: str) -> object:
    if (lightning := public_names(_NAME_OF_CLASS).get(name)) is not None:
        return _callback_class(lightning)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class PlanningCallback(_Base):
    """Profiles the first training batches and plans.

    Later compares steps with the plan's prediction.

    The strategy installs it for a fit with ``plan="auto"`` or the name of a planner, first in the
    list of callbacks.

    Args:
        run: The strategy's state.
        autoplan: Decides when to profile and to plan.

    Attributes:
        error: The errors of the plan's prediction.
    """

    def __init__(self, run: _Run, autoplan: Autoplan) -> None:
        self._run, self._autoplan = run, autoplan
        self._logged = LoggedSteps()
        self.error = PredictionError()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int) -> None:
        """Between two batches: applies a new plan, or prepares to profile the batch."""
        session = self._run.session
        if session is None:
            return
        alone = nullcontext()
        if self._autoplan.may_plan:  # planners and micro-benchmarks may draw random numbers
            alone = lightning_of(trainer).module("utilities.seed").isolate_rng(include_cuda=False)
        with alone:
            made = self._autoplan.before_batch(session, BatchSize(tokens=num_tokens(batch), micro_batches=_micro_batches(trainer)))
        if made is not None:
            self.error = PredictionError()
            self._run.forget_step_seconds()
            self._run.executor.heap.peak_bytes = 0
            log.info("%s", table(made, self._autoplan, self._autoplan.next_best(session)))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """After a batch: compares an optimizer step with the prediction."""
        self._autoplan.after_batch()
        seconds = self._run.take_step_seconds()
        session = self._run.session
        if seconds is None or session is None:
            return
        self._autoplan.after_step(session, seconds)
        executor = self._run.executor
        predicted = executor.plan.predicted
        if self._autoplan.steady and predicted is not None:
            self.error.update(predicted, seconds, executor.heap.peak_bytes)
            if (at := self._logged.step(trainer)) is not None:
                self._log(trainer, at)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The current batch was interrupted."""
        self._autoplan.abandon_batch()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends profiling."""
        self._autoplan.abandon_batch()

    def _log(self, trainer: pl.Trainer, at: int) -> None:
        """Logs directly to the loggers.

        The module's own metrics, which callbacks monitor, do not change.
        """
        values = {f"hetero_offload/{name}": value for name, value in self.error.compute().items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics=values, step=at)


class LoggedSteps:
    """Which steps of a run loggers get, and where: on the axis of the module's own metrics.

    Lightning counts batches that stepped there, however many optimizers did.
    """

    def __init__(self) -> None:
        self._seen: int | None = None  # such batches up to the last step

    def step(self, trainer: pl.Trainer) -> int | None:
        """The place of the step that has just ended; ``None`` if loggers do not get it.

        They get one of ``log_every_n_steps``, with 0 none. If a batch is due and has no step, they
        get the next step.
        """
        at: int = trainer.fit_loop.epoch_loop._batches_that_stepped
        seen, self._seen = at if self._seen is None else self._seen, at + 1
        every: int = vars(trainer)["log_every_n_steps"]
        return at if trainer.loggers and every > 0 and (at + 1) // every * every > seen else None


class PredictionError:
    """Mean absolute errors of a plan's prediction, relative to the measurements."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def update(self, prediction: Prediction, step_s: float, peak_bytes: int) -> None:
        """Adds one step.

        Args:
            prediction: The plan's prediction.
            step_s: Seconds that the step took.
            peak_bytes: The process's peak under the plan so far; 0 if it is not known.
        """
        pairs = {"step_time_error": (prediction.iteration_s, step_s)}
        if peak_bytes:
            pairs["host_peak_error"] = (prediction.host_peak_bytes, peak_bytes)
        for name, (predicted, measured) in pairs.items():
            if name not in self._metrics:
                from torchmetrics import MeanAbsolutePercentageError

                self._metrics[name] = MeanAbsolutePercentageError(sync_on_compute=False)  # other ranks may have no planner
            with torch.no_grad():
                values = (torch.tensor([float(x)], dtype=torch.float64) for x in (predicted, measured))
                self._metrics[name].update(*values)

    def compute(self) -> dict[str, float]:
        """The errors by name; empty before the first step."""
        return {name: float(metric.compute()) for name, metric in self._metrics.items()}


def num_tokens(batch: object) -> int:
    """Tokens of a batch: elements of its first integer tensor with a sequence; otherwise samples.

    ``"input_ids"`` of a dict comes first, as tokenizers name it.
    """
    if isinstance(batch, dict) and isinstance(batch.get("input_ids"), Tensor):
        return max(1, int(batch["input_ids"].numel()))
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    whole = next((t for t in tensors if t.ndim == 2 and not t.is_floating_point() and not t.is_complex()), None)
    if whole is not None:
        return max(1, whole.numel())
    return max(1, len(tensors[0])) if tensors else 1


def _micro_batches(trainer: pl.Trainer) -> int:
    return max(1, int(trainer.accumulate_grad_batches)) if trainer.lightning_module.automatic_optimization else 1


def table(plan: Plan, autoplan: Autoplan, rival: Plan | None) -> str:
    """A short table of the placement below a title line, at most 80 columns wide.

    Below it the prediction, also of the ``rival``: the plan that is next best.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    screen = io.StringIO()
    # Plain text, also in notebooks, which set FORCE_COLOR.
    console = Console(file=screen, highlight=False, width=_COLUMNS, force_jupyter=False, force_terminal=False)
    console.print(f"plan {plan.name!r}, made in {autoplan.planned_s:.2g} s, in place after {autoplan.moved_s:.2g} s")
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rows.add_column("blocks")
    rows.add_column("", justify="right")
    for title in ("weights", "state", "update"):
        rows.add_column(title)
    for names, kind in _groups(plan, on_device=autoplan.machine is not None and not autoplan.machine.shared_memory):
        rows.add_row(_names(names), str(len(names)), *kind)
    console.print(rows)
    if plan.predicted is not None:
        console.print(_prediction(plan.predicted))
        if rival is not None and rival.predicted is not None:
            console.print(f"           {_compared(rival.name, rival.predicted.iteration_s, plan.predicted.iteration_s)}")
    return screen.getvalue().rstrip()


def _compared(rival: str, rival_s: float, chosen_s: float) -> str:
    """What the next best plan would take. A faster one was left out because it gains too little."""
    percent = round(100 * (rival_s / chosen_s - 1))
    if percent < 0:
        return f"plan {rival!r} would take {-percent} % less, within the error of predictions"
    more = f"{percent} % more" if percent else "the same"
    return f"the next best, plan {rival!r}, would take {rival_s:.3g} s a step, {more}"


def _groups(plan: Plan, *, on_device: bool) -> list[tuple[list[str], tuple[str, str, str]]]:
    """Neighbouring blocks with equal placement; if that makes many groups, all such blocks."""
    key = _kind_on_device if on_device else _kind
    groups = [([row.name for row in rows], kind) for kind, rows in groupby(plan.blocks, key=key)]
    if len(groups) > _ROWS:
        alike: dict[tuple[str, str, str], list[str]] = {}
        for names, kind in groups:
            alike.setdefault(kind, []).extend(names)
        groups = [(names, kind) for kind, names in alike.items()]
    return groups


def _names(names: Sequence[str]) -> str:
    """The first and the last name, with the common part once: ``"model.layers.0 … 11"``."""
    first, last = names[0], names[-1]
    ends = [name.split(".") for name in (first, last)]
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*(end[:-1] for end in ends), strict=False)))
    text = first if first == last else f"{first} … {'.'.join(ends[1][shared:])}"
    half = _NAME // 2
    return text if len(text) <= _NAME else f"{text[: half - 1]}…{text[-half:]}"


def _kind(row: BlockPlan) -> tuple[str, str, str]:
    """A placement on a machine whose device is the host."""
    weights, state = ("disk" if tier is Tier.DISK else "memory" for tier in (row.weights, row.state))
    return weights, state, "beside compute" if row.update is UpdateLane.CPU else "after backward"


def _kind_on_device(row: BlockPlan) -> tuple[str, str, str]:
    """A placement on a device with memory of its own, with activations that are not kept."""
    saved = "" if row.saved is Saved.KEEP else f", {row.saved.value.replace('_', ' to ')}"
    return row.weights.value, row.state.value, f"on the {row.update.value}{saved}"


def _prediction(predicted: Prediction) -> str:
    forward, backward = (predicted.bound_by(phase) for phase in ("forward", "backward"))
    bound = forward if forward == backward else f"{forward} in forward, {backward} in backward"
    disk = f", {format_bytes(predicted.disk_bytes)} on disk" if predicted.disk_bytes else ""
    return (
        f"predicted: a step in {predicted.iteration_s:.3g} s, bound by {bound};\n"
        f"           {format_bytes(predicted.host_peak_bytes)} of memory at the peak{disk}"
    )
