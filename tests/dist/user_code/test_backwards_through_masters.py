"""A backward through what `parameters()` yields, outside of a step, adds to the reduced gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_zerocompile.fabric_strategy import ZeroCompileFabricStrategy
from lightning_zerocompile.strategy import ZeroCompileStrategy
from tests.support import engines, models, uneven
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER, reference


def _penalty(model: Any) -> Tensor:
    return 0.05 * sum(p.pow(2).sum() for p in model.parameters() if p.ndim > 0)


def _assert_trains_as_ddp(
    ours: models.Module, ddp: models.Module, stage: int, options: dict[str, Any], steps: int, **trainer: Any
) -> None:
    models.make_trainer("ddp", max_steps=steps, **trainer).fit(ddp, models.Batches(models.rank()))
    models.fit(ours, ZeroCompileStrategy(stage, **options), steps, **trainer)
    assert models.deviation(ours, ddp) < 1e-6


class Penalty(models.Module):
    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def on_after_backward(self) -> None:
        if self.hook == "after":
            _penalty(self.model.layers).backward()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.hook == "step":
            _penalty(self.model.layers).backward()
            _penalty(self.model.layers).backward()


@pytest.mark.parametrize("hook", ["after", "step"])
@pytest.mark.parametrize(
    ("stage", "options", "accumulate"),
    [
        (1, AOT, 1),
        (2, EAGER, 1),
        (3, AOT, 1),
        (3, EAGER, 1),
        (1, EAGER, 2),
        (3, EAGER, 2),
        (3, EAGER | {"defer_grad_sync": True}, 2),
        (3, EAGER | {"offload": "optimizer"}, 1),
        (3, EAGER | {"keep_gradients": True}, 1),
    ],
)
@on_ranks()
def test_a_penalty_between_backward_and_step(hook: str, stage: int, options: dict[str, Any], accumulate: int) -> None:
    ours, ddp = models.pair(Penalty, hook=hook)
    _assert_trains_as_ddp(ours, ddp, stage, options, 3, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("how", ["before", "together", "after", "raw"])
@pytest.mark.parametrize(("stage", "options"), [(1, EAGER), (2, AOT), (3, EAGER)])
@on_ranks()
def test_a_penalty_in_fabric(how: str, stage: int, options: dict[str, Any]) -> None:
    strategy = ZeroCompileFabricStrategy(stage=stage, **options)
    fabric = models.make_fabric(strategy)
    inner, plain = models.pair(models.ByteModel)
    model, optimizer = fabric.setup(inner, torch.optim.SGD(inner.parameters(), lr=0.5))
    theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
    for number in range(3):
        theirs.zero_grad()
        engines.mean_backward(plain, number)
        _penalty(plain).backward()
        theirs.step()
        if how == "before":
            fabric.backward(_penalty(model))
        loss = engines.token_loss(model, models.Batches(models.rank())[number])
        fabric.backward(loss + _penalty(model) if how == "together" else loss)
        if how == "after":
            fabric.backward(_penalty(model))
        elif how == "raw":
            _penalty(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    strategy.unshard()
    assert models.deviation(inner, plain) < 1e-6


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "mse times a number": lambda x, y: 3 * F.mse_loss(x, y),
    "sum of squares": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "squares": lambda x, y: F.mse_loss(x, y, reduction="none").sum(),
    "smooth l1": lambda x, y: F.smooth_l1_loss(x, y, beta=0.1),
    "huber": lambda x, y: F.huber_loss(x, y, delta=0.1),
    "soft margin": lambda x, y: F.soft_margin_loss(x, y.sign()),
    "binary cross entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "weighted": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), weight=y.abs()),
    "with logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "l1": F.l1_loss,
    "both trained": lambda x, y: F.mse_loss(x, x.detach() * 0.5) + F.mse_loss(2 * x, x + y),
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("scope", [False, "blocks"])
@on_ranks()
def test_losses_between_parameters(stage: int, scope: Any) -> None:
    """The mean is over all elements, of which the ranks may have different numbers."""
    torch.manual_seed(0)
    ours, plain = models.pair(uneven.Net, width=10)
    with engines.engine(ours, stage, compile_options={"backend": "aot_eager"}, compile=scope) as engine:
        for name, loss in LOSSES.items():
            anchors = {n: torch.randn_like(p) for n, p in plain.named_parameters()}
            for model in (ours, plain):
                model.zero_grad()
                for n, p in model.named_parameters():
                    with torch.no_grad():
                        anchor = torch.empty_like(p).copy_(anchors[n]) if p.numel() else p.detach()
                    loss(p, anchor).backward()
            full = engine.full_gradients(ours)
            for n, p in plain.named_parameters():
                assert torch.allclose(full[n], p.grad, rtol=1e-5, atol=1e-7), (name, n)  # type: ignore[arg-type]


class Distils(models.Module):
    """From a frozen copy of itself, whose weights are other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        for p in self.teacher.parameters():
            p.data.add_(0.1)

    def on_after_backward(self) -> None:
        sum(map(F.mse_loss, self.model.parameters(), self.teacher.parameters())).backward()


