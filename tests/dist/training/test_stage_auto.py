"""`stage="auto"` in a run: all ranks take the same stage, train as DDP, and keep the choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.plan.auto import SHARE, SHARE_WITHOUT_BATCH
from tests.support import models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER


def tokens() -> Tensor:
    return torch.zeros(models.BATCH, models.LENGTH, dtype=torch.long, device="meta")


def wrong_tokens() -> Tensor:
    return torch.zeros(models.BATCH, models.LENGTH, device="meta")


def _peaks(batch: Any = None, **options: Any) -> list[int]:
    gloo = models.device() == "cpu"
    plan = ZeroCompileStrategy(**options).plan(models.Module(), batch, world_size=models.world(), gloo=gloo)
    return [stage.memory.peak for stage in plan.stages]


def _free(size: int) -> Any:
    """So many bytes are free on this rank, of memory that it does not share."""
    return mock.patch("lightning_zerocompile.plan.auto.free_memory", return_value=("", size))


@pytest.mark.parametrize("options", [EAGER, pytest.param(AOT, marks=pytest.mark.long)], ids=["eager", "aot_eager"])
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_the_fastest_that_fits(stage: int, options: dict[str, Any], tmp_path: Path) -> None:
    """It trains as DDP does, says why in one line, and the checkpoint has the choice; a second fit makes none."""
    options = {"unit_bytes": 1, **options}
    limit = int(_peaks(**options)[stage - 1] / SHARE_WITHOUT_BATCH) + 2 + models.rank()  # of several the smallest
    module, twin = models.pair()
    strategy = ZeroCompileStrategy(stage="auto", **options)
    trainer = models.make_trainer(strategy, max_steps=3)
    with models.heard() as heard, _free(limit):
        trainer.fit(module, models.Batches(models.rank()))
    models.reference(twin, 3)
    assert models.deviation(module, twin) < 1e-6
    assert strategy.choice is not None and strategy.choice.stage == stage
    said = [line for line in heard if "stage='auto' takes" in line]
    assert len(said) == (models.rank() == 0) and all(f"takes stage {stage}:" in line for line in said)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    saved = torch.load(tmp_path / "model.ckpt", weights_only=True)["zerocompile"]
    assert saved == strategy.choice.as_dict() and saved["stage"] == stage
    assert strategy.stats.reductions > 0
    choice = strategy.choice
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module, models.Batches(models.rank()))
    assert strategy.choice is choice


@on_ranks()
def test_where_none_fits() -> None:
    """Every rank raises with the numbers, before anything was sharded; the module is what it was."""
    limit = int(_peaks(unit_bytes=1, **EAGER)[2] / SHARE_WITHOUT_BATCH) - 2
    module = models.Module()
    before = list(module.parameters())
    strategy = ZeroCompileStrategy(stage="auto", unit_bytes=1, **EAGER)
    said = r"no stage fits in .* KiB .*stage 3 .* KiB\. Use more ranks"
    with pytest.raises(RuntimeError, match=said), _free(limit + 100 * models.rank()):
        models.make_trainer(strategy, max_steps=1).fit(module, models.Batches(models.rank()))
    assert all(p is q for p, q in zip(module.parameters(), before, strict=True)) and strategy.choice is None


@on_ranks()
def test_a_batch_makes_activations_count() -> None:
    """The choice is of what fits with them, and a batch that the model cannot take is named."""
    peaks = _peaks(tokens(), unit_bytes=1, **EAGER)
    assert peaks[2] > _peaks(unit_bytes=1, **EAGER)[2]
    options = {"stage": "auto", "plan_batch": tokens, "unit_bytes": 1, **EAGER}
    strategy = ZeroCompileStrategy(**options)
    with _free(int(max(peaks) / SHARE) + 2):
        models.fit(models.Module(), strategy, 2)
    assert strategy.choice is not None and strategy.choice.peaks == tuple(peaks)
    strategy, said = ZeroCompileStrategy(**options), "they need, with activations: stage 1"
    with pytest.raises(RuntimeError, match=said), _free(int(min(peaks) / SHARE) - 2):
        models.fit(models.Module(), strategy, 2)
    strategy = ZeroCompileStrategy(stage="auto", plan_batch=wrong_tokens, **EAGER)
    with pytest.raises(RuntimeError, match=r"stage='auto' cannot plan the run: rank 0: .*float32\[4, 6\]"):
        models.fit(models.Module(), strategy, 1)


class AsksTheTrainer(models.Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


@on_ranks()
def test_optimizers_that_ask_the_trainer() -> None:
    """Their states are counted as AdamW's, and the line says so; what is free on the host is enough for stage 1."""
    strategy = ZeroCompileStrategy(stage="auto", **EAGER)
    models.fit(AsksTheTrainer(), strategy, 1)
    assert strategy.choice is not None and strategy.choice.stage == 1
    assert "States are counted as AdamW's" in strategy.choice.reason
