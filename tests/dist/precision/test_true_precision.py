"""Precisions "32-true" and "bf16-true", `param_dtype`, `master_dtype`: dtypes and numbers against a reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER
from tests.support.precisions import BF16, FP32


class Recorded(models.Module):
    """Keeps the dtypes that the forward, the gradient and the optimizer see."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(optimizer="adamw", lr=1e-2, **arguments)
        self.register_buffer("offset", torch.zeros(3))
        self.dtypes: dict[str, Any] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.dtypes["forward"] = {self.model.head.weight.dtype, self.model(batch).dtype}
        self.dtypes["buffer"] = self.offset.dtype
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.dtypes["master"] = {p.dtype for p in self.parameters()}
        self.dtypes["grad"] = {p.grad.dtype for p in self.parameters()}

    def on_train_end(self) -> None:
        states = self.trainer.optimizers[0].state.values()
        self.dtypes["state"] = {state["exp_avg"].dtype for state in states}


def _bf16_reference(twin: models.Module, steps: int, param: torch.dtype, reduce: torch.dtype) -> None:
    """Compute in ``param`` on casts of the masters, gradients averaged in ``reduce``."""
    optimizer = twin.configure_optimizers()
    masters = dict(twin.named_parameters())
    for step in range(steps):
        total: dict[str, Tensor] = {}
        for r in range(models.world()):
            casts = {n: p.detach().to(param).requires_grad_() for n, p in masters.items()}
            named = {f"module.{n}": v for n, v in casts.items()}
            loss = torch.func.functional_call(_Loss(twin), named, (models.Batches(r)[step],))
            for (n, cast), grad in zip(casts.items(), torch.autograd.grad(loss, list(casts.values())), strict=True):
                grad = grad.to(cast.dtype).to(reduce)
                total[n] = total[n] + grad if n in total else grad
        for n, p in masters.items():
            p.grad = (total[n] / models.world()).to(p.dtype)
        optimizer.step()


class _Loss(nn.Module):
    def __init__(self, module: models.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Tensor) -> Tensor:
        return self.module.loss(batch)


def _fresh() -> dict[str, Any]:
    torch.manual_seed(0)
    return Recorded().state_dict()


def _dtypes(forward: torch.dtype, master: torch.dtype, buffer: torch.dtype) -> dict[str, Any]:
    return {"forward": {forward}, "buffer": buffer, "master": {master}, "grad": {master}, "state": {master}}


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])  # stage 2 casts and reduces alike
@pytest.mark.parametrize(
    ("precision", "options", "expected"),
    [
        pytest.param("32-true", {}, _dtypes(FP32, FP32, FP32), marks=pytest.mark.long),
        ("bf16-true", {}, _dtypes(BF16, FP32, BF16)),
        ("bf16-true", {"reduce_dtype": FP32}, _dtypes(BF16, FP32, BF16)),
        pytest.param("32-true", {"param_dtype": BF16}, _dtypes(BF16, FP32, FP32), marks=pytest.mark.long),
    ],
    ids=["32", "bf16", "bf16_reduce32", "param_dtype"],
)
@on_ranks(2)  # a sum of halves over more ranks depends on their order
def test_precision(stage: int, precision: str, options: dict[str, Any], expected: dict[str, Any]) -> None:
    """The dtypes are those that were asked for, and training is that of casts of fp32 masters."""
    module, twin = models.pair(Recorded)
    # copies between GPUs sum bfloat16 in float32: tests/gpu/test_kernels.py
    strategy = ZeroCompileStrategy(stage=stage, copy_engine=False, **AOT, **options)
    models.fit(module, strategy, 4, precision=precision)
    assert module.dtypes == expected
    compute = next(iter(expected["forward"]))
    _bf16_reference(twin, 4, compute, options.get("reduce_dtype") or compute)
    assert models.deviation(module, twin) < 1e-6  # fp32 training ends 2e-2 away from bf16's
    start = Recorded()
    start.load_state_dict(_fresh())
    assert models.deviation(module, start) > 1e-2  # it moved by more than the tolerance


class LowPrecision(Recorded):
    """Its parameters are bfloat16 from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.to(BF16)


@pytest.mark.parametrize("master_dtype", [pytest.param(FP32, marks=pytest.mark.long), None], ids=["fp32", "own"])
@on_ranks()
def test_masters_of_bfloat16_parameters(master_dtype: torch.dtype | None) -> None:
    """By default the optimizer keeps low-precision parameters in fp32; ``None`` keeps their own dtype."""
    module, before = models.pair(LowPrecision)
    models.fit(module, ZeroCompileStrategy(stage=3, master_dtype=master_dtype, **AOT), 3)
    kept = master_dtype or BF16
    assert module.dtypes == _dtypes(BF16, kept, BF16)
    assert models.deviation(module, before) > 1e-3


@pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "aot_eager"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_a_sum_that_float16_does_not_have(stage: int, options: dict[str, Any]) -> None:
    """Gradients are divided before they are summed, as DDP does: 40000 on each rank is 40000, and not infinity."""
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.float16))
    with engines.engine(model, stage, **options) as engine:
        x = torch.ones(1, 4, dtype=torch.float16, device=engines.place())
        with engine.training_step():
            engines.backward(engine, (model(x).float() * 40000).sum())
        for name, gradient in engine.full_gradients(model).items():
            assert (gradient == 40000).all(), (name, gradient)
