"""``verify=N``: the first N optimizer steps are computed a second time, by plain Lightning's arithmetic, and compared bit by bit.

[Note: Replay]
The reference is a copy of the module with everything in ordinary memory, and an ordinary optimizer (torch's fused Adam where the
engine's kernels run; fp32 masters where weights have 16 bits). It takes weights and optimizer state over as the first batch
begins, and from then on goes its own way. The batches of a step are kept with the random numbers' state at which they
began. When the step is over the reference runs them: training steps, backwards, clipping, update; then losses, weights,
buffers and optimizer state are compared. So whatever goes wrong on the way is found: a stale weight, a lost gradient, a torn
update. What callbacks do to weights or gradients is not repeated, and shows as a difference.

[Note: Reference on a device]
Processors round differently, so each part of the reference runs where the plan has it run: forward, backward and clipping on the
device, an update on the device or, on masters there, on the CPU. All of it is in memory, of which plans have the rest.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError, UnsupportedError, VerificationError
from lightning_hetero.optim import adam
from lightning_hetero.optim.combined import held
from lightning_hetero.optim.reference import MasterWeightOptimizer
from lightning_hetero.runtime.batch_state import Generators
from lightning_hetero.runtime.offloaded_parameter import materialize
from lightning_hetero.store.capacity import available_memory_bytes
from lightning_hetero.units import format_bytes

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _Batch:
    """One training batch as it began."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int
    generators: Generators


