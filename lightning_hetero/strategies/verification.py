"""``verify=N``: computes the first N optimizer steps again in plain Lightning, and compares bits.

[Note: Reference]
The reference is a copy of the module, entirely in memory, with an ordinary optimizer
(docs/options.md). It copies weights and optimizer state as the first batch begins, and is
independent from then on. The batches of a step are kept, each with the random generators at its
beginning; after the step the reference repeats it. Changes by callbacks are not repeated, and show
as differences. Processors round differently, so each part of it runs where the plan runs it
(docs/devices.md).
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError, UnsupportedError, VerificationError
from lightning_hetero.handles.offloaded_parameter import materialize
from lightning_hetero.lanes.collectives import Collectives
from lightning_hetero.optim import adam
from lightning_hetero.optim.combined import held
from lightning_hetero.optim.reference import MasterWeightOptimizer
from lightning_hetero.store.capacity import available_memory_bytes
from lightning_hetero.strategies.data import RandomStates, random_state, set_random_state
from lightning_hetero.strategies.rank_means import RankMeans
from lightning_hetero.units import format_bytes

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import Precision

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _Batch:
    args: tuple[object, ...]
    kwargs: dict[str, object]
    number: int
    random: RandomStates


class Verifier:
    """Repeats optimizer steps of one fit on a reference, and compares; see [Note: Reference].

    Contract: made before a session hooks into the module. :meth:`batch_begins` and
    :meth:`batch_ended` surround each training step; :meth:`check` follows each optimizer step.
    Training is not changed.

    A device with memory of its own has room for :func:`reference_bytes`. Ranks that share a model
    have a reference each, of the whole, which knows the gradients of all of them. They call all
    methods together, where they read weights and state together.

    Args:
        module: The model.
        steps: How many steps are repeated.
        device: The device that computes, if it is a real one.
        collectives: Those of the ranks that share the model.
        outside: The ``id``s of parameters that are used outside repeated blocks.

    Raises:
        ConfigError: The device's kernels may be nondeterministic.
        UnsupportedError: The module optimizes manually, or cannot be copied.
        OutOfMemoryBudgetError: The host has no memory for the reference. Says how much it needs.
    """

    def __init__(
        self, module: pl.LightningModule, steps: int, *, device: torch.device | None = None,
        collectives: Collectives | None = None, outside: Collection[int] = (),
    ) -> None:  # fmt: skip
        if not module.automatic_optimization:
            raise UnsupportedError(
                "verify=N replays steps of automatic optimization, and optimization is manual. Leave verify out."
            )
        self._has_device, self._device = device is not None, device or _CPU
        if self._device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
            raise ConfigError(
                f"verify={steps} compares bits, and kernels of {device} may add in another order each time. Pass "
                f"Trainer(deterministic=True), or leave verify out."
            )
        self.steps_left = steps
        self._means = None if collectives is None else RankMeans(collectives, lambda twin: self._originals[id(twin)] in outside)
        self._on_cpu: Collection[int] = ()
        self._originals: dict[int, int] = {}  # id of a parameter of the reference -> id of the original
        self._step = 0
        self._batches: list[_Batch] = []
        self._losses: list[Tensor | None] = []
        # Of the reference, from the first batch on: a checkpoint may be loaded before.
        self._twin: Optimizer | None = None
        self._scaler: torch.amp.GradScaler | None = None
        memo: dict[int, object] = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad) for p in module.parameters()
        }
        try:
            self._copy: pl.LightningModule = copy.deepcopy(module, memo)  # its parameters have no memory yet
        except Exception as error:  # user code may raise anything
            raise UnsupportedError(
                f"verify=N copies the module, and {type(module).__name__} cannot be copied: {error!r}. Leave out of it what cannot "
                f"be copied (open files, locks, iterators), or leave verify out."
            ) from error
        if not self._has_device:
            copies = 1 if collectives is None else collectives.shards
            _check_memory(copies * reference_bytes(self._copy), "a reference of the model" + " on each rank" * (copies > 1))

    def batch_begins(
        self,
        module: pl.LightningModule,
        optimizer: Optimizer,
        precision: Precision,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> None:
        """Keeps a training batch as it begins."""
        if self._twin is None:
            self._twin = self._make_reference(module, optimizer, precision)
        number = module.trainer.fit_loop.epoch_loop.batch_idx
        self._batches.append(_Batch(*copy.deepcopy((args, kwargs)), number, random_state()))

    def batch_ended(self, output: object) -> None:
        """Keeps the loss that the training step has returned."""
        loss = _loss(output)
        self._losses.append(None if loss is None else loss.detach().clone())

    def check(self, module: pl.LightningModule, optimizer: Optimizer, precision: Precision, on_cpu: Collection[int] = ()) -> None:
        """Repeats the step that has just ended, and compares. No update is in progress.

        ``on_cpu`` has the ids of the parameters that the CPU has updated.

        Raises:
            VerificationError: Names the first tensor that differs, and how.
            UnsupportedError: The optimizer has other parameters than in the first step, or norms
                are computed on two processors.
            OutOfMemoryBudgetError: The device has no room for the reference's activations, or the
                host for its updates.
        """
        if self._twin is None:
            return  # no batch has begun
        self._step += 1
        if self._has_device:
            self._plan_updates(module, on_cpu)
        before = random_state()
        try:
            self._replay(self._twin, module.trainer, optimizer, precision)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryBudgetError(
                f"verify=N: in step {self._step} {self._device} has no room for the activations of the reference, which keeps them "
                f"all: {error} Verify with a smaller batch, or leave verify out.",
                tier="device",
            ) from error
        finally:
            set_random_state(before)
        self._compare(self._twin, module, optimizer)
        self.steps_left -= 1
        self._batches, self._losses = [], []
        if not self.steps_left:
            log.info("verify: losses, weights and optimizer state of %d steps are bitwise those of the reference.", self._step)

    # ---- the reference -----------------------------------------------------------------------

    def _make_reference(self, module: pl.LightningModule, optimizer: Optimizer, precision: Precision) -> Optimizer:
        """Gives the copy the module's present content; returns its optimizer."""
        twins: dict[int, nn.Parameter] = {}
        for ours, theirs in zip(module.modules(), self._copy.modules(), strict=True):
            theirs.training = ours.training
            for key, param in ours._parameters.items():
                if param is not None:
                    if id(param) not in twins:
                        content = materialize(param.detach()).clone().to(self._device if self._has_device else param.device)
                        twins[id(param)] = nn.Parameter(content, requires_grad=param.requires_grad)
                    theirs._parameters[key] = twins[id(param)]
            for key, buffer in ours._buffers.items():
                theirs._buffers[key] = None if buffer is None else buffer.detach().clone()
        self._copy._trainer = module._trainer
        for name in ("log", "log_dict"):
            setattr(self._copy, name, _no_log)
        self._originals = {id(twin): original for original, twin in twins.items()}
        self._scaler = copy.deepcopy(getattr(precision, "scaler", None))
        return _twin_optimizer(optimizer, twins, self._place if self._has_device else None)

    def _plan_updates(self, module: pl.LightningModule, on_cpu: Collection[int]) -> None:
        """Updates run on the processors of the plan, from this step on."""
        trainer = module.trainer
        norms = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm in (None, "norm")
        if norms and on_cpu and self._device.type != "cpu":
            raise UnsupportedError(
                f"verify=N: gradients are clipped by norm, and some are on the CPU then, so that their norms may have other last "
                f"bits than on {self._device}. Verify without gradient_clip_val, with gradient_clip_algorithm='value', with a "
                f'plan that updates on the device, or with accelerator="cpu".'
            )
        if set(on_cpu) != set(self._on_cpu):
            params = {id(p): p for p in module.parameters() if id(p) in on_cpu and p.requires_grad}.values()
            _check_memory(sum(_update_bytes(p) for p in params), "the part of its reference that the CPU updates")
            self._on_cpu = frozenset(on_cpu)

    def _place(self, twin: Tensor) -> torch.device:
        """Where the update of a parameter runs."""
        return _CPU if self._originals[id(twin)] in self._on_cpu else self._device

    def _replay(self, twin: Optimizer, trainer: pl.Trainer, optimizer: Optimizer, precision: Precision) -> None:
        module, scaler = self._copy, self._scaler
        self._copy_options(optimizer, twin)
        module.optimizer_zero_grad(trainer.current_epoch, self._batches[0].number, twin)
        means, params = self._means, list(module.parameters())
        for number, (batch, ours) in enumerate(zip(self._batches, self._losses, strict=True), 1):
            if means is not None:
                means.share(module.buffers())
            set_random_state(batch.random)
            with precision.train_step_context():
                loss = _loss(module.training_step(*batch.args, **batch.kwargs))
            if loss is not None and ours is not None:
                self._same("the loss", ours, loss.detach())
                loss = loss / trainer.accumulate_grad_batches
                torch.autograd.backward(loss if scaler is None else scaler.scale(loss))
            if means is not None:
                means.backward_ended(params, ends_step=number == len(self._batches))
            module.on_after_backward()
        if scaler is not None:
            scaler.unscale_(twin)
        module.on_before_optimizer_step(twin)
        with nullcontext() if means is None else means.clipping(precision):
            module.configure_gradient_clipping(
                twin, gradient_clip_val=trainer.gradient_clip_val, gradient_clip_algorithm=trainer.gradient_clip_algorithm
            )
        if scaler is None:
            twin.step()
        else:
            scaler.step(twin)
            scaler.update()

    @staticmethod
    def _copy_options(optimizer: Optimizer, twin: Optimizer) -> None:
        """Copies learning rates and the like, which schedulers and callbacks may have changed."""
        for ours, theirs in zip(optimizer.param_groups, twin.param_groups, strict=False):
            theirs.update({k: v for k, v in ours.items() if k not in ("params", "fused", "foreach")})
        now, before = ([len(g["params"]) for g in o.param_groups] for o in (optimizer, twin))
        if now != before:
            raise UnsupportedError(
                f"verify=N: the optimizer's groups had {before} parameters and now have {now}. Verify steps before "
                f"parameters are added to it, or leave verify out."
            )

    # ---- the comparison ----------------------------------------------------------------------

    def _compare(self, twins: Optimizer, module: pl.LightningModule, optimizer: Optimizer) -> None:
        ours, theirs = (chain(m.named_parameters(), m.named_buffers()) for m in (module, self._copy))
        for (name, tensor), (_, other) in zip(ours, theirs, strict=True):
            self._same(name, tensor.detach(), other.detach())
        names = {id(p): name for name, p in module.named_parameters()}
        for group, other_group in zip(optimizer.param_groups, twins.param_groups, strict=True):
            for param, twin in zip(group["params"], other_group["params"], strict=True):
                state, wanted = optimizer.state.get(param, {}), twins.state.get(twin, {})
                if state.keys() != wanted.keys():
                    raise self._error(names[id(param)], f"has optimizer state {sorted(state)}, the reference {sorted(wanted)}")
                for key, value in wanted.items():
                    if isinstance(value, Tensor):
                        self._same(f"{key} of {names[id(param)]}", state[key], value)

    def _same(self, name: str, ours: Tensor, theirs: Tensor) -> None:
        got, wanted = materialize(ours).cpu(), theirs.cpu()
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            raise self._error(name, f"is {tuple(got.shape)} {got.dtype}, the reference's {tuple(wanted.shape)} {wanted.dtype}")
        if torch.equal(got, wanted):
            return
        differ = (_bits(got) != _bits(wanted)).flatten()
        if not differ.any():
            return  # NaN in the same places
        at = int(differ.nonzero()[0])
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), got.shape)) if got.ndim else ()
        a, b = got.flatten()[at], wanted.flatten()[at]
        ulp = f", {_ulp_distance(a, b)} units in the last place apart" if a.is_floating_point() else ""
        count = f"{int(differ.sum())} of {got.numel()} elements differ"
        raise self._error(name, f"is {a.item()!r} at {list(index)}, the reference's {b.item()!r}{ulp}; {count}")

    def _error(self, name: str, what: str) -> VerificationError:
        return VerificationError(
            f"verify: in step {self._step}, {name} {what}. What was compared before is the same. If no callback changes weights or "
            f"gradients, and the module computes the same twice, this is a fault of this package: report it with strategy.plan."
        )


