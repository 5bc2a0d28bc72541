"""What is gathered counts as old after every update, also of optimizers that raise no version (torch's fused ones), and
as what the masters hold in a backward that has updated them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile.engine import Engine
from tests.support import engines, models
from tests.support.harness import Worlds, on_ranks
from tests.support.parity import AOT, EAGER, reference
from tests.support.slow import SlowModel

STEPS = 4
LONG = pytest.mark.long
CELLS = [  # stage, options, and whether the step goes past Lightning
    (1, EAGER, False), (1, EAGER, True), (3, EAGER, False), (3, EAGER, True), (3, AOT, True),
    pytest.param(2, EAGER, True, marks=LONG), pytest.param(1, AOT, False, marks=LONG),
    pytest.param(3, AOT, False, marks=LONG),
]  # fmt: skip


def _adamw(model: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)


def _step(engine: Engine, optimizer: torch.optim.Optimizer, batch: Tensor, past: bool = True) -> None:
    with engine.training_step():
        engines.backward(engine, engines.anchored_loss(engine.model, batch))
    if past:
        optimizer.step()
    else:
        engine.step(optimizer, lambda: None)
    optimizer.zero_grad()


def _assert_trained(model: nn.Module, twin: nn.Module, fused: bool = True) -> None:
    optimizer = _adamw(twin, fused)
    for number in range(STEPS):
        optimizer.zero_grad()
        for rank in range(models.world()):
            (engines.anchored_loss(twin, models.Batches(rank)[number]) / models.world()).backward()
        optimizer.step()
    assert models.deviation(model, twin) <= 1e-5


@pytest.mark.parametrize(("stage", "options", "past"), CELLS)
@on_ranks()
def test_a_hook_before_the_step_reads(stage: int, options: dict[str, Any], past: bool) -> None:
    """So at its end there is a gathered value, of before the update, that user code may have written to."""
    model, twin = models.pair(models.ByteModel)
    data = models.Batches(models.rank())
    norms: list[float] = []
    with engines.engine(model, stage, **options) as engine:
        optimizer = _adamw(model)
        engine.attach_optimizers([optimizer])
        optimizer.register_step_pre_hook(lambda *_: norms.append(model.head.weight.norm().item()))
        for number in range(STEPS):
            _step(engine, optimizer, data[number], past)
    assert len(set(norms)) == STEPS
    _assert_trained(model, twin)


@pytest.mark.parametrize(("stage", "options", "past"), CELLS)
@on_ranks()
def test_a_hook_after_the_step_raises(stage: int, options: dict[str, Any], past: bool) -> None:
    """The parameters are updated, and the caller goes on."""
    model, twin = models.pair(models.ByteModel)
    data = models.Batches(models.rank())

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    with engines.engine(model, stage, **options) as engine:
        optimizer = _adamw(model)
        engine.attach_optimizers([optimizer])
        optimizer.register_step_post_hook(fail)
        for number in range(STEPS):
            with pytest.raises(ValueError, match="on purpose"):
                _step(engine, optimizer, data[number], past)
            optimizer.zero_grad()
    _assert_trained(model, twin)


@pytest.mark.parametrize("beside", [False, True], ids=["", "in_backward"])
@pytest.mark.parametrize(("stage", "options", "past"), [(1, EAGER, False), (2, AOT, False), (3, EAGER, False)])
@on_ranks()
def test_what_a_hook_after_the_step_changes_stays(
    stage: int, options: dict[str, Any], past: bool, beside: bool
) -> None:
    """The learning rate, which it halves, and a group, which it adds in the first step."""
    model, twin = models.pair(models.ByteModel)

    def made(model: models.ByteModel) -> torch.optim.Optimizer:
        later = model.head.weight
        optimizer = torch.optim.SGD([p for p in model.parameters() if p is not later], lr=0.5, momentum=0.5)

        def after(*_: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            if len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": [dict(model.named_parameters())["head.weight"]], "lr": 0.2})

        optimizer.register_step_post_hook(after)
        return optimizer

    data = models.Batches(models.rank())
    with engines.engine(model, stage, optimizer_in_backward=beside, **options) as engine:
        with engine.giving_masters():
            ours = made(model)
        engine.attach_optimizers([ours])
        for number in range(STEPS):
            _step(engine, ours, data[number], past)
    theirs = made(twin)
    reference(twin, STEPS, engines.anchored_loss, optimizer=theirs)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in (ours, theirs)]
    assert rates[0] == rates[1] and len(rates[0]) == 2
    assert models.deviation(model, twin) <= 1e-6


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None


class _Looking(models.ByteModel):
    """When the backward comes to the embedding, `look` is called; rank 0 has updated the head by then."""

    look: Callable[[nn.Module], Any] = staticmethod(lambda model: None)
    seconds = (0.0, 0.0)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if x.requires_grad:
            x.register_hook(lambda _: self.look(self))
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 0:
                x = _Wait.apply(x, self.seconds[1])
        return _Wait.apply(self.head(x) * self.scale + self.shift, self.seconds[0])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long)])
@on_ranks(2)
def test_a_backward_reads_what_it_has_updated(stage: int, fused: bool) -> None:
    """It gets the value that the forward saw, on all ranks, whatever they have updated; and nothing is gathered."""
    model, twin = models.pair(_Looking)
    data = models.Batches(models.rank())
    seen: list[float] = []
    model.look = lambda model: seen.append(model.head.weight.norm().item())
    if models.rank() == 0:
        model.seconds = (0.5, 0.3)
    with engines.engine(model, stage, optimizer_in_backward=True, **EAGER) as engine:
        optimizer = _adamw(model, fused)
        engine.attach_optimizers([optimizer])
        updated = []
        for number in range(STEPS):
            _step(engine, optimizer, data[number])
            updated.append(engine.runtime.updated_in_backward)
    assert models.rank() or updated[-1] > updated[0] > -1
    expected: list[float] = []
    twin.look, twin.seconds = (lambda model: expected.append(model.head.weight.norm().item())), (0.0, 0.0)
    _assert_trained(model, twin, fused)
    assert seen == pytest.approx(expected[:: models.world()], rel=1e-5)


def _reads_what_is_dropped() -> str:
    model = SlowModel()
    model.look = lambda: model.head.weight.norm().item()
    made = engines.make_engine(model, 3, optimizer_in_backward=True, **EAGER)
    optimizer = _adamw(model)
    made.attach_optimizers([optimizer])
    data = models.Batches(models.rank())
    try:
        for number in range(STEPS):  # in the first one nothing is updated so early
            _step(made, optimizer, data[number])
    except RuntimeError as error:
        return str(error)
    finally:
        made.abandon()
    return ""


def test_a_backward_does_not_gather_what_it_has_updated(all_worlds: Worlds) -> None:
    """At stage 3 the value is dropped by then. Another rank may not have updated yet, so a gather would mix rows."""
    ranks = all_worlds.fresh(2)
    try:
        found = ranks.run(_reads_what_is_dropped)
    finally:
        ranks.close(kill=True)
    assert all("parameter `head.weight` is read in a backward that has updated it" in text for text in found), found
