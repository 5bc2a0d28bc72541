"""What tests of failures share: fits that a short timeout ends, and what shows that the next one is right."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning as L
import torch

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import Ranks


def strategy(stage: int = 2, seconds: float = 30, **options: Any) -> ZeroCompileStrategy:
    return ZeroCompileStrategy(**({"stage": stage, "compile": False, "timeout": timedelta(seconds=seconds)} | options))


def fit(module: models.Module, strategy: ZeroCompileStrategy, steps: int = 2, **arguments: Any) -> L.Trainer:
    data = models.Batches(models.rank())
    trainer = models.make_trainer(strategy, **({"max_steps": steps, "num_sanity_val_steps": 0} | arguments))
    trainer.fit(module, data, models.Batches(models.rank(), 1))
    return trainer


def expect_error(body: Any, *args: Any) -> str:
    group = Ranks(2)
    try:
        return group.expect_error(body, *args)
    finally:
        group.close(kill=True)


def works() -> None:
    """A fresh module trains as if nothing had happened."""
    torch.manual_seed(0)  # a model that differed has drawn more numbers
    module, twin = models.pair(models.Module)
    models.make_trainer(ZeroCompileStrategy(compile=False), max_steps=2).fit(module, models.Batches(models.rank()))
    models.reference(twin, 2)
    assert models.deviation(module, twin) < 1e-6
