"""On GPUs: user code runs parts of its model on streams of its own, and one of them is late."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import engines, models
from tests.support.harness import Ranks

pytestmark = pytest.mark.gpu
WIDTH, BLOCKS, STEPS, LATE = 512, 4, 3, 5 * 10**7  # the last: cycles
HELD = ["nothing", "first forward", "second forward", "first backward", "second backward"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [batch, WIDTH]
        return x + 0.1 * torch.tanh(self.linear(x))


class Towers(nn.Module):
    """Two towers over the same blocks, block by block in turns, each on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.streams: list[torch.cuda.Stream] = []
        self.held = "nothing"

    def forward(self, x: Tensor) -> Tensor:  # [batch, WIDTH]
        values = [x, x.flip(0)]
        if not self.streams:
            for layer in self.layers:
                values = [layer(value) for value in values]
            return values[0] * values[1]
        home = torch.cuda.current_stream()
        for stream in self.streams:
            stream.wait_stream(home)
        for number, layer in enumerate(self.layers):
            for tower, (name, stream) in enumerate(zip(("first", "second"), self.streams, strict=True)):
                with torch.cuda.stream(stream):
                    if self.held == f"{name} forward" and number == 1:
                        torch.cuda._sleep(LATE)
                    values[tower] = layer(values[tower])
                    if self.held == f"{name} backward":
                        values[tower].register_hook(_late)
                    torch.full((WIDTH, WIDTH), torch.nan, device=x.device)  # takes memory that was given back
        for stream, value in zip(self.streams, values, strict=True):
            home.wait_stream(stream)
            value.record_stream(home)
        return values[0] * values[1]


def _late(grad: Tensor) -> None:
    torch.cuda._sleep(LATE)


def _x(rank: int, step: int) -> Tensor:  # [64, WIDTH]
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).to(models.device())


def _backwards(model: Towers, step: int, rank: int, backward: Callable[[Tensor], Any]) -> None:
    """Two of them."""
    for part in _x(rank, step).chunk(2):
        backward(model(part).square().sum() / 64)


def _trained(stage: int, scope: Any, held: str, window: bool) -> tuple[float, float]:
    """How far the parameters are from those of training on one stream, and how far these moved."""
    torch.manual_seed(0)
    model = Towers()
    twin = copy.deepcopy(model).to(models.device())
    start = copy.deepcopy(model)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    model.streams, model.held = [torch.cuda.Stream(), torch.cuda.Stream()], held
    with engines.engine(
        model, stage, compile=scope, compile_options={"backend": "aot_eager"}, timeout=timedelta(seconds=60)
    ) as engine:
        optimizer = engines.sgd(engine, model, lr=0.1)
        for step in range(STEPS):
            with engine.training_step():
                if window:
                    with engine.windows.open("use", None, None):
                        _backwards(model, step, models.rank(), lambda loss: engines.backward(engine, loss))
                else:
                    _backwards(model, step, models.rank(), lambda loss: engines.backward(engine, loss))
            engine.step(optimizer, lambda: None)
            optimizer.zero_grad()
            for rank in range(models.world()):
                _backwards(twin, step, rank, lambda loss: (loss / models.world()).backward())
            theirs.step()
            theirs.zero_grad()
        torch.cuda.synchronize()
        model.streams = []
    moved = min(float((p - q.cpu()).abs().max()) for p, q in zip(start.parameters(), twin.parameters(), strict=True))
    return models.deviation(model, twin), moved


@pytest.mark.parametrize("window", [False, True], ids=["backwards", "window"])
@pytest.mark.parametrize("scope", [False, "blocks"], ids=["eager", "compiled"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_towers_on_two_streams(ranks: Ranks, stage: int, scope: Any, window: bool) -> None:
    wrong = {}
    for held in HELD:
        for deviation, moved in ranks.run(_trained, stage, scope, held, window, timeout=100):
            assert moved > 1e-4
            if not deviation <= 2e-5:
                wrong[held] = deviation
    assert not wrong
