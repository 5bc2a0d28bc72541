"""An optimizer's step that raises leaves nothing half done, and the gradients that it did not use stay."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile.engine import Engine
from tests.support import engines, models
from tests.support.harness import on_ranks

LR, MOMENTUM = 0.3, 0.9


class Boom(Exception):
    pass


def _boom() -> None:
    raise Boom


class Nested(torch.optim.SGD):
    """Not one of torch's own, so it steps on DTensors; its step calls its parent's, which has the hooks, too."""

    fails = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = None if closure is None else closure()
        super().step()
        if self.fails:
            raise Boom
        return result


class _Pair:
    """A sharded model and its plain twin, with an optimizer of each."""

    def __init__(self, stage: int, compiled: bool, kind: type[torch.optim.SGD] = torch.optim.SGD) -> None:
        torch.manual_seed(0)
        self.model, self.twin = models.ByteModel(), models.ByteModel()
        self.twin.load_state_dict(self.model.state_dict())
        self.twin.to(models.device())
        scope: Any = "blocks" if compiled else False
        self.engine = engines.make_engine(self.model, stage, compile=scope, unit_bytes=1)
        self.optimizer = kind(self.model.parameters(), lr=LR, momentum=MOMENTUM)
        self.engine.attach_optimizers([self.optimizer])
        self.plain = torch.optim.SGD(self.twin.parameters(), lr=LR, momentum=MOMENTUM)

    def backward(self, number: int) -> None:
        with self.engine.training_step():
            loss = engines.token_loss(self.model, models.Batches(models.rank())[number])
            engines.backward(self.engine, loss)
        engines.mean_backward(self.twin, number)

    def plain_step(self) -> None:
        self.plain.step()
        self.plain.zero_grad()

    def with_gradient(self) -> int:
        return sum(p.grad is not None for p in self.model.parameters())


def _cells(stage: int, scenario: Callable[[_Pair], None], kind: type[torch.optim.SGD] = torch.optim.SGD) -> None:
    for compiled in (False, True):
        torch._dynamo.reset()
        pair = _Pair(stage, compiled, kind)
        with engines.closing(pair.engine):
            scenario(pair)
        deviation = models.deviation(pair.model, pair.twin.cpu())
        assert deviation <= 1e-6, f"compiled={compiled}: {deviation}"


def _raw(pair: _Pair) -> None:
    """Past Lightning: what waits is reduced by the retry, gradients go with it, and a window still refuses steps."""
    engine, optimizer = pair.engine, pair.optimizer
    for number in range(3):
        with engine.accumulation():
            pair.backward(2 * number)
            pair.backward(2 * number + 1)
        if number == 1:
            with pytest.raises(Boom):
                optimizer.step(_boom)
            assert pair.with_gradient() == len(list(pair.model.parameters()))
        optimizer.step()
        assert pair.with_gradient() == 0
        pair.plain_step()
    with pytest.raises(Boom):
        optimizer.step(_boom)
    with pytest.raises(RuntimeError, match="inside `coalesce_grad_reduction`"), engine.windows.open("auto", None, None):
        optimizer.step()


def _through_lightning(pair: _Pair) -> None:
    """In the rest of a step whose optimizer raised, user code still computes with full values."""
    engine, optimizer = pair.engine, pair.optimizer
    for step in (lambda: engine.step(optimizer, _boom), lambda: optimizer.step(_boom)):
        with engine.training_step():
            with pytest.raises(Boom):
                step()
            assert engine.runtime.step_state.in_step
            total = sum(p.square().sum() for p in pair.model.parameters())
        assert isinstance(total, Tensor) and not isinstance(total, DTensor)
        assert not engine.runtime.step_state.in_step
        torch.testing.assert_close(total.detach(), sum(p.detach().square().sum() for p in pair.twin.parameters()))


def _retried(pair: _Pair) -> None:
    """A step that raised before it updated anything: by Lightning and past it, and a closure that raises."""
    engine, optimizer = pair.engine, pair.optimizer
    group = optimizer.param_groups[0]
    pair.backward(9)
    engine.step(optimizer, lambda: None)  # from the second step on, SGD multiplies by the momentum before it updates
    pair.plain_step()
    for number, step in enumerate((lambda: engine.step(optimizer, lambda: None), optimizer.step)):
        pair.backward(number)
        group["momentum"] = "not a number"
        with pytest.raises((TypeError, AssertionError)):  # on DTensors it is the latter
            step()
        group["momentum"] = MOMENTUM
        with pytest.raises(Boom):
            engine.step(optimizer, _boom)
        step()
        assert pair.with_gradient() == 0
        pair.plain_step()


def _half_way(pair: _Pair) -> None:
    """Some units are updated: their gradients are gone, and a retry updates the others, each once.

    The one that fails is the first in its unit: those before it would be updated twice, as by torch.
    """
    engine, optimizer = pair.engine, pair.optimizer
    pair.backward(0)
    engine.step(optimizer, lambda: None)
    pair.plain_step()
    pair.backward(1)
    for group in optimizer.param_groups:
        group["foreach"] = False  # which multiplies all of a unit's momenta before it fails
    bad = dict(pair.model.named_parameters())["layers.1.norm.weight"]
    buffer = optimizer.state[bad].pop("momentum_buffer")
    optimizer.state[bad]["momentum_buffer"] = torch.zeros(7, 5, 3, device=engine.device)
    with pytest.raises(RuntimeError, match=r"size|shape"):
        engine.step(optimizer, lambda: None)
    optimizer.state[bad]["momentum_buffer"] = buffer
    left = {name for name, p in pair.model.named_parameters() if p.grad is not None}
    assert "layers.1.norm.weight" in left and "layers.0.up.weight" not in left, left
    assert optimizer.param_groups[0]["params"] == list(pair.model.parameters())
    engine.step(optimizer, lambda: None)
    assert pair.with_gradient() == 0
    pair.plain_step()


def _nested(pair: _Pair) -> None:
    """A step on DTensors whose `step` calls its parent's; one that raised after the update has moved the masters."""
    engine, optimizer = pair.engine, pair.optimizer
    for number in range(3):
        pair.backward(number)
        Nested.fails = number == 1
        if Nested.fails:
            with pytest.raises(Boom):
                engine.step(optimizer, lambda: None)
            assert pair.with_gradient() == len(list(pair.model.parameters()))
            optimizer.zero_grad()
        else:
            engine.step(optimizer, lambda: None)
        Nested.fails = False
        assert pair.with_gradient() == 0
        pair.plain_step()


