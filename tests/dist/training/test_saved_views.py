"""Rule 15: what autograd saves of a gathered value comes back as what it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile.sharding.full_values import full_value
from tests.support import engines, models
from tests.support.harness import on_ranks

ROWS = 7  # two ranks pad it to eight


class Tagged(Tensor):
    """A user's subclass."""


class Dispatching(Tensor):
    """A user's subclass that sees each operator, and answers with plain tensors."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            return value.as_subclass(Tensor) if isinstance(value, cls) else value

        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            return func(*map(plain, args), **(kwargs or {}))


class Scale(torch.autograd.Function):
    """A product of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.as_subclass(Tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] * weight.as_subclass(Tensor), grads[0] * x


class Uses(nn.Module):
    """``x`` times a view of the weight, which autograd saves; x: [batch, 2 * ROWS]."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(ROWS, 2))  # memory of ROWS complex numbers
        self.numbers = nn.Parameter(torch.randn(ROWS, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        number = torch.view_as_complex(x.unflatten(-1, (ROWS, 2)))  # [batch, ROWS]
        real = x[..., :ROWS]
        weight = torch.view_as_complex(self.weight)
        results = {
            "complex": lambda: number * weight,
            "part": lambda: number[..., 2:] * weight[2:],  # its offset counts complex numbers
            "conjugate": lambda: number * weight.conj(),
            "negative": lambda: real * weight.conj().imag,
            "real": lambda: real * torch.view_as_real(self.numbers)[:, 1],
            "conjugate of a complex parameter": lambda: number * self.numbers.conj(),
            "bits": lambda: real * self.weight.detach().view(torch.int32).view(torch.float32)[:, 1],
            "halves": lambda: real * self.weight.detach().view(torch.bfloat16)[:, 3],
            "bytes": lambda: real * (self.weight.detach().view(torch.uint8)[:, 2] > 100),
            "transposed": lambda: real * self.weight.t()[1],
            "expanded": lambda: real * self.weight[3:4, 1].expand(ROWS),
            "nothing": lambda: torch.cat([real[..., :0] * self.weight[:0, 0], number.abs() * weight.abs()], -1),
            "subclass": lambda: Scale.apply(real, self.weight[:, 0].as_subclass(Tagged)),
            "dispatching subclass": lambda: Scale.apply(real, self.weight[:, 1].as_subclass(Dispatching)),
        }
        result: Tensor = results[self.kind]()
        return result.as_subclass(Tensor).abs()


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.before = nn.Linear(5, 2 * ROWS)
        self.layers = nn.ModuleList([Uses(kind)])  # a block

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.before(x)).square().sum()  # type: ignore[no-any-return]


TRACED = ("complex", "part", "conjugate", "real")
KINDS = (*TRACED, "negative", "conjugate of a complex parameter", "bits", "halves", "bytes", "transposed", "expanded",
         "nothing", "subclass", "dispatching subclass")  # fmt: skip


def _input(rank: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(rank)).to(models.device())


def _error(kind: str, stage: int, scope: Any) -> float:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, twin = models.pair(lambda: Net(kind))
    for rank in range(models.world()):
        (twin(_input(rank)) / models.world()).backward()
    with engines.engine(model, stage, compile=scope) as engine:
        with engine.training_step():
            engines.backward(engine, model(_input(models.rank())))
        expected = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
        found = {name: full_value(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        engine.runtime.core.drop_gradients()
    assert found.keys() == expected.keys()
    return max(((found[n] - g).abs().max() / g.abs().max().clamp(min=1.0)).item() for n, g in expected.items())


@pytest.mark.parametrize("scope", [False, "blocks"])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 3])
@on_ranks()
def test_rule_15_saved_views(stage: int, scope: Any) -> None:
    """Views of another dtype, conjugated, negated, of a part, of a subclass: the gradients are torch's."""
    errors = {kind: _error(kind, stage, scope) for kind in (KINDS if not scope else TRACED)}
    assert {kind: error for kind, error in errors.items() if not error <= 1e-5} == {}


@on_ranks()
def test_rule_15_what_cannot_be_described_raises() -> None:
    model = Net("complex")
    with engines.engine(model, 3, compile=False) as engine:
        with pytest.raises(RuntimeError) as raised, engine.training_step():
            weight = model.layers[0].weight  # type: ignore[union-attr]
            sizes = torch.tensor([[ROWS, 1]])
            strides = torch.tensor([[2, 1]])
            nested = torch._nested_view_from_buffer(weight.flatten(), sizes, strides, torch.tensor([0]))
            (nested * nested.detach()).sum()
        engine.runtime.core.end_forward()
    message = str(raised.value)
    assert "`layers.0.weight`" in message and "clone" in message
