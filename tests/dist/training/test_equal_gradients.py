"""A parameter that is used several times, with the same gradient: each use counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER, MODEL, assert_trains_like_ddp

LONG = pytest.mark.long


class Twice(nn.Module):
    """A layer on two inputs, a norm on three, and sums and products of a parameter with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(10, 10), nn.LayerNorm(10)
        self.weight = nn.Parameter(0.1 * torch.randn(10, 10))
        self.shift, self.scale = nn.Parameter(torch.randn(10)), nn.Parameter(torch.rand(10))

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, 10]
        x = self.layer(x) + self.layer(x.sin())
        x = self.norm(x) + self.norm(x.cos()) + self.norm(x.tanh())
        x = x + x @ (self.weight + self.weight)
        return x * self.scale + x * self.scale + 0.1 * (self.shift + self.shift)


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        pytest.param(1, AOT, id="1-blocks"),
        pytest.param(2, MODEL, id="2-model"),
        pytest.param(3, AOT, id="3-blocks"),
        pytest.param(3, EAGER, id="3-eager"),
        pytest.param(3, {"compile": "blocks", "compile_options": {"backend": "inductor"}}, id="3-inductor"),
        pytest.param(1, {"compile": "model", "compile_options": {"backend": "inductor"}}, id="1-inductor", marks=LONG),
        *(pytest.param(stage, EAGER, id=f"{stage}-eager", marks=LONG) for stage in (1, 2)),
        *(pytest.param(stage, MODEL, id=f"{stage}-model", marks=LONG) for stage in (1, 3)),
    ],
)
@on_ranks(timeout=240)
def test_each_use_counts(stage: int, options: dict[str, Any]) -> None:
    trained = assert_trains_like_ddp(models.Stacked(Twice), stage, lr=0.05, **options)
    assert bool(trained.compiled.backward) is bool(options["compile"])
