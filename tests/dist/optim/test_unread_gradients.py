"""Reduced gradients that nobody has read are no tensors of Python's; once somebody reads them, they are the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile.sharding.full_values import full_value
from lightning_zerocompile.sharding.master import as_plain_tensors, bound_gradient
from lightning_zerocompile.sharding.sharded import Sharded
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import EAGER


def _bound(model: nn.Module) -> int:
    """How many masters hold a gradient of Python's."""
    with as_plain_tensors():
        return sum(bound_gradient(p) is not None for p in model.parameters())


def _apart(model: nn.Module, gradients: list[Tensor]) -> float:
    pairs = zip(model.parameters(), gradients, strict=True)
    return max(float((full_value(p.grad) - grad).abs().max()) for p, grad in pairs)


def _twins() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = models.ByteModel()
    return model, copy.deepcopy(model).to(models.device())


def _backward(engine: Any, model: nn.Module, number: int) -> None:
    engines.accumulate(engine, model, models.Batches(models.rank())[number])


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.5)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, fused=True)


@pytest.mark.parametrize("kind", [_sgd, _adamw])
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_a_step_makes_none(stage: int, kind: Any) -> None:
    """From the backward to the end of the step no gradient becomes a DTensor; what is trained is the reference's."""
    model, twin = _twins()
    start = copy.deepcopy(twin)
    seen: list[int] = []
    with engines.engine(model, stage, **EAGER) as engine:
        ours = kind(model.parameters())
        engine.attach_optimizers([ours])
        for number in range(3):
            _backward(engine, model, number)
            seen.append(_bound(model))
            engine.step(ours, lambda: seen.append(_bound(model)))
            assert all(p.grad is None for p in model.parameters())
    theirs = kind(twin.parameters())
    for number in range(3):
        theirs.zero_grad()
        engines.mean_backward(twin, number)
        theirs.step()
    twin.cpu()
    assert seen == [0] * 6
    assert models.deviation(model, twin) < 1e-6 < 1e-3 < models.deviation(start.cpu(), twin)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_a_read_makes_one(stage: int) -> None:
    """Once read it is one DTensor, to which later backwards add and which the optimizer takes."""
    model, twin = _twins()
    results: dict[str, Any] = {}
    with engines.engine(model, stage, **EAGER) as engine:
        optimizer = engines.sgd(engine, model, lr=0.3)
        parameters = list(model.parameters())
        _backward(engine, model, 0)
        engines.mean_backward(twin, 0)
        _backward(engine, model, 1)  # is added to what nobody has read
        engines.mean_backward(twin, 1)
        results["unread"] = _bound(model)
        first = [p.grad for p in parameters]
        results["same"] = all(p.grad is grad for p, grad in zip(parameters, first, strict=True))
        results["kind"] = all(type(grad) is Sharded for grad in first)
        results["read"] = _bound(model)
        results["summed"] = _apart(model, [p.grad for p in twin.parameters()])
        _backward(engine, model, 2)  # is added to what somebody has
        engines.mean_backward(twin, 2)
        results["still"] = all(p.grad is grad for p, grad in zip(parameters, first, strict=True))
        results["added"] = _apart(model, [p.grad for p in twin.parameters()])
        parameters[0].grad.mul_(2)
        next(twin.parameters()).grad.mul_(2)
        engine.step(optimizer, lambda: None)
        torch.optim.SGD(twin.parameters(), lr=0.3).step()
        results["dropped"] = all(p.grad is None for p in parameters)
    results["stepped"] = models.deviation(model, twin.cpu())
    apart = {name: results.pop(name) for name in ("summed", "added", "stepped")}
    assert max(apart.values()) < 1e-6, apart
    read = results.pop("read")
    assert read > 0 and results == {"unread": 0, "same": True, "kind": True, "still": True, "dropped": True}


