"""A closure that user code hands to `step` in manual optimization reads parameters as the step around it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile.strategy import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER


class Closure(models.Module):
    """Its loss reads parameters outside of the model's forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.alpha = nn.Parameter(torch.linspace(1, 2, 8))
        self.how = how

    def penalty(self) -> Any:
        if self.how == "attribute":
            return self.alpha.pow(2).sum()
        return sum(p.pow(2).sum() for p in self.parameters())

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch) + 1e-4 * batch.float().mean() * self.penalty()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


@pytest.mark.parametrize("how", ["attribute", "parameters"])
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (1, AOT),
        (2, EAGER),
        (3, EAGER),
        (3, AOT),
        (1, EAGER | {"optimizer_in_backward": True}),
        (3, AOT | {"optimizer_in_backward": True}),
    ],
)
@on_ranks()
def test_a_loss_in_a_closure_reads_parameters(how: str, stage: int, options: dict[str, Any]) -> None:
    ours, ddp = models.pair(Closure, how=how)
    models.make_trainer("ddp_find_unused_parameters_true", max_steps=3).fit(ddp, models.Batches(models.rank()))
    models.train(ours, ZeroCompileStrategy(stage, **options), 3)
    assert models.deviation(ours, ddp) < 1e-6
