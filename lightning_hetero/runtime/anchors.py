"""Anchors: hooks observe where a block's forward and backward begin and end. Nothing is patched.

[Note: When a gradient is complete]
Autograd runs a parameter's accumulation node once per backward, after every use of the parameter
has contributed. So once all trainable parameters of a block have been accumulated, nothing in that
backward reads the block's weights again, and an update may write them in place. Reentrant
checkpointing breaks this rule, because an inner backward accumulates early. There a forward without
grad during training marks the block, and its update waits for the end of backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_hetero.errors import OffloadedAccessError
from lightning_hetero.store.live.blocks import Block
from lightning_hetero.untyped import Function

Inputs = tuple[tuple[object, ...], dict[str, object]]
"""The positional and keyword arguments of a forward."""


class Watcher(Protocol):
    """It is told of each anchor after the runtime has issued and waited, before compute goes on."""

    def forward_begins(self, block: Block, inputs: Inputs) -> None:
        """The forward of a block begins."""

    def forward_ends(self, block: Block) -> None:
        """The forward of a block ended, maybe by an exception."""

    def backward_begins(self, block: Block) -> None:
        """The first gradient has reached an output of the block, wherever its weights live."""


class _Runtime(Protocol):
    """It acts on anchors, before compute goes on."""

    watcher: Watcher | None

    def forward_begins(self, block: Block, inputs: Inputs) -> None: ...

    def forward_ends(self, block: Block, output: object) -> None: ...

    def backward_begins(self, block: Block) -> None: ...


def observe(blocks: list[Block], runtime: _Runtime) -> list[RemovableHandle]:
    """Registers the hooks; returns their handles."""
    trained = [(block, param) for block in blocks for param in block.params() if param.requires_grad]
    return [*observe_forwards(blocks, runtime), *(observe_gradient(block, param) for block, param in trained)]


def observe_forwards(blocks: list[Block], runtime: _Runtime) -> list[RemovableHandle]:
    """Registers the hooks on modules alone."""
    handles: list[RemovableHandle] = []
    for block in blocks:
        if block.rest is None:  # a trained part has the anchors of the rest
            handles += _observe_module(block, runtime)
    return handles


def observe_gradient(block: Block, param: nn.Parameter) -> RemovableHandle:
    """Tells the block when the gradient of one of its parameters is complete.

    Raises (during backward):
        OffloadedAccessError: The block's backward ran without its anchor, so it may have read
            weights that were not there.
    """
    key, opened = id(param), block.rest or block

    def complete(_: Tensor) -> None:
        block.grads_left.discard(key)
        if not opened.uses and opened.weights_on_disk:
            raise OffloadedAccessError(
                f"block {opened.name!r} has its weights on disk, and a gradient in it was computed before any output of its "
                f"forward had one: its forward must have left a tensor that reaches the loss in another way than being returned. "
                f"Return such tensors (in a tuple, list, dict or dataclass), or keep the block's weights in memory by another plan."
            )

    register: Callable[[Callable[[Tensor], None]], RemovableHandle] = param.register_post_accumulate_grad_hook
    return register(complete)


def _observe_module(block: Block, runtime: _Runtime) -> list[RemovableHandle]:
    def before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        runtime.forward_begins(block, (args, kwargs))

    def after(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        runtime.forward_ends(block, output)
        if (not block.spec.pinned or runtime.watcher is not None) and torch.is_grad_enabled():
            begins = _once_per_backward(lambda: runtime.backward_begins(block))
            given = frozenset(map(id, (*args, *kwargs.values())))  # returned as it came: the gradient of another block
            for leaf in tensors_in(output):
                if leaf.requires_grad and id(leaf) not in given:
                    register: Callable[[Callable[[Tensor], None]], RemovableHandle] = leaf.register_hook
                    register(begins)

    return [
        block.spec.module.register_forward_pre_hook(eager(before), prepend=True, with_kwargs=True),
        # Checkpointing leaves a forward by an exception.
        block.spec.module.register_forward_hook(eager(after), always_call=True, with_kwargs=True),
    ]


class _ModuleHook(functools.partial[object]):
    """A hook on a module. Copies of the module share it.

    A pickle of the module (``torch.save(model)``) has a function of the standard library in its
    place, which does nothing.
    """

    def __deepcopy__(self, memo: dict[int, object]) -> _ModuleHook:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (nullcontext(), "__exit__")


def eager(hook: Function) -> _ModuleHook:
    """Hooks act on the runtime, so a compiled model leaves its graph for them."""
    disable: Callable[[Function], Function] = torch.compiler.disable
    return _ModuleHook(disable(hook))


def _once_per_backward(call: Callable[[], None]) -> Callable[[Tensor], None]:
    """A block may have many outputs. The first gradient that arrives begins its backward."""
    last = [-1]

    def hook(_: Tensor) -> None:
        task: int = torch._C._current_graph_task_id()
        if task != last[0]:
            last[0] = task
            call()

    return hook


def tensors_in(tree: object) -> Iterator[Tensor]:
    """The tensors in a forward's arguments or results, in containers and dataclasses too."""
    if isinstance(tree, Tensor):
        yield tree
        return
    if type(tree) is tuple or type(tree) is list:  # as nearly all are; torch walks trees slowly
        for leaf in tree:
            yield from tensors_in(leaf)
        return
    if tree is None or (type(tree) is dict and not tree):
        return
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, field.name) for field in fields(leaf)])
