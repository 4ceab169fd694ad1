"""A slow and simple reference of 16-bit training with fp32 masters.

Everything is in memory, and the user's own optimizer updates the masters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hetero.optim.adam import MASTER

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class MasterWeightOptimizer(Optimizer):
    """Runs an optimizer on fp32 masters of 16-bit parameters.

    fp32 parameters are their own masters, unless ``place`` is given.

    One step, for each parameter with a gradient: ``master.grad = grad.float()``, the optimizer's
    own step, then ``parameter = master`` rounded to nearest even. With only fp32 parameters it
    equals the optimizer alone.

    ``param_groups`` hold the user's parameters; numbers that a scheduler writes there reach the
    optimizer at the next step. ``state_dict`` is the optimizer's own with ``"master_param"`` added
    to the state of each 16-bit parameter.

    Args:
        params: Parameters or groups, as for any optimizer.
        factory: Makes the optimizer from groups, such as
            ``functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)``.
        place: Returns the device of a parameter's step. It is called at every step; master and
            state are moved there first.
    """

    _optimizer: Optimizer
    _building = False  # in the constructor of torch's class, which adds the groups: there is no optimizer yet

    def __init__(
        self,
        params: Iterable[Any],
        factory: Callable[[list[dict[str, Any]]], Optimizer],
        *,
        place: Callable[[Tensor], torch.device] | None = None,
    ) -> None:
        self._building = True
        self._place = place
        self._masters: dict[Tensor, Tensor] = {}
        super().__init__(params, {})
        self._building = False
        self._optimizer = factory([self._master_group(group) for group in self.param_groups])
        self.defaults = self._optimizer.defaults
        self._adopt_groups(self.param_groups)

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer; its parameters are the masters."""
        return self._optimizer

    def master(self, param: Tensor) -> Tensor:
        """A parameter's master: itself if it is not 16-bit and no place is given."""
        return self._masters[param]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as ``torch.optim.Optimizer`` does."""
        super().add_param_group(param_group)
        if not self._building:
            self._optimizer.add_param_group(self._master_group(self.param_groups[-1]))
            self._adopt_groups(self.param_groups[-1:])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float = 1.0) -> Any:
        """Performs one step.

        Args:
            closure: Computes the loss and the gradients; called once, before the step.
            grad_scale: Multiplies each 16-bit parameter's gradient after its conversion to fp32; 1
                has no effect.

        Returns:
            The closure's result, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._push_groups()
        self._move()
        for param, master in self._masters.items():
            if master is not param:
                master.grad = None if param.grad is None else param.grad.to(master.device, master.dtype, copy=True)
                if master.grad is not None and grad_scale != 1.0:
                    master.grad.mul_(grad_scale)
        self.optimizer.step()
        for param, master in self._masters.items():
            if master is not param and master.grad is not None:
                param.copy_(master)
                master.grad = None
        self._publish_state()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state dict, with ``"master_param"`` for each 16-bit parameter."""
        self._push_groups()
        packed = self.optimizer.state_dict()
        for index, (param, master) in enumerate(self._in_order()):
            if param.dtype in _SIXTEEN_BIT:
                packed["state"][index] = {**packed["state"].get(index, {}), MASTER: master.detach()}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of the optimizer alone.

        Without masters they are taken from the parameters.
        """
        stripped = {
            index: {key: value for key, value in entry.items() if key != MASTER} for index, entry in state_dict["state"].items()
        }
        self.optimizer.load_state_dict({**state_dict, "state": {index: entry for index, entry in stripped.items() if entry}})
        with torch.no_grad():
            for index, (param, master) in enumerate(self._in_order()):
                if master is not param:
                    master.copy_(state_dict["state"].get(index, {}).get(MASTER, param))
        self._adopt_groups(self.param_groups)
        self._publish_state()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_optimizer": self._optimizer, "_masters": self._masters, "_place": self._place}

    def _master_group(self, group: dict[str, Any]) -> dict[str, Any]:
        for param in group["params"]:
            dtype = torch.float32 if param.dtype in _SIXTEEN_BIT else param.dtype
            apart = self._place is not None or dtype is not param.dtype
            self._masters[param] = param.detach().to(dtype, copy=True).requires_grad_() if apart else param
        return {**group, "params": [self._masters[param] for param in group["params"]]}

    def _move(self) -> None:
        if self._place is None:
            return
        for param, master in self._masters.items():
            where = self._place(param)
            if master.device != where:
                master.data = master.data.to(where)
                state = self.optimizer.state.get(master, {})
                state.update({key: value.to(where) for key, value in state.items() if isinstance(value, Tensor)})

    def _in_order(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters with their masters, in the order of a state dict's indices."""
        return [(param, self._masters[param]) for group in self.param_groups for param in group["params"]]

    def _adopt_groups(self, groups: list[dict[str, Any]]) -> None:
        """Copies the optimizer's hyper-parameters into the last ``len(groups)`` groups."""
        for group, inner in zip(groups, self.optimizer.param_groups[-len(groups) :], strict=True):
            group.update({key: value for key, value in inner.items() if key != "params"})

    def _push_groups(self) -> None:
        for group, inner in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key != "params"})

    def _publish_state(self) -> None:
        """Shows the optimizer's state under the user's parameters."""
        self.state.clear()
        for param, master in self._in_order():
            if master in self.optimizer.state:
                extra = {MASTER: master} if param.dtype in _SIXTEEN_BIT else {}
                self.state[param] = {**self.optimizer.state[master], **extra}
