"""Several backwards, one reduction: the window's gradients, its collectives and its errors."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from torch import Tensor

from lightning_zerocompile import ZeroCompileStrategy
from tests import models
from tests.harness import Ranks

MODES: dict[str, dict[str, Any]] = {"eager": {"compile": False}, "aot_eager": {"backend": "aot_eager"}}


class Chunked(models.Module):
    """Manual optimization: ``chunks`` backwards a step, inside a window or not."""

    def __init__(self, chunks: int, window: bool, misuse: str = "") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.chunks, self.window, self.misuse = chunks, window, misuse
        self.reductions: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        strategy: Any = self.trainer.strategy
        before = strategy.stats.reductions
        with strategy.coalesce_grad_reduction() if self.window else contextlib.nullcontext():
            for chunk in batch.repeat(2, 1).chunk(self.chunks):
                self.manual_backward(self.loss(chunk) / self.chunks)
            self._misuse(strategy, optimizer)
        self.reductions.append(strategy.stats.reductions - before)
        optimizer.step()
        optimizer.zero_grad()

    def _misuse(self, strategy: Any, optimizer: Any) -> None:
        if self.misuse == "step":
            optimizer.step()
        if self.misuse == "nest":
            with strategy.coalesce_grad_reduction():
                pass
        if self.misuse == "raise" and models.rank() == 0:
            raise ArithmeticError("inside the window")


def _train(stage: int, mode: str, chunks: int, window: bool) -> tuple[list[Tensor], list[int], int]:
    module = Chunked(chunks, window)
    record = models.train(module, ZeroCompileStrategy(stage=stage, **MODES[mode]), steps=3)
    return [p.detach() for p in module.parameters()], module.reductions, record.compiled.backward


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_window_equals_plain_backwards(ranks: Ranks, stage: int, mode: str, chunks: int) -> None:
    """Same parameters as reducing after every backward; collectives do not depend on the number of backwards."""
    for plain, window in zip(
        ranks.run(_train, stage, mode, chunks, False), ranks.run(_train, stage, mode, chunks, True), strict=True
    ):
        assert max((a - b).abs().max().item() for a, b in zip(plain[0], window[0], strict=True)) <= 1e-6
        once = plain[1][0] // chunks
        assert once > 0 and plain[1] == [once * chunks] * 3
        assert window[1] == [once] * 3
        assert window[2] == plain[2]  # the same compiled graphs serve inside and outside


def _misuse(misuse: str) -> None:
    models.train(Chunked(2, True, misuse), ZeroCompileStrategy(stage=3, compile=False), steps=1)


@pytest.mark.parametrize(
    ("misuse", "message"), [("step", "inside `coalesce_grad_reduction`"), ("nest", "do not nest")]
)
def test_misuse_raises_on_every_rank(ranks: Ranks, misuse: str, message: str) -> None:
    assert ranks.expect_error(_misuse, misuse).count(message) >= 2


def _survive(stage: int) -> list[Any]:
    """An exception inside a window on all ranks frees its gradients; the next step is right."""
    module, twin = Chunked(2, True), Chunked(2, True)
    twin.load_state_dict(module.state_dict())
    held: list[int] = []

    def training_step(batch: Tensor, batch_idx: int) -> None:
        strategy: Any = module.trainer.strategy
        with contextlib.suppress(ArithmeticError), strategy.coalesce_grad_reduction():
            module.manual_backward(module.loss(batch))
            held.append(strategy.engine.runtime.core.deferred_bytes())
            raise ArithmeticError
        held.append(strategy.engine.runtime.core.deferred_bytes())
        Chunked.training_step(module, batch, batch_idx)

    module.training_step = training_step  # type: ignore[method-assign]
    models.train(module, ZeroCompileStrategy(stage=stage, compile=False), steps=2)
    models.train(twin, ZeroCompileStrategy(stage=stage, compile=False), steps=2)
    return [held, models.deviation(module, twin)]


@pytest.mark.parametrize("stage", [1, 3])
def test_exception_drops_the_window(ranks: Ranks, stage: int) -> None:
    for held, deviation in ranks.run(_survive, stage):
        assert held[0] > 0 and held[1] == 0
        assert deviation == 0.0


def _other_units(stage: int) -> None:
    strategy = ZeroCompileStrategy(stage=stage, compile=False)

    class Reordered(models.Module):
        def loss(self, batch: Tensor) -> Tensor:
            layers = list(self.model.layers)
            x = self.model.embedding(batch[:, :-1])
            for layer in layers if models.rank() == 0 else layers[::-1]:
                x = layer(x)
            return self.model.head(x).square().mean()

    models.train(Reordered(), strategy, steps=1)


def test_ranks_that_gather_different_units_raise(ranks: Ranks) -> None:
    """No hang: every rank names the unit, the number of the gather and the remedy."""
    text = ranks.expect_error(_other_units, 3, timeout=60)
    assert text.count("gather number") >= 2 and "layers.0" in text and "stage 1 or 2" in text
