"""A backward that raised, and was caught, takes nothing with it but its own gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zerocompile.engine import Engine
from tests.support import engines, models, twins
from tests.support.harness import on_ranks


def _fine(engine: Engine, number: int) -> None:
    with engine.training_step():
        engines.backward(engine, twins.loss(engine.model, twins.mine(number)))


def _failing(engine: Engine, number: int) -> None:
    with engine.training_step():
        hidden = engines.FailsInBackward.apply(engine.model[0](twins.mine(number)))  # type: ignore[index]
        engines.backward(engine, engine.model[2](torch.tanh(hidden)).square().mean())  # type: ignore[index]


def _before(engine: Engine, inside: str) -> None:
    """In front of a window or an accumulation."""
    with contextlib.suppress(ValueError):
        _failing(engine, 0)
    if inside == "nothing":
        with engine.windows.open("auto", None, None):
            pass
        _fine(engine, 1)
    elif inside == "window":
        with engine.windows.open("auto", None, None):
            _fine(engine, 1)
    else:
        with engine.accumulation():
            pass
        _fine(engine, 1)


def _left(engine: Engine) -> None:
    """An accumulation that is left with the exception."""
    with contextlib.suppress(ValueError), engine.accumulation():
        _fine(engine, 0)
        _failing(engine, 2)
    with engine.accumulation():
        pass
    _fine(engine, 1)


def _zeroed(engine: Engine) -> None:
    """Caught inside an accumulation, and all is dropped there."""
    with engine.accumulation():
        _fine(engine, 0)
        with contextlib.suppress(ValueError):
            _failing(engine, 2)
        for p in engine.model.parameters():
            p.grad = None
        _fine(engine, 3)
        engine.model.zero_grad()
    _fine(engine, 1)


def _kept(engine: Engine) -> None:
    """Caught inside an accumulation, where nothing is dropped: what waits is incomplete, which nobody may overlook."""
    with engine.accumulation():
        _fine(engine, 0)
        with contextlib.suppress(ValueError):
            _failing(engine, 2)
    _says_so_until_all_is_zero(engine, "zero_grad")


def _says_so_until_all_is_zero(engine: Engine, text: str) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match=text):
            _fine(engine, 1)
    engine.model.zero_grad()
    _fine(engine, 1)


def _other(engine: Engine) -> None:
    """An exception that is no backward's leaves an accumulation: what waits is whole, and stays, as torch's does."""
    with contextlib.suppress(ArithmeticError), engine.accumulation():
        _fine(engine, 1)
        raise ArithmeticError
    engine.reduce_pending("the end")


def _last(engine: Engine) -> None:
    """Caught after an accumulation, whose last backward it was: as inside."""
    with engine.accumulation():
        _fine(engine, 0)
    with contextlib.suppress(ValueError):
        _failing(engine, 2)
    _says_so_until_all_is_zero(engine, "an accumulation, or was its last")


def _frozen(engine: Engine) -> None:
    """The last backward reduces what waited of a frozen parameter, too: it can be read, and `zero_grad` drops it."""
    weight = dict(engine.model.named_parameters())["0.weight"]
    with engine.accumulation():
        _fine(engine, 0)
    weight.requires_grad_(False)
    _fine(engine, 2)
    weight.requires_grad_(True)
    if weight.grad is None or engine.runtime.core.pending():
        raise RuntimeError("there is none, or something waits")
    engine.model.zero_grad()
    if weight.grad is not None:
        raise RuntimeError("it is still there")
    _fine(engine, 1)


SCENARIOS: dict[str, tuple[Any, ...]] = {
    "before nothing": (_before, "nothing"), "before a window": (_before, "window"),
    "before an accumulation": (_before, "accumulation"), "left": (_left,), "zeroed": (_zeroed,), "kept": (_kept,),
    "other": (_other,), "last": (_last,), "frozen": (_frozen,),
}  # fmt: skip


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_what_follows_a_failed_backward(stage: int) -> None:
    problems = []
    for scope in (False, "blocks"):
        for name, (scenario, *arguments) in SCENARIOS.items():
            torch._dynamo.reset()
            with twins.pair(stage, compile=scope, defer_grad_sync=True) as (engine, twin, _):
                try:
                    scenario(engine, *arguments)
                except RuntimeError as error:
                    problems.append(f"{name}, {scope=}: {error}")
                    continue
                twins.gradients(twin, twins.on_all(1))
                deviation = twins.grad_deviation(engine, twin)
            if deviation > 1e-6:
                problems.append(f"{name}, {scope=}: {deviation}")
    assert problems == [], "\n".join(problems)


def _three() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3))


@pytest.mark.parametrize("scope", [False, "blocks"])
@on_ranks()
def test_one_rank_leaves_a_held_window(scope: Any) -> None:
    """One rank leaves a window that gathers once, early or late; then both hold the same units."""
    problems = []
    for failing in (0, 1):
        for used in (0, 1, 3):  # layers of which the rank that fails has used the weights
            torch._dynamo.reset()
            with twins.pair(3, _three, compile=scope, unit_bytes=1) as (engine, twin, _):
                with pytest.raises((ArithmeticError, RuntimeError)), engine.windows.open("window", None, None):
                    if models.rank() == failing:
                        with engine.training_step():
                            x = twins.mine(0)
                            for layer in engine.model[:used]:  # type: ignore[index]
                                x = layer(x)
                        raise ArithmeticError
                    _fine(engine, 0)
                resident = engine.runtime.core.resident_units()
                _fine(engine, 1)
                twins.gradients(twin, twins.on_all(1))
                deviation = twins.grad_deviation(engine, twin)
            if deviation > 1e-6 or resident:
                problems.append(f"{scope=} rank {failing} after {used}: {deviation}, {resident}")
    assert problems == [], "\n".join(problems)
