"""Blocks with regions that ``torch.compiler.nested_compile_region`` marks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER, MODEL, assert_trains_like_ddp


@torch.compiler.nested_compile_region
def _outer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.relu(_inner(x, up)) @ down


@torch.compiler.nested_compile_region
def _inner(x: Tensor, up: Tensor) -> Tensor:
    return x @ up


class _Child(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Regional(nn.Module):
    """Two equal children, one of which is used twice, and a region in a region that is given parameters."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(width, 2 * width) / width)
        self.down = nn.Parameter(torch.randn(2 * width, width) / width)
        self.children_ = nn.ModuleList(_Child(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, width]
        one, two = self.children_
        return two(one(x + _outer(x, self.up, self.down))) + one(x)  # type: ignore[no-any-return]


INDUCTOR: dict[str, Any] = {}
CELLS = [(1, AOT), (3, AOT), (3, MODEL), (3, EAGER), pytest.param(3, INDUCTOR, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("stage", "options"), CELLS, ids=["1-aot", "3-aot", "3-model", "3-eager", "3-inductor"])
@on_ranks()
def test_regions_inside_blocks_train_as_under_ddp(stage: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    trained = assert_trains_like_ddp(models.Stacked(Regional), stage, tolerance=3e-6, **options)
    if options != EAGER:
        assert not [name for name in trained.eager_reads if name.startswith("layers.")]
