"""Two networks with an optimizer each, in one unit: one steps between the other's forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import ENDS, SCOPES

STEPS = 3


class _Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 5))
        self.critic = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def _numbers(seed: int, size: int) -> Tensor:  # [6, size]
    return torch.randn(6, size, generator=torch.Generator().manual_seed(seed)).to(models.device())


def _judge(model: Any, rank: int, number: int, fakes: list[Tensor]) -> Tensor:
    """The critic's loss. Adds what the generator has made to ``fakes``."""
    fakes.append(model.generator(_numbers(100 * rank + number, 4)))
    real = model.critic(_numbers(1000 + 100 * rank + number, 5) + 1)
    return F.softplus(-real).mean() + F.softplus(model.critic(fakes[-1].detach())).mean()


def _please(model: Any, fake: Tensor) -> Tensor:
    return F.softplus(-model.critic(fake)).mean()


def _train(model: Any, ranks: list[int], backward: Callable[[Tensor], None], attach: Any, entered: Any) -> None:
    """The order of DCGAN (Radford et al., 2015), as its examples have it."""
    generator = torch.optim.SGD(model.generator.parameters(), lr=0.3)
    critic = torch.optim.SGD(model.critic.parameters(), lr=0.3)
    attach([generator, critic])
    for number in range(STEPS):
        with entered():
            fakes: list[Tensor] = []
            critic.zero_grad()
            for rank in ranks:
                backward(_judge(model, rank, number, fakes) / len(ranks))
            critic.step()
            generator.zero_grad()
            for fake in fakes:
                backward(_please(model, fake) / len(ranks))
            generator.step()


@ENDS
@SCOPES
@on_ranks()
def test_a_critic_steps_before_the_generators_backward(stage: int, scope: Any) -> None:
    model, twin = models.pair(_Gan)
    _train(
        twin.to(models.device()),
        list(range(models.world())),
        lambda loss: loss.backward(),
        lambda optimizers: None,
        contextlib.nullcontext,
    )
    torch._dynamo.reset()
    with engines.engine(model, stage, compile=scope) as engine:
        _train(
            model,
            [models.rank()],
            lambda loss: engines.backward(engine, loss),
            engine.attach_optimizers,
            engine.training_step,
        )
        units = len(engine.runtime.units_in_order())
    assert (models.deviation(model, twin), units) == (pytest.approx(0, abs=1e-6), 1)
