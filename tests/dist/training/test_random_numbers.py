"""Random numbers for parameters: those of DDP on every rank, or an error that names the way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import CELLS


def _init(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.init.normal_(parameter)


def _uniform(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.2, 0.2)
            parameter.data.bernoulli_(0.3)
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def _schemes(model: nn.Module) -> None:
    weights = [p for p in model.parameters() if p.dim() == 2]
    nn.init.xavier_uniform_(weights[0])
    nn.init.kaiming_normal_(weights[2])
    nn.init.orthogonal_(model.head.weight)


def _modules(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    nn.init.trunc_normal_(model.head.weight)
    model.embedding.weight.data.normal_(0.0, 0.1)


RANDOM: dict[str, Callable[[nn.Module], None]] = {
    "init": _init,
    "methods": _uniform,
    "schemes": _schemes,
    "modules": _modules,
}


@pytest.mark.parametrize("name", list(RANDOM))
@on_ranks()
def test_random_numbers_are_those_of_ddp(name: str) -> None:
    """Equal seeds on all ranks give the whole parameter what one process draws, not every shard the same rows."""
    problems = []
    for stage, scope in CELLS:
        torch._dynamo.reset()
        model, twin = models.pair(models.ByteModel)
        torch.manual_seed(3)
        RANDOM[name](twin)
        after = torch.rand(1).item()
        with engines.engine(model, stage, compile=scope) as engine:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            torch.manual_seed(3)
            RANDOM[name](model)
            if torch.rand(1).item() != after:
                problems.append(f"stage {stage} {scope}: the generator is elsewhere than under DDP")
            engine.steps.before(optimizer)
        if models.deviation(model, twin) > 1e-6:
            problems.append(f"stage {stage} {scope}: {models.deviation(model, twin)}")
    assert problems == []


@on_ranks()
def test_random_numbers_of_a_shard_raise() -> None:
    stage = 3
    model, messages = models.ByteModel(), []
    engine = engines.make_engine(model, stage)
    for draw in (torch.bernoulli, nn.init.orthogonal_):
        try:
            draw(dict(model.named_parameters())["layers.0.up.weight"])
            messages.append("nothing was raised")
        except RuntimeError as error:
            messages.append(str(error))
    engine.abandon()
    for name, message in zip(("bernoulli", "orthogonal_"), messages, strict=True):
        assert f"`{name}`" in message and "`layers.0.up.weight`" in message, message
        assert "strategy.full_parameters" in message