@on_ranks()
def test_ways_to_meet_one() -> None:
    """Replacements, hooks, clipping and inference mode see what they would see of a gradient that is bound."""
    model, twin = _twins()
    problems = []
    with engines.engine(model, 1, **EAGER) as engine:
        parameters, reference = list(model.parameters()), list(twin.parameters())

        def fresh() -> None:
            for p in (*parameters, *reference):
                p.grad = None
            _backward(engine, model, 0)
            engines.mean_backward(twin, 0)

        def check(what: str, apart: float) -> None:
            if not apart < 1e-6:
                problems.append(f"{what}: {apart}")

        fresh()
        with torch.inference_mode():
            assert parameters[0].grad is not None
        _backward(engine, model, 1)
        engines.mean_backward(twin, 1)
        check("inference mode", _apart(model, [p.grad for p in reference]))
        fresh()
        parameters[0].grad = None  # nobody has read it
        reference[0].grad = None
        if parameters[0].grad is not None:
            problems.append("a gradient that was set to None")
        _backward(engine, model, 1)
        engines.mean_backward(twin, 1)
        check("set to None", _apart(model, [p.grad for p in reference]))
        fresh()
        parameters[0].grad = torch.zeros_like(parameters[0])  # somebody else's
        reference[0].grad = torch.zeros_like(reference[0])
        _backward(engine, model, 1)
        engines.mean_backward(twin, 1)
        check("replaced", _apart(model, [p.grad for p in reference]))
        fresh()
        with torch.no_grad():
            nn.utils.clip_grad_norm_(parameters, 0.01)
            nn.utils.clip_grad_norm_(reference, 0.01)
        check("clipped", _apart(model, [p.grad for p in reference]))
        fresh()
        heard: list[int] = []
        handle = parameters[1].register_post_accumulate_grad_hook(lambda p: heard.append(p.grad.shape[0]))
        _backward(engine, model, 1)
        handle.remove()
        _backward(engine, model, 1)
        if heard != [parameters[1].shape[0]]:
            problems.append(f"a hook heard {heard}")
    assert problems == [], "\n".join(problems)


@on_ranks()
def test_a_failure_leaves_them() -> None:
    """What was reduced before a failure can be looked at after it."""
    model, _ = _twins()
    engine = engines.make_engine(model, 3, **EAGER)
    _backward(engine, model, 0)
    engine.abandon()
    grads = [p.grad for p in model.parameters()]
    assert all(type(grad) is Sharded for grad in grads) and any(bool(g._local_tensor.any()) for g in grads)


@on_ranks()
def test_a_frozen_ones_is_kept() -> None:
    """A step that keeps gradients keeps the mean over ranks of a parameter that was frozen in the accumulation."""
    model, twin = _twins()
    with engines.engine(model, 1, keep_gradients=True, **EAGER) as engine:
        optimizer = engines.sgd(engine, model, lr=0.0)
        parameter, reference = next(model.parameters()), next(twin.parameters())
        with engine.accumulation():
            _backward(engine, model, 0)
        parameter.requires_grad_(False)
        _backward(engine, model, 1)  # what was summed of the frozen one is reduced
        engine.step(optimizer, lambda: None)
        with as_plain_tensors():
            bound = bound_gradient(parameter) is not None
        parameter.requires_grad_(True)
        for p in list(model.parameters())[1:]:
            p.grad = None
        _backward(engine, model, 2)
        for number in (0, 2):
            engines.mean_backward(twin, number)
        apart = float((full_value(parameter.grad) - reference.grad).abs().max())
    assert bound and apart < 1e-6


class Doubled(nn.Module):
    """Layers that are each read twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:  # [batch, 8]
        for layer in [*self.layers, *self.layers]:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks()
def test_a_unit_that_is_reduced_in_two_parts(stage: int) -> None:
    """A second backward through one graph: its first gradients seem to be all. Units reduced again, and the error."""
    torch.manual_seed(0)
    model, again, worst = Doubled(), 0, 0.0
    twin = copy.deepcopy(model).to(models.device())
    seeds = range(3 * models.world())
    data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(r)).to(models.device()) for r in seeds]
    with engines.engine(model, stage, **EAGER) as engine:
        for step in range(3):
            with engine.training_step():
                y = model(data[models.world() * step + models.rank()])
                for loss, retain in ((y.sum(), True), (y.square().mean(), False)):
                    model.zero_grad()
                    before = engine.runtime.stats().reductions
                    with engine.backward(loss):
                        loss.backward(retain_graph=retain)
                    again += engine.runtime.stats().reductions - before - len(engine.runtime.unit_of)
            twin.zero_grad()
            for rank in range(models.world()):
                (twin(data[models.world() * step + rank]).square().mean() / models.world()).backward()
            worst = max(worst, _apart(model, [p.grad for p in twin.parameters()]))
    assert again > 0 and worst <= 1e-6
