"""The next step uses what an optimizer keeps, whatever user code has done to that, and nothing else stays in memory."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import EAGER


def _replaced(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def _written(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg_sq"].mul_(4)


def _loaded(optimizer: Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _counted_again(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"] = torch.zeros_like(state["step"])


def _forgotten(optimizer: Optimizer) -> None:
    del optimizer.state[optimizer.param_groups[0]["params"][1]]


def _cleared(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def _adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, fused=True)


def _step(engine: engines.Engine, optimizer: Optimizer, number: int) -> None:
    engines.accumulate(engine, engine.model, models.Batches(models.rank())[number])
    engine.step(optimizer, lambda: None)
    optimizer.zero_grad()


@pytest.mark.parametrize("change", [_replaced, _written, _loaded, _counted_again, _forgotten, _cleared])
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_what_user_code_changes_counts(stage: int, change: Callable[[Optimizer], None]) -> None:
    torch.manual_seed(0)
    model = models.ByteModel()
    twin = copy.deepcopy(model).to(models.device())
    reference = _adamw(twin)
    with engines.engine(model, stage, **EAGER) as engine:
        optimizer = _adamw(model)
        engine.attach_optimizers([optimizer])
        for number in range(6):
            if number == 4:  # after two steps with the same states
                change(optimizer)
                change(reference)
            _step(engine, optimizer, number)
            engines.mean_backward(twin, number)
            reference.step()
            reference.zero_grad()
    # AdamW divides by the gradients' size, so another order of a sum over three ranks shows more than SGD would.
    assert models.deviation(model, twin) < 5e-6


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_states_that_are_cleared_are_freed(stage: int) -> None:
    torch.manual_seed(0)
    model = models.ByteModel()
    with engines.engine(model, stage, **EAGER) as engine:
        optimizer = _adamw(model)
        engine.attach_optimizers([optimizer])
        for number in range(3):
            _step(engine, optimizer, number)
        kept = (state["exp_avg"] for state in optimizer.state.values())
        held = [weakref.ref(one._local_tensor) for one in kept if isinstance(one, DTensor)]
        assert held and all(local() is not None for local in held)
        optimizer.state.clear()
        assert all(local() is None for local in held)
