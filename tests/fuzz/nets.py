"""The models of random programs: a front, equal blocks of random layers, a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.program import Model


class Boom(Exception):
    """What a program raises on purpose."""


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise Boom("in a backward")


@torch.compiler.disable
def _trip(x: Tensor, how: str) -> Tensor:
    if how == "forward":
        raise Boom("in a forward")
    return _Fails.apply(x)  # type: ignore[no-any-return]


class _Raw(torch.autograd.Function):
    """``x``; the gradient of ``weight`` is ``value`` everywhere and is made in ``dtype``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, value: float, dtype: torch.dtype) -> Tensor:
        ctx.value, ctx.dtype, ctx.size = value, dtype, weight.shape
        return x + weight.float().sum() * 0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        return grad, (grad.sum() * 0 + ctx.value).to(ctx.dtype).expand(ctx.size).clone(), None, None


class Layer(nn.Module):
    """A weight, [width, width], and a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * width**-0.5)
        self.bias = nn.Parameter(torch.randn(width) / 4)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:  # [rows, width] -> [rows, width]
        return F.linear(x, self.weight, self.bias)


class Transposed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class Sliced(Layer):
    def forward(self, x: Tensor) -> Tensor:
        half = self.width // 2
        weight = self.weight
        return torch.cat([F.linear(x, weight[:half]), F.linear(x, weight[half:])], 1) + self.bias


class Unbound(Layer):
    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.weight.unbind(0)
        return x * first + self.bias * sum(row.sum() for row in others)


class Indexed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[torch.tensor([0, self.width - 1, 0])] + self.bias


class Flat(Layer):
    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.view(-1)
        return F.linear(x, flat.view(self.width, self.width).mT.contiguous(), self.bias) * flat[0]


class Complex(Layer):
    """A real parameter that is the storage of complex numbers."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.weight = nn.Parameter(torch.randn(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        product = torch.complex(x, x.sin()) * torch.view_as_complex(self.weight)
        return product.real - product.imag + self.bias


class TwoReads(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight, self.bias)


