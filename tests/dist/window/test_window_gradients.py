"""What happens to gradients while they wait: zero_grad, .grad, steps and clipping, shared and recomputed parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zerocompile.plugins.precision import ZeroCompilePrecision
from tests.support import engines, models, twins
from tests.support.harness import on_ranks
from tests.support.parity import mean_backward

STAGES = (1, 2, 3)
LR = twins.LR


# ---- zero_grad, .grad, step and clipping while gradients wait ----


class Adversaries(nn.Module):
    """The generator's loss reaches the critic's parameters, as in a GAN without toggling."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(4, 4), nn.Linear(4, 1)

    def losses(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.critic(self.generator(x)).mean(), self.critic(x).square().mean()


@pytest.mark.parametrize(("stage", "where"), ((1, "window"), (2, "window"), (3, "window"), (1, "accumulation")))
@pytest.mark.parametrize("to_none", (True, False))
@on_ranks()
def test_zero_grad_clears_what_waits(stage: int, where: str, to_none: bool) -> None:
    with twins.pair(stage, Adversaries) as (engine, twin, _):
        critic = torch.optim.SGD(engine.model.critic.parameters(), lr=LR)  # type: ignore[union-attr, arg-type]
        inside = engine.accumulation if where == "accumulation" else lambda: engine.windows.open("auto", None, None)
        with engine.training_step():
            with inside():
                engines.backward(engine, engine.model.losses(twins.mine(0))[0])  # type: ignore[operator]
                critic.zero_grad(set_to_none=to_none)
                if where == "window":
                    engines.backward(engine, engine.model.losses(twins.mine(1))[1])  # type: ignore[operator]
            if where == "accumulation":
                engines.backward(engine, engine.model.losses(twins.mine(1))[1])  # type: ignore[operator]
        mean_backward(lambda rank: twin.losses(twins.batch(rank, 0))[0])  # type: ignore[operator]
        twin.critic.zero_grad()  # type: ignore[union-attr]
        mean_backward(lambda rank: twin.losses(twins.batch(rank, 1))[1])  # type: ignore[operator]
        result = twins.grad_deviation(engine, twin)
    assert result <= 1e-6


@pytest.mark.parametrize("stage", STAGES)
@on_ranks()
def test_grad_inside_a_window(stage: int) -> None:
    """`p.grad` inside a window: this rank's own sum; what was bound before, where something was."""
    with twins.pair(stage) as (engine, twin, _), engine.training_step():
        weights = [m[0].weight for m in (engine.model, twin)]  # type: ignore[index]
        assert weights[0].grad is None
        with engine.windows.open("auto", None, None):
            for number in (0, 1):
                engines.backward(engine, twins.loss(engine.model, twins.mine(number)))
                twins.loss(twin, twins.mine(number)).backward()
            torch.testing.assert_close(engine.model[0].weight.grad, weights[1].grad)  # type: ignore[index]
            torch.testing.assert_close(next(engine.model.parameters()).grad, weights[1].grad)
        bound = next(engine.model.parameters()).grad
        with engine.windows.open("auto", None, None):
            engines.backward(engine, twins.loss(engine.model, twins.mine(2)))
            assert next(engine.model.parameters()).grad is bound


@pytest.mark.parametrize(("stage", "where"), ((1, "window"), (3, "window"), (1, "accumulation")))
@on_ranks()
def test_what_waits_is_scaled(stage: int, where: str) -> None:
    """Between two backwards, in place or by assignment, as under DDP in `no_sync`."""
    with twins.pair(stage) as (engine, twin, _):
        inside = engine.accumulation if where == "accumulation" else lambda: engine.windows.open("auto", None, None)

        def scale(model: nn.Module) -> None:
            first, second, *_ = model.parameters()
            first.grad *= 0.5
            second.grad = second.grad * 0.25

        with engine.training_step():
            with inside():
                engines.backward(engine, twins.loss(engine.model, twins.mine(0)))
                scale(engine.model)
                if where == "window":
                    engines.backward(engine, twins.loss(engine.model, twins.mine(1)))
            if where == "accumulation":
                engines.backward(engine, twins.loss(engine.model, twins.mine(1)))
        twins.gradients(twin, twins.on_all(0))
        scale(twin)
        twins.gradients(twin, twins.on_all(1))
        result = twins.grad_deviation(engine, twin)
    assert result <= 1e-6


@pytest.mark.parametrize("how", ("step", "closure", "clip"))
@on_ranks()
def test_a_step_reduces_an_unfinished_accumulation(how: str) -> None:
    """An optimizer steps on an accumulation that no reducing backward has ended."""
    with twins.pair(1, keep_gradients=False) as (engine, twin, optimizer):

        def accumulate() -> None:
            with engine.accumulation():
                engines.backward(engine, twins.loss(engine.model, twins.mine(0)))

        plugin = ZeroCompilePrecision()
        plugin.engine = engine
        for _ in range(2):
            with engine.training_step():
                if how == "closure":
                    engine.step(optimizer, accumulate)
                else:
                    accumulate()
                if how == "clip":
                    plugin.clip_gradients(optimizer, 0.01)
            if how != "closure":
                optimizer.step()
            twin.zero_grad()
            twins.gradients(twin, twins.on_all(0))
            if how == "clip":
                torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
            torch.optim.SGD(twin.parameters(), lr=LR).step()
        result = twins.deviation(engine, twin)
    assert result <= 1e-6


def _clipped() -> str:
    with twins.pair(2) as (engine, _, optimizer), engine.training_step():
        plugin = ZeroCompilePrecision()
        plugin.engine = engine
        try:
            with engine.windows.open("auto", None, None):
                engines.backward(engine, twins.loss(engine.model, twins.mine(0)))
                plugin.clip_gradients(optimizer, 0.01)
        except RuntimeError as error:
            return str(error)
    return "no error"


@on_ranks()
def test_clipping_inside_a_window_is_an_error() -> None:
    message = _clipped()
    assert "inside `coalesce_grad_reduction`" in message and "lip" in message


# ---- shared parameters, persistent buffers, recomputation ----


class Tied(nn.Module):
    """Two heads on one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.left(self.shared(x)) + self.right(self.shared(x))


@pytest.mark.parametrize("keep", (False, True))
@on_ranks()
def test_two_optimizers_step_on_one_gradient(keep: bool) -> None:
    """Both optimizers step from one reduction, twice."""

    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        heads = (model.left, model.right)
        return [torch.optim.SGD([*model.shared.parameters(), *h.parameters()], lr=LR) for h in heads]  # type: ignore[union-attr, misc]

    worst = []
    for by_unit in (False, True):
        with twins.pair(2, Tied, keep_gradients=keep) as (engine, twin, _):
            ours, theirs = optimizers(engine.model), optimizers(twin)
            engine.attach_optimizers(ours)
            for number in (0, 1):
                with engine.training_step():
                    engines.backward(engine, twins.loss(engine.model, twins.mine(number)))
                twins.gradients(twin, twins.on_all(number))
                for one, other in zip(ours, theirs, strict=True):
                    engine.step(one, lambda: None) if by_unit else one.step()
                    other.step()
                for one in (*ours, *theirs):
                    one.zero_grad()
            worst.append(twins.deviation(engine, twin))
    assert max(worst) <= 1e-6


class Buffered(torch.autograd.Function):
    """x @ w, whose weight gradient is always in the same buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.buffer = buffer
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        torch.mm(ctx.saved_tensors[0].t(), grad, out=ctx.buffer)
        return None, ctx.buffer, None


class InBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))
        self.buffer = torch.zeros(4, 3, device=models.device())

    def forward(self, x: Tensor) -> Tensor:
        return Buffered.apply(x, self.weight, self.buffer)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("stage", (1, 3))
