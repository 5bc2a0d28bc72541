"""Compilation over many fits, validations and lengths in one process."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import on_ranks

AOT: dict[str, Any] = {"backend": "aot_eager"}
FITS = 10


class Graphs(L.Callback):
    """What a run's blocks did while the module was sharded."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.stats = copy.copy(trainer.strategy.compile_stats)  # type: ignore[attr-defined]
        self.eager = {name for name in trainer.strategy.eager_reads if ".layers." in name}  # type: ignore[attr-defined]


@pytest.mark.parametrize("scope", ["blocks", pytest.param("model", marks=pytest.mark.long)])
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
@on_ranks(2)
def test_later_fits_use_the_graphs_of_the_first(stage: int, scope: str) -> None:
    """k folds: a new module, strategy and Trainer each time, with validation before and in each."""
    graphs, eager, died, deviations = [], set(), [], []
    start = models.Module()
    for fold in range(FITS):
        module, twin, seen = copy.deepcopy(start), copy.deepcopy(start), Graphs()
        strategy = ZeroCompileStrategy(stage, scope, **AOT)
        trainer = models.make_trainer(strategy, max_epochs=1, callbacks=[seen])
        trainer.fit(module, models.Batches(models.rank(), 2), models.Batches(models.rank(), 1))
        graphs.append(seen.stats.dynamo_graphs)
        eager |= seen.eager
        if fold in (0, FITS - 1):
            models.reference(twin, steps=2)
            deviations.append(models.deviation(module, twin))
        died += [weakref.ref(one) for one in (module, module.model, *module.model.layers, strategy)]
        died += [weakref.ref(p) for p in module.parameters()]
        del module, twin, strategy, trainer, seen
    gc.collect()
    pickle.dumps(models.Module)
    assert graphs[0] > 0 and sum(graphs[1:]) == 0, graphs
    assert eager == set() and sum(ref() is not None for ref in died) == 0 and max(deviations) <= 1e-6


class Generates(models.Module):
    """Validation sees many lengths, as `generate` does."""

    def __init__(self, growing: bool) -> None:
        super().__init__()
        self.growing = growing

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        for length in range(1, models.LENGTH):
            for block in self.model.layers:  # type: ignore[union-attr]
                block.extra = length if self.growing else 0  # what Dynamo has to compile anew for
            self.model(batch[:, :length])
        for block in self.model.layers:  # type: ignore[union-attr]
            block.extra = 0


class Extra(models.Block):
    extra = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if self.extra == 0 else 1.0 + 0.0 * len("x" * self.extra))


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
@on_ranks(2)
def test_validation_cannot_use_up_the_graphs_of_training(stage: int) -> None:
    """The sanity validation meets Dynamo's limit: the warning names the limit and why, and training is compiled."""
    module, seen = Generates(growing=True), Graphs()
    module.model.layers = torch.nn.ModuleList(Extra(10) for _ in range(3))
    twin = copy.deepcopy(module)
    strategy = ZeroCompileStrategy(stage, **AOT)
    trainer = models.make_trainer(strategy, max_epochs=1, callbacks=[seen])
    with warnings.catch_warnings(record=True) as caught, torch._dynamo.config.patch(recompile_limit=3):
        warnings.simplefilter("always")
        trainer.fit(module, models.Batches(models.rank(), 2), models.Batches(models.rank(), 1))
    models.reference(twin, steps=2)
    assert seen.stats.backward == 1 and models.deviation(module, twin) <= 1e-6
    if models.rank() == 0:
        (said,) = [str(w.message) for w in caught if "runs eagerly" in str(w.message)]
        assert "recompile_limit" in said and "3 graphs" in said and "inference" in said and "extra" in said
        assert "skipped" not in said
