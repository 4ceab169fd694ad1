"""Models whose blocks are trained by several optimizers each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.optim.reference import MasterWeightOptimizer
from support.models import LitModel, Outcome, Recipe, data, outcome, quiet_trainer

Make = Callable[[Any], torch.optim.Optimizer]

MAKE: dict[str, Make] = {
    "Muon": partial(torch.optim.Muon, lr=1e-2),
    "AdamW": partial(torch.optim.AdamW, lr=3e-3, fused=True),
    "Adam": partial(torch.optim.Adam, lr=1e-3, betas=(0.5, 0.9), fused=True),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
}


def sixteen_bit(name: str) -> Make:
    """The reference for 16-bit weights."""
    return lambda groups: MasterWeightOptimizer(groups, MAKE[name])


class Several(LitModel):
    """Optimizes by hand, with one optimizer for the matrices of the blocks and one for the rest."""

    names: tuple[str, ...] = ("Muon", "AdamW")
    by_turns = False
    drops = False  # by turns, gradients of the others are dropped
    reference = False  # with 16-bit weights, under plain Lightning

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def split(self) -> Iterator[list[nn.Parameter]]:
        trained = [(n, p) for n, p in self.named_parameters() if p.requires_grad]
        yield [p for n, p in trained if p.ndim == 2 and ".blocks." in n]
        yield [p for n, p in trained if p.ndim != 2 or ".blocks." not in n]

    def configure_optimizers(self) -> Any:
        make = sixteen_bit if self.reference else MAKE.__getitem__
        optimizers = [make(name)(params) for name, params in zip(self.names, self.split(), strict=True)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.7) for o in optimizers]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        self.manual_backward(loss / self.recipe.accumulate)
        self.losses.append(loss.detach().clone())
        if (batch_idx + 1) % self.recipe.accumulate:
            return
        turn = batch_idx // self.recipe.accumulate
        for number, (optimizer, scheduler) in enumerate(zip(self.optimizers(), self.lr_schedulers(), strict=True)):
            if self.by_turns and turn % len(self.names) != number:
                if self.drops:
                    optimizer.zero_grad()
                continue
            if self.recipe.clip is not None:
                self.clip_gradients(optimizer, self.recipe.clip, "norm")
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()


class ByTurns(Several):
    """Each optimizer has the batches of its turn; gradients of the others wait, and add up."""

    names = ("SGD", "AdamW")
    by_turns = True


class Together(torch.optim.Optimizer):
    """An optimizer of the user's, which runs two others."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        self.inner = list(inner)
        super().__init__([p for o in inner for g in o.param_groups for p in g["params"]], {})
        self.param_groups = [group for o in inner for group in o.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for optimizer in self.inner:
            optimizer.step()
        return loss

    def state_dict(self) -> Any:
        return {"inner": [optimizer.state_dict() for optimizer in self.inner]}

    def load_state_dict(self, state_dict: Any) -> None:
        for optimizer, state in zip(self.inner, state_dict["inner"], strict=True):
            optimizer.load_state_dict(state)
        self.param_groups = [group for optimizer in self.inner for group in optimizer.param_groups]


class Automatic(Several):
    """One optimizer, as Lightning sees it, that runs two."""

    kind: Callable[..., torch.optim.Optimizer] = Together

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = True

    def configure_optimizers(self) -> Any:
        made = [MAKE[name](params) for name, params in zip(self.names, self.split(), strict=True)]
        optimizer = self.kind(*made)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        return LitModel.training_step(self, batch, batch_idx)


def by_hand(recipe: Recipe, strategy: Any, folder: Path, *, module_class: Any) -> Outcome:
    """Trains where the module clips and accumulates itself, and not the Trainer."""
    torch.manual_seed(7)
    module = module_class(recipe)
    trainer = quiet_trainer(
        strategy=strategy, max_epochs=1, limit_train_batches=recipe.steps * recipe.accumulate, default_root_dir=folder
    )
    trainer.fit(module, data())
    return outcome(trainer, module)
