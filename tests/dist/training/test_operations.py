"""Operations on parameters and gradients between steps that DTensor does otherwise than torch: whole values count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER


class Shapes(nn.Module):
    """Parameters of many shapes: with fewer rows than ranks, and with rows that no world size divides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(models.Block(6) for _ in range(2))
        self.one = nn.Parameter(torch.randn(1, 3))
        self.few = nn.Parameter(torch.randn(1))
        self.odd = nn.Parameter(torch.randn(5, 3))
        self.kernel = nn.Parameter(torch.randn(5, 2, 3, 3))
        self.line = nn.Parameter(torch.randn(4, 4, 3))

    def forward(self, x: Tensor) -> Tensor:  # [batch, 6] -> []
        for layer in self.layers:
            x = layer(x)
        others = (self.one, self.few, self.odd, self.kernel, self.line)
        return x.square().mean() + sum(torch.sin(p * (1 + number)).sum() for number, p in enumerate(others))


def _maximum_in_place(g: Tensor) -> Tensor:
    return g.masked_fill_(g < 0, g.max())


def _number_in_place(g: Tensor) -> Tensor:
    return g.masked_fill_(g < 0, torch.tensor(7.0, device=g.device))


def _transposed(g: Tensor) -> Tensor:
    return g.clone().t_() * 2


def _with_dimension(g: Tensor) -> Tensor:
    return g.clone().unsqueeze_(-1).mul_(2)


def _eye(g: Tensor) -> Tensor:
    return torch.eye(*g.shape, out=g)


