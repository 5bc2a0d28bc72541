"""Rule 11 of lightning_zerocompile/README.md in eager code: what user code writes to a gathered value is kept."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from tests import engines, models
from tests.dist.test_compiled_writes import Writer
from tests.dist.test_rules import SCOPES, STAGES, _pair, _sgd
from tests.harness import Ranks


def _eager_writes(how: str, stage: int) -> float:
    """Eager writes in the forward; each rank writes the same."""
    model, twin = _pair(lambda: models.Stacked(lambda: Writer(how)))
    data = models.Batches(0)
    with engines.engine(model, stage, compile=False) as engine:
        optimizer = _sgd(engine, model)
        for number in range(3):
            engines.step(engine, optimizer, lambda number=number: engines.token_loss(model, data[number]))
    optimizer = torch.optim.SGD(twin.to(models.device()).parameters(), lr=0.5)
    for number in range(3):
        optimizer.zero_grad()
        engines.token_loss(twin, data[number]).backward()
        optimizer.step()
    return models.deviation(model, twin)


@STAGES
@pytest.mark.parametrize("how", ["data", "mul_", "clamp_", "renorm"])
def test_rule_11_eager_write_in_forward(ranks: Ranks, how: str, stage: int) -> None:
    """`weight.data.mul_` and its like in an eager forward train as in one process."""
    assert max(ranks.run(_eager_writes, how, stage)) <= 1e-6


class MaxNorm(nn.Module):
    """torch's own layer that writes to its weight in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 10, max_norm=0.5)
        self.layers = nn.ModuleList(models.Block(10) for _ in range(2))
        self.head = nn.Linear(10, models.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _writes_between_steps(stage: int, scope: Any, moment: str) -> tuple[float, float]:
    """Writes to a block's and to the head's weight, after a step or between backward and step."""
    model, twin = _pair(MaxNorm)
    data = models.Batches(0)

    def write(module: nn.Module) -> None:
        with torch.no_grad():
            module.layers[1].up.weight.data.mul_(0.5)
            module.head.weight.clamp_(-0.1, 0.1)

    strategy = ZeroCompileStrategy(stage=stage, compile=scope, backend="aot_eager")

    class Hook(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            if moment == "after":
                write(model)

        def on_before_optimizer_step(self, *_: Any) -> None:
            if moment == "before":
                write(model)

    module = models.Module(lambda: model)
    models.make_trainer(strategy, max_steps=3, callbacks=[Hook()]).fit(module, data)
    optimizer = torch.optim.SGD(twin.to(models.device()).parameters(), lr=0.5)
    for number in range(3):
        optimizer.zero_grad()
        engines.token_loss(twin, data[number]).backward()
        if moment == "before":
            write(twin)
        optimizer.step()
        if moment == "after":
            write(twin)
    return models.deviation(model, twin), float(model.head.weight.detach().abs().max())


@STAGES
@SCOPES
@pytest.mark.parametrize("moment", ["after", "before"])
def test_rule_11_eager_write_between_steps(ranks: Ranks, stage: int, scope: Any, moment: str) -> None:
    """Writes outside the forward, and those of `nn.Embedding(max_norm=...)`, reach the masters on every rank."""
    for deviation, largest in ranks.run(_writes_between_steps, stage, scope, moment):
        assert deviation <= 1e-6
        assert moment == "before" or largest <= 0.1 + 1e-6
