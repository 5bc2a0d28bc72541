"""The dtype of a gradient: the leaf's `grad_dtype` decides, at every stage, before anything is communicated.

Exact data: small integers, so that every sum is exact in the dtype that the contract names, and in no narrower one.
Source of the cases: DeepSpeed PR 8038.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile.sharding.full_values import full_value
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.memory import padded
from tests.support.parity import CELLS
from tests.support.precisions import BF16, FP32, RAW, RawWhole

LONG: list[tuple[int, Any]] = [(1, False), (2, "blocks"), (3, "model"), (3, "inductor")]


def _raw(rank: int) -> float:
    return RAW + 4 * rank


def _eager(dtype: torch.dtype, grad_dtype: Any, values: list[float]) -> dict[str, Tensor]:
    """Gradients of a plain model in one process after a backward for each value, in the leaf's own accumulation."""
    model = RawWhole(dtype, grad_dtype)
    for value in values:
        model(torch.tensor([value])).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _gradients(
    dtype: torch.dtype, grad_dtype: Any, stage: int, scope: Any, values: list[float] | None = None, **options: Any
) -> Any:
    """Full gradients after a backward for each of this rank's values, and the bytes that each of them reduced."""
    torch._dynamo.reset()
    model = RawWhole(dtype, grad_dtype)
    backend = "inductor" if scope == "inductor" else "aot_eager"
    scope = "blocks" if scope == "inductor" else scope
    with engines.engine(
        model, stage, compile=scope, compile_options={"backend": backend}, master_dtype=None, **options
    ) as engine:
        reduced = []
        for value in values or [_raw(models.rank())]:
            before = engine.runtime.stats().reduce_bytes
            with engine.training_step():
                loss = model(torch.tensor([value], device=models.device())).sum()
                engines.backward(engine, loss)
            reduced.append(engine.runtime.stats().reduce_bytes - before)
        if (engine.runtime.stats().graph_reductions > 0) is not bool(scope):
            raise AssertionError(f"{engine.runtime.stats()} with compile={scope!r}")
        dtypes = {name: (p.grad.dtype, p.dtype) for name, p in model.named_parameters()}
        whole = {
            name: (full_value(p.grad) if isinstance(p.grad, DTensor) else p.grad).cpu()
            for name, p in model.named_parameters()
        }
    return whole, dtypes, reduced


# (dtype, grad_dtype) -> dtype in which the raw gradient is communicated
CONTRACT: dict[tuple[torch.dtype, Any], torch.dtype] = {
    (FP32, "absent"): FP32,
    (FP32, FP32): FP32,
    (FP32, None): FP32,
    (BF16, "absent"): BF16,
    (BF16, BF16): BF16,
    (BF16, FP32): FP32,
    (BF16, None): FP32,
    (FP32, BF16): BF16,
}


@on_ranks(timeout=240)
def test_contract(long: bool) -> None:
    """Absent: the parameter's dtype; explicit: that; None: as produced. Values, bytes on the wire and `grad.dtype`."""
    assert torch.tensor(RAW).bfloat16().item() != RAW
    cells = CELLS + LONG * long
    problems = []
    raw = 2 * padded(3)  # elements of [3, 2] as they are reduced
    for (dtype, grad_dtype), wire in CONTRACT.items():
        for stage, scope in cells:
            cell = f"{dtype} grad_dtype={grad_dtype} stage {stage} {scope}"
            whole, dtypes, reduced = _gradients(dtype, grad_dtype, stage, scope)
            values = [torch.tensor(_raw(r)).to(wire) for r in range(models.world())]
            expected = torch.stack(values).float().mean().item()
            for name, grad in whole.items():
                if "inner" not in name and (grad.float() != expected).any():
                    problems.append(f"{cell}: {name} is {grad}, not {expected}")
                if "inner" in name and (grad != RAW + 2 * (models.world() - 1)).any():
                    problems.append(f"{cell}: {name} is {grad}")
            # per block: raw and scalar in the wire's dtype, inner in float32
            wanted = 2 * ((raw + 1) * wire.itemsize + raw * 4)
            if reduced != [wanted]:
                problems.append(f"{cell}: reduced {reduced} bytes, not {wanted}")
            leaf = _eager(dtype, grad_dtype, [RAW])
            for name, (seen, _) in dtypes.items():
                if seen != leaf[name].dtype:
                    problems.append(f"{cell}: {name}.grad is {seen}, torch's own is {leaf[name].dtype}")
    assert problems == [], "\n".join(problems)


