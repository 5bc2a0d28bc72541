"""Compilation over many fits, validations and lengths in one process."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models, parity
from tests.support.harness import on_ranks

AOT: dict[str, Any] = {"compile_options": {"backend": "aot_eager"}}
FITS = 10
LONG = pytest.mark.long


class Graphs(L.Callback):
    """What a run's blocks did while the module was sharded."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.stats = copy.copy(trainer.strategy.compile_stats)  # type: ignore[attr-defined]
        self.eager = {name for name in trainer.strategy.eager_reads if ".layers." in name}  # type: ignore[attr-defined]


@pytest.mark.parametrize("scope", ["blocks", pytest.param("model", marks=pytest.mark.long)])
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
@on_ranks()
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


class Encoder(L.LightningModule):
    """Blocks and layers of torch's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.heads = nn.ModuleList(nn.Linear(width, count) for count in (1, 2, 3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out = self.encoder(batch)
        return sum((head(out).square().mean() for head in self.heads), out.square().mean())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # torch 2.11 cannot trace its operator with dynamic sizes
        try:
            self.training_step(batch, batch_idx)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _batches(width: int) -> Callable[[int], list[Tensor]]:
    """By rank."""

    def of(rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(4, 5, width, generator=generator) for _ in range(2)]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "scope"),
    [(3, "blocks"), *(pytest.param(*c, marks=LONG) for c in [(1, "model"), (1, "blocks"), (2, "model"), (3, "model")])],
)
@on_ranks()
def test_torchs_own_layers_share_no_limit(stage: int, scope: str) -> None:
    """A sweep over the width: as many graphs at each, more in all than Dynamo keeps for one code object."""
    graphs = []
    for width in (8, 12, 16, 20):
        module = Encoder(width)
        twin = copy.deepcopy(module)
        strategy = ZeroCompileStrategy(stage, scope, **AOT)
        data = _batches(width)
        mine: Any = torch.utils.data.DataLoader(data(models.rank()), batch_size=None)  # type: ignore[arg-type]
        models.make_trainer(strategy, max_epochs=1).fit(module, mine, mine)
        graphs.append((strategy.compile_stats.forward, strategy.compile_stats.backward))
        assert not any(".layers." in name for name in strategy.eager_reads), (width, strategy.eager_reads)
        parity.reference(twin, 2, lambda net, batch: net.training_step(batch, 0), data, lr=0.1)
        assert models.deviation(module, twin) <= 1e-6
    assert graphs == [graphs[0]] * len(graphs) and graphs[0][1] > 0, graphs


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
@on_ranks()
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


class _RunsAnother(models.Module):
    """Another Trainer validates this module, or a copy of it, or a part of it, when an epoch ends."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.seen = what, []

    def validation_step(self, batch: Tensor, _: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    def _run(self) -> None:
        outer, self.trainer = self.trainer, None  # type: ignore[assignment]
        module: Any = copy.deepcopy(self) if self.what == "copy" else self
        if self.what == "part":
            module = _RunsAnother("nothing")
            module.model = self.model
        trainer = models.make_trainer(ZeroCompileStrategy(stage=1, compile=False))
        self.seen += [one["loss"] for one in trainer.validate(module, models.Batches(models.rank(), 1), verbose=False)]
        self.trainer = outer

    def on_train_epoch_end(self) -> None:
        if self.what in ("whole", "part", "copy"):
            self._run()

    def on_fit_end(self) -> None:
        if self.what == "after":
            self._run()


@pytest.mark.parametrize("what", ["whole", "part", "copy", "after"])
@pytest.mark.parametrize(("stage", "scope"), [(1, "blocks"), (2, False), (3, False), (3, "blocks")])
@on_ranks()
def test_another_trainer_inside_a_run(stage: int, scope: Any, what: str) -> None:
    """With this module it takes its shards away, which the next step says; with a copy, or after the last step, not."""
    module = _RunsAnother(what)
    twin = copy.deepcopy(module)
    trainer = models.make_trainer(ZeroCompileStrategy(stage=stage, compile=scope, **AOT), max_epochs=2)
    data = models.Batches(models.rank(), 2)
    if what in ("whole", "part"):
        with pytest.raises(RuntimeError, match=r"Another Trainer.*or with a part of it.*`copy.deepcopy\(module\)`"):
            trainer.fit(module, data)
        return
    trainer.fit(module, data)
    parity.reference(twin, [0, 1, 0, 1], lambda twin, batch: twin.loss(batch))
    assert models.deviation(module, twin) <= 1e-6
    assert len(module.seen) == (2 if what == "copy" else 1)
