"""A gradient that overflows float16 where it is cast: infinity reaches the master, and all ranks skip the step.

The raw gradient is finite, in float32, and only one rank owns the row that it overflows in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from lightning_zerocompile.plugins.grad_scaler import ShardedGradScaler
from lightning_zerocompile.sharding.full_values import full_value
from tests.support import engines, models
from tests.support.alive import Partitions
from tests.support.harness import on_ranks
from tests.support.precisions import FP16, FP32

CELLS: list[tuple[int, Any]] = [(1, False), (2, False), (3, "blocks")]
LONG: list[tuple[int, Any]] = [(1, "blocks"), (2, "blocks"), (3, False), (3, "model")]
DTYPES: list[Any] = [(None, None), (FP32, FP32)]  # master_dtype, reduce_dtype
LONG_DTYPES: list[Any] = [(None, FP32), (FP32, None)]
LARGE = 1e5  # finite in float32; infinite in float16


class RawRows(torch.autograd.Function):
    """`x`; the gradient with respect to `weight` is `rows`, in float32, whatever the weight's dtype is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return x + weight.float().sum() * 0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return grads[0], grads[0] * rows, None


class Block(nn.Module):
    """One weight in float16, ``[4, 2]``, and a 0-dim one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2, dtype=FP16))
        self.scalar = nn.Parameter(torch.zeros((), dtype=FP16))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:  # [1], [4, 2]
        return RawRows.apply(RawRows.apply(x, self.weight, rows), self.scalar, rows[0, 0])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, rows)
        return x


def _step(engine: Any, model: Any, which: str) -> list[str]:
    """A backward whose gradient on the last rank overflows there, and the scaler's verdict."""
    problems = []
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    engine.attach_optimizers([optimizer])
    scaler = ShardedGradScaler.like(GradScaler(device=models.device(), init_scale=1.0))
    rows = torch.ones(4, 2, device=models.device())
    if models.rank() == models.world() - 1 and which != "finite":
        rows[-1 if which == "last row" else 0, 0] = LARGE
    partitions = Partitions(parameters)
    with engine.training_step():
        loss = model(torch.ones(1, device=models.device()), rows).sum()
        engines.backward(engine, scaler.scale(loss))
    partitions.note()
    weight, scalar = full_value(parameters[0].grad), full_value(parameters[1].grad)
    infinite = torch.zeros(4, 2, dtype=torch.bool)
    if which != "finite":
        infinite[-1 if which == "last row" else 0, 0] = True
    if not torch.equal(weight.isinf().cpu(), infinite) or bool(scalar.isinf()) is not (which == "scalar"):
        problems.append(f"gradients {weight}, {scalar}")
    engine.steps.before(optimizer)
    scaler.unscale_(optimizer)
    if scaler.skips(optimizer) is not (which != "finite"):
        problems.append(f"skips: {scaler.skips(optimizer)}")
    engine.steps.skip(optimizer)
    del weight, scalar
    if any(p.grad is not None for p in parameters) or partitions.alive():
        problems.append(f"{partitions.alive()} gradients alive after a skipped step")
    return problems


@on_ranks(timeout=240)
def test_overflow_survives_the_cast(long: bool) -> None:
    """Infinite exactly there, one verdict on all ranks, and the gradients' memory is gone after a skipped step."""
    cells = CELLS + LONG * long
    dtypes = DTYPES + LONG_DTYPES * long
    problems = []
    for stage, scope in cells:
        for master_dtype, reduce_dtype in dtypes:
            torch._dynamo.reset()
            model = models.Whole(Net())
            options = {"master_dtype": master_dtype, "reduce_dtype": reduce_dtype}
            with engines.engine(model, stage, compile=scope, **options) as engine:
                for which in ("finite", "last row", "scalar"):
                    cell = f"stage {stage} {scope} {options} {which}"
                    problems += [f"{cell}: {problem}" for problem in _step(engine, model, which)]
                if (engine.runtime.stats().graph_reductions > 0) is not bool(scope):
                    problems.append(f"stage {stage} {scope}: {engine.runtime.stats()}")
    assert problems == [], "\n".join(problems)


@on_ranks()
def test_a_mean_of_scalars_that_fits_is_finite() -> None:
    """They are divided before they are summed: 40000 on each of two ranks. (For others NCCL does so, gloo does not.)"""
    # 0-dim gradients whose sum float16 cannot hold; their mean it can.
    model = models.Whole(Net())
    with engines.engine(model, 3, compile=False, master_dtype=None) as engine:
        with engine.training_step():
            rows = torch.full((4, 2), 4e4, device=models.device())
            engines.backward(engine, model(torch.ones(1, device=models.device()), rows).sum())
        seen = [full_value(p.grad).float().item() for p in model.parameters() if p.dim() == 0]
    assert seen == [torch.tensor(4e4, dtype=FP16).item()] * 2
