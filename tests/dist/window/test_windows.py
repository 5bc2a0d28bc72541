"""Windows that fail, whose ranks differ, or that are bounded or held: nothing is lost, left behind or mixed up."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile.sharding.full_values import full_value
from tests.support import engines, models, twins
from tests.support.harness import Ranks, on_ranks
from tests.support.models import Routed

STAGES = (1, 2, 3)


# ---- windows that fail ----


def _fail(grad: Tensor) -> None:
    raise ArithmeticError("in backward")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("swallowed", "texts"), [(False, ("on rank 0", "failed inside")), (True, ("incomplete", "incomplete"))]
)
@on_ranks(timeout=40)
def test_a_window_that_fails_on_one_rank_is_dropped_on_all(swallowed: bool, texts: tuple[str, str], stage: int) -> None:
    """Rank 0 raises in it, or swallows the error of a backward: all raise, and the next step is right."""
    with twins.pair(stage) as (engine, twin, optimizer):
        with (
            pytest.raises((ArithmeticError, RuntimeError), match=texts[min(models.rank(), 1)]),
            engine.training_step(),
            engine.windows.open("window", None, None),
        ):
            twins.loss(engine.model, twins.mine(8)).backward()
            if models.rank() == 0:
                if not swallowed:
                    raise ArithmeticError("on rank 0")
                y = engine.model(twins.mine(9))
                y.register_hook(_fail)
                with contextlib.suppress(ArithmeticError):
                    engines.backward(engine, y.sum())
        assert engine.runtime.core.deferred_bytes() == 0
        optimizer.zero_grad()
        engines.step(engine, optimizer, lambda: twins.loss(engine.model, twins.mine(0)))
        twins.gradients(twin, twins.on_all(0))
        torch.optim.SGD(twin.parameters(), lr=twins.LR).step()
        assert twins.deviation(engine, twin) <= 1e-6


@pytest.mark.parametrize("counts", ((0, 1), (1, 0), (0, 0)))
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(timeout=40)
def test_a_rank_without_a_backward_in_the_first_window(counts: tuple[int, int], stage: int) -> None:
    """The first window ever; a rank of which the count is 0 runs no backward. Further ranks take the counts in turn."""
    with twins.pair(stage) as (engine, twin, _):
        with engine.training_step(), engine.windows.open("window", None, None):
            for number in range(counts[models.rank() % 2]):
                twins.loss(engine.model, twins.mine(number)).backward()
        twins.gradients(twin, {rank: list(range(counts[rank % 2])) for rank in range(models.world())})
        assert twins.grad_deviation(engine, twin) <= 1e-6


@pytest.mark.parametrize("stage", STAGES)
@on_ranks()
def test_a_bounded_window_that_raises_leaves_gradients_as_they_were(stage: int) -> None:
    """Gradients before a bounded window that raises, and after it; first none, then some."""
    same = []
    with twins.pair(stage) as (engine, _, _):
        for before in (False, True):
            with engine.training_step():
                if before:
                    engines.backward(engine, twins.loss(engine.model, twins.mine(0)))
                expected = twins.grads(engine.model)
                with contextlib.suppress(ArithmeticError), engine.windows.open("auto", 0, None):
                    engines.backward(engine, twins.loss(engine.model, twins.mine(1)))
                    raise ArithmeticError
            both = zip(twins.grads(engine.model), expected, strict=True)
            same.append(all(a is b if a is None or b is None else torch.equal(a, b) for a, b in both))
            same.append(engine.runtime.core.deferred_bytes() == 0)
    assert all(same), (stage, same)


class Weighted(nn.Module):
    """Its gradient is the number it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.bfloat16))

    def forward(self, number: float) -> Tensor:
        return (self.weight * number).sum() + self.scale * number


@pytest.mark.parametrize(("dtype", "expected"), ((torch.float32, 264.0), (None, 256.0)))
@on_ranks()
def test_what_is_reduced_early_is_summed_in_the_windows_dtype(dtype: torch.dtype | None, expected: Any) -> None:
    """256 + 8 x 1, each reduced at once, in bf16 throughout."""
    with twins.pair(3, Weighted, master_dtype=None) as (engine, _, _):
        with engine.training_step(), engine.windows.open("auto", 0, dtype):
            for number in (256.0, *[1.0] * 8):
                engines.backward(engine, engine.model(number))
        grads = [p.grad for p in engine.model.parameters()]
        values = [float(full_value(g).flatten()[0]) for g in grads]
        dtypes = [g.dtype for g in grads]
    assert values == [expected] * 2 and dtypes == [torch.bfloat16] * 2


@pytest.mark.parametrize("stage", STAGES)
@on_ranks()
def test_a_window_inside_an_accumulation_is_an_error_at_every_stage(stage: int) -> None:
    with (
        twins.pair(stage) as (engine, _, _),
        pytest.raises(RuntimeError, match="inside an accumulation"),
        engine.accumulation(),
        engine.windows.open("auto", None, None),
    ):
        pass


# ---- held windows ----


def _routes() -> int:
    """Ranks take different ways in a held window, then the same way outside."""
    model, data = Routed(), models.Batches(models.rank())
    engine = engines.make_engine(model, 3, compile=False, timeout=timedelta(seconds=10))
    optimizer = engines.sgd(engine, model, lr=0.1)
    try:
        for route in ([0, 1], [0, 2], [0, 3]):  # the ways are known
            model.route = route
            engines.step(engine, optimizer, lambda: engines.token_loss(model, data[0]))
        with engine.training_step(), engine.windows.open("window", None, None):
            for route in ([0, 1 + models.rank() % 3], [3 - models.rank() % 3, 0]):
                model.route = route
                engines.token_loss(model, data[1]).backward()
        optimizer.step()
        for route in ([0, 1], [0, 2]):
            model.route = route
            engines.step(engine, optimizer, lambda: engines.token_loss(model, data[0]))
        return engine.runtime.stats().prefetched
    finally:
        engine.abandon()


def test_what_ranks_ran_in_a_held_window_is_no_prediction(ranks: Ranks) -> None:
    assert len(set(ranks.run(_routes, timeout=40))) == 1


@on_ranks()
def test_a_held_window_gathers_what_was_half_released() -> None:
    """Gathers inside a held window; before it a graph has released one of a unit's two values."""
    with twins.pair(3, lambda: nn.Linear(4, 3)) as (engine, _, _):
        weight, bias = engine.runtime.sharded_parameters
        with engine.training_step():
            both = [weight.handle, bias.handle]
            sources = [weight.source, bias.source]
            values = torch.ops.zerocompile.gather_unit(sources, both, [3, 4, 3], False)
            torch.ops.zerocompile.release_(values[:1], both[:1], False)
            torch.ops.zerocompile.release_(values[1:], both[1:], True)
            del values
            with engine.windows.open("window", None, None):
                before = engine.runtime.stats().gathers
                twins.loss(engine.model, twins.mine(0)).backward()
                result = engine.runtime.stats().gathers - before
    assert result == 0
