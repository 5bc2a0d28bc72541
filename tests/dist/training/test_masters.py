"""What user code does with a parameter has the effect that it has under DDP, or raises and names the way out."""

from __future__ import annotations

import copy
import operator
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support import engines, models, twins
from tests.support.harness import on_ranks
from tests.support.parity import CELLS, EAGER

LR, STEPS = 0.5, 3
Backward = Callable[[Tensor], None]
User = Callable[[nn.Module, Tensor, Backward], None]


def _weights(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


# ---- in the step: works ----


def _penalty(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    """The L2 term, as users write it, and terms with functions that no shard could compute."""
    term = sum(p.pow(2).sum() for p in model.parameters())
    term = (
        term
        + torch.cat([p.flatten() for p in model.parameters()]).norm()
        + sum(p.T[0].abs().max() for p in _weights(model))
    )
    backward(engines.token_loss(model, batch) + 0.01 * term)


def _penalty_alone(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    backward(engines.token_loss(model, batch))
    backward(0.01 * sum((p - 0.1).square().sum() for p in model.parameters()))


def _toggled(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    """Freezes one parameter by its module and a block by `parameters()`, between two backwards."""
    model.head.weight.requires_grad_(False)
    for parameter in model.layers[0].parameters():
        parameter.requires_grad = False
    backward(engines.token_loss(model, batch))
    model.head.weight.requires_grad = True
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(True)
    backward(engines.token_loss(model, batch.flip(0, 1)))


def _inner_gradient(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    """A gradient of an activation inside the step."""
    x = model.embedding(batch[:, :-1])
    (inner,) = torch.autograd.grad(model.head(model.layers[0](x)).square().mean(), x, retain_graph=False)
    backward(engines.token_loss(model, batch) + inner.detach().abs().sum() * model.scale)


def _regularize(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    """With what was computed from parameters outside of a step: an anchor, masks, Fisher information."""
    anchor, mask, fisher = model.__dict__["kept"]
    head = model.head.weight
    loss = engines.token_loss(model, batch) + 0.1 * (head - anchor["head.weight"]).square().sum()
    loss = loss + (fisher["layers.1.up.weight"] * (model.layers[1].up.weight - 0.1) ** 2).sum()
    loss = loss + (model.embedding.weight * mask["embedding.weight"]).square().sum()
    x = F.linear(model.embedding(batch[:, :-1]), model.layers[0].up.weight * mask["layers.0.up.weight"])
    loss = loss + (x - anchor["layers.0.up.bias"]).square().mean()
    y = model.head(model.embedding(batch[:, :-1]))
    y *= fisher["head.weight"][:, 0]
    loss = loss + y.square().mean()
    backward(loss + sum((fisher[n] * (p - anchor[n]) ** 2).sum() for n, p in model.named_parameters()))


def _weigh(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    """The loss by what is computed, without gradients, from this rank's batch and what was kept."""
    anchor, *_ = model.__dict__["kept"]
    with torch.no_grad():
        x = F.linear(model.embedding(batch[:, :-1]), anchor["layers.0.up.weight"])
        bias = anchor["layers.0.up.bias"]
        listed = torch._foreach_mul([x[0, 0]], [bias])[0]
        number = (x * bias).mean() + listed.sum() + (x - bias).square().mean()
    backward(engines.token_loss(model, batch) * (1 + number.tanh()))


def _keep(model: nn.Module) -> None:
    named = dict(model.named_parameters())
    model.__dict__["kept"] = (
        {name: p.detach().clone() for name, p in named.items()},
        {name: p.abs() > 0.1 for name, p in named.items()},
        {name: torch.zeros_like(p) + 0.05 * p.detach().abs() for name, p in named.items()},
    )


# ---- between steps: works ----


def _nothing(model: nn.Module) -> None:
    """The twin's counterpart of what was done in the step."""


def _clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)
    model.layers[1].up.weight.data.clamp_(-0.1, 0.1)
    for parameter in model.layers[0].parameters():
        parameter.data.clamp_(-0.15, 0.15)


def _copy(model: nn.Module) -> None:
    """Full tensors into parameters: by `copy_`, by `data.copy_`, by assignment to `data`, through the module."""
    ramp = [torch.linspace(-0.3, 0.3, p.numel(), device=p.device).view(p.shape) for p in _weights(model)]
    with torch.no_grad():
        _weights(model)[0].copy_(ramp[0])
        _weights(model)[1].add_(ramp[1], alpha=0.5)
    _weights(model)[2].data.copy_(ramp[2])
    _weights(model)[3].data = ramp[3]
    model.layers[2].down.weight.data = 0.5 * torch.ones_like(model.layers[2].down.weight)
    assert model.head.weight.shape == (models.VOCABULARY, 10)
    model.head.weight.data.copy_(torch.full((models.VOCABULARY, 10), 0.02))


def _set_memory(model: nn.Module) -> None:
    """By `set_`, of an attribute and of what `parameters()` yields."""
    with torch.no_grad():
        for weight in (model.head.weight, _weights(model)[1]):
            weight.set_(torch.linspace(-0.3, 0.3, weight.numel(), device=weight.device).view(weight.shape))


def _load(model: nn.Module) -> None:
    weight = torch.linspace(-0.4, 0.4, models.VOCABULARY * 10).view(models.VOCABULARY, 10)
    model.load_state_dict({"head.weight": weight, "scale": torch.tensor(0.7)}, strict=False)


def _scale_gradients(model: nn.Module) -> None:
    """After the backward: through the module's attribute, through `parameters()`, and one that is dropped."""
    model.head.weight.grad.mul_(0.5)
    for parameter in model.layers[0].parameters():
        parameter.grad *= 0.25
    model.layers[1].up.weight.grad = None


def _write_rows(model: nn.Module) -> None:
    """Parts of parameters, most of them of rows that another rank holds: see [Note: pieces]."""
    first, second, third, fourth, *_ = _weights(model)
    first.data[0].zero_()
    second.data[-2:].mul_(0.5)
    third.data.view(-1)[3:17] = 0.02
    fourth.data[fourth.data.abs() < 0.05] = 0.0
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data[-1] = 0.9
    with torch.no_grad():
        first[1:3] = 0.01
        second[torch.tensor([0, 3], device=second.device)] = 0.03
        third.add_(torch.full((third.shape[1],), 0.01, device=third.device))
        fourth[:, 2].fill_(0.04)
        model.head.weight[2] = 0.05
    model.embedding.weight.data[4].zero_()


def _write_rows_of_gradients(model: nn.Module) -> None:
    first, second, third, *_ = _weights(model)
    model.embedding.weight.grad[:3] = 0
    model.head.weight.grad[-1].zero_()
    second.grad[[0, 2]] *= 0.5
    third.grad.mul_(torch.linspace(0, 1, third.numel(), device=third.device).view(third.shape))
    third.grad = third.grad * torch.linspace(0, 2, third.shape[1], device=third.device)
    first.grad[:, 1] = 0.01
    for parameter in model.layers[0].parameters():
        parameter.grad[torch.arange(len(parameter), device=parameter.device) % 2 == 0] = 0.0


def _write_rows_in_the_step(model: nn.Module) -> None:
    with torch.no_grad():
        first, second, *_ = _weights(model)
        first.data[0].zero_()
        second[-1].mul_(0.5)
        model.head.weight.data[1].zero_()


def _write_views(model: nn.Module) -> None:
    """Views of parameters, and two writes of which the second must see the first."""
    first, second, third, fourth, *_ = _weights(model)
    for parameter in model.parameters():
        parameter.data.view(-1).mul_(0.9)
    first.data.t().mul_(0.8)
    second.data.T[0].mul_(0.5)
    with torch.no_grad():
        third.data.flatten()[1:2].fill_(0.5)
        third.reshape(-1)[-1:].mul_(0.5)
        fourth.view(-1)[:2].fill_(0.1)
        fourth.data.view(-1).unsqueeze(0).mul_(0.5)


def _write_lists(model: nn.Module) -> None:
    """Lists of parameters of several units, as torch's averages and fused code of users write them."""
    parameters = list(model.parameters())
    with torch.no_grad():
        torch._foreach_mul_(parameters, 0.95)
        torch._foreach_copy_(parameters[:2], [p * 0.9 for p in parameters[:2]])
    torch._foreach_mul_([p.detach() for p in parameters], 0.95)
    torch._foreach_mul_([p.data for p in parameters], 0.95)


def _write_lists_beside_others(model: nn.Module) -> None:
    """Lists of what was detached, alone and with a full tensor (a buffer): moving averages write these."""
    detached, full = [p.detach() for p in model.parameters()], torch.ones(3, device=models.device())
    torch._foreach_mul_([*detached, full], 0.95)
    torch._foreach_lerp_([*detached, full], [*(p * 0 for p in detached), full], 0.05)


def _copy_lists(model: nn.Module) -> None:
    detached = [p.detach() for p in model.parameters()]
    torch._foreach_copy_(detached, [p * 0.9 for p in detached])


def _set_gradients(model: nn.Module) -> None:
    """To full tensors, and to what is computed from gradients: code that projects gradients does so."""
    first, second, third, fourth, *_ = _weights(model)
    model.scale.grad = first.grad.sum()
    model.shift.grad = torch.full_like(model.shift.detach(), 0.3)
    flat = torch.cat([p.grad.flatten() for p in (first, second)])
    first.grad = flat[: first.numel()].view(first.shape) * 0.5
    second.grad = flat[first.numel() :].view(second.shape)
    third.grad = torch.full(third.shape, 0.01, device=third.device)
    fourth.grad = fourth.grad.t().contiguous().t().mul(0.5)
    model.head.weight.grad = model.head.weight.grad.reshape(-1).view(model.head.weight.shape)


def _write_data_of_gradients(model: nn.Module) -> None:
    """Also noise, of which all ranks draw the same, and the mean over no dimension, which is that over all."""
    torch.manual_seed(7)
    for parameter in model.parameters():
        parameter.grad.data = parameter.grad.data * 0.5
        parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01)
        parameter.grad.add_(torch.zeros_like(parameter.grad).uniform_(), alpha=0.01)
        parameter.grad.sub_(parameter.grad.mean(dim=()))


def _write_states(model: nn.Module) -> None:
    """Through a state dict, after a read of the module's attribute."""
    assert model.head.weight.shape
    for value in model.state_dict().values():
        value.detach().mul_(0.9)


def _swap(model: nn.Module) -> None:
    """As averages are swapped in and out: what was taken from ``data`` keeps its values."""
    for take in (lambda p: p.data, lambda p: p.detach()):
        kept = [take(p) for p in model.parameters()]
        for parameter in model.parameters():
            parameter.data = torch.ones_like(parameter.data)
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.data = value
    for parameter in model.parameters():
        parameter.data.mul_(0.95)


def _write_whole(model: nn.Module) -> None:
    """By what writes all of a parameter and takes no tensor."""
    first, second, third, *_ = _weights(model)
    nn.init.eye_(first)
    with torch.no_grad():
        torch.linspace(-0.2, 0.2, len(model.layers[0].norm.weight), out=next(model.layers[0].norm.parameters()))
        torch.full(model.head.weight.shape, 0.03, out=next(model.head.parameters()).data)
        if second.device.type == "cpu":
            second.detach().apply_(lambda value: 0.5 * value)
            third.data.apply_(lambda value: value + 0.01)
        else:
            second.mul_(0.5)


def _write_both(model: nn.Module) -> None:
    """By a module's attribute, and then to another parameter of its unit, or to the same one; reads see both."""
    named = dict(model.named_parameters())
    with torch.no_grad():
        model.layers[1].up.weight.mul_(0.5)
        named["layers.1.up.bias"].add_(0.1)
        model.head.weight.mul_(0.5)
        named["head.weight"].mul_(0.9)
        model.layers[2].up.weight.mul_(2.0)
        named["layers.2.up.weight"].mul_(0.2 + 0.1 * float(named["layers.2.up.weight"].norm()))
        model.layers[2].down.weight.fill_(0.03)
        named["layers.2.norm.bias"].copy_(named["layers.2.down.weight"].detach()[:, 0])
    model.layers[0].down.weight.data.mul_(0.7)
    named["layers.0.norm.weight"].data = torch.full_like(named["layers.0.norm.weight"].data, 0.8)
    model.embedding.weight.data.mul_(0.6)
    named["embedding.weight"].data.mul_(0.9)
    torch.manual_seed(3)
    model.layers[0].up.weight.data.mul_(0.7)
    named["layers.0.up.weight"].data.add_(0.05 * torch.randn_like(named["layers.0.up.weight"].data))


def _write_late(model: nn.Module) -> None:
    """To values that were read before those of other units, as target networks are updated."""
    first, second, third = model.layers
    first.up.weight.data.lerp_(third.up.weight.data, 0.3)
    first.down.weight.data.copy_(third.down.weight.data)
    with torch.no_grad():
        second.down.weight.lerp_(third.down.weight, 0.3)
        second.norm.bias.add_(first.norm.weight, alpha=0.1)
    held = second.up.weight.data
    assert first.up.bias.sum() != third.up.bias.sum()
    held.mul_(0.5)
    assert torch.equal(second.up.weight.data, held)
    assert first.up.bias.sum() != third.up.bias.sum()
    held.add_(0.01)
    with torch.no_grad():
        dict(second.named_parameters())["up.weight"].mul_(0.9)
    assert torch.equal(second.up.weight.data, held)  # one memory, as in torch
    held = first.norm.weight.data
    assert second.up.bias.sum() != third.up.bias.sum()
    held.mul_(0.5)
    assert first.norm.weight.data.sum() == held.sum()
    assert second.up.bias.sum() != third.up.bias.sum()
    held.add_(0.01)  # it is the last reference, and ends here


def _hold(model: nn.Module, batch: Tensor, backward: Callable[[Tensor], None]) -> None:
    first, second, third = model.layers
    attributes = first.down.weight, second.up.weight, third.norm.bias, model.head.weight
    model.__dict__["held"] = [value.data for value in attributes]
    backward(engines.token_loss(model, batch))


def _write_held(model: nn.Module) -> None:
    for held in model.__dict__.pop("held"):
        held.mul_(0.9)


def _hooked(model: nn.Module) -> list[Any]:
    def hook(parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)

    return [p.register_post_accumulate_grad_hook(hook) for p in [*_weights(model)[:3], model.scale]]


@dataclass(frozen=True)
class Works:
    """``step`` and then ``inside`` run inside the step, ``after`` between it and the optimizer's, ``between`` after
    the optimizer's, ``before`` once before the first."""

    step: User = lambda model, batch, backward: backward(engines.token_loss(model, batch))
    inside: Callable[[nn.Module], None] = _nothing
    after: Callable[[nn.Module], None] = _nothing
    between: Callable[[nn.Module], None] = _nothing
    before: Callable[[nn.Module], None] = _nothing


WORKS = {
    "penalty": Works(_penalty),
    "penalty alone": Works(_penalty_alone),
    "toggled": Works(_toggled),
    "inner gradient": Works(_inner_gradient),
    "clamp": Works(between=_clamp),
    "copy": Works(between=_copy),
    "load": Works(between=_load),
    "set": Works(between=_set_memory),
    "gradients": Works(after=_scale_gradients),
    "clamp before the step": Works(after=_clamp),
    "rows": Works(between=_write_rows),
    "rows of gradients": Works(after=_write_rows_of_gradients),
    "lists": Works(between=_write_lists),
    "lists beside others": Works(between=_write_lists_beside_others),
    "copies of lists": Works(between=_copy_lists),
    "data of gradients": Works(after=_write_data_of_gradients),
    "states": Works(between=_write_states),
    "swap": Works(between=_swap),
    "whole": Works(between=_write_whole),
    "late": Works(between=_write_late),
    "late in the step": Works(inside=_write_late),
    "held over a backward": Works(step=_hold, inside=_write_held),
    "both": Works(between=_write_both),
    "both in the step": Works(inside=_write_both),
    "rows in the step": Works(inside=_write_rows_in_the_step),
    "views": Works(between=_write_views),
    "views in the step": Works(inside=_write_views),
    "gradients that are set": Works(after=_set_gradients),
    "what was kept": Works(step=_regularize, before=_keep),
    "data beside what was kept": Works(step=_weigh, before=_keep),
}


def _reference(case: Works, twin: nn.Module) -> None:
    optimizer = torch.optim.SGD(twin.to(models.device()).parameters(), lr=LR)
    data = [models.Batches(r) for r in range(models.world())]
    case.before(twin)
    for number in range(STEPS):
        for batches in data:
            case.step(twin, batches[number], lambda loss: (loss / models.world()).backward())
        case.inside(twin)
        case.after(twin)
        optimizer.step()
        optimizer.zero_grad()
        case.between(twin)


def _train(case: Works, model: nn.Module, stage: int, scope: Any) -> None:
    data = models.Batches(models.rank())
    torch._dynamo.reset()
    with engines.engine(model, stage, compile=scope) as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        engine.attach_optimizers([optimizer])

        def backward(loss: Tensor) -> None:
            engines.backward(engine, loss)

        case.before(model)
        for number in range(STEPS):
            with engine.training_step():
                case.step(model, data[number], backward)
                case.inside(model)
            case.after(model)
            if stage == 2:  # past Lightning
                optimizer.step()
            else:
                engine.step(optimizer, lambda: None)
            optimizer.zero_grad()
            case.between(model)


@pytest.mark.parametrize("name", list(WORKS))
@on_ranks()
def test_works_as_under_ddp(name: str) -> None:
    """The parameters after some steps are DDP's, and would not be without what the user did."""
    case, source, problems = WORKS[name], models.ByteModel(), []
    twin = models.ByteModel()
    twin.load_state_dict(source.state_dict())
    _reference(case, twin)
    for stage, scope in CELLS:
        model = models.ByteModel()
        model.load_state_dict(source.state_dict())
        try:
            _train(case, model, stage, scope)
        except Exception:
            problems.append(f"stage {stage} {scope}: {traceback.format_exc()[-1500:]}")
            continue
        deviation = models.deviation(model, twin)
        plain = models.ByteModel()
        plain.load_state_dict(source.state_dict())
        _reference(Works(), plain)
        if deviation > 1e-6 or models.deviation(plain, twin) < 1e-3:
            problems.append(f"stage {stage} {scope}: {deviation}, without it {models.deviation(plain, twin)}")
        if any(type(p) is not nn.Parameter for p in model.parameters()):
            problems.append(f"stage {stage} {scope}: {[type(p) for p in model.parameters()]}")
    assert problems == [], "\n".join(problems)


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "copy": lambda kept, p: kept.copy_(p.data),
    "copy of a parameter": lambda kept, p: kept.copy_(p),
    "lerp": lambda kept, p: kept.lerp_(p.data, 0.25),
    "operator": lambda kept, p: operator.iadd(kept, p.data),
    "two": lambda kept, p: kept.addcdiv_(p.data, p.data.abs() + 1),
    "list": lambda kept, p: torch._foreach_lerp_([kept], [p.data], 0.25),
    "out": lambda kept, p: torch.add(kept, p.data, out=kept),
}


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_tensors_of_the_users_are_written(stage: int) -> None:
    """Outside of a step, as an average or a teacher that user code keeps: with whole values, as under DDP."""
    model, twin = models.pair()
    with engines.engine(model, stage, compile=False), torch.no_grad():
        for name, write in WRITES.items():
            for parameter, whole in zip(model.parameters(), twin.parameters(), strict=True):
                kept = torch.full_like(whole, 2.0, device=models.device())
                expected = kept.clone()
                write(kept, parameter)
                write(expected, whole.to(models.device()))
                assert torch.equal(kept, expected), name


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
@on_ranks()
def test_a_parametrized_module_is_copied(stage: int) -> None:
    def make() -> nn.Module:
        squares = nn.Sequential(nn.Linear(6, 6), nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)))
        nn.utils.parametrize.register_parametrization(squares[0], "weight", _Symmetric())
        return squares

    model, twin = models.pair(make)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)).to(models.device())
    with engines.engine(model, stage, compile=False):
        copied = copy.deepcopy(model)
        assert all(type(p) is nn.Parameter for p in copied.parameters())
        assert models.deviation(copied, twin) == 0
        assert torch.equal(copied(x), twin.to(models.device())(x))
        with torch.no_grad():
            copied[0].parametrizations.weight.original.zero_()
        assert not torch.equal(copied(x), model(x))
    assert models.deviation(model, twin) == 0


