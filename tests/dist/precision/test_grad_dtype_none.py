"""`grad_dtype=None`: gradients keep the dtype in which they are produced, and all ranks agree which one that is.

As in torch, each backward decides anew where `grad` is None, and adds to it in its own dtype where it is not.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile.sharding.full_values import full_value
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.precisions import BF16, FP16, FP32

Plan = list[list[tuple[torch.dtype, float] | None]]  # by backward, by rank: the raw gradient; None: the rank has none


class Raw(torch.autograd.Function):
    """Zero, whose gradient with respect to `weight` is `value` everywhere, produced in `dtype`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        ctx.shape, ctx.dtype = weight.shape, dtype
        return weight.float().sum() * 0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (value,) = ctx.saved_tensors
        return value.to(ctx.dtype).expand(ctx.shape).clone(), None, None


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
        if raw is not None:  # a number would become a symbol, which torch cannot trace here
            raw = raw[0], torch.tensor(raw[1], device=self.layers[0].bias.device)  # type: ignore[assignment]
        return sum(layer(raw) for layer in self.layers)


def _grads(
    plan: Plan, stage: int, window: str, options: dict[str, Any], scope: Any
) -> tuple[list[dict[str, Tensor | None]], int]:
    """Gradients after each backward of `plan` (in a window: after the last), and the bytes that were reduced.

    ``window``: "" and "kept": there is none; the latter leaves gradients where they are.
    """
    torch._dynamo.reset()
    model = Net()
    with engines.engine(model, stage, compile=scope, master_dtype=None, **options) as engine:
        seen = []

        def backward(raw: Any) -> None:
            with engine.training_step():
                engines.backward(engine, model(raw))

        def note() -> None:
            seen.append({n: _full(p.grad) for n, p in model.named_parameters() if "layers.0" in n})
            for p in model.parameters():
                if window != "kept":
                    p.grad = None

        if window in WINDOWS:
            opened = WINDOWS[window]
            with nullcontext() if opened is None else engine.windows.open("auto", *opened):
                for raws in plan[:-1]:
                    with engine.accumulation() if opened is None else nullcontext():
                        backward(raws[models.rank()])
                backward(plan[-1][models.rank()])
            note()
        else:
            for raws in plan:
                backward(raws[models.rank()])
                note()
        return seen, engine.runtime.stats().reduce_bytes


def _full(grad: Any) -> Tensor | None:
    return full_value(grad).cpu().clone() if isinstance(grad, DTensor) else grad if grad is None else grad.clone()


ONE, OTHER, BOTH = (FP32, 257.0), (BF16, 4.0), (FP32, 259.0)
LOW, LITTLE = (BF16, 256.0), (FP32, 1.0)  # their sum needs nine bits
# name -> max_bytes and accumulate_dtype of the window; None: an accumulation
WINDOWS: dict[str, Any] = {"local": None, "coalesced": (None, None), "bounded": (0, None), "fp32": (None, FP32)}
# name -> (plan, options, window, (dtype, value) after each backward: of the mean over the two ranks)
CASES: dict[str, tuple[Plan, dict[str, Any], str, list[tuple[torch.dtype, float] | None]]] = {
    "one rank": ([[ONE, None]], {}, "", [(FP32, 128.5)]),
    "the other rank": ([[None, ONE]], {}, "", [(FP32, 128.5)]),
    "other dtypes": ([[ONE, OTHER]], {}, "", [(FP32, 130.5)]),
    "both halves": ([[(FP16, 256.0), (BF16, 2.0**17)]], {}, "", [(BF16, 2.0**16)]),
    "no rank at first": ([[None, None], [OTHER, ONE], [OTHER, OTHER]], {}, "", [None, (FP32, 130.5), (BF16, 4.0)]),
    "each time anew": ([[OTHER, OTHER], [ONE, None]], {}, "", [(BF16, 4.0), (FP32, 128.5)]),
    "kept, narrow": ([[LOW, LOW], [LITTLE, LITTLE]], {}, "kept", [(BF16, 256.0), (BF16, 256.0)]),
    "kept, wide": ([[ONE, ONE], [OTHER, OTHER]], {}, "kept", [(FP32, 257.0), (FP32, 261.0)]),
    "reduced in float32": ([[OTHER, OTHER], [OTHER, None]], {"reduce_dtype": FP32}, "", [(BF16, 4.0), (BF16, 2.0)]),
    "reduced in bfloat16": ([[ONE, BOTH]], {"reduce_dtype": BF16}, "", [(FP32, 258.0)]),
    "accumulated": ([[ONE, None], [OTHER, BOTH]], {"defer_grad_sync": True}, "local", [(FP32, 260.0)]),
    "accumulated, narrow": ([[LOW, LOW], [LITTLE, LITTLE]], {"defer_grad_sync": True}, "local", [(BF16, 256.0)]),
    "coalesced": ([[OTHER, None], [None, ONE]], {}, "coalesced", [(FP32, 130.5)]),
    "coalesced, narrow": ([[LOW, LOW], [LITTLE, LITTLE]], {}, "coalesced", [(BF16, 256.0)]),
    "coalesced, wide": ([[ONE, ONE], [OTHER, OTHER]], {}, "coalesced", [(FP32, 261.0)]),
    "bounded, narrow": ([[LOW, LOW], [LITTLE, LITTLE]], {}, "bounded", [(BF16, 256.0)]),
    "bounded, wide": ([[ONE, None], [None, OTHER]], {}, "bounded", [(FP32, 130.5)]),
    "bounded, then nothing": ([[ONE, ONE], [None, None]], {}, "bounded", [(FP32, 257.0)]),
    "summed in float32": ([[LOW, LOW], [(BF16, 3.0), (BF16, 3.0)], [LITTLE, LITTLE]], {}, "fp32", [(BF16, 260.0)]),
}


