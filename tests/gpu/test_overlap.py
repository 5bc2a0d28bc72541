"""On GPUs: communication overlaps compute, across regions, and its buffers are safe meanwhile (rule 4)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile.config import Config
from lightning_zerocompile.engine import Engine
from tests.support.device_time import beside, spans, total
from tests.support.harness import Worlds

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("a_gpu_a_rank")]
WIDTH, ROWS = 4096, 8192


class Wide(nn.Module):
    """A region whose compute takes longer than the transfer of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [rows, width]
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wide() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:  # [rows, width]
        for layer in self.layers:
            x = layer(x)
        return x


def _overlap(stage: int) -> dict[str, float]:
    """The share of each collective's time in which a matrix product ran."""
    from torch.profiler import ProfilerActivity, profile, schedule

    device = torch.device("cuda", torch.cuda.current_device())
    engine = Engine(Stack(), device, Config(stage=stage, copy_engine=False), torch.bfloat16, "nccl")
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=1e-3)
    engine.attach_optimizers([optimizer])
    x = torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16)

    def step() -> None:
        with engine.training_step():
            loss = engine.model(x).float().square().mean()
            with engine.backward(loss):
                loss.backward()
        engine.step(optimizer, lambda: loss)

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    # The profiler's own start holds up one rank more than another, and collectives would wait for it.
    warm_up = schedule(wait=0, warmup=2, active=4)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], schedule=warm_up) as profiler:
        for _ in range(5):
            step()
            torch.cuda.synchronize()
            profiler.step()
    events = profiler.events()
    compute = spans(events, "nvjet", "gemm", "triton")
    found = {word: spans(events, word) for word in ("ReduceScatter", "AllGather")}
    return {word: beside(one, compute) / total(one) for word, one in found.items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_reductions_overlap_compute(worlds: Worlds, stage: int) -> None:
    """More than 70 % of the reductions' time, over regions of one block each (the last has nothing to hide behind)."""
    for shares in worlds(2).run(_overlap, stage, timeout=180):
        assert shares["ReduceScatter"] > 0.7
        if stage == 3:
            assert shares["AllGather"] > 0.6


class Headed(nn.Module):
    """The unit that is used first, and reduced last, is large."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.layers = Stack().layers

    def forward(self, x: Tensor) -> Tensor:  # [rows, width]
        x = x + self.first(x)[:, :WIDTH]
        for layer in self.layers:
            x = layer(x)
        return x


def _after_backward(reads: bool) -> list[tuple[float, float]]:
    """When each step's last reduction ends, and when its optimizer's first kernel begins."""
    from torch.profiler import ProfilerActivity, profile

    device = torch.device("cuda", torch.cuda.current_device())
    engine = Engine(Headed(), device, Config(stage=1, copy_engine=False), torch.bfloat16, "nccl")
    optimizer = torch.optim.AdamW(engine.model.parameters(), lr=1e-3, fused=True)
    engine.attach_optimizers([optimizer])
    x = torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16)

    def step() -> None:
        with engine.training_step():
            loss = engine.model(x).float().square().mean()
            with engine.backward(loss):
                loss.backward()
        if reads:
            assert all(p.grad is not None for p in engine.model.parameters())
        engine.step(optimizer, lambda: None)

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    times = []
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        events = profiler.events()
        updates = [begin for begin, _ in spans(events, "FusedAdam")]
        times.append((max(end for _, end in spans(events, "ReduceScatter")), min(updates)))
    return times


@pytest.mark.parametrize("reads", [False, True])
def test_the_update_begins_before_the_last_reduction_ends(worlds: Worlds, reads: bool) -> None:
    """With the units that are reduced already; not if the user has read all gradients before."""
    for times in worlds(2).run(_after_backward, reads, timeout=180):
        assert all((update < reduced) is not reads for reduced, update in times), times
