"""`zero_grad(set_to_none=False)` where gradients wait drops them, as it does under DDP where they are in `grad`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zerocompile.engine import Engine
from tests.support import engines, models, twins
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER

PLACES = ("window", "bounded", "fp32", "accumulation")


def _zero_all(grads: list[Tensor]) -> None:
    for grad in grads:
        grad.zero_()


def _ways(engine: Engine, optimizer: Any, taken: list[Tensor]) -> dict[str, Callable[[], None]]:
    """``taken``: gradients that were read before the window; empty: there were none."""
    model = engine.model

    def now() -> list[Tensor]:
        return [p.grad for p in model.parameters() if p.grad is not None]

    ways = {
        "optimizer": lambda: optimizer.zero_grad(set_to_none=False),
        "module": lambda: model.zero_grad(set_to_none=False),
        "by hand": lambda: _zero_all(now()),
        "foreach": lambda: torch._foreach_zero_(now()),
    }
    if taken:
        ways["taken before"] = lambda: _zero_all(taken)
    return ways


def _cell(engine: Engine, twin: Any, optimizer: Any, place: str, before: bool, way: str, after: bool) -> float:
    """``before``: whether there are gradients from before; ``after``: whether a backward follows the zeroing."""
    for p in engine.model.parameters():
        p.grad = None

    def backward(number: int) -> None:
        with engine.training_step():
            engines.backward(engine, twins.loss(engine.model, twins.mine(number)))

    if before:
        backward(0)
    taken = [p.grad for p in engine.model.parameters()] if before else []
    zero = _ways(engine, optimizer, taken)[way]  # type: ignore[arg-type]
    if place == "accumulation":
        with engine.accumulation():
            backward(1)
        with engine.accumulation() if after else contextlib.nullcontext():
            zero()
        if after:
            backward(2)
        else:
            engine.reduce_pending("the end")
    else:
        sum_dtype = torch.float32 if place == "fp32" else None
        with engine.windows.open("auto", None if place == "window" else 0, sum_dtype):
            backward(1)
            zero()
            if after:
                backward(2)
    for p in twin.parameters():
        p.grad = torch.zeros_like(p)
    if after:
        twins.gradients(twin, twins.on_all(2))
    return twins.grad_deviation(engine, twin)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_gradients_that_are_zeroed_in_place(stage: int, place: str) -> None:
    """They are zeros, not None: an optimizer with weight decay moves the one and not the other."""
    problems = []
    for scope in (False, "blocks"):
        torch._dynamo.reset()
        with twins.pair(stage, compile=scope, defer_grad_sync=True) as (engine, twin, optimizer):
            for before in (False, True):
                for after in (False, True):
                    for way in _ways(engine, optimizer, [torch.zeros(())] * before):
                        deviation = _cell(engine, twin, optimizer, place, before, way, after)
                        if deviation > 1e-6:
                            problems.append(f"{scope=} {before=} {after=} by {way}: {deviation}")
    assert problems == [], "\n".join(problems)


def _by_optimizer(model: Any, optimizers: list[Any], number: int) -> None:
    optimizers[number].zero_grad()


def _by_module(model: Any, optimizers: list[Any], number: int) -> None:
    model.zero_grad()


def _by_hand(model: Any, optimizers: list[Any], number: int) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _of_all_before(model: Any, optimizers: list[Any], number: int) -> None:
    """As in a GAN, before the first of two backwards; the second comes after the first optimizer's step."""
    if number == 0:
        for optimizer in optimizers:
            optimizer.zero_grad()


def _never(model: Any, optimizers: list[Any], number: int) -> None:
    pass


@pytest.mark.parametrize("zero", [_by_optimizer, _by_module, _by_hand, _of_all_before, _never])
@pytest.mark.parametrize(("stage", "options"), [(1, EAGER), (3, AOT)])
@on_ranks()
def test_gradients_that_nobody_zeroes_are_warned_of_once(stage: int, options: dict[str, Any], zero: Any) -> None:
    model = models.ByteModel()
    with engines.engine(model, stage, **options) as engine, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parts = [model.layers.parameters(), model.head.parameters()]
        optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
        engine.attach_optimizers(optimizers)
        for step in range(6):
            with engine.training_step():
                loss = engines.token_loss(model, models.Batches(models.rank())[step])
            zero(model, optimizers, step % 2)
            engines.backward(engine, loss)
            optimizers[step % 2].step()
    said = [str(one.message) for one in caught if "nobody has zeroed" in str(one.message)]
    assert len(said) == (zero is _never and models.rank() == 0)
    assert all("`SGD.step()`" in one and "`optimizer.zero_grad()`" in one for one in said)