# 1 is lost beside 256 or 264 in bfloat16: the mean of two ranks' sums is 260 there, and 262 in float32
def _addends(rank: int) -> list[float]:
    return [256.0 + 8 * rank, 1.0, 1.0]


@on_ranks(timeout=400)
def test_accumulation(long: bool) -> None:
    """Several backwards add in the gradient's own dtype, as a plain leaf does: equal to the bit."""
    cells = CELLS + LONG * long
    problems = []
    for dtype, grad_dtype in ((FP32, "absent"), (BF16, "absent"), (BF16, FP32), (BF16, None), (FP32, BF16)):
        for stage, scope in cells:
            whole, _, _ = _gradients(dtype, grad_dtype, stage, scope, _addends(models.rank()))
            leaves = [_eager(dtype, grad_dtype, _addends(r)) for r in range(models.world())]
            mean_of_firsts = 256.0 + 4 * (models.world() - 1)
            sums = {mean_of_firsts if CONTRACT[dtype, grad_dtype] == BF16 else mean_of_firsts + 2}
            for name, grad in whole.items():
                mean = torch.stack([leaf[name].double() for leaf in leaves]).mean(0)
                if not torch.equal(grad.double(), mean) or (
                    "inner" not in name and set(mean.flatten().tolist()) != sums
                ):
                    problems.append(f"{dtype} {grad_dtype} stage {stage} {scope}: {name} {grad} not {mean}")
    assert problems == [], "\n".join(problems)


@on_ranks(timeout=240)
def test_reduce_dtype_is_independent() -> None:
    """`reduce_dtype` is of the communication alone: the gradient has its own dtype before and after it."""
    problems = []
    raw = 2 * padded(3)  # elements of [3, 2] as they are reduced
    for dtype, grad_dtype, reduce_dtype in ((FP32, "absent", BF16), (BF16, "absent", FP32), (BF16, FP32, BF16)):
        for stage, scope in CELLS:
            whole, dtypes, reduced = _gradients(dtype, grad_dtype, stage, scope, reduce_dtype=reduce_dtype)
            cell = f"{dtype} {grad_dtype} {reduce_dtype} stage {stage} {scope}"
            own = dtype if grad_dtype == "absent" else grad_dtype
            if reduced != [2 * (raw + 1 + raw) * reduce_dtype.itemsize]:
                problems.append(f"{cell}: {reduced} bytes")
            values = [torch.tensor(_raw(r)).to(own).to(reduce_dtype) for r in range(models.world())]
            expected = torch.stack(values).float().mean().to(reduce_dtype).to(own)
            for name, grad in whole.items():
                if "inner" in name:
                    continue
                if dtypes[name][0] != own or (grad != expected).any():
                    problems.append(f"{cell}: {name} is {grad} ({dtypes[name]}), not {expected}")
    assert problems == [], "\n".join(problems)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("dtype, grad_dtype", [(BF16, FP32), (FP32, None), (FP32, BF16)])