class OneRead(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        return F.linear(torch.tanh(F.linear(x, weight)), weight, self.bias) + weight.mean()


class EqualGradients(Layer):
    """Several uses of a parameter have the same gradient, see [Note: equal gradients]."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight, self.bias) + F.linear(x.sin(), self.weight, self.bias)
        return x + self.weight.mean() + self.weight.mean()


class NoGradRead(Layer):
    """Reads its weight without gradients, and uses the value with them."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            weight, scale = self.weight, self.weight.abs().mean()
        return F.linear(x, weight / (1 + scale), self.bias)


class Broken(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(F.linear(x, self.weight))
        torch._dynamo.graph_break()
        return F.linear(x, self.weight, self.bias)


class Disabled(Layer):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Skipped(Layer):
    """Its weight is read in a compiled frame and in one that is skipped."""

    @torch._dynamo.disable
    def skipped(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.skipped(torch.tanh(F.linear(x, self.weight, self.bias)))


class Checkpointed(Layer):
    reentrant = False

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(torch.tanh(F.linear(x, self.weight)), self.weight, self.bias))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class Reentrant(Checkpointed):
    reentrant = True


class Scalar(Layer):
    """A 0-dim parameter, and one with a single row, of which one rank has nothing."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.row = nn.Parameter(torch.randn(1, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * self.scale + self.row


class Normed(Layer):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), F.normalize(self.weight, dim=1), self.bias)


class Squared(Layer):
    """What autograd saves is computed from the weight alone."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.weight.tanh(), self.bias)


class Detached(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = self.weight.abs().mean()
        return F.linear(x, self.weight, self.bias) / (1 + size) + F.linear(x, self.weight.detach())


class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        y.mul_(0.5).add_(self.bias)
        return y


class Empty(Layer):
    """A parameter without elements, and one of another dtype."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.none = nn.Parameter(torch.zeros(0, width))
        self.precise = nn.Parameter(torch.randn(width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.none])
        return F.linear(x, self.weight, self.bias) * self.precise.float()


class Frozen(Layer):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.weight.requires_grad_(False)


class Unused(Layer):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.idle = nn.Parameter(torch.randn(3))


class ByRank(Layer):
    """Which weight is used depends on the rank, and one is used by a single rank."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.other, self.extra = nn.Linear(width, width), nn.Parameter(torch.randn(width))
        self.rank = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.extra if self.rank == 0 else self.other(x)


class RawSame(Layer):
    """A bfloat16 parameter whose gradients come in other dtypes, from several uses."""

    reads, dtypes = 1, (torch.float32, torch.float32)

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.low = nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16))
        self.rank = 0

    def forward(self, x: Tensor) -> Tensor:
        x, low = F.linear(x, self.weight, self.bias), self.low
        x = _Raw.apply(x, low, 257.0 + 4 * self.rank, self.dtypes[0])
        return _Raw.apply(x, low if self.reads == 1 else self.low, 1.0, self.dtypes[1])  # type: ignore[no-any-return]


class RawMixed(RawSame):
    dtypes = (torch.float32, torch.bfloat16)


class RawTwoReads(RawMixed):
    reads = 2


class RawNone(RawSame):
    """With ``grad_dtype=None`` a gradient keeps the dtype in which it was produced."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.low.grad_dtype = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.float32 if self.calls % 2 else torch.bfloat16
        return _Raw.apply(F.linear(x, self.weight, self.bias), self.low, 257.0 + 4 * self.rank, dtype)  # type: ignore[no-any-return]


KINDS: dict[str, type[Layer]] = {
    "plain": Layer, "transposed": Transposed, "sliced": Sliced, "unbound": Unbound, "indexed": Indexed, "flat": Flat,
    "complex": Complex, "two_reads": TwoReads, "one_read": OneRead, "equal_gradients": EqualGradients,
    "no_grad_read": NoGradRead, "broken": Broken,
    "disabled": Disabled, "skipped": Skipped, "checkpointed": Checkpointed, "reentrant": Reentrant, "scalar": Scalar,
    "normed": Normed, "squared": Squared, "detached": Detached, "in_place": InPlace, "empty": Empty, "frozen": Frozen,
    "unused": Unused, "by_rank": ByRank, "raw_same": RawSame, "raw_mixed": RawMixed, "raw_two_reads": RawTwoReads,
    "raw_none": RawNone,
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, kinds: tuple[str, ...], width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(KINDS[kind](width) for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(part(x)) + x / 2
        return x


class Net(nn.Module):
    """``trip`` is where and how the next forward or its backward fails; ``around``: a checkpoint round each block."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.width, self.around = model.width, model.around
        self.front = nn.Linear(model.width, model.width)
        self.layers = nn.ModuleList(Block(model.block, model.width) for _ in range(model.count))
        self.head = nn.Linear(model.width, model.width)
        self.trip: tuple[str, int] | None = None
        if model.tied == "ends":
            self.head.weight = self.front.weight
        elif model.tied == "blocks":
            self.layers[-1].parts[0].weight = self.layers[0].parts[0].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for number, layer in enumerate(self.layers):
            if self.trip is not None and self.trip[1] == number:
                x = _trip(x, self.trip[0])
            x = layer(x) if self.around is None else checkpoint(layer, x, use_reentrant=self.around == "reentrant")
        return self.head(x)


def build(model: Model) -> Net:
    """The same numbers on every rank and every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(model)


def set_rank(net: Net, rank: int) -> None:
    for module in net.modules():
        if "rank" in module.__dict__:
            module.rank = rank  # type: ignore[assignment]


def set_calls(net: Net, calls: int) -> None:
    for module in net.modules():
        if "calls" in module.__dict__:
            module.calls = calls  # type: ignore[assignment]


def batch(width: int, rank: int, number: int, device: torch.device | str) -> Tensor:
    """``[3, width]``."""
    return torch.randn(3, width, generator=torch.Generator().manual_seed(1000 * rank + number)).to(device)


Penalty = Callable[[Net], Tensor]
