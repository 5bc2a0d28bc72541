"""On GPUs: what spans hosts moves as one flat tensor, and replicas are summed on their own stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from lightning_zerocompile.config import Config
from lightning_zerocompile.engine import Engine
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER

pytestmark = pytest.mark.gpu


def _trained(nodes: int, stage: int, **options: Any) -> tuple[torch.nn.Module, torch.nn.Module, list[Any]]:
    """A model after three steps of SGD, what one process makes of it, and the events of the last step."""
    torch.manual_seed(0)  # each model that is made here begins with the same values
    model, twin = models.pair(models.ByteModel)
    own = models.Batches(models.rank())
    config = Config(stage, copy_engine=False, **options)
    with engines.closing(Engine(model, engines.place(), config, None, dist.get_backend(), nodes=nodes)) as engine:
        optimizer = engines.sgd(engine, model)
        for number in range(2):
            engines.step(engine, optimizer, lambda: engines.token_loss(model, own[number]))  # noqa: B023
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            engines.step(engine, optimizer, lambda: engines.token_loss(model, own[2]))
            torch.cuda.synchronize()
        events: list[Any] = list(profiler.events())
    engines.window_reference(twin, [[0], [1], [2]])
    return model, twin, events


@pytest.mark.parametrize("options", [EAGER, AOT], ids=["eager", "aot_eager"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_a_unit_is_one_tensor_between_hosts(stage: int, options: dict[str, Any]) -> None:
    """Inside a host nothing is packed. The result is the same to the bit: two ranks add in one order only."""
    inside, twin, events = _trained(1, stage, **options)
    assert not any(e.name in ("aten::_chunk_cat", "aten::split_with_sizes_copy") for e in events)
    between, _, events = _trained(2, stage, **options)
    names = [e.name for e in events]
    gathers = sum(name.startswith("zerocompile: gather") for name in names)
    reductions = sum(name.startswith("zerocompile: reduce") for name in names)
    packed, unpacked = names.count("aten::_chunk_cat"), names.count("aten::split_with_sizes_copy")
    assert 0 < packed <= reductions and packed < unpacked <= packed + gathers
    assert all(torch.equal(a, b) for a, b in zip(inside.parameters(), between.parameters(), strict=True))
    assert models.deviation(between, twin) <= 1e-6


@on_ranks(4)
def test_the_backward_gathers_inside_a_host() -> None:
    model, twin, _ = _trained(2, 3, reshard_after_forward="nodes", **EAGER)
    assert models.deviation(model, twin) <= 1e-6


@on_ranks(4)
def test_replicas_are_summed_beside_the_next_reduce_scatter() -> None:
    model, twin, events = _trained(2, 3, device_mesh=2, **EAGER)
    kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    scattered = {e.device_resource_id for e in kernels if "DevKernel_ReduceScatter" in e.name}
    summed = {e.device_resource_id for e in kernels if "DevKernel_AllReduce" in e.name}
    assert len(scattered) == 1 and summed - scattered, (scattered, summed)
    assert models.deviation(model, twin) <= 1e-6