@on_ranks()
def test_grad_dtype_is_the_masters_too(stage: int, dtype: torch.dtype, grad_dtype: Any) -> None:
    """A parameter keeps its `grad_dtype` as a master and when the model is whole again; it cannot be set meanwhile."""
    model = RawWhole(dtype, grad_dtype)
    errors = []
    with engines.engine(model, stage, compile=False, master_dtype=FP32) as engine:
        block = model.model.layers[0]
        masters = {name: (p.dtype, p.grad_dtype) for name, p in model.named_parameters()}
        raw = next(model.parameters())
        raw.grad_dtype = raw.grad_dtype  # as it is: allowed
        with engine.training_step():
            read = block.raw
            if read.grad_dtype != raw.grad_dtype:
                errors.append("a read parameter has another grad_dtype")
            for target in (raw, read):
                try:
                    target.grad_dtype = torch.float64
                except RuntimeError as error:
                    errors.append(str(error))
        engine.runtime.core.end_forward()
    after = {n: p.grad_dtype for n, p in model.named_parameters()}
    assert masters["model.layers.0.raw"] == (FP32, grad_dtype)
    assert masters["model.layers.0.inner.weight"] == (FP32, FP32)
    assert after["model.layers.0.raw"] == grad_dtype
    assert after["model.layers.0.inner.weight"] == FP32
    assert len(errors) == 2
    assert all("model.layers.0.raw" in error and "configure_model" in error for error in errors)


class Produces(torch.autograd.Function):
    """Zero, whose gradient with respect to `weight` is `value` everywhere, produced in `dtype`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype, value: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.shape, ctx.dtype, ctx.value = weight.shape, dtype, value
        return x * weight.float().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0], (grads[0] * x).sum().mul(ctx.value).to(ctx.dtype).expand(ctx.shape).clone(), None, None


class Uses(nn.Module):
    """Uses a bfloat16 weight twice: by one read, by two, or by two with a graph break between them."""

    def __init__(self, how: str, dtypes: tuple[torch.dtype, torch.dtype], grad_dtype: Any) -> None:
        super().__init__()
        self.how, self.dtypes = how, dtypes
        self.raw = nn.Parameter(torch.zeros(3, 2, dtype=BF16))
        if grad_dtype != "absent":
            self.raw.grad_dtype = grad_dtype

    def forward(self, x: Tensor) -> Tensor:  # [1]
        raw = self.raw
        y = Produces.apply(x, raw, self.dtypes[0], 1.0)
        if self.how == "across a break":
            torch._dynamo.graph_break()
        z = torch.ones_like(x)
        return y + Produces.apply(z, raw if self.how == "one read" else self.raw, self.dtypes[1], 1.0)  # type: ignore[no-any-return]


class Several(nn.Module):
    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Uses(*arguments) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x) for layer in self.layers)


@pytest.mark.parametrize("how", ["one read", "two reads", "across a break"])
@pytest.mark.parametrize("stage, scope", [(1, "blocks"), (2, False), (3, False), (3, "blocks")])
@on_ranks()
def test_several_uses(stage: int, scope: Any, how: str) -> None:
    """Each use's gradient is cast to the leaf's dtype before it is added to the others, as in torch."""
    # 257 + 1 and 261 + 1: 256 and 260 in bfloat16, cast before they are added; 260 is the mean if that is after.
    problems = []
    for dtypes in ((FP32, FP32), (FP32, BF16), (BF16, FP32)):
        for grad_dtype in ("absent", FP32) + ((None,) if dtypes == (FP32, FP32) else ()):
            torch._dynamo.reset()
            model = Several(how, dtypes, grad_dtype)
            leaves = []
            for rank in range(models.world()):
                plain = Several(how, dtypes, grad_dtype)
                plain(torch.tensor([_raw(rank)])).sum().backward()
                leaves.append(plain.layers[0].raw.grad)
            with engines.engine(model, stage, compile=scope, master_dtype=None) as engine:
                with engine.training_step():
                    x = torch.tensor([_raw(models.rank())], device=models.device())
                    engines.backward(engine, model(x).sum())
                mean = torch.stack(leaves).double().mean(0)
                for block in model.layers:
                    grad = full_value(block._parameters["raw"].grad).cpu()
                    if grad.dtype != leaves[0].dtype or not torch.equal(grad.double(), mean):
                        problems.append(f"{scope} {dtypes} {grad_dtype}: {grad}, not {mean} in {leaves[0].dtype}")
    assert problems == [], "\n".join(problems)
