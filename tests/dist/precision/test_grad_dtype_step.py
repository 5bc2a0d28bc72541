"""Gradients of another dtype than their parameters': the optimizer's step equals torch's, or raises by name before it.

The contract itself is in test_grad_dtype.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zerocompile.optim.supported import ELEMENTWISE, PER_PARAMETER
from lightning_zerocompile.sharding.full_values import full_value
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.precisions import BF16, FP32, RAW, RawWhole, same

KINDS = sorted(ELEMENTWISE | PER_PARAMETER, key=lambda kind: kind.__name__)
PAIRS: list[Any] = [(FP32, BF16), (BF16, None)]
LONG_PAIRS: list[Any] = [(BF16, FP32)]


class Plain(torch.optim.Optimizer):
    """Not torch's own: it steps on DTensors. Wants gradients of its parameters' dtype."""

    def __init__(self, parameters: Any, lr: float = 0.5) -> None:
        super().__init__(parameters, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = closure() if closure is not None else None
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(torch.lerp(p.grad, p, 0.5), alpha=-group["lr"])
        return result


class Picky(Plain):
    """Cannot step on what is not the model's, so it cannot be tried out: it gets its gradients as they are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.names = {p: str(number) for group in self.param_groups for number, p in enumerate(group["params"])}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = closure() if closure is not None else None
        for p in self.param_groups[0]["params"]:
            if self.names[p] and p.grad is not None:
                p.add_(p.grad, alpha=-0.5)
        return result


ROUTES: list[tuple[Any, bool]] = [(kind, True) for kind in (*KINDS, Plain, Picky)]  # by engine.step
ROUTES += [(partial(kind, foreach=True), True) for kind in (torch.optim.Adagrad, torch.optim.AdamW)]  # CUDA's default
ROUTES += [(kind, False) for kind in (torch.optim.SGD, torch.optim.AdamW)]  # on DTensors; of others that raises


def _matrices(model: nn.Module) -> list[Any]:
    """Of the first block: of the dtypes in question, and one in float32."""
    return [p for p in model.parameters() if p.dim() == 2][:2]


def _torchs(kind: type[Optimizer], values: list[Tensor], grads: list[Tensor]) -> list[Tensor] | None:
    """Parameters after two steps of a plain optimizer on the same gradients; None: torch raises."""
    leaves = []
    for value, grad in zip(values, grads, strict=True):
        leaf = nn.Parameter(value.clone())
        leaf.grad_dtype = None
        leaf.grad = grad.clone()
        leaves.append(leaf)
    optimizer = kind(leaves)
    try:
        for _ in range(2):
            optimizer.step()
    except RuntimeError:
        return None
    return leaves


def _full(tensor: Any) -> Tensor:
    return full_value(tensor).detach().clone()


def _state(optimizer: Optimizer) -> list[Tensor]:
    """What it keeps of its parameters, whole: Adagrad from its construction on, others from their first step on."""
    values = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    return [_full(value) if isinstance(value, DTensor) else value.clone() for value in values]


def _step(engine: Any, parameters: list[Any], grads: list[Tensor], kind: Any, by_engine: bool) -> list[str]:
    """Two steps on `grads`, which are bound: as torch's own, or an error by name that changes nothing."""
    problems = []
    optimizer = kind(parameters)
    name = type(optimizer).__name__
    engine.attach_optimizers([optimizer])
    before, state = [_full(p) for p in parameters], _state(optimizer)
    expected = _torchs(kind, before, grads)
    raised = ""
    try:
        for _ in range(2):
            engine.step(optimizer, lambda: None) if by_engine else optimizer.step()
    except RuntimeError as error:
        raised = str(error)
    after = [_full(p) for p in parameters]
    if expected is None:
        if any(word not in raised for word in ("model.layers.0.raw", name, "grad_dtype", str(BF16))):
            problems.append(f"the error is: {raised!r}")
        if not same(_state(optimizer), state) or not same(after, before):
            problems.append("something was updated before the error")
    elif raised:
        problems.append(f"torch takes it, here: {raised}")
    elif not same(after, expected):
        problems.append(f"{after} are not {expected}")
    return [f"{name} {'engine.step' if by_engine else 'step'}: {problem}" for problem in problems]


@on_ranks(timeout=240)
def test_optimizers_take_the_gradient_or_raise(long: bool) -> None:
    """Every kind of optimizer, through `engine.step` (unit by unit where it may) and through its own `step`."""
    stages = [1, 2, 3] if long else [3]
    pairs = PAIRS + LONG_PAIRS * long
    problems = []
    for stage in stages:
        for dtype, grad_dtype in pairs:
            model = RawWhole(dtype, grad_dtype)
            made = engines.make_engine(model, stage, compile=False, master_dtype=None, keep_gradients=True)
            with engines.closing(made) as engine:
                parameters = _matrices(model)
                with engine.training_step():
                    x = torch.tensor([RAW + 4 * models.rank()], device=models.device())
                    engines.backward(engine, model(x).sum())
                grads = [_full(p.grad) for p in parameters]
                cell = f"{dtype} grad_dtype={grad_dtype} stage {stage}"
                if parameters[0].grad.dtype == dtype:
                    problems.append(f"{cell}: the gradient has its parameter's dtype")
                for kind, by_engine in ROUTES:
                    problems += [f"{cell}: {p}" for p in _step(engine, parameters, grads, kind, by_engine)]
    assert problems == [], "\n".join(problems)
