"""The hooks that pipelines need in a module, and steps for other strategies made from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_hetero.errors import ConfigError
from lightning_hetero.parallel.pipeline.sums import Sums

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


class StagedSteps:
    """A mixin: a LightningModule defines its layers and its loss, and gets steps for any strategy.

    ``class Model(StagedSteps, LightningModule)`` defines :meth:`stage_layers` and :meth:`loss_sum`.
    Pipelines call these two (and :meth:`stage_inputs`) and no step of the module. The steps here do
    the same under every other strategy.
    """

    def stage_layers(self) -> nn.ModuleDict:
        """The layers in the order of forward; every parameter is in one of them.

        The output of each is the input of the next: a tensor, or a tuple of tensors as positional
        arguments. The names are for messages; parameters keep those of ``named_parameters()``.
        """
        raise NotImplementedError

    def loss_sum(self, output: Any, batch: Any) -> Any:
        """The loss of a batch summed over its items.

        The sums of two halves add up to the sum of the whole.

        Returns:
            The sum; or the sum and the number of items, such as tokens that are not padding
            (default: samples); or these and ``{name: other sum}``, which are logged as means.
        """
        raise NotImplementedError

    def stage_inputs(self, batch: Any) -> Any:
        """The input of the first layer: a tensor or a tuple of them.

        Default: the batch, or the first element of a sequence.
        """
        return first_tensor(batch)

    def tensor_parallel(self, layer: nn.Module) -> Mapping[str, ParallelStyle]:
        """How the ranks of one stage divide a layer: torch's styles by module name.

        Empty: each computes all.

        Default: pairs of Linears, one that widens and the next that narrows.
        """
        from lightning_hetero.parallel.pipeline.linear_pairs import linear_pairs

        return linear_pairs(layer)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean loss, logged as ``train_loss``."""
        return self._step("train", batch, prog_bar=True)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Logs the mean loss as ``val_loss``."""
        self._step("val", batch, sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Logs the mean loss as ``test_loss``."""
        self._step("test", batch, sync_dist=True)

    def _step(self, prefix: str, batch: Any, **options: Any) -> Tensor:
        module: Any = self
        output = run_layers(self.stage_layers().values(), self.stage_inputs(batch))
        sums = Sums.of(self.loss_sum(output, batch), batch)
        for name, value in (("loss", sums.loss), *sums.further.items()):
            mean = torch.as_tensor(value).detach() / sums.count
            module.log(f"{prefix}_{name}", mean, batch_size=int(sums.count), **options)
        mean_loss: Tensor = sums.loss / sums.count
        return mean_loss


def first_tensor(batch: Any) -> Tensor:
    """A batch that is a tensor, or the first of a sequence of them.

    Raises:
        ConfigError: It is neither.
    """
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Sequence) and batch and isinstance(batch[0], Tensor):
        return batch[0]
    raise ConfigError(
        f"the batch is a {type(batch).__name__}; define stage_inputs(batch), which returns the input of the first layer."
    )


def run_layers(layers: Iterable[nn.Module], value: Any) -> Any:
    """Passes a value through layers."""
    for layer in layers:
        value = layer(*value) if isinstance(value, tuple) else layer(value)
    return value
