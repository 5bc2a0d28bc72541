"""Stage 3: which units are gathered ahead of their use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import engines, models
from tests.support.harness import on_ranks

WIDTH = 40


def _ahead(compile: Any, prefetch: int) -> list[list[str]]:
    """The units that are gathered while each block computes, in the third step's forward. A norm, which is far smaller
    than they are, and a head follow the blocks."""
    model, data = models.Normed(lambda: models.Block(WIDTH), WIDTH, nn.LayerNorm), models.Batches(models.rank())
    seen: list[list[str]] = []
    with engines.engine(model, 3, compile=compile, prefetch=prefetch, unit_bytes=1) as engine:
        optimizer = engines.sgd(engine, model)
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: seen.append(sorted(engine.runtime.core.resident_units())))
        for _ in range(3):
            seen.clear()
            engines.step(engine, optimizer, lambda: engines.token_loss(model, data[0]))
    return seen


@pytest.mark.parametrize("compile", [False, "blocks"])
@on_ranks()
def test_a_small_unit_does_not_count(compile: Any) -> None:
    """Nothing hides behind a norm's compute, so the head's gather starts with the last block, not with the norm."""
    seen = _ahead(compile, 1)
    assert seen == [
        ["layers.0", "layers.1"],
        ["layers.1", "layers.2"],
        ["head.weight", "layers.2", "norm.bias", "norm.weight"],
    ]


@on_ranks()
def test_distance() -> None:
    seen = _ahead(False, 2)
    assert seen[0] == ["layers.0", "layers.1", "layers.2"]
    assert seen[1] == ["head.weight", "layers.1", "layers.2", "norm.bias", "norm.weight"]
    assert _ahead(False, 0) == [["layers.0"], ["layers.1"], ["layers.2"]]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:  # [batch, WIDTH]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("prefetch", [0, 1])
@on_ranks()
def test_what_backward_begins_with_stays(prefetch: int) -> None:
    """The forward's last unit is the backward's first: known from the first step on, it is not gathered twice."""
    model, twin = (models.Whole(Stack()).to(models.device()) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    inputs = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(models.world())]
    between, gathers = [], []
    with engines.engine(model, 3, compile="model", prefetch=prefetch) as engine:
        optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
        engine.attach_optimizers([optimizer])

        def loss() -> Tensor:
            value = model(inputs[models.rank()].to(models.device())).square().mean()
            between.append(sorted(engine.runtime.core.resident_units()))
            return value

        for _ in range(4):
            before = engine.runtime.stats().gathers
            engines.step(engine, optimizer, loss)
            gathers.append(engine.runtime.stats().gathers - before)
            for x in inputs:
                (twin(x.to(models.device())).square().mean() / models.world()).backward()
            plain.step()
            plain.zero_grad()
    last = ["model.layers.2.weight"] if prefetch else []
    assert between == [[], last, last, last] and gathers == ([5, 4, 4, 4] if prefetch else [5] * 4)
    assert models.deviation(model, twin) <= 1e-6
