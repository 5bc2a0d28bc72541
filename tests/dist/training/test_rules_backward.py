"""Rule 8 of lightning_zerocompile/README.md: the end of a backward is its end also when it is nested, checkpointed or
raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support import engines, models, parity
from tests.support.harness import on_ranks
from tests.support.parity import SCOPES, STAGES


class Nested(torch.autograd.Function):
    """A loss whose backward (or forward) runs a backward of its own, as GradCache does."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, run: Callable[[], None], where: str) -> Tensor:
        ctx.run, ctx.where = run, where
        if where == "forward":
            with torch.enable_grad():
                run()
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.where == "backward":
            with torch.enable_grad():
                ctx.run()
        return grads[0], None, None


def _checkpointed(model: models.ByteModel, batch: Tensor) -> Tensor:
    def forward(tokens: Tensor) -> Tensor:
        x = model.embedding(tokens)
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return model.head(x) * model.scale + model.shift

    return engines.token_loss(forward, batch)


def _nested_loss(where: str, backward: Callable[[Tensor], None]) -> Callable[[nn.Module, Tensor], Tensor]:
    """The loss of one batch; the same loss on the reversed batch is differentiated inside it."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        inner = lambda: backward(engines.token_loss(model, batch.flip(0, 1)))  # noqa: E731
        return engines.token_loss(lambda tokens: Nested.apply(model(tokens), inner, where), batch)

    return loss


@STAGES
@SCOPES
@pytest.mark.parametrize("kind", ["checkpoint", "backward", "forward"])
@on_ranks()
def test_rule_08_nested_backwards(kind: str, stage: int, scope: Any) -> None:
    """Reentrant checkpoints and a backward inside a backward flush once, at the outermost end; gradients are right."""
    model, twin = models.pair(models.ByteModel)
    data = models.Batches(models.rank())
    loss: Callable[[nn.Module, Tensor], Tensor]
    with engines.engine(model, stage, compile=scope) as engine:
        optimizer = engines.sgd(engine, model)

        def manual_backward(value: Tensor) -> None:
            engines.backward(engine, value)

        loss = _checkpointed if kind == "checkpoint" else _nested_loss(kind, manual_backward)
        for number in range(3):
            engines.step(engine, optimizer, lambda number=number: loss(model, data[number]))
        backwards = engine.runtime.stats().backwards
    inner = _nested_loss(kind, lambda value: value.backward())  # the reference divides all gradients
    parity.reference(twin, [0, 1, 2], _checkpointed if kind == "checkpoint" else inner)
    assert models.deviation(model, twin) <= 1e-6
    # a backward inside a *forward* is an outermost one of its own
    assert backwards == (6 if kind == "forward" else 3)


@STAGES
@SCOPES
@pytest.mark.parametrize("nested", [False, True])
@on_ranks()
def test_rule_08_a_step_after_a_failed_backward(stage: int, scope: Any, nested: bool) -> None:
    """A backward that raises leaves nothing behind: the next step is right."""
    model, twin = models.pair(models.ByteModel)
    data = models.Batches(models.rank())

    def failing(batch: Tensor) -> Tensor:
        x = engines.FailsInBackward.apply(model.embedding(batch[:, :-1]))
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=True) if nested else layer(x)
        return F.cross_entropy(model.head(x).flatten(0, 1), batch[:, 1:].flatten())

    with engines.engine(model, stage, compile=scope) as engine:
        optimizer = engines.sgd(engine, model)
        for number in range(3):
            with pytest.raises(ValueError, match="on purpose"), engine.training_step():
                loss = failing(data[number + 5])
                engines.backward(engine, loss)
            optimizer.zero_grad()
            engines.step(engine, optimizer, lambda number=number: engines.token_loss(model, data[number]))
    parity.reference(twin, [0, 1, 2])
    assert models.deviation(model, twin) <= 1e-6


class Replayed(torch.autograd.Function):
    """Returns one and the same tensor at every call, as a CUDA graph does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[Tensor]) -> Tensor:
        if not kept:
            kept.append(torch.empty_like(x))
        return kept[0].copy_(2 * x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return 2 * grads[0], None


@on_ranks()
def test_results_that_are_replayed_are_watched_each_time() -> None:
    """What a backward with `create_graph=True` through what is watched raises, call by call."""
    kept: list[Tensor] = []
    raised = []
    with engines.engine(models.ByteModel(), 2, compile=False) as engine:
        for _ in range(3):
            x = torch.ones(2, requires_grad=True)
            result = Replayed.apply(x, kept)
            engine.runtime.core.watch_backward(result, [], "layers.0")
            try:
                torch.autograd.grad(result.sum(), x, create_graph=True)
            except RuntimeError as error:
                raised.append(str(error))
    assert len(raised) == 3 and all("`layers.0`" in text and "create_graph" in text for text in raised)
