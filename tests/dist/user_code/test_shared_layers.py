"""Parameters and layers that code uses past the module that holds them: as arguments, from lists, from registries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, CELLS, EAGER, assert_trains_like_ddp

WIDTH = 6


class Registered(nn.Module):
    """Its subclasses are registered by name, each once, as layers of some libraries are."""

    names: list[str] = []  # noqa: RUF012

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__name__ in Registered.names:
            raise ValueError(f"{cls.__name__} is registered twice")
        Registered.names.append(cls.__name__)


class Block(Registered):
    """Uses a layer and a parameter that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, layer: nn.Module, bias: Tensor, pair: list[Tensor]) -> Tensor:
        return x + torch.tanh(layer(self.own(x)) + bias) @ pair[0]


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # [rows, WIDTH] -> [rows, WIDTH]
        for block in self.blocks:
            x = block(x, self.shared, self.bias, [self.matrix])
        return x


class Holder(nn.Module):
    """Calls a layer that it holds in a list, so that torch does not count it to this module."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.others = [layer]

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.others[0](self.own(x)))


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Holder(self.shared[0]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # [rows, WIDTH] -> [rows, WIDTH]
        for block in self.blocks:
            x = block(x)
        return x


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _frozen_in_between(model: Any, batch: Tensor) -> Tensor:
    """The shared layer is trained by one part of the loss only."""
    loss = _loss(model, batch)
    model.shared.requires_grad_(False)
    loss = loss + _loss(model, batch * 3)
    model.shared.requires_grad_(True)
    return loss


def _hooked_in_between(model: Any, batch: Tensor) -> Tensor:
    """A hook on the shared layer comes and goes."""
    loss = _loss(model, batch)
    layer = model.shared if isinstance(model, Sharing) else model.shared[0]
    handle = layer.register_forward_hook(lambda module, inputs, output: output * 2)
    loss = loss + _loss(model, batch * 3)
    handle.remove()
    return loss + _loss(model, batch * 0.5)


def _data(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, WIDTH, generator=generator).to(models.device()) for _ in range(3)]


@pytest.mark.parametrize(
    ("model", "loss"),
    [(Sharing, _loss), (Sharing, _frozen_in_between), (Sharing, _hooked_in_between), (Holding, _hooked_in_between)],
)
@on_ranks()
def test_blocks_use_what_they_are_given(model: Any, loss: Any) -> None:
    for stage, scope in CELLS:
        torch.manual_seed(0)
        torch._dynamo.reset()
        options = AOT if scope else EAGER
        trained = assert_trains_like_ddp(model(), stage, loss=loss, data=_data, lr=0.1, **options)
        assert (trained.compiled.backward > 0) is bool(scope)


@on_ranks()
def test_torchs_fast_path_in_evaluation() -> None:
    """nn.TransformerEncoder leaves out padded positions, and asks whether its weights are plain tensors before."""
    for stage in (1, 3):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 2).eval()
        x, padded = torch.randn(2, 5, WIDTH), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        with torch.no_grad():
            expected = model(x, src_key_padding_mask=padded)
        assert expected[1, 3:].abs().sum() == 0  # the fast path ran
        with engines.engine(model, stage, **EAGER) as engine, engine.evaluation_step(), torch.no_grad():
            found = model(x.to(engines.place()), src_key_padding_mask=padded.to(engines.place()))
        assert torch.allclose(found.cpu(), expected, atol=1e-6), stage
