"""What autograd saves inside a step: writes to it are found, and it lives no longer than the graph."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "aot_eager"])
@on_ranks()
def test_a_write_to_an_input_raises(options: dict[str, Any], requires_grad: bool) -> None:
    model = _model()
    with engines.engine(model, 3, **options) as engine:
        x = torch.randn(2, 8, device=models.device(), requires_grad=requires_grad)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"), engine.training_step():
            loss = model(x).sum()
            with torch.no_grad():
                x.add_(1)
            engines.backward(engine, loss)
        engine.runtime.core.end_forward()
        with engine.training_step():
            engines.backward(engine, model(x).sum())
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "aot_eager"])
@on_ranks()
def test_nothing_keeps_itself_alive(options: dict[str, Any]) -> None:
    model = _model()
    with engines.engine(model, 3, **options) as engine:
        for _ in range(2):  # the first compiles
            x = torch.randn(2, 8, device=models.device())
            with engine.training_step():
                loss = model(x).tanh().sum()
            engine.runtime.core.end_forward()
        gc.collect()
        gc.disable()
        try:
            with engine.training_step():
                x = torch.randn(2, 8, device=models.device())
                y = model(x).tanh()
                seen = [weakref.ref(x), weakref.ref(y)]
                loss = y.sum()
            engine.runtime.core.end_forward()
            del x, y, loss
            assert [one() for one in seen] == [None, None]
        finally:
            gc.enable()
