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
from tests import engines, models
from tests.dist.test_lifetime import Partitions
from tests.harness import Ranks

F16, F32 = torch.float16, torch.float32
CELLS: list[tuple[int, Any]] = [(1, False), (2, False), (3, "blocks")]
LONG: list[tuple[int, Any]] = [(1, "blocks"), (2, "blocks"), (3, False), (3, "model")]
DTYPES: list[Any] = [(None, None), (F32, F32)]  # master_dtype, reduce_dtype
LONG_DTYPES: list[Any] = [(None, F32), (F32, None)]
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
        self.weight = nn.Parameter(torch.zeros(4, 2, dtype=F16))
        self.scalar = nn.Parameter(torch.zeros((), dtype=F16))

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


def _overflow(cells: list[tuple[int, Any]], dtypes: list[Any]) -> list[str]:
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
    return problems


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
        problems.append(f"{partitions.alive()} gradients alive behind a skipped step")
    return problems


def test_overflow_survives_the_cast(ranks: Ranks, long: bool) -> None:
    """Infinite exactly there, one verdict on all ranks, and the gradients' memory is gone behind a skipped step."""
    for problems in ranks.run(_overflow, CELLS + LONG * long, DTYPES + LONG_DTYPES * long, timeout=240):
        assert problems == [], "\n".join(problems)


def _large_mean() -> list[float]:
    """0-dim gradients whose sum float16 cannot hold; their mean it can."""
    model = models.Whole(Net())
    with engines.engine(model, 3, compile=False, master_dtype=None) as engine:
        with engine.training_step():
            rows = torch.full((4, 2), 4e4, device=models.device())
            engines.backward(engine, model(torch.ones(1, device=models.device()), rows).sum())
        return [full_value(p.grad).float().item() for p in model.parameters() if p.dim() == 0]


def test_a_mean_of_scalars_that_fits_is_finite(ranks: Ranks) -> None:
    """They are divided before they are summed: 40000 on each of two ranks. (For others NCCL does so, gloo does not.)"""
    for seen in ranks.run(_large_mean):
        assert seen == [torch.tensor(4e4, dtype=F16).item()] * 2
