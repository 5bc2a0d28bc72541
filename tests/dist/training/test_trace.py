"""A profiler's trace names what the runtime does, by unit."""

from __future__ import annotations

import pytest
import torch

from tests.support import engines, models
from tests.support.harness import on_ranks


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_units_are_named(stage: int) -> None:
    blocks = [f"model.layers.{index}" for index in range(3)]
    torch._dynamo.reset()
    model, data = models.Whole(models.ByteModel()), models.Batches(models.rank())
    with engines.engine(model, stage, compile="blocks") as engine:
        trace = engines.profiled_step(engine, model, data[0])
        names = {event.name for event in trace.events() if event.name.startswith("zerocompile: ")}
    assert {f"zerocompile: reduce {block}" for block in blocks} <= names
    assert {f"zerocompile: gather {block} in forward" for block in blocks} <= names
    assert any(name.endswith(" in backward") for name in names) is (stage == 3)
