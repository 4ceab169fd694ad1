"""What pipelines ask of a module, and steps for other strategies made of the same."""

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
    """A mixin: a LightningModule says what its layers and its loss are, and has its steps for any strategy.

    ``class Model(StagedSteps, LightningModule)`` defines :meth:`stage_layers` and :meth:`loss_sum`. Pipelines ask for these two
    (and :meth:`stage_inputs`) and execute no step of the module; the steps here do the same under every other strategy.
    """

    def stage_layers(self) -> nn.ModuleDict:
        """The layers in the order of forward; every parameter is in one of them.

        Each takes what the one before gives: a tensor, or a tuple of tensors as positional arguments. The names are for messages;
        parameters keep those of ``named_parameters()``.
        """
        raise NotImplementedError

    def loss_sum(self, output: Any, batch: Any) -> Any:
        """The loss of a batch summed over its items: over two halves it adds up to that of the whole.

        Returns:
            The sum; or the sum and the number of items, such as tokens that are not padding (default: samples); or these and
            ``{name: other sum}``, which are logged as means.
        """
        raise NotImplementedError

    def stage_inputs(self, batch: Any) -> Any:
        """What of a batch the first layer gets: a tensor or a tuple of them. Default: a tensor itself, the first of a sequence."""
        return first_tensor(batch)

    def tensor_parallel(self, layer: nn.Module) -> Mapping[str, ParallelStyle]:
        """How the ranks of one stage share a layer: torch's styles by the names of its modules; none: each computes all of it.

        Default: pairs of Linears of which one widens and the next narrows.
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
    raise ConfigError(f"the batch is a {type(batch).__name__}; say with stage_inputs(batch) what of it the first layer gets.")


def run_layers(layers: Iterable[nn.Module], value: Any) -> Any:
    """Hands a value through layers."""
    for layer in layers:
        value = layer(*value) if isinstance(value, tuple) else layer(value)
    return value
