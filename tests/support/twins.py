"""A small sharded model and the plain twin that it is compared with, gradient by gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zerocompile.engine import Engine
from lightning_zerocompile.sharding.full_values import full_value
from tests.support import engines, models

LR = 0.25


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * number + rank)).to(models.device())


def mine(number: int) -> Tensor:
    return batch(models.rank(), number)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def gradients(twin: nn.Module, numbers: dict[int, list[int]]) -> None:
    """Adds what DDP would: the mean over ranks of each rank's summed gradients."""
    twin.to(models.device())
    for rank, own in numbers.items():
        for number in own:
            (loss(twin, batch(rank, number)) / models.world()).backward()


def on_all(*numbers: int) -> dict[int, list[int]]:
    return {rank: list(numbers) for rank in range(models.world())}


def grads(model: nn.Module) -> list[Tensor | None]:
    return [full_value(p.grad).clone() if p.grad is not None else None for p in model.parameters()]


@contextlib.contextmanager
def pair(stage: int, make: Callable[[], nn.Module] = small, **options: Any) -> Iterator[tuple[Engine, nn.Module, Any]]:
    """A sharded model, its twin and its optimizer; the model is never made whole, which would communicate."""
    model, twin = models.pair(make)
    engine = engines.make_engine(
        model, stage, **({"compile": False, "timeout": timedelta(seconds=10), "keep_gradients": True} | options)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine.attach_optimizers([optimizer])
    try:
        yield engine, twin, optimizer
    finally:
        engine.abandon()


def deviation(engine: Engine, twin: nn.Module) -> float:
    """Of parameters, where the sharded model is still sharded; collective."""
    pairs = zip(engine.model.parameters(), twin.parameters(), strict=True)
    return max((full_value(a) - b).abs().max().item() for a, b in pairs)


def grad_deviation(engine: Engine, twin: nn.Module) -> float:
    """Of gradients; infinite where one is None and the other is not."""
    worst = 0.0
    for a, b in zip(grads(engine.model), (p.grad for p in twin.parameters()), strict=True):
        if a is None or b is None:
            worst = max(worst, 0.0 if a is b else float("inf"))
        else:
            worst = max(worst, (a - b).abs().max().item())
    return worst
