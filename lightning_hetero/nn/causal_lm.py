"""Chunked heads for the causal language models of Hugging Face transformers.

[Note: Loss in the head]
Such a model calls its head, and then a loss function with the logits. With a chunked head the loss
is computed in the head: only there is it sure that the head's weights are in memory. The model's
labels are taken as its forward begins. The head returns :class:`NoLogits`, and the loss function
takes the loss from it. A model that does something else with logits or labels in between is
refused.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol, cast

from torch import Tensor, nn

from lightning_hetero.errors import ConfigError
from lightning_hetero.nn.chunked_head import chunked_cross_entropy

_LOSS = "ForCausalLMLoss"  # the loss function of transformers that this module computes


class _CausalLM(Protocol):
    """What is used of a model of transformers."""

    loss_function: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any: ...
    def get_output_embeddings(self) -> nn.Module | None: ...


class ChunkedCausalLMs:
    """Gives the causal language models in a module chunked heads, until :meth:`remove`.

    Calls without labels, as in generation, compute logits as before.

    Args:
        root: The module.

    Raises:
        ConfigError: It has no causal language model, or one whose head or loss is of another kind.
    """

    def __init__(self, root: nn.Module) -> None:
        found = [(name or type(module).__name__, module) for name, module in root.named_modules() if _is_causal(module)]
        if not found:
            raise ConfigError(
                "chunked_head=True, but the model has no causal language model of Hugging Face transformers. Leave the option "
                "out. In a model of your own, use lightning_hetero.nn.ChunkedHead as head and loss."
            )
        heads = [_heads(name, module) for name, module in found]
        self._models = [_ChunkedModel(module, linears) for (_, module), linears in zip(found, heads, strict=True)]

    def remove(self) -> None:
        """Gives the models their own heads back."""
        for model in self._models:
            model.remove()


class NoLogits:
    """Stands for logits that a chunked head does not compute, and has their loss.

    It allows what leaves the loss as it is: ``contiguous()``, and ``float()``, which the loss
    function of transformers calls anyway. Any other use is refused by name.
    """

    def __init__(self, loss: Tensor, asked: _Asked, model: str) -> None:
        self.loss, self.asked, self._model = loss, asked, model

    def contiguous(self) -> NoLogits:
        """Itself."""
        return self

    def float(self) -> NoLogits:
        """Itself."""
        return self

    def _refuse(self, use: str) -> NoReturn:
        raise ConfigError(
            f"with chunked_head=True a call of {self._model} with labels computes a loss and no logits, but {use!r} uses the "
            f"logits. Either the model itself does that, because it scales or caps them, or code that reads output.logits. Call "
            f"the model without labels for logits, or leave chunked_head out."
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what copy, pickle and numpy look for
            raise AttributeError(name)
        self._refuse(name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> NoReturn:
        given = [*args, *(kwargs or {}).values()]
        nested = [item for value in given if isinstance(value, list | tuple) for item in value]
        for used in (*given, *nested):
            if isinstance(used, NoLogits):
                used._refuse(func.__name__)
        raise ConfigError(f"with chunked_head=True a call with labels computes no logits, but {func.__name__!r} uses them.")


def _refused(operator: str) -> Callable[..., NoReturn]:
    def refuse(logits: NoLogits, *_: object) -> NoReturn:
        logits._refuse(operator)

    return refuse


_OPERATORS = """add radd sub rsub mul rmul truediv rtruediv floordiv mod pow rpow matmul rmatmul neg abs eq ne lt le gt ge
getitem setitem len iter float int"""
for _operator in _OPERATORS.split():
    setattr(NoLogits, f"__{_operator}__", _refused(f"__{_operator}__"))


@dataclass(frozen=True, slots=True)
class _Asked:
    """The arguments of a model's forward that its loss function gets."""

    labels: Tensor
    shift_labels: Tensor | None
    num_items: Tensor | int | None
    ignore_index: int

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> _Asked | None:
        if given.get("labels") is None:
            return None
        return cls(given["labels"], given.get("shift_labels"), given.get("num_items_in_batch"), given.get("ignore_index", -100))

    def is_same(self, other: _Asked) -> bool:
        pairs = ((self.labels, other.labels), (self.shift_labels, other.shift_labels), (self.num_items, other.num_items))
        return all(a is b for a, b in pairs) and self.ignore_index == other.ignore_index

    def loss(self, hidden: Tensor, head: nn.Linear) -> Tensor:
        """The loss as transformers computes it from logits: each row predicts the next label."""
        targets = self.shift_labels
        if targets is None:
            targets = nn.functional.pad(self.labels, (0, 1), value=self.ignore_index)[..., 1:]
        loss = chunked_cross_entropy(
            hidden,
            head.weight,
            targets.to(hidden.device),
            head.bias,
            ignore_index=self.ignore_index,
            reduction="mean" if self.num_items is None else "sum",
        )
        if self.num_items is None:
            return loss
        return loss / (self.num_items.to(loss.device) if isinstance(self.num_items, Tensor) else self.num_items)


