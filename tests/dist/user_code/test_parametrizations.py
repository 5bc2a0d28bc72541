"""Parametrizations that a forward registers and removes again, as PEFT's LoRA on the weights of experts does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER, MODEL, assert_trains_like_ddp


class _Plus(nn.Module):
    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, value: Tensor) -> Tensor:
        return value + self.delta


class Adapted(nn.Module):
    """A layer, of which the weight is frozen, with two deltas that are a part of it during its forward only."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.weight.requires_grad_(False)
        self.delta = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, width]
        for name in ("weight", "bias"):
            parametrize.register_parametrization(self.base, name, _Plus(getattr(self.delta, name) * 0.5))
        try:
            return x + torch.tanh(self.base(x))
        finally:
            for name in ("weight", "bias"):
                parametrize.remove_parametrizations(self.base, name, leave_parametrized=False)


@pytest.mark.parametrize(("stage", "options"), [(1, EAGER), (1, AOT), (2, AOT), (3, EAGER), (3, AOT), (3, MODEL)])
@on_ranks()
def test_a_parametrization_that_comes_and_goes_trains_as_under_ddp(stage: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = models.Stacked(Adapted)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    assert_trains_like_ddp(model, stage, **options)
    assert model.state_dict().keys() == start.keys()
    assert type(model.layers[0].base) is nn.Linear  # type: ignore[index, union-attr]
    assert torch.equal(model.state_dict()["layers.0.base.weight"].cpu(), start["layers.0.base.weight"])


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_another_name_under_another_class_raises_and_the_rest_trains_on(stage: int) -> None:
    model = models.Stacked(Adapted)
    with engines.engine(model, stage, **EAGER) as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        engine.attach_optimizers([optimizer])
        parametrize.register_parametrization(model.head, "weight", _Plus(torch.zeros((), device=models.device())))
        with pytest.raises(RuntimeError, match=r"`bias_orig` of a sharded Linear .* First remove the parametrization"):
            prune.l1_unstructured(model.head, "bias", 0.5)
        parametrize.remove_parametrizations(model.head, "weight", leave_parametrized=False)
        batch = models.Batches(models.rank())[0]
        engines.step(engine, optimizer, lambda: engines.token_loss(model, batch))
