"""What waits in a window: how it is summed, in which memory and dtype, and up to how many bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile.sharding.full_values import full_value
from tests.support import engines, models
from tests.support.harness import Ranks, on_ranks
from tests.support.parity import STAGES

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
@on_ranks(2)
def test_gradients_that_share_memory(stage: int, compile: Any) -> None:
    """A sum is made in place only in memory that is one parameter's."""
    # How far the sums of a window are from autograd's, and how many gradients came from graphs.
    model, twin = models.Whole(Layers()), models.Whole(Layers()).to(models.device())
    twin.load_state_dict(model.state_dict())

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
    for rank in range(models.world()):
        for number in range(4):
            (loss(twin, rank, number) / models.world()).backward()
    worst = max((found[n] - p.grad).abs().max().item() for n, p in twin.named_parameters())
    assert worst <= 1e-5 and delivered == (4 * 4 if compile else 0)


# ---- limits and dtypes ----


def _bounded(stage: int, max_bytes: int) -> tuple[float, int, list[int]]:
    model, twin = models.ByteModel(), models.ByteModel()
    twin.load_state_dict(model.state_dict())
    data, held = models.Batches(models.rank()), []
    with engines.engine(model, stage) as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        engine.attach_optimizers([optimizer])
        with engine.training_step(), engine.windows.open("auto", max_bytes, None):
            for number in range(4):
                loss = engines.token_loss(model, data[number]) / 4
                with engine.backward(loss):
                    loss.backward()
                held.append(engine.runtime.core.deferred_bytes())
        scatters = engine.runtime.stats().reductions
        optimizer.step()
    engines.window_reference(twin, [[0, 1, 2, 3]])
    return models.deviation(model, twin), scatters, held


@STAGES
def test_max_bytes_reduces_the_largest_units_early(ranks: Ranks, stage: int) -> None:
    full = 2 * 4 + 2 * 520 + 3 * (40 + 40 + 840 + 84 + 840)
    unbounded = ranks.run(_bounded, stage, full)[0]
    assert unbounded[2] == [full] * 4
    for deviation, reductions, held in ranks.run(_bounded, stage, 3000):
        assert deviation <= 1e-6
        assert max(held) <= 3000 and min(held) > 0
        assert reductions > unbounded[1]


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


def test_accumulate_dtype(ranks: Ranks) -> None:
    """256 + 7 x 1: bf16 drops each 1; fp32 keeps them, and communication in bf16 rounds the sum once."""
    fp32 = torch.float32
    assert ranks.run(_summed, None, None)[0] == 256.0
    assert ranks.run(_summed, fp32, None)[0] == 264.0
    assert ranks.run(_summed, fp32, fp32)[0] == 263.0