WRITES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "masked_fill_ by a maximum": (_maximum_in_place, ("one", "few", "odd", "kernel")),
    "masked_fill_ by a number": (_number_in_place, ("one", "few", "odd", "kernel")),
    "t_": (_transposed, ("odd",)),
    "swapdims_": (lambda g: g.clone().swapdims_(1, 2).mul_(2), ("kernel", "line")),
    "transpose_": (lambda g: g.clone().transpose_(0, 1).contiguous(), ("odd", "kernel")),
    "unsqueeze_": (_with_dimension, ("odd", "line", "few")),
    "squeeze_": (lambda g: g.clone().unsqueeze_(1).squeeze_(1).add_(1), ("odd", "kernel")),
    "eye": (_eye, ("odd", "one")),
}
READS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "convolution": (lambda p: F.conv2d(p, p, padding=1).square(), ("kernel",)),
    "convolution of lines": (lambda p: F.conv1d(p, p, padding=2).square(), ("line",)),
    "transposed convolution": (lambda p: F.conv_transpose1d(p, p).square(), ("line",)),
    "distance": (lambda p: torch.dist(p, p * 0.5, float("inf")), ("one", "few", "odd")),
    "least distance": (lambda p: torch.dist(p, p * 0.5, -float("inf")), ("one", "few", "odd")),
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "aot_eager"])
@on_ranks()
def test_numbers_are_those_of_whole_values(stage: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, twin = models.pair(Shapes)
    x = torch.randn(2, 6, device=models.device())
    with engines.engine(model, stage, **options) as engine:
        for writes, operations in ((True, WRITES), (False, READS)):
            for name, (operation, parameters) in operations.items():
                model.zero_grad()
                twin.zero_grad()
                with engine.training_step():
                    engines.backward(engine, model(x))
                twin(x).backward()
                for parameter in parameters:
                    p, q = model.get_parameter(parameter), twin.get_parameter(parameter)
                    where = f"{name} of {parameter}"
                    with torch.no_grad():
                        ours, plain = operation(p.grad), operation(q.grad)  # type: ignore[arg-type]
                        assert ours.shape == plain.shape, where
                        assert torch.allclose(models.full(ours), plain, rtol=1e-5, atol=1e-6), where
                        assert torch.allclose(models.full(p.grad), q.grad, rtol=1e-5, atol=1e-6), where  # type: ignore[arg-type]
                    if not writes:
                        operation(p).sum().backward()
                        operation(q).sum().backward()
                        assert torch.allclose(models.full(p.grad), q.grad, rtol=1e-4, atol=1e-5), where  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_a_shape_that_needs_other_rows_is_refused(stage: int) -> None:
    """On all ranks, and nothing has changed after it."""
    model = Shapes()
    with engines.engine(model, stage, **EAGER) as engine:
        with engine.training_step():
            engines.backward(engine, model(torch.ones(2, 6, device=models.device())))
        grad: Any = model.one.grad
        before = grad.full_tensor()
        with torch.no_grad():
            with pytest.raises(RuntimeError, match=r"`squeeze_` of a sharded tensor.*Use `squeeze`"):
                grad.squeeze_()
            assert grad.shape == (1, 3) and torch.equal(grad.full_tensor(), before)
            assert torch.equal(grad.squeeze().full_tensor(), before.squeeze())


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_sums_in_half_precision_can_be_changed(stage: int) -> None:
    """As adaptive gradient clipping does it."""
    model = Shapes().to(torch.bfloat16)
    with engines.engine(model, stage, master_dtype=torch.bfloat16, **EAGER) as engine:
        with engine.training_step():
            engines.backward(engine, model(torch.ones(2, 6, dtype=torch.bfloat16, device=models.device())))
        for p in (model.odd, model.kernel, model.line):
            grad: Any = p.grad
            whole = grad.full_tensor()
            assert whole.dtype == torch.bfloat16
            with torch.no_grad():
                for change in (
                    lambda g: g.norm(dim=1).clamp_(min=1e-3),
                    lambda g: g.mean(1, keepdim=True).mul_(2),
                    lambda g: g.sum(0).mul_(2),
                    lambda g: g.float().sum(0).to(torch.bfloat16).mul_(2),
                ):
                    got, want = change(grad).full_tensor(), change(whole)
                    assert got.dtype == want.dtype and torch.allclose(got, want, rtol=1e-2, atol=1e-2)
                assert torch.equal(grad.full_tensor(), whole)


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "fft": lambda x: torch.fft.fft(x).abs(),
    "rfft": lambda x: torch.fft.rfft(x).abs(),
    "irfft": lambda x: torch.fft.irfft(x),
    "fft2": lambda x: torch.fft.fft2(x[:, None] * x[..., None]).real,
    "max_pool1d": lambda x: F.max_pool1d(x, 2),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 2),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x, 2),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x[:, None] * x[..., None], 2),
}


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(3)
def test_of_a_rank_without_rows(stage: int) -> None:
    """torch raises for a tensor without elements, and would on that rank alone."""
    model, twin = models.pair(lambda: nn.Sequential(nn.Linear(6, 4, bias=False)))  # ranks have 2, 2 and 0 rows
    x = torch.randn(2, 6, device=models.device())
    with engines.engine(model, stage, **EAGER) as engine:
        with engine.training_step():
            engines.backward(engine, model(x).square().mean())
        twin(x).square().mean().backward()
        ours: Any = model.get_parameter("0.weight")
        plain: Any = twin.get_parameter("0.weight")
        for what, p, q in (("gradient", ours.grad, plain.grad), ("value", ours.detach(), plain.detach())):
            for name, transform in TRANSFORMS.items():
                with torch.no_grad():
                    got, want = models.full(transform(p)), transform(q)
                assert torch.allclose(got, want, rtol=1e-5, atol=1e-6), f"{name} of the {what}"


class Gathers(TorchDispatchMode):
    """Counts the gathers of DTensor's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor's own code goes on, and its collectives come here
        self.count += func is torch.ops._c10d_functional.all_gather_into_tensor.default
        return func(*args, **(kwargs or {}))


PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "argmax": torch.argmax,
    "argmin": torch.argmin,
    "argmax along rows": lambda x: x.argmax(0),
    "argmin along columns": lambda x: x.argmin(-1, keepdim=True),
    "max along rows": lambda x: x.max(0).indices,
    "min along rows": lambda x: x.min(0).values,
    "median": torch.median,
    "sort": lambda x: x.sort(0).indices,
    "topk": lambda x: x.flatten().topk(3).values,
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_gloo_gathers_one_at_a_time(stage: int) -> None:
    """Two gathers of DTensor's code in flight at a time corrupt the heap now and then, see [Note: gloo gathers]."""
    if torch.cuda.is_available():
        pytest.skip("of gloo")
    model = Shapes()
    with engines.engine(model, stage, **EAGER) as engine:
        with engine.training_step():
            engines.backward(engine, model(torch.ones(2, 6)))
        for p in (model.odd, model.kernel, model.line):
            grad: Any = p.grad
            whole = grad.full_tensor()
            for name, place in PLACES.items():
                with torch.no_grad(), Gathers() as gathers:
                    got = place(grad)
                assert gathers.count <= 1, name
                assert torch.equal(models.full(got), place(whole)), name