@pytest.mark.parametrize(("stage", "options"), [(1, EAGER), (2, AOT), (3, EAGER), (3, AOT)])
@on_ranks()
def test_a_distance_to_a_frozen_copy(stage: int, options: dict[str, Any]) -> None:
    ours, ddp = models.pair(Distils)
    _assert_trains_as_ddp(ours, ddp, stage, options, 3)


@pytest.mark.parametrize(("stage", "options"), [(1, EAGER), (2, AOT), (3, EAGER), (3, AOT)])
@on_ranks()
def test_a_penalty_in_a_window_of_fabric(stage: int, options: dict[str, Any]) -> None:
    """There, too, a loss reads whole values of `parameters()` between a forward and its backward."""
    strategy = ZeroCompileFabricStrategy(stage=stage, **options)
    fabric = models.make_fabric(strategy)
    inner, plain = models.pair(models.ByteModel)
    model, optimizer = fabric.setup(inner, torch.optim.SGD(inner.parameters(), lr=0.3))
    theirs, data = torch.optim.SGD(plain.parameters(), lr=0.3), models.Batches(models.rank())
    for number in range(3):
        with strategy.coalesce_grad_reduction():
            fabric.backward(engines.token_loss(model, data[number]) + _penalty(model))
            fabric.backward(_penalty(model))
            fabric.backward(engines.token_loss(model, data[number + 3]) + 2 * _penalty(model))
        with fabric.no_backward_sync(model):
            fabric.backward(engines.token_loss(model, data[number + 6]) + _penalty(model))
        fabric.backward(engines.token_loss(model, data[number + 9]))
        fabric.clip_gradients(model, optimizer, max_norm=0.3)
        optimizer.step()
        optimizer.zero_grad()
        theirs.zero_grad()
        for batch in range(number, number + 12, 3):
            engines.mean_backward(plain, batch)
        (5 * _penalty(plain)).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        theirs.step()
    strategy.unshard()
    assert models.deviation(inner, plain) < 1e-6


@pytest.mark.parametrize(("stage", "options"), [(1, EAGER), (3, AOT)])
@on_ranks()
def test_a_penalty_from_before_the_forward_of_fabric(stage: int, options: dict[str, Any]) -> None:
    strategy = ZeroCompileFabricStrategy(stage=stage, **options)
    fabric = models.make_fabric(strategy)
    inner = models.ByteModel()
    model, _ = fabric.setup(inner, torch.optim.SGD(inner.parameters(), lr=0.5))
    penalty = _penalty(model)
    loss = engines.token_loss(model, models.Batches(models.rank())[0])
    with pytest.raises(RuntimeError, match=r"parameter `.*outside of the step.*fabric.backward\(term\)"):
        fabric.backward(loss + penalty)


class Scaled(torch.autograd.Function):
    """An L1 term, times a number of this rank."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.scale = scale
        return scale * weight.abs().sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return weight.sign() * (ctx.scale * grad.item()), None


def _of_parameters(module: Functions) -> list[Tensor]:
    return list(module.model.head.parameters())


def _of_attributes(module: Functions) -> list[Tensor]:
    return [module.model.head.weight]


class Functions(models.Module):
    def __init__(self, weights: Callable[[Functions], list[Tensor]] = _of_parameters) -> None:
        super().__init__()
        self.weights = weights

    def training_step(self, batch: Tensor, index: int) -> Tensor:  # type: ignore[override]
        loss = self.loss(batch)
        return loss + sum(Scaled.apply(weight, 0.1 * float(loss.detach())) for weight in self.weights(self))  # type: ignore[no-untyped-call]


STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
BOTH = pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "aot_eager"])


@STAGES
@BOTH
@on_ranks()
def test_a_function_gets_an_attribute(stage: int, options: dict[str, Any]) -> None:
    ours, ddp = models.pair(Functions, weights=_of_attributes)
    _assert_trains_as_ddp(ours, ddp, stage, options, 3)


@STAGES
@BOTH
@on_ranks()
def test_a_function_gets_a_parameter(stage: int, options: dict[str, Any]) -> None:
    """Its gradient would be this rank's own."""
    trainer = models.make_trainer(ZeroCompileStrategy(stage, **options), max_steps=1)
    with pytest.raises(RuntimeError, match=r"parameter `model.head.weight` itself has got.*attribute"):
        trainer.fit(Functions(), models.Batches(models.rank()))