# ---- hooks ----


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("early", [True, False])
@on_ranks()
def test_post_accumulate_hooks_see_the_reduced_gradient(stage: int, early: bool) -> None:
    """They run once a backward with the mean over ranks in `grad`, whether registered before sharding or after."""
    # ``early``: registered before the model is sharded. One hook is removed after the second step.
    model, twin = models.pair(models.ByteModel)
    handles = _hooked(model) if early else []
    calls: list[bool] = []
    data = models.Batches(models.rank())
    with engines.engine(model, stage) as engine:
        handles = handles or _hooked(model)
        model.head.weight.register_post_accumulate_grad_hook(lambda p: calls.append(isinstance(p.grad, DTensor)))
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        engine.attach_optimizers([optimizer])
        for number in range(STEPS):
            if number == 2:
                handles[0].remove()
            engines.step(engine, optimizer, lambda number=number: engines.token_loss(model, data[number]))
    optimizer = torch.optim.SGD(twin.parameters(), lr=LR)
    for number in range(STEPS):
        for batches in (models.Batches(r) for r in range(models.world())):
            (engines.token_loss(twin, batches[number]) / models.world()).backward()
        for hooked in [*_weights(twin)[number == 2 : 3], twin.scale]:
            hooked.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert models.deviation(model, twin) <= 1e-6
    assert len(calls) == STEPS and all(calls)


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks()
def test_optimizer_in_backward(stage: int) -> None:
    """Each parameter has an optimizer of its own, which steps in the hook."""
    model, twin = models.pair(models.ByteModel)
    data = models.Batches(models.rank())
    with engines.engine(model, stage, compile=False) as engine:
        optimizers = {p: torch.optim.SGD([p], lr=LR) for p in model.parameters()}

        def hook(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(hook)
        for number in range(STEPS):
            with engine.training_step():
                loss = engines.token_loss(model, data[number])
                engines.backward(engine, loss)
        kept = sum(p.grad is not None for p in model.parameters())
    _reference(Works(), twin)
    result = models.deviation(model, twin) + kept
    assert result <= 1e-6


# ---- what raises ----


def _hook_on_parameter(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    next(model.layers[0].parameters()).register_hook(lambda grad: 2 * grad)


def _hook_on_attribute(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    model.head.weight.register_hook(lambda grad: 2 * grad)


def _grad_of_parameters(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    torch.autograd.grad(engines.token_loss(model, batch), list(model.parameters()), allow_unused=True)


def _grad_of_attribute(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    torch.autograd.grad(engines.token_loss(model, batch), [model.head.weight])


def _backward_of_inputs(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    engines.token_loss(model, batch).backward(inputs=list(model.head.parameters()))


def _added(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    model.head.bias = nn.Parameter(torch.zeros(models.VOCABULARY))


def _cast(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    model.head.half()


def _other_dtype(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    model.head.weight.data = torch.zeros(models.VOCABULARY, 10, dtype=torch.bfloat16)


def _func_grad(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    torch.func.grad(lambda x: model.layers[0](x).sum())(torch.ones(2, 10))


def _func_vmap(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    torch.func.vmap(model.head)(torch.ones(2, 10))


def _func_jvp(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    torch.func.jvp(model.head, (torch.ones(2, 10),), (torch.ones(2, 10),))


def _create_graph(model: nn.Module, batch: Tensor, backward: Backward) -> None:
    x = model.embedding(batch[:, :-1])
    (inner,) = torch.autograd.grad(model.head(model.layers[1](x)).square().mean(), x, create_graph=True)
    backward(engines.token_loss(model, batch) + inner.square().mean())


RAISES: dict[str, tuple[User, tuple[str, ...]]] = {
    "hook": (_hook_on_parameter, ("`layers.0.norm.weight`", "register_post_accumulate_grad_hook")),
    "hook on attribute": (_hook_on_attribute, ("`head.weight`", "register_post_accumulate_grad_hook")),
    "grad": (_grad_of_parameters, ("`scale`", "strategy.full_parameters", "`backward`")),
    "grad of attribute": (_grad_of_attribute, ("read again from a sharded module", "call `backward`")),
    "backward of inputs": (_backward_of_inputs, ("`head.weight`", "requires_grad_")),
    "added": (_added, ("`head.bias` was added", "configure_model")),
    "cast": (_cast, ("`head.weight`", "torch.float16", "configure_model")),
    "other dtype": (_other_dtype, ("`head.weight`", "torch.bfloat16", "configure_model")),
    "torch.func.grad": (_func_grad, ("torch.func", "strategy.full_parameters")),
    "torch.func.vmap": (_func_vmap, ("torch.func", "`head.weight`", "strategy.full_parameters")),
    "torch.func.jvp": (_func_jvp, ("torch.func", "strategy.full_parameters")),
    "create_graph": (_create_graph, ("`layers.1`", "create_graph", "compile=False")),
}


def _message(name: str, stage: int, scope: Any) -> str:
    model = models.ByteModel()
    engine = engines.make_engine(model, stage, compile=scope)
    user, data = RAISES[name][0], models.Batches(models.rank())

    def backward(loss: Tensor) -> None:
        engines.backward(engine, loss)

    try:
        for _ in range(2):  # what is done to the module itself is found at the next step
            with engine.training_step():
                user(model, data[0], backward)
    except RuntimeError as error:
        return str(error)
    finally:
        engine.abandon()
    return "nothing was raised"


@pytest.mark.parametrize("name", list(RAISES))
@on_ranks()
def test_raises_and_names_the_way_out(name: str) -> None:
    """On every rank, at every stage, compiled or not."""
    cells = [cell for cell in CELLS if name != "create_graph" or cell[1]]
    found = {}
    for stage, scope in cells:
        torch._dynamo.reset()
        found[stage, scope] = _message(name, stage, scope)
    for cell, message in found.items():
        assert all(text in message for text in RAISES[name][1]), f"{cell}: {message}"


def _hook_before_sharding() -> str:
    model = models.ByteModel()
    model.layers[1].up.weight.register_hook(lambda grad: 2 * grad)
    try:
        engines.make_engine(model, 3)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


@on_ranks()
def test_hook_from_before_sharding() -> None:
    message = _hook_before_sharding()
    assert "`layers.1.up.weight`" in message and "register_post_accumulate_grad_hook" in message
    assert "log='parameters'" in message and "full_gradients" in message


# ---- the ways out work ----


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_create_graph_without_compilation(stage: int) -> None:
    """A gradient penalty with compile=False."""
    model, twin = models.pair(models.ByteModel)
    case = Works(_create_graph)
    _reference(case, twin)
    _train(case, model, stage, False)
    assert models.deviation(model, twin) <= 2e-6


class _Penalised(nn.Module):
    """A module without blocks whose forward takes a gradient that is differentiated once more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:  # [batch, 6]
        x = x.detach().requires_grad_()
        y = self.inner(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + grad.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(("stage", "scope"), [(1, "blocks"), (2, "model"), (3, "blocks"), (3, False)])
@on_ranks()
def test_create_graph_inside_a_compiled_module(stage: int, scope: Any) -> None:
    model = nn.Sequential(_Penalised())
    with engines.engine(model, stage, compile_options={"backend": "aot_eager"}, compile=scope) as engine:
        raises: Any = pytest.raises(RuntimeError, match=r"double backward.*compile=False") if scope else nullcontext()
        with raises, engine.training_step():
            engines.backward(engine, model(torch.ones(2, 6, device=models.device())).square().mean())
        assert scope or model[0].inner[0].weight.grad is not None  # type: ignore[index, union-attr]


@pytest.mark.parametrize(("stage", "scope"), [(1, "blocks"), (3, False), (3, "blocks")])
@on_ranks()
def test_torch_func_on_full_parameters(stage: int, scope: Any) -> None:
    """What the error names does work, also where the runtime's own hooks are on."""
    # Per-sample gradients of the sharded model by `torch.func`, inside a training step.
    model, twin = models.pair(models.ByteModel)
    batch = models.Batches(models.rank())[0]

    def gradients(module: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
        def loss(values: dict[str, Tensor], sample: Tensor) -> Tensor:
            logits = torch.func.functional_call(module, values, (sample[None, :-1],))
            return F.cross_entropy(logits[0], sample[1:])

        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, batch)  # type: ignore[no-any-return]

    expected = gradients(twin.to(models.device()), {name: 0.9 * p.detach() for name, p in twin.named_parameters()})
    with engines.engine(model, stage, compile=scope) as engine:
        with engine.training_step(), engine.full_parameters(model, writeback=False) as values:
            seen = gradients(model, {name: 0.9 * value for name, value in values.items()})
        result = max((seen[name] - expected[name]).abs().max().item() for name in expected)
    assert result <= 1e-6


@pytest.mark.parametrize(("stage", "scope"), [(1, "blocks"), (2, False), (3, False), (3, "blocks")])
@on_ranks()
def test_a_forward_sees_what_a_view_was_written_to(stage: int, scope: Any) -> None:
    """In one step, before any optimizer makes the values anew."""
    model, twin = models.pair(models.ByteModel)
    batch = models.Batches(models.rank())[0]
    with engines.engine(model, stage, compile=scope) as engine, engine.training_step():
        engines.backward(engine, engines.token_loss(model, batch))
        for write in (lambda p: p.view(-1).mul_(0.9), lambda p: p.unsqueeze(0).view(-1)[:1].fill_(0.3)):
            for one in (model, twin):
                for parameter in one.parameters():
                    write(parameter.data)
            assert (engines.token_loss(model, batch) - engines.token_loss(twin, batch)).abs() < 1e-6


@pytest.mark.parametrize(("stage", "scope"), [(1, "blocks"), (2, False), (3, False), (3, "blocks")])
@on_ranks()
def test_values_that_are_held_over_a_drop(stage: int, scope: Any) -> None:
    """Of attributes: a swap and its way back, a write that one rank notices alone, and a lent unit."""
    model = models.ByteModel()
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    with engines.engine(model, stage, compile=scope) as engine, torch.no_grad():
        first, second, third = model.layers
        kept = [first.up.weight.data, second.up.weight.detach(), third.up.weight.data]
        third.up.weight.data = kept[2]
        for layer in model.layers:
            layer.up.weight.data = torch.ones_like(layer.up.weight.data)
        assert all(layer.up.weight.min() == 1 == layer.up.weight.max() for layer in model.layers)
        for layer, backup in zip(model.layers, kept, strict=True):
            layer.up.weight.data = backup

        held = first.down.weight
        assert third.up.bias.sum() != first.up.bias.sum()  # the unit is dropped, and gathered again
        held.mul_(0.5)
        if models.rank() == 0:
            _ = dict(model.named_parameters())["layers.0.down.weight"].data
        assert torch.equal(first.down.weight, held) and second.up.bias.sum() != third.up.bias.sum()

        held = second.down.weight.data
        with engine.full_parameters(second, True) as values:
            values["down.weight"].add_(1)
        held.mul_(3)
        assert torch.equal(second.down.weight, held)
    whole["layers.0.down.weight"] *= 0.5
    whole["layers.1.down.weight"] = 3 * (whole["layers.1.down.weight"] + 1)
    for name, p in model.named_parameters():
        assert torch.equal(p.cpu(), whole[name]), name


class _Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x

    def right_inverse(self, x: Tensor) -> Tensor:
        return x / 2


def _parametrized() -> nn.Module:
    model = twins.small()
    nn.utils.parametrize.register_parametrization(model[0], "weight", _Doubled())
    nn.utils.parametrizations.weight_norm(model[2])
    return model


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_a_parametrized_weight_is_assigned(stage: int) -> None:
    """`layer.weight = value` goes through the parametrization to its parameters."""
    with twins.pair(stage, _parametrized) as (engine, twin, optimizer):
        theirs = torch.optim.SGD(twin.to(models.device()).parameters(), lr=twins.LR)
        for number in range(3):
            engines.step(engine, optimizer, lambda number=number: twins.loss(engine.model, twins.mine(number)))
            theirs.zero_grad()
            twins.gradients(twin, twins.on_all(number))
            theirs.step()
            for model in (engine.model, twin):
                for layer in (model[0], model[2]):
                    ramp = torch.linspace(-0.3, 0.4, layer.weight.numel(), device=models.device())
                    with torch.no_grad():
                        layer.weight = ramp.view(layer.weight.shape) * (1 + number)
            assert twins.deviation(engine, twin) <= 1e-6


# of a parameter and a tensor of its size
BESIDE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "product": lambda p, own: p * own,
    "from the left": lambda p, own: own - p,
    "sum": lambda p, own: torch.add(p, own, alpha=0.5),
    "choice": lambda p, own: torch.where(own > 1, p, own),
    "comparison": lambda p, own: p < own,
    "row": lambda p, own: p * own[0],
    "matrices": lambda p, own: own.T @ p,
    "loss": lambda p, own: F.mse_loss(p, own),
    "list": lambda p, own: torch._foreach_mul([p], [own])[0],
    "number": lambda p, own: torch.tensor(torch.equal(p, own)),
    "joined": lambda p, own: torch.cat([p, own]),
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_a_parameter_beside_data_of_one_s_own(stage: int) -> None:
    """In a hook between steps, with gradients and without: each rank gets what its own data give."""
    model = models.ByteModel()
    whole = model.head.weight.detach().clone().to(models.device())
    own = torch.linspace(-2, 2, whole.numel(), device=whole.device).view_as(whole) * (1 + models.rank())
    with engines.engine(model, stage, **EAGER):
        parameter = dict(model.named_parameters())["head.weight"]
        for name, call in BESIDE.items():
            for enabled in (True, False):
                with torch.set_grad_enabled(enabled):
                    result, expected = call(parameter, own), call(whole, own)
                assert not isinstance(result, DTensor), name
                torch.testing.assert_close(result.detach(), expected, msg=name)
        with torch.no_grad():
            torch.testing.assert_close(own @ parameter.T, own @ whole.T)
        with pytest.raises(RuntimeError, match=r"`mm` takes a shard.*`torch\.no_grad\(\)`"):
            own @ parameter.T


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_lists_of_parameters_and_of_one_s_own(stage: int) -> None:
    """An operation on a list writes to all of it, whatever is in it."""
    model, twin = models.pair(models.ByteModel)
    with engines.engine(model, stage, **EAGER):
        for one in (model, twin):
            weights = [p for p in one.parameters() if p.dim() == 2]
            others = [torch.ones(p.shape, device=models.device()) for p in weights]
            with torch.no_grad():
                torch._foreach_mul_([*weights, *others], 0.5)
                torch._foreach_add_([*others, *weights], [torch.ones_like(p) for p in [*others, *others]])
            assert all(torch.equal(other, torch.full_like(other, 1.5)) for other in others)
    assert models.deviation(model, twin) <= 1e-6
