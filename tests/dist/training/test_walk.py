"""One training step, walked: how often control goes from one room of the package to another."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_zerocompile
from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import on_ranks

ROOT = Path(lightning_zerocompile.__file__).parent
MOST = 60  # visits; a reader who follows a step has to change rooms so often
STRATEGY = ("strategy.py", "engine_owner.py")  # what both strategies share is of the strategy's room


class Walked(models.Module):
    """Notes which file of the package each Python call of its fourth step is in."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[Path] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        def called(frame: FrameType, event: str, _: Any) -> None:
            file = Path(frame.f_code.co_filename)
            if event == "call" and ROOT in file.parents:
                self.files.append(file)

        if batch_idx == 3:  # all is compiled, and the order of the gathers is known
            sys.setprofile(called)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        sys.setprofile(None)


@pytest.mark.slow
@on_ranks()
def test_a_step_visits_few_rooms() -> None:
    """Stage 3, blocks compiled by aot_eager, AdamW."""
    module = Walked()
    strategy = ZeroCompileStrategy(stage=3, backend="aot_eager")
    models.make_trainer(strategy, max_steps=5).fit(module, models.Batches(models.rank()))
    names = [file.relative_to(ROOT).parts[0] for file in module.files]
    visits = [room for room, _ in groupby("strategy" if name in STRATEGY else name for name in names)]
    assert {"strategy", "engine.py", "compile", "runtime", "sharding", "optim", "ranks", "plugins"} <= set(visits)
    assert len(visits) <= MOST, visits