class Verifier:
    """Replays optimizer steps of one fit, and compares.

    Contract: made before a session hooks into the module; :meth:`batch_begins` and :meth:`batch_ended` around every training step,
    :meth:`check` when the optimizer's step is over. The training run is the same with it and without.

    Args:
        module: The LightningModule, as the user has made it.
        steps: How many steps are replayed.
        device: Where it computes, if that has memory of its own, which has room for the reference: :func:`reference_bytes`.

    Raises:
        ConfigError: The device's kernels need not repeat themselves.
        UnsupportedError: The module optimizes manually, or cannot be copied.
        OutOfMemoryBudgetError: The machine has no memory for the reference: says how much is needed.
    """

    def __init__(self, module: Any, steps: int, *, device: torch.device | None = None) -> None:
        if not module.automatic_optimization:
            raise UnsupportedError(
                "verify=N replays steps of automatic optimization, and optimization is manual. Leave verify out."
            )
        if device is not None and device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
            raise ConfigError(
                f"verify={steps} compares bits, and kernels of {device} may add in another order each time. Pass "
                f"Trainer(deterministic=True), or leave verify out."
            )
        self.steps_left = steps
        self._device = device
        self._on_cpu: Collection[int] = ()
        self._originals: dict[int, int] = {}  # the id of the parameter that the reference's one, by its id, stands for
        self._step = 0
        self._batches: list[_Batch] = []
        self._losses: list[Tensor | None] = []
        self._filled = False
        self._optimizer: Any = None
        self._scaler: Any = None
        # Parameters have no memory until the first batch begins: a checkpoint may be loaded before.
        memo: dict[int, Any] = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad) for p in module.parameters()
        }
        try:
            self._module: Any = copy.deepcopy(module, memo)
        except Exception as error:  # whatever the module's attributes are
            raise UnsupportedError(
                f"verify=N copies the module, and {type(module).__name__} cannot be copied: {error!r}. Leave out of it what cannot "
                f"be copied (open files, locks, iterators), or leave verify out."
            ) from error
        if device is None:
            _check_memory(reference_bytes(self._module), "a reference of the model")

    def batch_begins(
        self, module: Any, optimizer: Optimizer, precision: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Keeps what a training batch begins with.

        Args:
            module: The LightningModule; no update of it is under way.
            optimizer: Its optimizer.
            precision: The precision plugin.
            args: What its training step is called with.
            kwargs: The same, by name.
        """
        if not self._filled:
            self._fill(module, optimizer, precision)
        number = module.trainer.fit_loop.epoch_loop.batch_idx
        self._batches.append(_Batch(*copy.deepcopy((args, kwargs)), number, Generators(self._device or _CPU)))

    def batch_ended(self, output: Any) -> None:
        """Keeps the loss in what the training step has returned."""
        loss = _loss(output)
        self._losses.append(None if loss is None else loss.detach().clone())

    def check(self, module: Any, optimizer: Optimizer, precision: Any, on_cpu: Collection[int] = ()) -> None:
        """Replays the step that has just ended, and compares.

        Args:
            module: The LightningModule; no update of it is under way.
            optimizer: Its optimizer.
            precision: The precision plugin.
            on_cpu: The ids of the parameters that the CPU has updated, where a device computes.

        Raises:
            VerificationError: Names the first tensor that differs, and how.
            UnsupportedError: The optimizer's parameters are no longer those of the first step, or norms are of two processors.
            OutOfMemoryBudgetError: The device has no room for the reference's activations, or the host for what it updates.
        """
        self._step += 1
        self._refuse_norms(module.trainer, on_cpu)
        if self._device is not None and set(on_cpu) != set(self._on_cpu):
            params = {id(p): p for p in module.parameters() if id(p) in on_cpu and p.requires_grad}.values()
            _check_memory(sum(_update_bytes(p) for p in params), "what of its reference the CPU updates")
            self._on_cpu = frozenset(on_cpu)
        before = Generators(self._device or _CPU)
        try:
            self._replay(module.trainer, optimizer, precision)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryBudgetError(
                f"verify=N: in step {self._step} {self._device} has no room for the activations of the reference, which keeps them "
                f"all: {error} Verify with a smaller batch, or leave verify out.",
                tier="device",
            ) from error
        finally:
            before.restore()
        self._compare(module, optimizer)
        self.steps_left -= 1
        self._batches, self._losses = [], []
        if not self.steps_left:
            log.info("verify: losses, weights and optimizer state of %d steps are bitwise those of the reference.", self._step)

    # ---- the reference ------------------------------------------------------------------------------------------------------

    def _fill(self, module: Any, optimizer: Optimizer, precision: Any) -> None:
        """Gives the reference the module's content as it is now."""
        self._filled = True
        twins: dict[int, nn.Parameter] = {}
        for ours, theirs in zip(module.modules(), self._module.modules(), strict=True):
            theirs.training = ours.training
            for key, param in ours._parameters.items():
                if param is not None:
                    if id(param) not in twins:
                        content = materialize(param.detach()).clone().to(self._device or param.device)
                        twins[id(param)] = nn.Parameter(content, requires_grad=param.requires_grad)
                    theirs._parameters[key] = twins[id(param)]
            for key, buffer in ours._buffers.items():
                theirs._buffers[key] = None if buffer is None else buffer.detach().clone()
        self._module._trainer = module._trainer
        for name in ("log", "log_dict"):
            setattr(self._module, name, _no_log)
        self._originals = {id(twin): original for original, twin in twins.items()}
        self._optimizer = _twin_optimizer(optimizer, twins, None if self._device is None else self._place)
        self._scaler = copy.deepcopy(getattr(precision, "scaler", None))

    def _refuse_norms(self, trainer: Any, on_cpu: Collection[int]) -> None:
        norms = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm in (None, "norm")
        if norms and on_cpu and self._device is not None and self._device.type != "cpu":
            raise UnsupportedError(
                f"verify=N: gradients are clipped by norm, and some are on the CPU then, so that their norms may have other last "
                f"bits than on {self._device}. Verify without gradient_clip_val, with gradient_clip_algorithm='value', with a "
                f'plan that updates on the device, or with accelerator="cpu".'
            )

    def _place(self, twin: Tensor) -> torch.device:
        """Where the update of a parameter runs."""
        assert self._device is not None
        return _CPU if self._originals[id(twin)] in self._on_cpu else self._device

    def _replay(self, trainer: Any, optimizer: Optimizer, precision: Any) -> None:
        module, twin = self._module, self._optimizer
        self._copy_numbers(optimizer)
        module.optimizer_zero_grad(trainer.current_epoch, self._batches[0].number, twin)
        for batch, ours in zip(self._batches, self._losses, strict=True):
            batch.generators.restore()
            with precision.train_step_context():
                loss = _loss(module.training_step(*batch.args, **batch.kwargs))
            if loss is not None and ours is not None:
                self._same("the loss", ours, loss.detach())
                loss = loss / trainer.accumulate_grad_batches
                (loss if self._scaler is None else self._scaler.scale(loss)).backward()
            module.on_after_backward()
        if self._scaler is not None:
            self._scaler.unscale_(twin)
        module.on_before_optimizer_step(twin)
        module.configure_gradient_clipping(
            twin, gradient_clip_val=trainer.gradient_clip_val, gradient_clip_algorithm=trainer.gradient_clip_algorithm
        )
        if self._scaler is None:
            twin.step()
        else:
            self._scaler.step(twin)
            self._scaler.update()

    def _copy_numbers(self, optimizer: Optimizer) -> None:
        """Learning rates and the like of this step: schedulers and callbacks change those of the real optimizer."""
        for ours, theirs in zip(optimizer.param_groups, self._optimizer.param_groups, strict=False):
            theirs.update({k: v for k, v in ours.items() if k not in ("params", "fused", "foreach")})
        counts = [[len(g["params"]) for g in o.param_groups] for o in (optimizer, self._optimizer)]
        if counts[0] != counts[1]:
            raise UnsupportedError(
                f"verify=N: the optimizer's groups had {counts[1]} parameters and now have {counts[0]}. Verify steps before "
                f"parameters are added to it, or leave verify out."
            )

    # ---- the comparison -----------------------------------------------------------------------------------------------------

    def _compare(self, module: Any, optimizer: Optimizer) -> None:
        for (name, ours), (_, theirs) in zip(module.named_parameters(), self._module.named_parameters(), strict=True):
            self._same(name, ours.detach(), theirs.detach())
        for (name, ours), (_, theirs) in zip(module.named_buffers(), self._module.named_buffers(), strict=True):
            self._same(name, ours, theirs)
        names = {id(p): name for name, p in module.named_parameters()}
        for group, other in zip(optimizer.param_groups, self._optimizer.param_groups, strict=True):
            for param, twin in zip(group["params"], other["params"], strict=True):
                ours, theirs = optimizer.state.get(param, {}), self._optimizer.state.get(twin, {})
                if ours.keys() != theirs.keys():
                    raise self._error(names[id(param)], f"has optimizer state {sorted(ours)}, the reference {sorted(theirs)}")
                for key, value in theirs.items():
                    if isinstance(value, Tensor):
                        self._same(f"{key} of {names[id(param)]}", ours[key], value)

    def _same(self, name: str, ours: Tensor, theirs: Tensor) -> None:
        got, wanted = materialize(ours).cpu(), theirs.cpu()
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            raise self._error(name, f"is {tuple(got.shape)} {got.dtype}, the reference's {tuple(wanted.shape)} {wanted.dtype}")
        if torch.equal(got, wanted):
            return
        differ = (_bits(got) != _bits(wanted)).flatten()
        if not differ.any():
            return  # not a number in the same places
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


def _no_log(*_: Any, **__: Any) -> None:
    """The reference logs nothing."""


def _loss(output: Any) -> Tensor | None:
    """The loss in what a training step returns."""
    loss = output.get("loss") if isinstance(output, dict) else output
    return loss if isinstance(loss, Tensor) else None


def reference_bytes(module: nn.Module, *, apart: bool = False) -> int:
    """What a reference of a model takes, without its activations.

    Args:
        module: The model.
        apart: All weights have masters, as on a device.
    """
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
    """An ordinary optimizer of the twins, with the same state; ``place`` says where each of them is updated.

    Raises:
        UnsupportedError: It runs other optimizers, of which there is no copy.
    """
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
    place = place if native else None  # others run where the weights are
    if place is not None or any(p.dtype in adam.MASTERED for g in groups for p in g["params"]):
        twin: Optimizer = MasterWeightOptimizer(groups, make, place=place)
    else:
        twin = make(groups)
    twin.load_state_dict(state)
    # Only where an optimizer leaves unscaling to the scaler can gradients be clipped in between.
    vars(twin)["_step_supports_amp_scaling"] = False
    return twin


def _like(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """A new optimizer of the same class, made as unpickling makes one: constructors differ."""
    new = type(optimizer).__new__(type(optimizer))
    new.__setstate__({"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups})
    return new


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _ulp_distance(a: Tensor, b: Tensor) -> int:
    """How many numbers of their dtype lie between two, plus one."""

    def rank(value: Tensor) -> int:
        bits = int(_bits(value))
        return bits if bits >= 0 else -(bits + (1 << (8 * value.element_size() - 1)))

    return abs(rank(a) - rank(b))