class _ChunkedModel:
    """One model, from the labels that its forward gets to the loss that it returns."""

    def __init__(self, model: nn.Module, heads: list[nn.Linear]) -> None:
        self._model, self._heads = model, heads
        self._signature = inspect.signature(model.forward)
        self._asked: _Asked | None = None
        self._own_loss = vars(model).get("_loss_function")
        self._hooks = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        ]
        _causal(model).loss_function = self._take_loss
        for head in heads:
            vars(head)["forward"] = partial(self._head, head)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        vars(self._model).pop("_loss_function")
        if self._own_loss is not None:
            _causal(self._model).loss_function = self._own_loss
        for head in self._heads:
            vars(head).pop("forward")

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = self._signature.bind_partial(*args, **kwargs).arguments
        self._asked = _Asked.of({**given, **given.get("kwargs", {})})

    def _end(self, *_: object) -> None:
        self._asked = None

    def _head(self, head: nn.Linear, hidden: Tensor) -> Tensor | NoLogits:
        if self._asked is None:
            return nn.Linear.forward(head, hidden)
        return NoLogits(self._asked.loss(hidden, head), self._asked, type(self._model).__name__)

    def _take_loss(self, logits: object, labels: Tensor, vocab_size: int | None = None, **kwargs: Any) -> Tensor:
        """Takes the place of the model's loss function."""
        asked = _Asked.of({"labels": labels, **kwargs})
        if not isinstance(logits, NoLogits) or asked is None or not logits.asked.is_same(asked):
            raise ConfigError(
                f"chunked_head=True: {type(self._model).__name__} changes logits or labels between its head and its loss, so "
                f"its head cannot be chunked. Leave chunked_head out."
            )
        return logits.loss


def _causal(model: nn.Module) -> _CausalLM:
    return cast(_CausalLM, model)


def _is_causal(module: nn.Module) -> bool:
    """Whether it is a model of transformers with a head, and not a part of one or a wrapper."""
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return False
    return module.get_output_embeddings() is not None


def _heads(name: str, model: nn.Module) -> list[nn.Linear]:
    """The linear heads of a model: its own and, if PEFT trains copies of it, these.

    Raises:
        ConfigError: The head is not linear, or the loss is another one.
    """
    loss = _causal(model).loss_function
    if getattr(loss, "__name__", "") != _LOSS:
        raise ConfigError(
            f"chunked_head=True: {name!r} computes its loss with {getattr(loss, '__name__', loss)!r}; only {_LOSS!r} of "
            f"transformers can be chunked. Leave chunked_head out."
        )
    head = _causal(model).get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    heads = [head] if copies is None else [getattr(head, "original_module", None), *copies.values()]
    linears = [h for h in heads if type(h) is nn.Linear]
    if len(linears) != len(heads):
        raise ConfigError(
            f"chunked_head=True: the head of {name!r} is a {type(head).__module__}.{type(head).__qualname__}; only "
            f"torch.nn.Linear can be chunked. With PEFT, train the head by modules_to_save rather than by an adapter, or leave "
            f"chunked_head out."
        )
    return linears
