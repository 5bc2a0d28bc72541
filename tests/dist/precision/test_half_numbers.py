"""Norms and sums of masters and gradients in half precision: rounded once, as torch rounds those of the whole value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_zerocompile.plugins.clipping import clip_norm
from lightning_zerocompile.sharding.full_values import full_value
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import STAGES

NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda x: x.norm(),
    **{
        f"norm {order}": lambda x, order=order: torch.linalg.vector_norm(x, order)  # type: ignore[misc]
        for order in (0, 0.5, 1, 2, 3, float("inf"), -float("inf"))
    },
    "rows": lambda x: x.norm(dim=0),
    "columns": lambda x: x.norm(dim=-1),
    "columns, kept": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "ones of rows": lambda x: x.norm(1, dim=0),
    "all dims": lambda x: torch.linalg.vector_norm(x, 2, list(range(x.dim()))),
    "in float32": lambda x: torch.linalg.vector_norm(x, dtype=torch.float32),
    "foreach": lambda x: torch._foreach_norm([x, x * 2])[1],
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(0),
    "sum of columns": lambda x: x.sum(-1),
    "sum in half": lambda x: x.float().sum(dtype=x.dtype),
    "sum, cast": lambda x: x.float().sum().to(x.dtype),
    "norm, cast": lambda x: x.float().norm().to(x.dtype),
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean(0),
    "dist": lambda x: torch.dist(x, x * 2),
    "dot": lambda x: x.flatten().dot(x.flatten()),
    "squares": lambda x: x.square().sum(),
    "std": lambda x: x.std(correction=0),
    "max": lambda x: x.max(),
    "largest": lambda x: x.abs().amax(),
    "unit": lambda x: x / x.norm(),
    "format": lambda x: torch.tensor(float(f"{x.norm():.7f}")),
    "some": lambda x: (x > 0).any().float(),
    "every": lambda x: (x.abs() >= 0).all().to(x.dtype),
    "many": lambda x: torch.stack([x.norm(), x.max(), x.norm(1), x.min(), x.sum()]),
}


class Half(nn.Module):
    """Parameters of half precision: 301 elements, of which more than 256 are counted; one row; a 0-dim one."""

    def __init__(self, dtype: torch.dtype, size: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.long, self.row, self.scale = (
            nn.Parameter((value * size).to(dtype))
            for value in (torch.randn(6, 5), torch.randn(301), torch.randn(1, 3), torch.tensor(0.3))
        )
        self.size = size

    def forward(self, rank: int) -> Tensor:
        factors = torch.Generator().manual_seed(rank)
        total = torch.zeros((), device=models.device())
        for parameter in (self.weight, self.long, self.row, self.scale):
            chosen = torch.randn(parameter.shape, generator=factors) * self.size
            total = total + (parameter * chosen.to(parameter)).float().sum()
        return total


def _differences(model: nn.Module) -> list[str]:
    """Which numbers of values and gradients are not those of their full values."""
    found = []
    for name, parameter in model.named_parameters():
        for kind, sharded in (("value", parameter.detach()), ("grad", parameter.grad)):
            whole = _copied(sharded)
            for what, number in NUMBERS.items():
                if whole.dim() == 0 and ("rows" in what or "columns" in what):
                    continue
                ours, wanted = number(sharded), number(whole)  # type: ignore[arg-type]
                got = torch.as_tensor(ours.tolist(), dtype=ours.dtype)
                off = 1e-6 if wanted.dtype is torch.float32 else 0.0
                if ours.dtype != wanted.dtype or not torch.allclose(got, wanted.cpu(), rtol=off, atol=off):
                    found.append(f"{what} of {kind} of {name}: {ours.dtype} {got} instead of {wanted}")
    return found


def _copied(value: Any) -> Tensor:
    return full_value(value).clone()


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 1.0), (torch.float16, 1.0), (torch.float16, 40.0)])
@pytest.mark.parametrize("scope", [False, pytest.param("blocks", marks=pytest.mark.long)])  # it is the same in both
@STAGES
@on_ranks()
def test_numbers_are_rounded_once(stage: int, scope: Any, dtype: torch.dtype, size: float) -> None:
    model = Half(dtype, size)
    with engines.engine(model, stage, compile=scope, master_dtype=None) as engine:
        with engine.training_step():
            engines.backward(engine, model(models.rank()))
        found = _differences(model)
        assert found == [], found


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 1.0), (torch.float16, 40.0)])
@STAGES
@on_ranks()
def test_clipping_by_norm(stage: int, dtype: torch.dtype, size: float) -> None:
    """Gradients are clipped as those of one process, to the bit; and Lightning's ``grad_norm`` says the same."""
    model = Half(dtype, size)
    with engines.engine(model, stage, compile=False, master_dtype=None) as engine:
        with engine.training_step():
            engines.backward(engine, model(models.rank()))
        masters = list(model.parameters())
        for kind in (1.0, 2.0, float("inf")):
            for foreach in (True, False, "rows"):
                twin = nn.ParameterDict(
                    {name: nn.Parameter(_copied(p.detach())) for name, p in model.named_parameters()}
                )
                for name, master in model.named_parameters():
                    twin[name].grad = _copied(master.grad)
                ours, wanted = ({n: float(norm) for n, norm in grad_norm(m, kind).items()} for m in (model, twin))
                assert ours == wanted
                if foreach == "rows":  # as the Trainer clips
                    total = clip_norm(masters, 0.7 * size, kind)
                else:
                    total = nn.utils.clip_grad_norm_(masters, 0.7 * size, kind, foreach=foreach)
                expected = nn.utils.clip_grad_norm_(list(twin.parameters()), 0.7 * size, kind, foreach=bool(foreach))
                assert (total.dtype, float(total)) == (expected.dtype, float(expected))
                for name, master in model.named_parameters():
                    assert torch.equal(_copied(master.grad), twin[name].grad)