@on_ranks()
def test_a_gradient_that_its_function_keeps_is_copied(stage: int) -> None:
    """As AccumulateGrad does; an ordinary one is not."""
    with twins.pair(stage, InBuffer) as (engine, twin, _):
        with engine.training_step(), engine.windows.open("auto", None, None):
            for number in (0, 1, 2):
                twins.loss(engine.model, twins.mine(number)).backward()
        twins.gradients(twin, twins.on_all(0, 1, 2))
        deviation = twins.grad_deviation(engine, twin)
    with twins.pair(stage) as (engine, _, _):
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        with engine.training_step(), engine.windows.open("auto", None, None), profiler:
            twins.loss(engine.model, twins.mine(0)).backward()
        names = [event.name() for event in profiler.profiler.kineto_results.events()]  # type: ignore[union-attr]
        clones = names.count("aten::clone")
    assert deviation <= 1e-6 and clones == 0


class Moved(nn.Module):
    """The gradient of its parameter is also that of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.by).sin()


@pytest.mark.parametrize("compile", [False, "model"])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks()
def test_a_gradient_that_the_graph_returns_is_copied(compile: Any, stage: int) -> None:
    """The gradient of the input is zeroed while that of the parameter waits."""
    with twins.pair(stage, lambda: nn.Sequential(Moved()), compile=compile) as (engine, twin, _):
        x = twins.mine(0).requires_grad_()
        with engine.training_step(), engine.windows.open("auto", None, None):
            engines.backward(engine, twins.loss(engine.model, x))
            assert x.grad is not None
            x.grad.zero_()
        twins.gradients(twin, twins.on_all(0))
        result = twins.grad_deviation(engine, twin)
    assert result <= 1e-6


class Recomputed(nn.Module):
    """Its layers are recomputed by a nested backward: their forward, under no_grad, announces no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(models.Block(4) for _ in range(3))  # each is a unit

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return x


@pytest.mark.parametrize("stage", STAGES)
@on_ranks()
def test_accumulation_over_reentrant_checkpoints(stage: int) -> None:
    """What earlier micro-batches have left does not make a unit complete: each is reduced once."""
    with twins.pair(stage, Recomputed, defer_grad_sync=True) as (engine, twin, _):
        counts = []
        for numbers in ([0], [0, 1]):
            before = engine.runtime.stats().reductions
            with engine.training_step():
                for number in numbers[:-1]:
                    with engine.accumulation():
                        engines.backward(engine, twins.loss(engine.model, twins.mine(number)))
                engines.backward(engine, twins.loss(engine.model, twins.mine(numbers[-1])))
            counts.append(engine.runtime.stats().reductions - before)
        twins.gradients(twin, twins.on_all(0, 0, 1))
        deviation = twins.grad_deviation(engine, twin)
    assert deviation <= 1e-6 and counts == [4, 4], (stage, counts)  # units
