"""Our own kernels cast as torch does and sum in float32 (csrc/kernels.cu), whatever sizes and alignments they meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_zerocompile.config import Config
from lightning_zerocompile.engine import Engine
from lightning_zerocompile.sharding.full_values import full_value
from tests.support.harness import Worlds

pytestmark = pytest.mark.gpu
# 16 MiB, many blocks of threads with a rest; fewer rows than some worlds have; rows that no world divides, at addresses
# that no vector fits; one element
SIZES = [(2048, 2048), (1026, 640), (2, 4096), (7, 33), (1,), (4096,)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(size) for size in SIZES)

    def forward(self, factors: list[Tensor]) -> Tensor:  # the gradient of each weight is its factor
        return torch.stack([(w * f).sum() for w, f in zip(self.weights, factors, strict=True)]).sum()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.table = nn.Parameter(torch.randn(7001, 2048))  # of three blocks: too large for the mapped buffer

    def forward(self, factors: dict[str, Tensor]) -> Tensor:
        total = (self.table * factors["table"]).sum()
        for number, layer in enumerate(self.layers):
            total = total + layer([factors[f"layers.{number}.weights.{k}"] for k in range(len(SIZES))])
        return total


def _factors(rank: int, model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(rank)
    return {
        name: torch.randn(p.shape, device=device, generator=generator).bfloat16()
        for name, p in model.named_parameters()
    }


def _bits(numel: int) -> Tensor:
    """float32 numbers of all kinds: denormal, infinite, no numbers, ties."""
    bits = torch.randint(-(2**31), 2**31, (numel,), dtype=torch.int64, generator=torch.Generator().manual_seed(numel))
    bits[::3] &= ~0xFFFF  # exact
    bits[1::3] = bits[1::3] & ~0xFFFF | 0x8000  # half way
    bits[:8] = torch.tensor([0x7F800000, -(2**23), 0x7F800001, 0x7FFFFFFF, 0x7F7FFFFF, 1, 0, -(2**31)])[:numel]
    return bits.to(torch.int32).view(torch.float32)


def _ran(profiled: profile, kernel: str) -> int:
    return sum(kernel in event.name for event in profiled.events())


def _gathered(stage: int) -> tuple[list[str], int, int, int]:
    device = torch.device("cuda", torch.cuda.current_device())
    model = Blocks()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(_bits(p.numel()).view(p.shape))
    expected = {name: p.detach().to(device).bfloat16() for name, p in model.named_parameters()}
    config = Config(stage=stage, compile=False, unit_bytes=1)  # the mapped buffer is as large as a block
    engine = Engine(model, device, config, torch.bfloat16, "nccl")
    wrong = []
    with profile(activities=[ProfilerActivity.CUDA]) as profiled, engine.training_step(), torch.no_grad():
        if stage < 3:
            engine.runtime.core.masters_changed(list(engine.runtime.unit_of.values()))
        for name, wanted in expected.items():
            module, _, last = name.rpartition(".")
            seen = getattr(engine.model.get_submodule(module), last)
            nan = wanted.isnan()
            same = torch.equal(seen.view(torch.int16)[~nan], wanted.view(torch.int16)[~nan])
            if not (same and torch.equal(seen.isnan(), nan)):
                wrong.append(name)
        torch.cuda.synchronize()
    stats = engine.runtime.stats()
    engine.abandon()
    return wrong, stats.peer_gathers, stats.gathers, _ran(profiled, "zerocompile_cast")


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_casts_are_torchs(worlds: Worlds, world: int, stage: int) -> None:
    for wrong, copies, gathers, kernels in worlds(world).run(_gathered, stage, timeout=120):
        assert wrong == []
        assert 4 * copies == 3 * gathers > 0
        assert kernels >= 3


def _reduced(stage: int, scope: Any, copy_engine: bool) -> tuple[list[float], int, int, int]:
    """Largest errors relative to each mean, after one backward and after a second one that adds to it."""
    device, world = torch.device("cuda", torch.cuda.current_device()), dist.get_world_size()
    config = Config(stage=stage, compile=scope, compile_options={"backend": "aot_eager"}, copy_engine=copy_engine)
    model = Blocks()
    by_rank = [_factors(rank, model, device) for rank in range(world)]
    means = {name: torch.stack([mine[name].double() for mine in by_rank]).mean(0) for name in by_rank[0]}
    engine = Engine(model, device, config, torch.bfloat16, "nccl")
    del means["table"]  # NCCL sums it, in bfloat16
    errors = []
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for times in (1, 2):
            with engine.training_step():
                loss = engine.model(by_rank[dist.get_rank()])
                with engine.backward(loss):
                    loss.backward()
            grads = {name: full_value(p.grad) for name, p in engine.model.named_parameters()}
            errors.append(max(float((grads[n] / times - m).abs().max() / m.abs().max()) for n, m in means.items()))
    stats = engine.runtime.stats()
    engine.abandon()
    return errors, stats.peer_reductions, stats.reductions, _ran(profiled, "zerocompile_sum")


@pytest.mark.parametrize("scope", [False, "blocks"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_are_float32(worlds: Worlds, world: int, stage: int, scope: Any) -> None:
    for errors, copies, reductions, kernels in worlds(world).run(_reduced, stage, scope, True, timeout=120):
        assert max(errors) < 1e-6
        assert 3 * reductions == 4 * copies > 0
        assert kernels >= copies
    for errors, copies, reductions, kernels in worlds(world).run(_reduced, stage, scope, False, timeout=120):
        assert 1e-6 < max(errors) < 1e-2  # NCCL sums in bfloat16
        assert copies == kernels == 0 < reductions
