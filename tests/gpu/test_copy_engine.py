"""Copies between the GPUs of one host gather what NCCL gathers (see [Note: copy engines])."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_zerocompile.config import Config
from lightning_zerocompile.engine import Engine
from tests.support import engines, models
from tests.support.device_time import Span, spans
from tests.support.harness import Worlds
from tests.support.memory import Stack

pytestmark = pytest.mark.gpu


class Uneven(nn.Module):
    """Blocks with parameters from one element to 4 MiB, and rows that no world size divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(width, 2 * width + 1), nn.LayerNorm(2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.scale, self.gain = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., width]
        return x + 0.1 * self.scale * self.gain * self.down(torch.tanh(self.norm(self.up(x))))


class Net(nn.Module):
    def __init__(self, width: int = 700) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, width)
        self.layers = nn.ModuleList(Uneven(width) for _ in range(5))
        self.head = nn.Linear(width, models.VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # [batch, length]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _trained(stage: int, scope: Any, copy_engine: bool, batches: bool = True) -> tuple[nn.Module, int, int]:
    torch.manual_seed(0)
    model, data = Net(), models.Batches(models.rank())
    with engines.engine(model, stage, compile=scope, copy_engine=copy_engine) as engine:
        if not batches:
            engine.runtime._map_peers(batches=False)
        optimizer = engines.sgd(engine, model, lr=0.1)
        for number in range(40):  # many gathers and reductions in flight, without a pause of the host
            engine.model.zero_grad()
            with engine.training_step():
                engines.backward(engine, engines.token_loss(model, data[number]))
            optimizer.step()
        stats = engine.runtime.stats()
    return model, stats.peer_gathers, stats.gathers


def _compare(stage: int, scope: Any) -> tuple[float, int, int, int]:
    copied, copies, gathers = _trained(stage, scope, True)
    collective, none, _ = _trained(stage, scope, False)
    return models.deviation(copied, collective), copies, gathers, none


@pytest.mark.parametrize("scope", [False, "blocks"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_copies_equal_collectives(worlds: Worlds, world: int, stage: int, scope: Any) -> None:
    for deviation, copies, gathers, none in worlds(world).run(_compare, stage, scope, timeout=180):
        assert deviation <= 1e-6 and none == 0
        assert copies > gathers / 2 > 0


def _in_batches(batches: bool) -> tuple[nn.Module, float]:
    """The trained model, and how many copies a gather is for the profiler, with all others on the device: a batch is
    one."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        model, gathers, _ = _trained(3, False, True, batches)
        torch.cuda.synchronize()
    copies = [event for event in profiled.events() if "PtoP" in event.name or "DtoD" in event.name]
    return model, len(copies) / gathers


def _compare_batches() -> tuple[float, float, float]:
    batched, few = _in_batches(True)
    single, many = _in_batches(False)
    return models.deviation(batched, single), few, many


@pytest.mark.usefixtures("a_gpu_a_rank")
def test_a_driver_without_batches_copies_one_by_one(worlds: Worlds) -> None:
    """Two large parameters a block: one copy less for each gather of a block."""
    for deviation, few, many in worlds(2).run(_compare_batches, timeout=180):
        assert deviation == 0
        assert many - few > 0.5


def _meetings() -> tuple[list[Span], list[Span]]:
    """The barriers of gathers, and the times from a reduction's first copy to its last one's end."""
    config = Config(stage=3, compile=False, copy_engine=True)
    made = Engine(Stack(4096, 12), engines.place(), config, torch.bfloat16, "nccl")
    with engines.closing(made) as engine:
        optimizer = engines.sgd(engine, engine.model, lr=1e-3)
        x = torch.randn(1024, 4096, device=engines.place(), dtype=torch.bfloat16)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(8):
                engines.step(engine, optimizer, lambda: engine.model(x).float().square().mean())
            torch.cuda.synchronize()
    by_stream: dict[int, list[Any]] = {}
    for event in profiled.events():
        by_stream.setdefault(event.device_resource_id, []).append(event)
    met, pushed = [], []
    for events in by_stream.values():
        meetings, copies = spans(events, "zerocompile_barrier"), spans(events, "PtoP", "DtoD")
        if not spans(events, "zerocompile_sum"):
            met += meetings
            continue
        begin = float("-inf")
        for start, end in meetings:  # a reduction's copies are before its barrier
            own = [span for span in copies if begin <= span[0] < start]
            if own:
                pushed.append((own[0][0], max(span[1] for span in own)))
            begin = end
    return met, pushed


@pytest.mark.usefixtures("a_gpu_a_rank")
def test_no_gather_meets_while_its_rank_pushes(worlds: Worlds) -> None:
    """See [Note: pulls after pushes]."""
    waited = 0
    for met, pushed in worlds(4).run(_meetings, timeout=180):
        assert len(met) > 12 and len(pushed) > 12
        for start, end in met:
            within = [push for push in pushed if push[0] < start < push[1]]
            waited += len(within)
            assert all(end > push[1] for push in within), (start, end, within)
    assert waited > 0