CELLS = [(1, False), (3, False), (2, "blocks")]
LONG = [pytest.param(*cell, marks=pytest.mark.long) for cell in ((2, False), (1, "blocks"), (3, "blocks"))]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("stage", "scope"), [*CELLS, *LONG])
@on_ranks(2, timeout=60)
def test_ranks_agree(name: str, stage: int, scope: Any) -> None:
    """Value, dtype and bytes on the wire, when ranks differ in who has a gradient and in which dtype."""
    plan, options, window, expected = CASES[name]
    seen, reduced = _grads(plan, stage, window, options, scope)
    for number, (grads, wanted) in enumerate(zip(seen, expected, strict=True)):
        for parameter in ("layers.0.weight", "layers.0.scalar"):
            grad = grads[parameter]
            if wanted is None or grad is None:
                assert wanted is None and grad is None, (number, parameter)
            else:
                assert grad.dtype == wanted[0], (number, parameter)
                assert (grad == torch.tensor(wanted[1]).to(wanted[0])).all(), (number, parameter)
    if window in ("bounded", "fp32") or (window == "kept" and options == {}):  # not what `grad` is in
        return
    wire = options.get("reduce_dtype", FP32)
    # per backward and block: weight [3 -> 4, 2] and scalar in the agreed dtype, bias [3 -> 4] in the wire's
    sizes = [2 * (9 * options.get("reduce_dtype", w[0]).itemsize + 4 * wire.itemsize) for w in expected if w]
    sizes += [2 * (9 * BF16.itemsize + 4 * wire.itemsize) for w in expected if w is None]
    assert reduced == sum(sizes)


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(timeout=30)
def test_a_dtype_that_was_dropped(stage: int) -> None:
    """A dtype that one rank alone has had in a backward whose gradients were dropped is no word of the ranks'."""
    model = Net()
    with engines.engine(model, stage, compile=False, master_dtype=None) as engine:

        def backward(raw: Any) -> None:
            with engine.training_step():
                engines.backward(engine, model(raw))

        backward(OTHER)
        model.zero_grad()
        with engine.windows.open("auto", None, None):
            backward(ONE if models.rank() == 0 else None)
            model.zero_grad()
            backward(None)
        block = model.layers[0]
        with engine.training_step():
            without = [p.grad is None for p in (block.weight, block.scalar, block.bias)]
    assert without == [True, True, False]


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_several_dtypes_in_one_backward(stage: int) -> None:
    """Gradients of several dtypes in one backward: what a plain leaf has, in dtype and to the bit."""
    problems = []
    for pair in ((LOW, LITTLE), (LITTLE, LOW), (ONE, OTHER), (OTHER, ONE)):
        model, twin = Net(), Net()
        with engines.engine(model, stage, compile=False, master_dtype=None) as engine:
            with engine.training_step():
                engines.backward(engine, model(pair[0]) + model(pair[1]))
            (twin(pair[0]) + twin(pair[1])).backward()
            for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
                grad = _full(p.grad)
                if grad is None or q.grad is None or grad.dtype != q.grad.dtype or not torch.equal(grad, q.grad):
                    problems.append(f"{pair}: {name} is {grad}, not {q.grad}")
    assert problems == [], "\n".join(problems)
