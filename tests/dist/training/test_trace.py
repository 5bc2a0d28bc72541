"""A profiler's trace names what the runtime does, by unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.support import engines, models
from tests.support.harness import on_ranks


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_units_are_named(stage: int) -> None:
    blocks = [f"model.layers.{index}" for index in range(3)]
    torch._dynamo.reset()
    model, data = models.Whole(models.ByteModel()), models.Batches(models.rank())
    with engines.engine(model, stage, compile="blocks") as engine:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.attach_optimizers([optimizer])
        for traced in (False, True):
            with profile(activities=[ProfilerActivity.CPU]) if traced else torch.no_grad() as trace:
                with torch.enable_grad(), engine.training_step():
                    engines.backward(engine, engines.token_loss(model, data[0]))
                engine.step(optimizer, lambda: None)
                engine.apply_writes()  # while gloo's threads still record, the profiler may lose all other events
        assert isinstance(trace, profile)
        names = {event.name for event in trace.events() if event.name.startswith("zerocompile: ")}
    assert {f"zerocompile: reduce {block}" for block in blocks} <= names
    assert {f"zerocompile: gather {block} in forward" for block in blocks} <= names
    assert any(name.endswith(" in backward") for name in names) is (stage == 3)
