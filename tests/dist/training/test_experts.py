"""A mixture of experts outside of repeated blocks, and loops that the data ends: what the frames' cases rest on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import engines, graph_breaks, models
from tests.support.harness import Ranks, on_ranks
from tests.support.parity import reference


class Once(nn.Module):
    """Experts that stand alone: each of their parameters is gathered where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Embedding(models.VOCABULARY, graph_breaks.WIDTH)
        self.moe = graph_breaks.Experts()
        self.head = nn.Linear(graph_breaks.WIDTH, models.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.moe(self.front(tokens)))  # type: ignore[no-any-return]


def _alone(stage: int, **options: Any) -> None:
    model, twin = models.pair(Once)

    def loss(_: Any, rank: int) -> Tensor:
        twin.moe.rank = rank
        return engines.token_loss(twin, models.Batches(rank)[0])

    reference(twin, 1, loss, lambda rank: [rank])
    unused = [name for name, p in twin.named_parameters() if p.grad is None]
    with engines.engine(model, stage, compile=False, unit_bytes=1, **options) as engine:
        optimizer = engines.sgd(engine, model)
        with engine.training_step():
            engines.backward(engine, engines.token_loss(model, models.Batches(models.rank())[0]))
        none = [name for name, p in model.named_parameters() if p.grad is None]
        optimizer.step()
    assert none == unused == ["moe.experts.3.weight", "moe.experts.3.bias"]
    assert models.deviation(model, twin) <= 1e-6


@pytest.mark.parametrize(("stage", "options"), [(1, {}), (2, {}), (3, {"keep_gathered": ("moe.experts",)})])
@on_ranks()
def test_experts_outside_of_blocks(stage: int, options: dict[str, Any]) -> None:
    """An expert without tokens keeps `grad=None`; one that a single rank uses is trained by it."""
    _alone(stage, **options)


def test_experts_outside_of_blocks_raise_at_stage_3(ranks: Ranks) -> None:
    """Ranks that gather different experts are told so, and what to do."""
    message = ranks.expect_error(_alone, 3)
    assert "moe.experts.2" in message and "keep_gathered" in message


@on_ranks()
def test_the_loop_breaks_sometimes() -> None:
    """How many loops of the frames' case ran at all, and to their end."""
    model, counts = models.Whole(graph_breaks.Net(graph_breaks.Loop)), [0, 0]

    def count(which: int) -> Any:
        def hook(*_: Any) -> None:
            counts[which] += 1

        return hook

    for module in model.modules():
        if isinstance(module, graph_breaks.Loop):
            module.register_forward_hook(count(0))
            module.experts[-1].register_forward_hook(count(1))
    for rank in range(models.world()):
        for number in range(3):
            engines.token_loss(model, models.Batches(rank)[number].cpu())
    assert 0 < counts[1] < counts[0]


@pytest.mark.parametrize("scope", ["blocks", "model"])
@on_ranks()
def test_no_collective_while_compiling(scope: Any) -> None:
    """Ranks compile at different steps, so compiling must not communicate."""
    # How many frames were compiled, and what the compilations gathered or reduced.
    model = models.Whole(graph_breaks.Net(graph_breaks.Disabled))
    compile_frame = torch._dynamo.convert_frame._compile
    moved: list[int] = []
    with pytest.MonkeyPatch.context() as patch, engines.engine(model, 3, compile=scope) as engine:

        def collectives() -> int:
            stats = engine.runtime.stats()
            return stats.gathers + stats.reductions

        def spy(*args: Any, **kwargs: Any) -> Any:
            before = collectives()
            try:
                return compile_frame(*args, **kwargs)
            finally:
                moved.append(collectives() - before)

        patch.setattr(torch._dynamo.convert_frame, "_compile", spy)
        optimizer = engines.sgd(engine, model)
        for number in range(2):
            batch = models.Batches(models.rank())[number][:, : 3 + number]
            engines.step(engine, optimizer, lambda batch=batch: engines.token_loss(model, batch))
        assert collectives() > 0
    assert len(moved) >= 3 and set(moved) == {0}
