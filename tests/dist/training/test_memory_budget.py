"""Stage 3 with memory to spare: units that stay gathered, chosen once and alike on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import reference

LR, STEPS = 0.5, 6


def _plain(twin: nn.Module) -> None:
    reference(twin, STEPS, optimizer=torch.optim.SGD(twin.parameters(), lr=LR, momentum=0.9))


def _sizes(engine: Any) -> dict[int, int]:
    return dict(engine.runtime.used_units())


def _run(scope: Any, budget: Any, recompiles: int) -> list[str]:
    """Trains at stage 3; `budget`: (), "auto", a number of bytes, or by rank; further ranks take them in turn."""
    torch._dynamo.reset()
    counters.clear()
    twin, problems = models.Whole(models.ByteModel()), []
    model = models.Whole(models.ByteModel())
    model.load_state_dict(twin.state_dict())
    _plain(twin.to(models.device()))
    data, mine = (
        models.Batches(models.rank()),
        budget[models.rank() % 2] if isinstance(budget, tuple) and budget else budget,
    )
    with engines.engine(model, 3, compile=scope, keep_gathered=mine) as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        engine.attach_optimizers([optimizer])
        sizes, gathers, graphs = _sizes(engine), [], []
        for number in range(STEPS):
            before = engine.runtime.stats()
            with engine.training_step():
                engines.backward(engine, engines.token_loss(model, data[number]))
            engine.step(optimizer, lambda: None)
            now = engine.runtime.stats()
            gathers.append(now.gathers - before.gathers)
            graphs.append(engine.regions.stats.dynamo_graphs)
        left = _sizes(engine)
        kept = {unit: size for unit, size in sizes.items() if unit not in left}
        smallest = min(budget) if isinstance(budget, tuple) and budget else budget if isinstance(budget, int) else None
        cell = f"{scope} {budget}: kept {kept} of {sizes}, gathers {gathers}, graphs {graphs}"
        once = engine.runtime.core.resident_units()
        if once:
            problems.append(f"{cell}: still gathered {once}")
        if budget == () and (kept or gathers[1] != gathers[-1]):
            problems.append(f"{cell}: something is kept")
        if smallest is not None and sum(kept.values()) > smallest:
            problems.append(f"{cell}: more than the budget")
        if (budget == "auto" or (smallest or 0) > 10**9) and gathers[-1] > len(sizes):
            problems.append(f"{cell}: with all the memory more than one gather a unit")
        if kept and not gathers[-1] < gathers[1]:
            problems.append(f"{cell}: nothing saved")
        if bool(kept) != (budget == "auto" or bool(smallest)):
            problems.append(f"{cell}: kept")
        if graphs[-1] - graphs[1] > recompiles or graphs[-1] != graphs[3]:
            problems.append(f"{cell}: recompiled")
    if models.deviation(model, twin) > 1e-6:
        problems.append(f"{cell}: {models.deviation(model, twin)}")
    return problems


@on_ranks(timeout=300)
def test_units_that_stay() -> None:
    """Parameters equal DDP's, a kept unit is gathered once a step, equal blocks are compiled once more."""
    cells = [
        (False, (), 0),
        (False, "auto", 0),
        ("blocks", 0, 0),
        ("blocks", "auto", 4),
        ("blocks", 5000, 4),
        ("model", 2**40, 4),
        (False, (2**40, 3000), 0),  # the smallest of the ranks' counts
        ("blocks", (0, 2**40), 0),
    ]
    problems = [problem for cell in cells for problem in _run(*cell)]
    assert problems == [], "\n".join(problems)


@pytest.mark.parametrize("budget", ["auto", 1])
@on_ranks()
def test_in_a_trainer(budget: Any) -> None:
    module, twin = models.pair(models.Module)
    strategy = ZeroCompileStrategy(stage=3, compile=False, keep_gathered=budget, unshard_after_fit=False)
    models.train(module, strategy, 5)
    left = strategy.engine.runtime.used_units()
    strategy.engine.unshard()
    models.reference(twin, 5)
    assert models.deviation(module, twin) < 1e-6
    assert (len(left) < len(strategy.engine.runtime.unit_of)) is (budget == "auto")
