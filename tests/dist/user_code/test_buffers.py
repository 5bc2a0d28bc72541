"""Buffers that training reads: rank 0's on all ranks when, and only when, DDP broadcasts them ([Note: buffers])."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER


class Centered(L.LightningModule):
    """A center as DINO has it, and running statistics; each rank has other data."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("center", torch.zeros(8))
        self.validated: list[float] = []

    def _output(self, batch: Tensor) -> Tensor:  # [rows, 8] -> [rows, 8]
        for layer in self.body:
            batch = layer(batch)
        return self.norm(batch)

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        output = self._output(batch)
        loss = F.mse_loss(output - self.center, batch.flip(1))
        with torch.no_grad():
            self.center.mul_(0.8).add_(batch.mean(0))
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return None

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.validated.append(F.mse_loss(self._output(batch) - self.center, batch).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2)


def _data(number: int) -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(models.rank() + 10 * number)
    batches: Any = [torch.randn(4, 8, generator=generator) for _ in range(6)]
    return DataLoader(batches, batch_size=None)


def _cell(how: str, stage: int, options: dict[str, Any]) -> Any:
    chosen = [("manual", 1, EAGER), ("manual", 3, AOT), ("accumulation", 3, EAGER), ("plain", 1, EAGER)]
    return pytest.param(how, stage, options, marks=() if (how, stage, options) in chosen else pytest.mark.long)


@pytest.mark.parametrize(
    ("how", "stage", "options"),
    [
        _cell(how, stage, options)
        for how in ("plain", "accumulation", "manual")
        for stage, options in ((1, EAGER), (2, EAGER), (3, EAGER), (3, AOT))
    ],
)
@on_ranks()
def test_buffers_are_those_of_ddp(how: str, stage: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    start = Centered(how == "manual")
    found = {}
    for name, strategy in (("ours", ZeroCompileStrategy(stage=stage, **options)), ("ddp", "ddp")):
        module = copy.deepcopy(start)
        trainer = models.make_trainer(
            strategy, max_epochs=2, accumulate_grad_batches=2 if how == "accumulation" else 1, limit_val_batches=2
        )
        trainer.fit(module, _data(0), _data(1))
        found[name] = module.cpu()
    assert models.deviation(found["ours"], found["ddp"]) <= 1e-6
    for (name, ours), theirs in zip(found["ours"].named_buffers(), found["ddp"].buffers(), strict=True):
        assert (ours - theirs).abs().max() <= 1e-6, name
    assert found["ours"].validated == pytest.approx(found["ddp"].validated, abs=1e-6)
