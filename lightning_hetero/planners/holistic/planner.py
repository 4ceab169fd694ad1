"""The holistic planner: a linear programme gives starts and a bound; a search simulates plans.

What is decided together: for each block the tiers of its weights and state, the lane of its update,
and what becomes of each operator's output and of its input; for the plan the depths of prefetching
and of waiting gradients, and how a batch is split. Caches take what is left. The other planners'
plans are candidates too, so the result is never slower than theirs by simulation.

See docs/planners/holistic.md.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from lightning_hetero.clock import now_s
from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.activations import saved_bytes
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import TRAINED, Plan
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.lowering import fitted
from lightning_hetero.planners.baselines import BASELINES, disk, variants
from lightning_hetero.planners.evaluation import proved
from lightning_hetero.planners.holistic.evaluator import Evaluator
from lightning_hetero.planners.holistic.frontier import NAME, Frontier
from lightning_hetero.planners.holistic.plan_bounds import PlanBounds
from lightning_hetero.planners.holistic.relaxation import Relaxation
from lightning_hetero.planners.holistic.remedies import SearchRequest, check_rates, infeasible
from lightning_hetero.planners.holistic.search import Search
from lightning_hetero.planners.holistic.solvers import load_solver
from lightning_hetero.planners.micro_batches import split
from lightning_hetero.planners.one_rank import one_rank

OTHERS = ("autohete", "deep_optimizer_states", "protrain", "lohan")
_WITHOUT_DISK = ("autohete", "deep_optimizer_states", "protrain")  # all in memory
SECONDS = 20.0
_SIMULATED_BLOCKS = 900  # blocks simulated in one search: a large model gets fewer simulations
_EVALUATIONS = (8, 300)
_FEW_BLOCKS, _OF_FEW_BLOCKS = 3, 1000  # such models are simulated quickly, and single moves miss more of their plans
_GOOD = 0.02  # over the bound: the search goes on until its plan is as near
_MARGIN, _OWN_CPU_MARGIN = 0.01, 0.05  # see prefer_resident
_TIE = 1e-9


def plan(
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    micro_batches: Sequence[int] = (1,),
    updates: Updates = Updates.IN_BACKWARD,
    prefer_resident: float | None = None,
    evaluations: int | None = None,
    seconds: float = SECONDS,
) -> Plan:
    """The fastest plan found by simulation.

    ``objective_s`` is its simulated step. ``decisions`` say what is where: counts of blocks by tier
    of ``weights`` and ``state`` and by lane of the ``update``; ``kept_bytes``,
    ``recomputed_bytes``, ``swapped_host_bytes`` and ``swapped_disk_bytes`` of activations in one
    micro-batch; the depths. And how good that is: ``lower_bound_s`` (no plan is faster), ``gap`` to
    it, ``start`` (the planner whose plan it is, or that it grew from), ``evaluations`` (simulations
    of the search), and why the search ``ended``: ``"bound"`` (the plan is near it), ``"time"`` (the
    simulations that it may use are used up) or ``"all tried"``.

    Args:
        model: The model; the batch of its profile is the batch of one step.
        hardware: The machine.
        micro_batches: Allowed splits of that batch. Where the best is not 1, the plan is for a
            profile of so many times smaller micro-batches: :func:`split`.
        updates: When updates may run: during backward, or only once all gradients are known.
        prefer_resident: How much slower than the fastest plan found, relatively, the resident one
            may be and still be chosen, as it depends least on the profile. ``None``: what cannot be
            told apart (docs/adr/0008-resident-or-fastest.md): 0.01, or 0.05 where the device is the
            host's own CPU.
        evaluations: Simulations that the search may use; ``None``: as many as a second allows on
            two cores.
        seconds: Wall time after which the search ends whatever is left: a backstop that no ordinary
            case reaches, since a result that depends on it depends on the machine that plans.

    Raises:
        PlanError: Nothing fits: names the tightest tier, what is missing there and the cheapest
            remedy.
        ConfigError: A split that is not positive, or none that this machine runs.
    """
    model, hardware = one_rank(model, hardware)
    check_rates(model, hardware)
    load_solver()
    deadline_s = now_s() + seconds
    margin = prefer_resident if prefer_resident is not None else _OWN_CPU_MARGIN if hardware.shared_memory else _MARGIN
    budget = evaluations if evaluations is not None else _evaluations(model)
    found: list[_Joint] = []
    for parts in _splits(micro_batches, model, hardware):
        part = split(model, parts)
        relaxation = Relaxation(part, hardware, micro_batches=parts, updates=updates)
        plan_bounds = PlanBounds(relaxation)
        evaluator = Evaluator(
            part, hardware, updates=updates, evaluations=budget, bound_s=plan_bounds.seconds, deadline_s=deadline_s
        )
        found.append(_Joint(relaxation, evaluator, plan_bounds, margin=margin))
        found[-1].run(min((j.evaluator.best_s for j in found[:-1]), default=math.inf))
    best = min(found, key=lambda j: j.evaluator.best_s)
    if best.evaluator.best is None:
        raise infeasible(SearchRequest(model=model, hardware=hardware, parts=found[-1].parts, updates=updates))
    return best.described(best.evaluator.best)


def _splits(allowed: Sequence[int], model: ModelProfile, hardware: HardwareProfile) -> list[int]:
    """The allowed splits that this machine runs and the batch has, smallest first."""
    if not allowed or not all(isinstance(m, int) and not isinstance(m, bool) and 1 <= m <= 1024 for m in allowed):
        raise ConfigError(f"micro_batches={allowed!r}; allowed: integers from 1 to 1024, such as [1, 2, 4].")
    found = [m for m in sorted(set(allowed)) if m == 1 or (model.tokens % m == 0 and not hardware.shared_memory)]
    if not found:
        where = "the host's own CPU splits no batch" if hardware.shared_memory else f"a batch has {model.tokens} tokens"
        raise ConfigError(f"micro_batches={allowed!r}: {where}. Allow 1 too.")
    return found


def _evaluations(model: ModelProfile) -> int:
    least, most = _EVALUATIONS
    count = sum(not b.name.endswith(TRAINED) for b in model.blocks)  # trained parts take hardly any time
    if count <= _FEW_BLOCKS:
        return _OF_FEW_BLOCKS
    return max(least, min(most, _SIMULATED_BLOCKS // (count + 2)))


class _Joint:
    """The search for one split of the batch.

    Args:
        relaxation: The programme, of one micro-batch.
        evaluator: Evaluates plans.
        plan_bounds: Lower bounds of plans.
        margin: As ``prefer_resident`` of :func:`plan`.
    """

    def __init__(self, relaxation: Relaxation, evaluator: Evaluator, plan_bounds: PlanBounds, *, margin: float) -> None:
        self.relaxation, self.evaluator, self.plan_bounds, self.margin = relaxation, evaluator, plan_bounds, margin
        self.parts = relaxation.micro_batches
        self.bound_s = relaxation.bound_s()
        self.ended = "bound"

    def run(self, rival_s: float) -> None:
        """Looks for the fastest plan, if one may be faster than ``rival_s``."""
        if self.bound_s is None or self.bound_s >= rival_s:
            return
        evaluator = self.evaluator
        self._baseline("resident")
        resident, resident_s = evaluator.best, evaluator.best_s
        if resident_s <= self.bound_s * (1 + self.margin):
            return
        bound_s = self.bound_s
        search = Search(relaxation=self.relaxation, evaluator=evaluator, bound_s=bound_s)
        search.first()
        for name in BASELINES:
            self._baseline(name)
        for name in OTHERS:
            self._other(name)
        search.run()
        Frontier(evaluator, self.plan_bounds, lambda: evaluator.exhausted or evaluator.best_s <= bound_s * (1 + _GOOD)).run()
        if evaluator.best_s > bound_s * (1 + _GOOD):
            self.ended = "time" if evaluator.exhausted else "all tried"
        if resident is not None and resident_s <= evaluator.best_s * (1 + self.margin + _TIE):
            evaluator.admit(resident, proved=False, anyway=True)

    def _baseline(self, name: str) -> None:
        """Evaluates the plans of a baseline."""
        for variant in variants(name, self.evaluator.model.shape(), self.evaluator.hardware):
            self.evaluator.seconds(replace(variant, micro_batches=self.parts), always=True)

    def _other(self, name: str) -> None:
        """Evaluates another planner's plan, if it has one that could be the fastest."""
        evaluator = self.evaluator
        if self._least_s(name) >= evaluator.best_s:
            return
        planner: Callable[..., Plan] = importlib.import_module(f"lightning_hetero.planners.{name}").plan
        with suppress(PlanError):
            found = planner(evaluator.model, evaluator.hardware, updates=evaluator.updates)
            if self.parts == 1:
                evaluator.admit(found, proved=True)
            else:
                evaluator.seconds(replace(found, micro_batches=self.parts), always=True)

    def _least_s(self, name: str) -> float:
        """A lower bound of another planner's plan before it plans; infinite if it can have none.

        It is 0 if nothing is known before the planner runs.
        """
        h, shape = self.evaluator.hardware, self.evaluator.model.shape()
        weight_bytes = sum(b.weight_bytes for b in shape.blocks)
        if name == "deep_optimizer_states" and not h.shared_memory and weight_bytes > h.device_memory_bytes:
            return math.inf  # it keeps all weights on the device
        if name in _WITHOUT_DISK:
            memory = h.host_memory_bytes + (0 if h.shared_memory or h.unified_memory else h.device_memory_bytes)
            return math.inf if weight_bytes + sum(b.state_bytes for b in shape.blocks) > memory else 0.0
        # LoHan places weights and state as disk does, and whatever becomes of activations takes
        # longer than keeping them.
        plan = replace(disk(shape), priority=False, micro_batches=self.parts)
        return self.plan_bounds.seconds(fitted(plan, shape, device=h.copies_weights))

    def described(self, best: Plan) -> Plan:
        """The best plan, proved and with its decisions."""
        evaluator = self.evaluator
        model, hardware = evaluator.model, evaluator.hardware
        placed = replace(best, name=NAME, objective_s=None, decisions={})
        found = placed if evaluator.proved else proved(placed, model, hardware, updates=evaluator.updates)
        step_s = best.require_predicted().iteration_s
        saved = Counter[str]()
        for block, rule in zip(model.blocks, found.blocks, strict=True):
            saved.update(asdict(saved_bytes(block, rule, shared_memory=hardware.shared_memory)))
        bound_s = self.bound_s or 0.0
        decisions: dict[str, Any] = {
            key: dict(Counter(getattr(rule, key).value for rule in found.blocks)) for key in ("weights", "state", "update")
        }
        decisions |= {
            "kept_bytes": saved["kept"],
            "recomputed_bytes": saved["recomputed"],
            "swapped_host_bytes": saved["to_host"],
            "swapped_disk_bytes": saved["to_disk"],
            "prefetch_depth": found.prefetch_depth,
            "gradient_depth": found.gradient_depth,
            "micro_batches": found.micro_batches,
            "lower_bound_s": bound_s,
            "gap": step_s / bound_s - 1 if bound_s else None,
            "start": best.name,
            "evaluations": evaluator.evaluations,
            "ended": self.ended,
        }
        return replace(found, objective_s=step_s, decisions=decisions)