def _no_log(*_: object, **__: object) -> None:
    """The reference logs nothing."""


def _loss(output: object) -> Tensor | None:
    """The loss in the result of a training step."""
    loss = output.get("loss") if isinstance(output, dict) else output
    return loss if isinstance(loss, Tensor) else None


def reference_bytes(module: nn.Module, *, apart: bool = False) -> int:
    """Bytes of a model's reference, without its activations."""
    params = {id(p): p for p in module.parameters()}.values()
    updates = sum(p.nbytes + _update_bytes(p, apart=apart) for p in params if p.requires_grad)
    return sum(p.nbytes for p in params) + updates


def _update_bytes(param: Tensor, *, apart: bool = True) -> int:
    """Both moments, and a master."""
    return 4 * param.numel() * (3 if apart or param.dtype in adam.MASTERED else 2)


def _check_memory(needed: int, what: str) -> None:
    free = available_memory_bytes()
    if needed > free:
        raise OutOfMemoryBudgetError(
            f"verify=N needs {format_bytes(needed)} for {what} in memory, without its activations; {format_bytes(free)} are free. "
            f"Verify a smaller model of the same kind, or leave verify out.",
            needed_bytes=needed,
        )


def _twin_optimizer(
    optimizer: Optimizer, twins: dict[int, nn.Parameter], place: Callable[[Tensor], torch.device] | None
) -> Optimizer:
    """An ordinary optimizer of the reference's parameters, with the same state."""
    if inner := next(held(optimizer), None):
        raise UnsupportedError(
            f"verify=N repeats steps with a copy of the optimizer, and {type(optimizer).__name__} runs another one "
            f"({type(inner).__name__}), which would not be copied. Leave verify out."
        )
    groups = [{**g, "params": [twins[id(p)] for p in g["params"]]} for g in optimizer.param_groups]
    native = adam.supports(optimizer)
    if native:
        groups = [{**g, "fused": True, "foreach": None} for g in groups]
    state = pytree.tree_map_only(Tensor, lambda t: materialize(t).clone(), optimizer.state_dict())
    if native:
        for group in state["param_groups"]:
            group.update(fused=True, foreach=None)
    make = partial(_like, optimizer)
    place = place if native else None  # other optimizers run where the weights are
    if place is not None or any(p.dtype in adam.MASTERED for g in groups for p in g["params"]):
        twin: Optimizer = MasterWeightOptimizer(groups, make, place=place)
    else:
        twin = make(groups)
    twin.load_state_dict(state)
    # Gradients can be clipped after unscaling only if the optimizer leaves unscaling to the scaler.
    vars(twin)["_step_supports_amp_scaling"] = False
    return twin


def _like(optimizer: Optimizer, groups: list[dict[str, object]]) -> Optimizer:
    """A new optimizer of the same class, made as unpickling does, because constructors differ."""
    new = type(optimizer).__new__(type(optimizer))
    new.__setstate__({"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups})
    return new


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _ulp_distance(a: Tensor, b: Tensor) -> int:
    """The distance of two numbers, counted in numbers of their dtype."""

    def rank(value: Tensor) -> int:
        bits = int(_bits(value))
        return bits if bits >= 0 else -(bits + (1 << (8 * value.element_size() - 1)))

    return abs(rank(a) - rank(b))
