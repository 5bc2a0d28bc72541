"""On GPUs: what spans hosts moves as one flat tensor, or in two levels, and replicas are summed on their own stream."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_zerocompile.config import Config
from lightning_zerocompile.engine import Engine
from lightning_zerocompile.ranks.groups import Groups
from lightning_zerocompile.report.start import start_line
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER

pytestmark = pytest.mark.gpu
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor")


def _trained(nodes: int, stage: int, **options: Any) -> tuple[torch.nn.Module, torch.nn.Module, list[Any]]:
    """A model after three steps of SGD, what one process makes of it, and the events of the last step."""
    torch.manual_seed(0)  # each model that is made here begins with the same values
    model, twin = models.pair(models.ByteModel)
    own = models.Batches(models.rank())
    config = Config(stage, copy_engine=False, **options)
    with engines.closing(Engine(model, engines.place(), config, None, dist.get_backend(), nodes=nodes)) as engine:
        optimizer = engines.sgd(engine, model)
        two = options.get("hierarchical_collectives") is True
        assert ("collectives in two levels over 2 hosts" in start_line(engine, [optimizer])) == two
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


OPTIONS = {
    "eager": EAGER,
    "aot_eager": AOT,
    "inner": {**EAGER, "reshard_after_forward": "nodes"},
}


@pytest.mark.parametrize(
    ("stage", "name"), [(stage, name) for stage in (1, 2, 3) for name in OPTIONS if stage == 3 or name != "inner"]
)
@on_ranks(4)
def test_two_levels(stage: int, name: str) -> None:
    """Two hosts of two ranks: one collective across, then one for each host's rows inside; back the other way round."""
    one, _, events = _trained(2, stage, hierarchical_collectives=False, **OPTIONS[name])
    before = Counter(e.name for e in events)
    two, twin, events = _trained(2, stage, hierarchical_collectives=True, **OPTIONS[name])
    now = Counter(e.name for e in events)
    inside = [now[f"nccl:{what}_coalesced"] - before[f"nccl:{what}_coalesced"] for what in COLLECTIVES]
    assert all(count > 0 for count in inside), (before, now)
    assert models.deviation(two, twin) <= 1e-6 and models.deviation(two, one) <= 1e-6


@on_ranks(4)
def test_a_single_tensor_goes_straight_to_its_place_in_two_levels() -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(64, 31, bias=False), nn.Linear(64, 31, bias=False)  # rows that the ranks do not divide
    twin.load_state_dict(model.state_dict())
    batches = [torch.randn(8, 64, generator=torch.Generator().manual_seed(rank)) for rank in range(models.world())]
    config = Config(3, copy_engine=False, hierarchical_collectives=True, **EAGER)
    with engines.closing(Engine(model, engines.place(), config, None, dist.get_backend(), nodes=2)) as engine:
        optimizer = engines.sgd(engine, model)
        engines.step(engine, optimizer, lambda: model(batches[models.rank()].to(engines.place())).square().mean())
    torch.stack([twin(batch).square().mean() for batch in batches]).mean().backward()
    with torch.no_grad():
        twin.weight -= 0.5 * twin.weight.grad
    assert models.deviation(model, twin) <= 1e-6


@pytest.mark.parametrize(("seconds", "kept"), [((1.0, 0.5), True), ((1.0, 0.95), False)])
@on_ranks(4)
def test_the_faster_way_is_chosen(seconds: tuple[float, float], kept: bool) -> None:
    """By the slowest rank's measurement; groups that are not used are destroyed."""
    mine = seconds if models.rank() == 3 else (1.0, 0.1)  # the other ranks would choose two levels
    groups = Groups.make(engines.place(), dist.get_backend(), timedelta(seconds=60), [[0, 1, 2, 3]], None, 2, True)
    groups.connect(engines.place())
    assert groups.levels is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Groups, "_seconds", lambda self, device, levels: mine[levels is not None])
        chosen = groups.chosen(engines.place())
    assert (chosen.levels == groups.levels) if kept else (chosen.levels is None)
    assert len(groups.own) - len(chosen.own) == (0 if kept else 4)
    assert groups._seconds(engines.place(), groups.levels[:2] if kept else None) > 0
    chosen.destroy()


@on_ranks(4)
def test_replicas_are_summed_beside_the_next_reduce_scatter() -> None:
    model, twin, events = _trained(2, 3, device_mesh=2, **EAGER)
    kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    scattered = {e.device_resource_id for e in kernels if "DevKernel_ReduceScatter" in e.name}
    summed = {e.device_resource_id for e in kernels if "DevKernel_AllReduce" in e.name}
    assert len(scattered) == 1 and summed - scattered, (scattered, summed)
    assert models.deviation(model, twin) <= 1e-6
