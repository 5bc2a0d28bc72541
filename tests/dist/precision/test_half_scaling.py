"""Loss scaling beyond DDP's own precisions: ``16-true``, compiled modules, and an optimizer that captures graphs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.amp import GradScaler

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.plugins.precision import ZeroCompileHalfPrecision
from tests.support import models, precisions
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER
from tests.support.precisions import Overflowing, Recorded


def _precision(precision: str, **scaling: Any) -> dict[str, Any]:
    if precision != "16-true":
        return precisions.arguments(precision, **scaling)
    return {"plugins": [ZeroCompileHalfPrecision("16-true", GradScaler(models.device(), **scaling))]}


# ---- skipped steps ----


@pytest.mark.long
@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
@on_ranks()
def test_skipped_step_of_compiled_modules(precision: str) -> None:
    """An overflow in one rank's rows: all ranks skip, parameters and states stay to the bit, and training goes on."""
    for stage, options in ((1, AOT), (3, AOT), (3, EAGER)):
        for accumulate in (1, 2):
            module = precisions.pair(Overflowing)[0]
            trainer = precisions.fit(
                module, ZeroCompileStrategy(stage, **options), 5, accumulate_grad_batches=accumulate,
                **_precision(precision, init_scale=64.0),
            )  # fmt: skip
            states = module.states
            assert [precisions.same(a, b) for a, b in itertools.pairwise(states)] == [False, True, False, False]
            assert module.cleared and trainer.global_step == 5
            assert module.scales == [64.0] * 3 * accumulate + [32.0] * 2 * accumulate


# ---- the scaler in checkpoints ----


@on_ranks()
def test_scaler_of_16_true_in_checkpoints(tmp_path: Path) -> None:
    """Scale and growth go on after a resume, to the bit, from a file and from a directory."""
    folder = str(tmp_path)
    scaling = {"init_scale": 2.0**19, "growth_interval": 3}

    def fit(module: Recorded, epochs: int, checkpoint: Any, path: str | None = None) -> L.Trainer:
        strategy = ZeroCompileStrategy(3, compile=False, state_dict_type=checkpoint)
        trainer = models.make_trainer(strategy, max_epochs=epochs, **_precision("16-true", **scaling))
        trainer.fit(module, models.Batches(models.rank(), 4), ckpt_path=path, weights_only=False)
        return trainer

    whole = precisions.pair()[0]
    fit(whole, 2, "full")
    for checkpoint in ("full", "sharded"):
        half, resumed = precisions.pair()
        path = f"{folder}/{checkpoint}.ckpt"
        fit(half, 1, checkpoint).save_checkpoint(path)
        fit(resumed, 2, checkpoint, path)
        assert half.scales + resumed.scales == whole.scales and len(set(whole.scales)) > 2
        assert models.deviation(resumed, whole) == 0
    state = torch.load(f"{folder}/full.ckpt", weights_only=False)["ZeroCompileHalfPrecision"]
    assert state["scale"] == resumed.scales[0] and state["growth_interval"] == 3


# ---- optimizers for CUDA graphs ----


class Capturable(models.Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01, capturable=True, eps=1e-3)


@pytest.mark.gpu
@on_ranks()
def test_capturable_optimizer() -> None:
    """``Adam(capturable=True)``, whose step count lives on the device; with ``--device cuda``."""
    start, twin = precisions.pair(Capturable)  # type: ignore[type-var]
    losses = models.reference(twin, 5)
    assert models.deviation(twin, start) > 1e-2
    for stage, options in ((1, EAGER), (3, EAGER), (3, AOT)):
        module = precisions.pair(Capturable)[0]  # type: ignore[type-var]
        models.train(module, ZeroCompileStrategy(stage, **options), 5)
        assert module.losses == pytest.approx(losses, abs=1e-5) and models.deviation(module, twin) < 1e-5
