"""Gradients that torch has conjugated or negated lazily: a bit of the tensor says so, and its memory does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import models, twins
from tests.support.engines import backward
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER


class Negated(torch.autograd.Function):
    """Its gradient has the bit of a negation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return -x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return torch._neg_view(grad)


class Layer(nn.Module):
    """Its rows divide among the ranks, so no gradient is padded, which would resolve the bits."""

    def __init__(self) -> None:
        super().__init__()
        rows = 2 * models.world()
        self.weight = nn.Parameter(torch.randn(rows, 4, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(rows, 4))

    def forward(self, x: Tensor) -> Tensor:  # [5, 4] -> [5, rows]
        return (x.to(torch.complex64) @ self.weight.mH).abs() + x @ Negated.apply(self.scale).mT


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("stage", "options"),
    [(1, EAGER), (2, EAGER), (3, EAGER), pytest.param(1, AOT, marks=LONG), pytest.param(2, AOT, marks=LONG), (3, AOT)],
    ids=str,
)
@on_ranks()
def test_lazy_gradients_are_reduced(stage: int, options: dict[str, Any]) -> None:
    with twins.pair(stage, lambda: nn.Sequential(Layer()), **options) as (engine, twin, optimizer):
        lazy: list[bool] = []  # what plain torch's gradients say
        twin[0].weight.register_hook(lambda grad: lazy.append(grad.is_conj()))
        twin[0].scale.register_hook(lambda grad: lazy.append(grad.is_neg()))
        for number in range(2):
            optimizer.zero_grad()
            twin.zero_grad()
            with engine.training_step():
                backward(engine, twins.loss(engine.model, twins.mine(number)))
            twins.gradients(twin, twins.on_all(number))
            assert twins.grad_deviation(engine, twin) < 1e-6
        assert lazy and all(lazy)
