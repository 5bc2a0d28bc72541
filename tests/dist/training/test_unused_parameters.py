"""Who gets a gradient: parameters that some ranks, or none, use; parameters that are frozen between steps."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import architectures, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER, MODEL


class SometimesBlock(nn.Module):
    """A block with a matrix and a scalar that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(architectures.WIDTH, architectures.WIDTH)
        self.one_rank = nn.Linear(architectures.WIDTH, architectures.WIDTH)
        self.one_rank_scalar = nn.Parameter(torch.tensor(1.3))
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.always(x))
        return x + self.one_rank(x) * self.one_rank_scalar if self.on else x


class Keeps(torch.autograd.Function):
    """Reads a weight and has no gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x + weight.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class Sometimes(nn.Module):
    """``root``: one rank alone also uses a parameter outside of blocks (at stage 3 ranks must enter equal units)."""

    def __init__(self, root: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SometimesBlock() for _ in range(3))
        self.nobody = nn.Parameter(torch.ones(3, 2))
        self.nobody_scalar = nn.Parameter(torch.tensor(1.0))
        self.one_rank = nn.Parameter(torch.ones(architectures.WIDTH))
        self.root = root

    def forward(self, x: Tensor) -> Tensor:
        x = Keeps.apply(self.layers[1](self.layers[0](x)), self.nobody)
        return x * self.one_rank if self.root and self.layers[0].on else x


class OnOneRank(architectures.Net):
    """Rank 0 uses parameters that the others do not."""

    which = staticmethod(models.rank)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        on = self.which() == 0
        for layer in self.model.layers:
            layer.on = on
        return architectures.objective(self.model, batch)


@pytest.mark.parametrize("options", [EAGER, AOT, MODEL], ids=["eager", "blocks", "model"])
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_unused_parameters(stage: int, options: dict[str, Any]) -> None:
    """Nobody's: grad None, AdamW leaves it. One rank's: averaged with zero, as DDP's find_unused_parameters."""
    if stage == 3 and options is MODEL:
        pytest.skip("at stage 3 the graphs of all ranks must gather the same units, and here they differ")
    arguments: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    make = functools.partial(Sometimes, root=stage != 3)
    module, twin = models.pair(lambda: OnOneRank(make, torch.optim.AdamW, **arguments))
    start = {n: p.detach().clone() for n, p in twin.named_parameters()}
    watch = architectures.fit(module, ZeroCompileStrategy(stage=stage, **options), steps=3)
    order = iter(list(reversed(range(models.world()))) * 3)
    twin.which = lambda: next(order)  # type: ignore[method-assign, assignment]
    gradients = architectures.reference(twin, steps=3)
    ours = dict(module.named_parameters())
    untouched = all(torch.equal(ours[n].cpu(), start[n].cpu()) for n in ours if "nobody" in n or "layers.2" in n)
    gradients = max(architectures.difference(a, b) for a, b in zip(watch.gradients, gradients, strict=True))
    assert untouched
    assert gradients <= 1e-6 and architectures.difference(ours, dict(twin.named_parameters())) <= 1e-6


class Adapter(nn.Module):
    """A block whose base is frozen and which trains two small matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(architectures.WIDTH, architectures.WIDTH).requires_grad_(False)
        self.down = nn.Linear(architectures.WIDTH, 2, bias=False)
        self.up = nn.Linear(2, architectures.WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapter() for _ in range(3))
        self.head = nn.Linear(architectures.WIDTH, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Toggled(architectures.Net):
    """Unfreezes one base in step 1, freezes its adapter in step 2 and everything but the head in step 3."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        layer = self.model.layers[1]
        if batch_idx == 1:
            layer.base.requires_grad_(True)
        if batch_idx == 2:
            layer.up.requires_grad_(False)
        if batch_idx == 3:
            self.model.layers.requires_grad_(False)
            self.model.head.requires_grad_(True)
        return architectures.objective(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("options", [EAGER, AOT, MODEL], ids=["eager", "blocks", "model"])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
@on_ranks()
def test_requires_grad_toggles_between_steps(stage: int, options: dict[str, Any]) -> None:
    """Adapters on a frozen base; what is trained changes between steps, in compiled regions too."""
    module, twin = models.pair(lambda: Toggled(Adapted))
    watch = architectures.fit(module, ZeroCompileStrategy(stage=stage, **options), steps=4)
    gradients = architectures.reference(twin, steps=4)
    parameters = architectures.difference(dict(module.named_parameters()), dict(twin.named_parameters()))
    gradients = max(architectures.difference(a, b) for a, b in zip(watch.gradients, gradients, strict=True))
    assert [sum(g is not None for g in seen.values()) for seen in watch.gradients] == [6, 8, 7, 2]
    assert gradients <= 1e-6 and parameters <= 1e-6
