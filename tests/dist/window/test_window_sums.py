"""What waits in a window: how it is summed, in which memory and dtype, and up to how many bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile.sharding.full_values import full_value
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import STAGES, mean_backward

WIDTH = 6


# ---- memory ----


class Twice(nn.Module):
    """Both parameters have the same gradient: autograd, and a graph, give one tensor to both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(4, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # [4, WIDTH]
        return torch.tanh(x + self.left + self.right)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Twice() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # [4, WIDTH]
        for layer in self.layers:
            x = layer(x)
        return x


@STAGES
@pytest.mark.parametrize("compile", [False, "blocks", "model"])
@on_ranks()
def test_gradients_that_share_memory(stage: int, compile: Any) -> None:
    """A sum is made in place only in memory that is one parameter's."""
    model, twin = models.pair(lambda: models.Whole(Layers()))

    def loss(module: nn.Module, rank: int, number: int) -> Tensor:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * rank + number))
        return module(x.to(models.device())).square().sum()  # type: ignore[no-any-return]

    engine = engines.make_engine(model, stage, compile=compile, keep_gradients=True)
    try:
        with engine.training_step(), engine.windows.open("window", None, None):
            for number in range(4):
                engines.backward(engine, loss(engine.model, models.rank(), number))
        found = {name: full_value(p.grad) for name, p in model.named_parameters()}
        delivered = engine.runtime.stats().graph_reductions
    finally:
        engine.abandon()
    for number in range(4):
        mean_backward(lambda rank, number=number: loss(twin, rank, number))  # type: ignore[misc]
    worst = max((found[n] - p.grad).abs().max().item() for n, p in twin.named_parameters())
    assert worst <= 1e-5 and delivered == (4 * 4 if compile else 0)


# ---- limits and dtypes ----


@STAGES
@on_ranks()
def test_where_max_bytes_are_reached_all_that_waits_is_reduced(stage: int) -> None:
    full = 2 * 4 + 2 * 520 + 3 * (40 + 40 + 840 + 84 + 840)
    found = []
    for max_bytes in (full, full - 1):
        model, twin = models.pair(models.ByteModel)
        data, held = models.Batches(models.rank()), []
        with engines.engine(model, stage) as engine:
            optimizer = engines.sgd(engine, model)
            with engine.training_step(), engine.windows.open("auto", max_bytes, None):
                for number in range(4):
                    engines.backward(engine, engines.token_loss(model, data[number]) / 4)
                    held.append(engine.runtime.core.deferred_bytes())
            found.append((held, engine.runtime.stats().reductions))
            optimizer.step()
        engines.window_reference(twin, [[0, 1, 2, 3]])
        assert models.deviation(model, twin) <= 1e-6
    (all_held, at_the_end), (held, early) = found
    assert all_held == [full] * 4 and held == [0] * 4
    assert early == 4 * at_the_end


class Scaled(nn.Module):
    """Its gradient is the number it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))

    def forward(self, number: float) -> Tensor:
        return (self.weight * number).sum()


def _summed(dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> float:
    model = Scaled()
    engine = engines.make_engine(model, 3, compile=False, keep_gradients=True, reduce_dtype=reduce_dtype)
    try:
        with engine.training_step(), engine.windows.open("auto", None, dtype):
            for number in (256.0, *[1.0] * 7):
                model(number).backward()
        return float(full_value(next(model.parameters()).grad)[0])
    finally:
        engine.abandon()


@on_ranks()
def test_accumulate_dtype() -> None:
    """256 + 7 x 1: bf16 drops each 1; fp32 keeps them, and communication in bf16 rounds the sum once."""
    fp32 = torch.float32
    assert _summed(None, None) == 256.0
    assert _summed(fp32, None) == 264.0
    assert _summed(fp32, fp32) == 263.0
