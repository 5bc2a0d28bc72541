"""What attention keeps, in a plan for devices. See [Note: attention of devices] in plan/attention.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zerocompile.config import Config
from lightning_zerocompile.plan.machine import Machine
from lightning_zerocompile.plan.plan import Plan, make_plan

BATCH, HEADS, LENGTH, DIM = 2, 4, 64, 16
SCORES = BATCH * HEADS * LENGTH * LENGTH  # elements
WIDTH = HEADS * DIM


class Block(nn.Module):
    def __init__(self, dropout: float, mask: str, shared: int) -> None:
        super().__init__()
        self.dropout, self.mask, self.shared = dropout, mask, shared
        self.query, self.pair = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH // shared)
        self.positions = nn.Parameter(torch.zeros(1, HEADS, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:  # [BATCH, LENGTH, WIDTH]
        query = self.query(x).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        key, value = self.pair(x).unflatten(-1, (2 * HEADS // self.shared, DIM)).transpose(1, 2).chunk(2, 1)
        masks: dict[str, Any] = {
            "none": None,
            "bool": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril(),
            "constant": self.positions.detach(),
            "learned": self.positions,
        }
        y = F.scaled_dot_product_attention(
            query, key, value, masks[self.mask], self.dropout, enable_gqa=self.shared > 1
        )
        return x + y.transpose(1, 2).flatten(2)


def _plan_of(module: nn.Module, scope: Any, gloo: bool = False, **dtypes: torch.dtype | None) -> Plan:
    return make_plan(
        module,
        torch.zeros(BATCH, LENGTH, WIDTH),
        world_size=2,
        config=Config(compile=scope),
        machine=Machine(gloo=gloo),
        step=lambda module, batch: module(batch).float().square().mean(),
        optimizer=torch.optim.SGD,
        **dtypes,  # type: ignore[arg-type]
    )


def _plan(dropout: float = 0.1, mask: str = "none", scope: Any = "blocks", gloo: bool = False, shared: int = 1) -> Plan:
    module = nn.Sequential(*(Block(dropout, mask, shared) for _ in range(3)))
    return _plan_of(module, scope, gloo, compute_dtype=torch.bfloat16)


def _kept(**options: Any) -> int:
    """Bytes that one of the three blocks keeps."""
    plan = _plan(**options)
    assert not any("eager code" in note for note in plan.notes), plan.notes
    return plan.stages[0].memory.activations // 3


@pytest.mark.parametrize("scope", ["blocks", False])
@pytest.mark.parametrize("mask", ["none", "bool", "constant"])
def test_dropout_keeps_no_scores(mask: str, scope: Any) -> None:
    """On the CPU it does: the probabilities, and what was dropped of them."""
    assert _kept(mask=mask, scope=scope, gloo=True) > 4 * SCORES
    # a mask of numbers may be kept once for each block, for all rows of the batch
    assert (
        _kept(mask=mask, scope=scope) < 2 * SCORES // (BATCH if mask != "none" else 1) + 8 * 2 * BATCH * LENGTH * WIDTH
    )
    assert _kept(mask=mask, scope=scope) < _kept(mask=mask, scope=scope, gloo=True) / 2


def test_a_mask_with_a_gradient() -> None:
    """Only eager code has a fused kernel for it."""
    assert _kept(mask="learned") == _kept(mask="learned", gloo=True) > 4 * SCORES
    assert _kept(mask="learned", scope=False) < _kept(mask="learned", scope=False, gloo=True) / 2


def test_without_dropout_it_is_as_on_the_cpu() -> None:
    for mask in ("none", "bool"):
        assert _kept(dropout=0.0, mask=mask) == _kept(dropout=0.0, mask=mask, gloo=True) < 4 * SCORES


def _loss(q: int, v: int, dtype: torch.dtype | None, autocast: torch.dtype | None, dropout: float) -> int:
    """What attention alone keeps of queries and keys with ``q`` elements and values with ``v``."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.value = nn.Linear(WIDTH, HEADS * q), nn.Linear(WIDTH, HEADS * v)

        def forward(self, x: Tensor) -> Tensor:
            query, value = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.value))
            if autocast is not None:
                query = query.float()  # as rotary positions leave them
            return F.scaled_dot_product_attention(query, query, value, dropout_p=dropout)

    plan = _plan_of(Pair(), False, compute_dtype=dtype, autocast_dtype=autocast)
    return plan.stages[0].memory.activations


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
@pytest.mark.parametrize("v", [8, 32])
def test_values_of_another_size(v: int, dtype: torch.dtype | None) -> None:
    """No flash attention takes them."""
    assert _loss(16, v, dtype, None, 0.1) > 0


def test_autocast_casts_what_attention_takes() -> None:
    with_dropout, without = (_loss(16, 16, None, torch.bfloat16, dropout) for dropout in (0.1, 0.0))
    assert abs(with_dropout - without) < 0.05 * without


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_flops_are_of_all_heads(dropout: float) -> None:
    """Heads that share keys and values compute as much as others, in the forward and in the backward."""
    plain, shared = _plan(dropout), _plan(dropout, shared=2)
    pair = 3 * 2 * BATCH * LENGTH * WIDTH * WIDTH  # of a linear layer of that width
    assert plain.flops is not None and shared.flops is not None
    assert plain.flops - shared.flops == 3 * pair - pair // 3  # nobody asks for the batch's gradient
