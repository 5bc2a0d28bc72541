"""The seconds of updates that multiply matrices: Muon's, whose matrices the ranks share, and those on whole values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import _muon as torch_muon
from torch.utils.flop_counter import FlopCounterMode

from lightning_zerocompile.config import Config
from lightning_zerocompile.optim.matrices import flops, flops_of_a_step
from lightning_zerocompile.plan.machine import Machine
from lightning_zerocompile.plan.plan import make_plan

SIZE, BLOCKS, STEPS = (24, 32), 4, 3
RATE = 1e6  # FLOP a second; communication takes next to no time
ONE = flops(SIZE, STEPS)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(SIZE[1], SIZE[0], bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [rows, 32] -> [rows, 32]
        return x + torch.nn.functional.pad(self.up(x), (0, SIZE[1] - SIZE[0]))


class Squares(torch.optim.Optimizer):
    """A user's optimizer that sees whole values: it multiplies each of them by itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_((p.grad @ p.grad.T) @ p, alpha=0.1)


def _seconds(optimizer: Any, world: int, stage: int = 3, **options: Any) -> float:
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    plan = make_plan(
        model,
        torch.zeros(16, SIZE[1]),
        world_size=world,
        config=Config(compile=False, unit_bytes=1, **options),
        machine=Machine(bandwidth=1e18, flops=RATE),
        stages=[stage],
        step=lambda model, batch: model(batch).square().mean(),
        optimizer=optimizer,
    )
    seconds = plan.stages[0].seconds
    assert len(plan.units) == BLOCKS and seconds is not None
    return seconds


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _muon(parameters: Any) -> list[torch.optim.Optimizer]:
    """Two, of half of the matrices each."""
    return [torch.optim.Muon(part, lr=0.1, ns_steps=STEPS) for part in (parameters[:2], parameters[2:])]


@pytest.mark.parametrize("size", [(6, 10), (10, 6), (8, 8)])
def test_flops_of_a_matrix(size: tuple[int, int]) -> None:
    """Those that torch counts."""
    with FlopCounterMode(display=False) as counter:
        torch_muon._zeropower_via_newtonschulz(torch.randn(size), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert flops(size, 5) == counter.get_total_flops()


def test_flops_of_a_step() -> None:
    """Two rounds of two units: the rank with most of the first has 7, that of the second 4."""
    assert flops_of_a_step([[5, 2], [4, 2], [4]], 2) == 7 + 4
    assert flops_of_a_step([[5, 2], [4, 2], [4]], 1) == 17
    assert flops_of_a_step([], 4) == 0


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("world", "most"), [(1, 4), (2, 2), (3, 2), (4, 2)])
def test_ranks_share_the_matrices_of_muon(world: int, most: int, stage: int) -> None:
    """Of two optimizers with two equal matrices each, a rank has at most so many."""
    more = _seconds(_muon, world, stage) - _seconds(_sgd, world, stage)
    assert more == pytest.approx(most * ONE / RATE, rel=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_whole_values_are_updated_on_all_ranks(world: int) -> None:
    more = _seconds(Squares, world, full_param_optimizers=("Squares",)) - _seconds(_sgd, world)
    products = 2 * 2 * SIZE[0] ** 2 * SIZE[1]
    assert more == pytest.approx(BLOCKS * products / RATE, rel=1e-6)
