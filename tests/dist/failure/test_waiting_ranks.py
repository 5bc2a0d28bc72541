"""Ranks that wait for a dead one; ranks that are set up differently."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.comptime import comptime

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.ranks.messages import CommunicationError, Messages
from tests.support import engines, failing, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER


def _fit(module: L.LightningModule, strategy: ZeroCompileStrategy, **arguments: Any) -> None:
    start = time.monotonic()
    data = models.Batches(models.rank())
    try:
        models.make_trainer(strategy, max_steps=4, num_sanity_val_steps=0, limit_val_batches=0, **arguments).fit(
            module, data
        )
    except CommunicationError as error:
        raise CommunicationError(f"after {time.monotonic() - start:.0f} s: {error}") from None


class KilledInWindow(models.Module):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        with self.trainer.strategy.coalesce_grad_reduction():  # type: ignore[attr-defined]
            self.manual_backward(self.loss(batch))
            if models.rank() == 1 and batch_idx == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        self.optimizers().step()  # type: ignore[union-attr]


def _killed(stage: int, options: dict[str, Any]) -> None:
    _fit(KilledInWindow(), ZeroCompileStrategy(stage=stage, timeout=timedelta(minutes=5), **options))


@pytest.mark.parametrize(
    ("stage", "options"),
    [(1, EAGER), *(pytest.param(stage, AOT, marks=pytest.mark.long) for stage in (2, 3))],
)
def test_a_wait_in_the_store_notices_a_dead_process(stage: int, options: dict[str, Any]) -> None:
    text = failing.expect_error(_killed, stage, options)
    assert "rank 0 lost another rank in" in text and "its process has died" in text and "hangs after" not in text, text


class DiesInCompile(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        comptime(_die)
        return self.block(x)


def _die(context: object) -> None:
    if models.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _killed_in_compile(stage: int) -> None:
    module = models.Module()
    module.model.layers = nn.ModuleList(DiesInCompile(block) for block in module.model.layers)
    _fit(module, ZeroCompileStrategy(stage=stage, timeout=timedelta(minutes=5), **AOT))


@pytest.mark.long
@pytest.mark.parametrize("stage", [3, 1])
def test_a_process_that_dies_in_the_first_compile(stage: int) -> None:
    text = failing.expect_error(_killed_in_compile, stage)
    assert "rank 1 died with exit code -9" in text, text
    assert "rank 0 lost another rank in" in text and "its process has died" in text and "hangs after" not in text, text


# ---- what is compared at set-up ----


class Rate(models.Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.lr == 2 and models.rank() == 1:
            return torch.optim.AdamW(self.parameters(), lr=0.5)
        return torch.optim.SGD(self.parameters(), lr=self.lr + (self.lr == 0.5) * models.rank())


@on_ranks()
def test_ranks_that_are_set_up_differently() -> None:
    second = models.rank() == 1
    cases: dict[str, Any] = {
        "stage": ({"stage": 2 if second else 3}, {}, 1.0),
        "reduce_dtype": ({"reduce_dtype": torch.bfloat16 if second else None}, {}, 1.0),
        "gradient_clip_val": ({}, {"gradient_clip_val": 1.0 if second else 2.0}, 1.0),
        "`lr`": ({}, {}, 0.5),
        "the class": ({}, {}, 2),
    }
    said = {}
    for name, (options, arguments, lr) in cases.items():
        with pytest.raises(RuntimeError) as raised:
            _fit(Rate(lr=lr), ZeroCompileStrategy(**({"compile": False} | options)), **arguments)
        said[name] = str(raised.value)
    for name, text in said.items():
        assert name in text and "on rank 0 but" in text and "on rank 1" in text, text


# ---- a steady state ----


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_requests_in_a_steady_state(stage: int) -> None:
    """One of the used flags, and at stage 3 one of the step's mark."""
    counts: list[int] = []
    store = Messages._store

    class Counting:
        def __getattr__(self, name: str) -> Any:
            counts[-1] += 1
            return getattr(store(), name)

    Messages._store = staticmethod(Counting)  # type: ignore[method-assign]
    try:
        counts.append(0)
        model, data = models.ByteModel(), models.Batches(models.rank())
        with engines.engine(model, stage) as engine:
            optimizer = engines.sgd(engine, model)
            for number in range(6):
                counts.append(0)
                engines.step(engine, optimizer, lambda number=number: engines.token_loss(model, data[number]))
            seen = counts[1:]
            counts.append(0)
    finally:
        Messages._store = staticmethod(store)  # type: ignore[method-assign]
    assert max(seen[3:]) <= (1 if stage < 3 else 2), seen
