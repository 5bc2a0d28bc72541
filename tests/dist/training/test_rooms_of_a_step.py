"""How often one traced step goes from one room of the package to another: what a reader has to follow.

``pytest -s tests/dist/training/test_rooms_of_a_step.py`` prints the walk.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import pytest
import torch

import lightning_zerocompile
from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import on_ranks
from tests.support.parity import AOT

ROOT = Path(lightning_zerocompile.__file__).parent
STEP = 4  # by then everything is compiled
ROOMS = {
    "strategy.py", "engine_owner.py", "engine", "plugins", "compile", "optim", "runtime", "sharding", "ranks",
}  # fmt: skip


class Walk(L.Callback):
    """Which room's functions are called, or return, in one step: each room once for as long as the step stays there."""

    def __init__(self) -> None:
        self.visits: list[tuple[str, str]] = []  # the room, and the first function there

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event in ("call", "return") and ROOT in path.parents:
            room = path.relative_to(ROOT).parts[0]
            if not self.visits or self.visits[-1][0] != room:
                self.visits.append((room, f"{path.stem}.{frame.f_code.co_name}"))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        if number == STEP:
            sys.setprofile(self)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
        sys.setprofile(None)


class Module(models.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model.layers = self.model.layers[:1]  # type: ignore[index, assignment]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@on_ranks(1)
def test_a_step_is_a_short_walk() -> None:
    """At most sixty visits of nine rooms with one compiled block, at stage 3."""
    if models.device() != "cpu":
        pytest.skip("counted on the CPU; on a device the ranks also meet")
    walk = Walk()
    strategy = ZeroCompileStrategy(stage=3, **AOT)
    models.make_trainer(strategy, max_steps=STEP + 2, max_epochs=1, callbacks=[walk]).fit(
        Module(), models.Batches(0, STEP + 2)
    )
    for room, function in walk.visits:
        print(f"{room:16} {function}")
    assert {room for room, _ in walk.visits} == ROOMS
    assert strategy.compile_stats.backward == 1 and strategy.eager_reads == {}
    assert 40 < len(walk.visits) <= 60, len(walk.visits)
