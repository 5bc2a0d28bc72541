"""A backward through what `parameters()` yields, outside of a step, adds to the reduced gradients."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_zerocompile.fabric_strategy import ZeroCompileFabricStrategy
from lightning_zerocompile.strategy import ZeroCompileStrategy
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER


def _penalty(model: Any) -> Tensor:
    return 0.05 * sum(p.pow(2).sum() for p in model.parameters() if p.ndim > 0)


class Penalty(models.Module):
    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def on_after_backward(self) -> None:
        if self.hook == "after":
            _penalty(self.model.layers).backward()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.hook == "step":
            _penalty(self.model.layers).backward()
            _penalty(self.model.layers).backward()


@pytest.mark.parametrize("hook", ["after", "step"])
@pytest.mark.parametrize(
    ("stage", "options", "accumulate"),
    [
        (1, AOT, 1),
        (2, EAGER, 1),
        (3, AOT, 1),
        (3, EAGER, 1),
        (1, EAGER, 2),
        (3, EAGER, 2),
        (3, EAGER | {"defer_grad_sync": True}, 2),
        (3, EAGER | {"offload": "optimizer"}, 1),
        (3, EAGER | {"keep_gradients": True}, 1),
    ],
)
@on_ranks()
def test_a_penalty_between_backward_and_step(hook: str, stage: int, options: dict[str, Any], accumulate: int) -> None:
    ours, ddp = models.pair(Penalty, hook=hook)
    how = {"max_steps": 3, "accumulate_grad_batches": accumulate}
    models.make_trainer("ddp", **how).fit(ddp, models.Batches(models.rank()))
    models.make_trainer(ZeroCompileStrategy(stage, **options), **how).fit(ours, models.Batches(models.rank()))
    assert models.deviation(ours, ddp) < 1e-6


@pytest.mark.parametrize("how", ["before", "together", "after", "raw"])
@pytest.mark.parametrize(("stage", "options"), [(1, EAGER), (2, AOT), (3, EAGER)])
@on_ranks()
def test_a_penalty_in_fabric(how: str, stage: int, options: dict[str, Any]) -> None:
    strategy = ZeroCompileFabricStrategy(stage=stage, **options)
    fabric = L.Fabric(accelerator=models.device(), devices=models.ranks_here(), strategy=strategy)
    fabric.launch()
    inner, plain = models.pair(models.ByteModel)
    model, optimizer = fabric.setup(inner, torch.optim.SGD(inner.parameters(), lr=0.5))
    theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
    for number in range(3):
        theirs.zero_grad()
        engines.mean_backward(plain, number)
        _penalty(plain).backward()
        theirs.step()
        if how == "before":
            fabric.backward(_penalty(model))
        loss = engines.token_loss(model, models.Batches(models.rank())[number])
        fabric.backward(loss + _penalty(model) if how == "together" else loss)
        if how == "after":
            fabric.backward(_penalty(model))
        elif how == "raw":
            _penalty(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    strategy.unshard()
    assert models.deviation(inner, plain) < 1e-6


@pytest.mark.parametrize(("stage", "options"), [(1, EAGER), (3, AOT)])
@on_ranks()
def test_a_penalty_from_before_the_forward_of_fabric(stage: int, options: dict[str, Any]) -> None:
    strategy = ZeroCompileFabricStrategy(stage=stage, **options)
    fabric = L.Fabric(accelerator=models.device(), devices=models.ranks_here(), strategy=strategy)
    fabric.launch()
    inner = models.ByteModel()
    model, _ = fabric.setup(inner, torch.optim.SGD(inner.parameters(), lr=0.5))
    penalty = _penalty(model)
    loss = engines.token_loss(model, models.Batches(models.rank())[0])
    with pytest.raises(RuntimeError, match=r"mixes what this rank computes with parameter `.*fabric.backward"):
        fabric.backward(loss + penalty)
