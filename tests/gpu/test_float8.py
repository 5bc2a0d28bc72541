"""On GPUs: gathers that move float8 weights of torchao's layers. The same bits as without, and half of the bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_zerocompile.config import Config
from lightning_zerocompile.engine import Engine
from tests.support.harness import Worlds

pytestmark = pytest.mark.gpu
float8 = pytest.importorskip("torchao.float8")

WIDTH, ROWS, BLOCKS, STEPS = 1024, 512, 4, 6


class Block(nn.Module):
    """Its last layer is too narrow for the vectors of the kernel on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.narrow = nn.Linear(WIDTH, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [ROWS, WIDTH]
        x = x + self.down(torch.relu(self.up(x)))
        return x + nn.functional.pad(self.narrow(x), (0, WIDTH - 48))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _trained(gathers: bool, options: dict[str, Any]) -> tuple[list[Tensor], Any, int, int]:
    """The masters, statistics of the last step, and how often our kernel of casts ran in it."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    model = Stack()
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=gathers)
    float8.convert_to_float8_training(model, config=config)
    engine = Engine(model, device, Config(stage=3, compile="blocks", **options), torch.bfloat16, "nccl")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach_optimizers([optimizer])
    generator = torch.Generator(device).manual_seed(torch.distributed.get_rank())

    def step() -> None:
        x = torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16, generator=generator)
        with engine.training_step():
            loss = engine.model(x).float().square().mean()
            with engine.backward(loss):
                loss.backward()
        engine.step(optimizer, lambda: None)
        optimizer.zero_grad()

    for _ in range(STEPS - 1):
        step()
    torch.cuda.synchronize()
    before = engine.runtime.stats().gather_bytes
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    moved = engine.runtime.stats().gather_bytes - before
    kernels = sum("zerocompile_float8" in event.name for event in profiled.events())
    masters = [p.detach().to_local().cpu() for p in model.parameters()]
    low = len(engine.runtime.casts.low)
    engine.abandon()
    return masters, moved, kernels, low


def _compare(options: dict[str, Any]) -> tuple[list[float], int, int, int, int]:
    plain, before, none, _ = _trained(False, options)
    masters, moved, kernels, low = _trained(True, options)
    assert none == 0
    return [float((a - b).abs().max()) for a, b in zip(plain, masters, strict=True)], before, moved, kernels, low


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_the_same_bits(worlds: Worlds, world: int, copies: bool, backend: str) -> None:
    options = {"compile_options": {"backend": backend}, "copy_engine": "auto" if copies else False}
    for differences, before, moved, kernels, low in worlds(world).run(_compare, options, timeout=300):
        assert max(differences) == 0
        assert low == 3 * BLOCKS and 0.5 <= moved / before < 0.55
        assert (kernels > 0) == copies