SCENARIOS: dict[str, tuple[Callable[[_Pair], None], type[torch.optim.SGD]]] = {
    "raw": (_raw, torch.optim.SGD),
    "through lightning": (_through_lightning, torch.optim.SGD),
    "retried": (_retried, torch.optim.SGD),
    "half way": (_half_way, torch.optim.SGD),
    "nested": (_nested, Nested),
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", SCENARIOS)
@on_ranks()
def test_a_step_that_raises(name: str, stage: int) -> None:
    _cells(stage, *SCENARIOS[name])


def _watched(engine: Engine, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    early = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps `step`, too, before and after us
    wrapped = vars(optimizer)["step"]
    engine.attach_optimizers([optimizer])
    late = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engines.step(engine, optimizer, lambda: engines.token_loss(model, models.Batches(models.rank())[0]))
        early.step()
        late.step()
    before = [p.to_local().clone() for p in model.parameters()]  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=r"`SGD\.step\(optimizer\)`.*Call the method of the optimizer"):
        torch.optim.SGD.step(optimizer)
    assert all(map(torch.equal, before, (p.to_local() for p in model.parameters())))  # type: ignore[operator]
    engine.attach_optimizers([])
    assert vars(optimizer)["step"] is wrapped
    other = torch.optim.SGD(model.parameters(), lr=LR)
    engine.attach_optimizers([other])
    engine.attach_optimizers([])
    assert "step" not in vars(other)


@on_ranks()
def test_watched_optimizers_are_left_as_they_were() -> None:
    model = models.ByteModel()
    with engines.engine(model, 1, compile=False) as engine:
        _watched(engine, model)
