"""A backward through what `parameters()` yields, outside of a step, adds to the reduced gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_zerocompile.fabric_strategy import ZeroCompileFabricStrategy
from lightning_zerocompile.strategy import ZeroCompileStrategy
from tests.support import engines, models, uneven
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


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "mse times a number": lambda x, y: 3 * F.mse_loss(x, y),
    "sum of squares": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "squares": lambda x, y: F.mse_loss(x, y, reduction="none").sum(),
    "smooth l1": lambda x, y: F.smooth_l1_loss(x, y, beta=0.1),
    "huber": lambda x, y: F.huber_loss(x, y, delta=0.1),
    "soft margin": lambda x, y: F.soft_margin_loss(x, y.sign()),
    "binary cross entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "weighted": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), weight=y.abs()),
    "with logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "l1": F.l1_loss,
    "both trained": lambda x, y: F.mse_loss(x, x.detach() * 0.5) + F.mse_loss(2 * x, x + y),
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("scope", [False, "blocks"])
@on_ranks()
def test_losses_between_parameters(stage: int, scope: Any) -> None:
    """The mean is over all elements, of which the ranks may have different numbers."""
    torch.manual_seed(0)
    ours, plain = models.pair(uneven.Net, width=10)
    with engines.engine(ours, stage, backend="aot_eager", compile=scope) as engine:
        for name, loss in LOSSES.items():
            anchors = {n: torch.randn_like(p) for n, p in plain.named_parameters()}
            for model in (ours, plain):
                model.zero_grad()
                for n, p in model.named_parameters():
                    with torch.no_grad():
                        anchor = torch.empty_like(p).copy_(anchors[n]) if p.numel() else p.detach()
                    loss(p, anchor).backward()
            full = engine.full_gradients(ours)
            for n, p in plain.named_parameters():
                assert torch.allclose(full[n], p.grad, rtol=1e-5, atol=1e-7), (name, n)  # type: ignore[arg-type]


class Distils(models.Module):
    """From a frozen copy of itself, whose weights are other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        for p in self.teacher.parameters():
            p.data.add_(0.1)

    def on_after_backward(self) -> None:
        sum(map(F.mse_loss, self.model.parameters(), self.teacher.parameters())).backward()


@pytest.mark.parametrize(("stage", "options"), [(1, EAGER), (2, AOT), (3, EAGER), (3, AOT)])
@on_ranks()
def test_a_distance_to_a_frozen_copy(stage: int, options: dict[str, Any]) -> None:
    ours, ddp = models.pair(Distils)
    models.make_trainer("ddp", max_steps=3).fit(ddp, models.Batches(models.rank()))
    models.make_trainer(ZeroCompileStrategy(stage, **options), max_steps=3).fit(ours, models.Batches(models.rank()))
    assert models.deviation(ours, ddp) < 1e-6


@pytest.mark.parametrize(("stage", "options"), [(1, EAGER), (2, AOT), (3, EAGER), (3, AOT)])
@on_ranks()
def test_a_penalty_in_a_window_of_fabric(stage: int, options: dict[str, Any]) -> None:
    """There, too, a loss reads whole values of `parameters()` between a forward and its backward."""
    strategy = ZeroCompileFabricStrategy(stage=stage, **options)
    fabric = L.Fabric(accelerator=models.device(), devices=models.ranks_here(), strategy=strategy)
    fabric.launch()
    inner, plain = models.pair(models.ByteModel)
    model, optimizer = fabric.setup(inner, torch.optim.SGD(inner.parameters(), lr=0.3))
    theirs, data = torch.optim.SGD(plain.parameters(), lr=0.3), models.Batches(models.rank())
    for number in range(3):
        with strategy.coalesce_grad_reduction():
            fabric.backward(engines.token_loss(model, data[number]) + _penalty(model))
            fabric.backward(_penalty(model))
            fabric.backward(engines.token_loss(model, data[number + 3]) + 2 * _penalty(model))
        with fabric.no_backward_sync(model):
            fabric.backward(engines.token_loss(model, data[number + 6]) + _penalty(model))
        fabric.backward(engines.token_loss(model, data[number + 9]))
        fabric.clip_gradients(model, optimizer, max_norm=0.3)
        optimizer.step()
        optimizer.zero_grad()
        theirs.zero_grad()
        for batch in range(number, number + 12, 3):
            engines.mean_backward(plain, batch)
        (5 * _penalty(plain)).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        theirs.step()
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
    with pytest.raises(RuntimeError, match=r"parameter `.*mixes what this rank computes.*fabric.backward.*clamp"):
        fabric.backward(loss + penalty)