@STAGES
@pytest.mark.parametrize("how", ["backward", "raw", "window"])
@on_ranks()
def test_a_function_gets_a_parameter_in_fabric(stage: int, how: str) -> None:
    strategy = ZeroCompileFabricStrategy(stage=stage, **EAGER)
    fabric = models.make_fabric(strategy)
    model = fabric.setup_module(models.ByteModel())
    batches = models.Batches(models.rank())
    window = strategy.coalesce_grad_reduction() if how == "window" else nullcontext()
    with pytest.raises(RuntimeError, match="itself has got a gradient"), window:
        loss = engines.token_loss(model, batches[0])
        loss = loss + Scaled.apply(next(model.parameters()), 0.1 * float(loss.detach()))  # type: ignore[no-untyped-call]
        if how == "window":  # both losses, then their backwards
            fabric.backward(engines.token_loss(model, batches[1]))
        loss.backward() if how == "raw" else fabric.backward(loss)


class Recomputes(models.Module):
    """A gate that a reentrant checkpoint computes from `parameters()`, which it reads itself or is given."""

    def __init__(self, given: bool = False) -> None:
        super().__init__()
        self.gate, self.given = torch.nn.Linear(10, 10), given

    def training_step(self, batch: Tensor, index: int) -> Tensor:  # type: ignore[override]
        def gated(x: Tensor, *given: Tensor) -> Tensor:
            return x * torch.stack([p.sum() for p in given or self.gate.parameters()]).sum()

        x = self.model.embedding(batch)
        given = tuple(self.gate.parameters()) if self.given else ()
        gates = torch.utils.checkpoint.checkpoint(gated, x, *given, use_reentrant=True)
        return self.loss(batch) + gates.square().mean()  # type: ignore[no-any-return]


@STAGES
@BOTH
@on_ranks()
def test_a_reentrant_checkpoint_reads_parameters(stage: int, options: dict[str, Any]) -> None:
    ours, ddp = models.pair(Recomputes)
    _assert_trains_as_ddp(ours, ddp, stage, options, 3)
    with pytest.raises(RuntimeError, match=r"parameter `gate\..*reentrant checkpoint: give them"):
        models.make_trainer(ZeroCompileStrategy(stage, **options), max_steps=1).fit(
            Recomputes(given=True), models.Batches(models.rank())
        )


class Earlier(models.Module):
    """A penalty that is computed before the step; its backward runs by itself, or with that of the loss."""

    def __init__(self, how: str = "itself") -> None:
        super().__init__()
        self.automatic_optimization, self.how = False, how

    def on_train_batch_start(self, *_: Any) -> None:
        self.penalty = _penalty(self.model.layers)

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss if self.how == "itself" else loss + float(loss.detach()) * self.penalty)
        if self.how == "itself":
            self.manual_backward(self.penalty)
        optimizer.step()


@STAGES
@on_ranks()
def test_a_penalty_from_before_a_step(stage: int) -> None:
    ours, twin = models.pair(Earlier)
    models.make_trainer(ZeroCompileStrategy(stage, **EAGER), max_steps=3).fit(ours, models.Batches(models.rank()))
    reference(twin, 3, lambda m, batch: m.loss(batch) + _penalty(m.model.layers), optimizer=twin.configure_optimizers())
    assert models.deviation(ours, twin) < 1e-6
    with pytest.raises(RuntimeError, match="outside of the step"):
        models.make_trainer(ZeroCompileStrategy(stage, **EAGER), max_steps=1).fit(
            Earlier("together"), models.Batches(models.rank())
        )
