"""`grad_dtype=None`: gradients keep the dtype in which they are produced, and all ranks agree which one that is."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile.full_values import full_value
from tests import engines, models
from tests.harness import Ranks

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
Plan = list[list[tuple[torch.dtype, float] | None]]  # by backward, by rank: the raw gradient; None: the rank has none


class Raw(torch.autograd.Function):
    """Zero, whose gradient with respect to `weight` is `value` everywhere, produced in `dtype`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype, value: float) -> Tensor:
        ctx.shape, ctx.dtype, ctx.value = weight.shape, dtype, value
        return weight.float().sum() * 0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.full(ctx.shape, ctx.value, dtype=ctx.dtype, device=grads[0].device), None, None


class Block(nn.Module):
    """Two weights in bfloat16 with `grad_dtype=None`, one in float32 that every rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2, dtype=BF16))
        self.scalar = nn.Parameter(torch.zeros((), dtype=BF16))
        self.bias = nn.Parameter(torch.zeros(3))
        self.weight.grad_dtype = None
        self.scalar.grad_dtype = None

    def forward(self, raw: tuple[torch.dtype, float] | None) -> Tensor:
        y = self.bias.sum()
        if raw is not None:
            y = y + Raw.apply(self.weight, *raw) + Raw.apply(self.scalar, *raw)
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, raw: tuple[torch.dtype, float] | None) -> Tensor:
        return sum(layer(raw) for layer in self.layers)


def _grads(plan: Plan, stage: int, window: str, options: dict[str, Any]) -> tuple[list[dict[str, Tensor | None]], int]:
    """Gradients behind each backward of `plan` (in a window: behind the last), and the bytes that were reduced."""
    model = Net()
    with engines.engine(model, stage, compile=False, master_dtype=None, **options) as engine:
        seen = []

        def backward(raw: Any) -> None:
            with engine.training_step():
                engines.backward(engine, model(raw))

        def note() -> None:
            seen.append({n: _full(p.grad) for n, p in model.named_parameters() if "layers.0" in n})
            for p in model.parameters():
                p.grad = None

        if window:
            with engine.windows.open("auto", None, None) if window == "coalesced" else nullcontext():
                for raws in plan[:-1]:
                    with nullcontext() if window == "coalesced" else engine.accumulation():
                        backward(raws[models.rank()])
                backward(plan[-1][models.rank()])
            note()
        else:
            for raws in plan:
                backward(raws[models.rank()])
                note()
        return seen, engine.runtime.stats().reduce_bytes


def _full(grad: Any) -> Tensor | None:
    return full_value(grad).cpu() if isinstance(grad, DTensor) else grad


ONE, OTHER, BOTH = (F32, 257.0), (BF16, 4.0), (F32, 259.0)
# name -> (plan, options, window, (dtype, value) behind each backward: of the mean over the two ranks)
CASES: dict[str, tuple[Plan, dict[str, Any], str, list[tuple[torch.dtype, float] | None]]] = {
    "one rank": ([[ONE, None]], {}, "", [(F32, 128.5)]),
    "the other rank": ([[None, ONE]], {}, "", [(F32, 128.5)]),
    "other dtypes": ([[ONE, OTHER]], {}, "", [(F32, 130.5)]),
    "both halves": ([[(F16, 256.0), (BF16, 2.0**17)]], {}, "", [(BF16, 2.0**16)]),
    "no rank at first": ([[None, None], [OTHER, ONE], [OTHER, OTHER]], {}, "", [None, (F32, 130.5), (BF16, 4.0)]),
    "anew": ([[OTHER, OTHER], [ONE, None]], {}, "", [(BF16, 4.0), (F32, 128.5)]),
    "reduced in float32": ([[OTHER, OTHER], [OTHER, None]], {"reduce_dtype": F32}, "", [(BF16, 4.0), (BF16, 2.0)]),
    "reduced in bfloat16": ([[ONE, BOTH]], {"reduce_dtype": BF16}, "", [(F32, 258.0)]),
    "accumulated": ([[ONE, None], [OTHER, BOTH]], {"accumulate": "local"}, "local", [(F32, 260.0)]),
    "coalesced": ([[OTHER, None], [None, ONE]], {}, "coalesced", [(F32, 130.5)]),
}


def _case(name: str, stage: int) -> list[str]:
    plan, options, window, expected = CASES[name]
    seen, reduced = _grads(plan, stage, window, options)
    problems = []
    for number, (grads, wanted) in enumerate(zip(seen, expected, strict=True)):
        for parameter in ("layers.0.weight", "layers.0.scalar"):
            grad = grads[parameter]
            if wanted is None or grad is None:
                right = wanted is None and grad is None
            else:
                right = grad.dtype == wanted[0] and bool((grad == torch.tensor(wanted[1]).to(wanted[0])).all())
            if not right:
                problems.append(f"{name}, stage {stage}, backward {number}: {parameter} is {grad}, not {wanted}")
    wire = options.get("reduce_dtype", F32)
    # per backward and block: weight [3 -> 4, 2] and scalar in the agreed dtype, bias [3 -> 4] in the wire's
    sizes = [2 * (9 * options.get("reduce_dtype", w[0]).itemsize + 4 * wire.itemsize) for w in expected if w]
    sizes += [2 * (9 * BF16.itemsize + 4 * wire.itemsize) for w in expected if w is None]
    if reduced != sum(sizes):
        problems.append(f"{name}, stage {stage}: reduced {reduced} bytes, not {sum(sizes)}")
    return problems


@pytest.mark.parametrize("name", CASES)
def test_ranks_agree(ranks: Ranks, name: str, long: bool) -> None:
    """Value, dtype and bytes on the wire, when ranks differ in who has a gradient and in which dtype."""
    for stage in (1, 2, 3) if long else (1, 3):
        for problems in ranks.run(_case, name, stage, timeout=30):
            assert problems == [], "\n".join(problems)
