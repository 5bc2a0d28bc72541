"""`stage="auto"`: what is taken, from what every rank needs and has."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_zerocompile import ZeroCompileFabricStrategy, ZeroCompileStrategy
from lightning_zerocompile.config import Config
from lightning_zerocompile.plan.auto import SHARE_WITHOUT_BATCH, Needs, decide
from lightning_zerocompile.plan.machine import Machine
from lightning_zerocompile.plan.plan import make_plan
from lightning_zerocompile.plan.trace import PlanError
from tests.support import models

AUTO = Config(stage="auto")


def _needs(memory: int, accumulate: int = 1, host: str = "") -> Needs:
    """Of a rank of eight GPUs."""
    plan = make_plan(
        models.Module(optimizer="adamw"), None, world_size=8, config=Config(compile=False, unit_bytes=1),
        machine=Machine(gloo=False), accumulate=accumulate,
    )  # fmt: skip
    peaks, traffic = zip(*((s.memory.peak, s.traffic.total) for s in plan.stages), strict=True)
    return Needs("", peaks, traffic, host, memory)


def _taken(memory: int, accumulate: int = 1) -> int:
    return decide([_needs(memory, accumulate)] * 8, AUTO, has_batch=False).stage


def test_each_stage_is_taken_where_it_is_the_fastest_that_fits() -> None:
    """An accumulation's waiting gradients make stage 1 larger than 2, and gathered parameters make 2 larger than 3."""
    one, two, three = _needs(1, accumulate=2).peaks
    assert one > two > three
    share = SHARE_WITHOUT_BATCH
    assert [_taken(int(peak / share) + 2, 2) for peak in (one, two, three)] == [1, 2, 3]
    assert [_taken(int(peak / share) - 2, 2) for peak in (one, two)] == [2, 3]
    with pytest.raises(PlanError, match=r"no stage fits in .*stage 1 .*, stage 2 .*, stage 3 .* Use more ranks"):
        _taken(int(three / share) - 2, 2)
    assert _taken(int(one / share) + 2, 1) == 1  # where both fit and cost the same


def test_the_smallest_memory_counts_and_a_host_is_shared() -> None:
    one, _, three = _needs(1).peaks
    large, small = int(one / SHARE_WITHOUT_BATCH) + 2, int(three / SHARE_WITHOUT_BATCH) + 2
    assert decide([_needs(large), _needs(small)], AUTO, has_batch=False).stage == 3
    assert decide([_needs(large), _needs(large)], AUTO, has_batch=False).stage == 1
    assert decide([_needs(2 * large, host="a")] * 2, AUTO, has_batch=False).memory == large


def test_what_stays_gathered() -> None:
    """Stage 3 by choice fills what is left, measured in the run, unless the option says something else."""
    one, _, three = _needs(1).peaks
    memory = int(three / 0.6) + 2
    assert decide([_needs(memory)], AUTO, has_batch=False).keep_gathered == "auto"
    assert decide([_needs(int(one / 0.6) + 2)], AUTO, has_batch=False).keep_gathered == ()
    for given in (7, ("head",)):
        own = Config(stage="auto", keep_gathered=given)
        assert decide([_needs(memory)], own, has_batch=False).keep_gathered == given


def test_an_error_of_one_rank_is_everybodys() -> None:
    with pytest.raises(PlanError, match=r"rank 1: no file\. Or choose a stage: 1, 2 or 3"):
        decide([_needs(10**9), Needs("rank 1: no file.")], AUTO, has_batch=True)


def _batch() -> Tensor:
    return torch.zeros(2, models.LENGTH, dtype=torch.long)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": "fast"}, "or 'auto'"),
        ({"stage": 2, "plan_batch": _batch}, "has no meaning with another stage"),
        ({"stage": "auto", "plan_batch": torch.zeros(2)}, "must be a function"),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ZeroCompileStrategy(**arguments)


def test_without_a_strategy_nothing_chooses() -> None:
    with pytest.raises(ValueError, match="here choose 1, 2 or 3"):
        assert AUTO.chosen_stage
    assert Config(stage=2).chosen_stage == 2


def test_fabric_chooses_too() -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=ZeroCompileFabricStrategy(stage="auto", compile=False))
    fabric.launch()
    fabric.setup_module(models.ByteModel())
    assert fabric.strategy.choice.stage == 1 and fabric.strategy.engine.config.stage == 1  # type: ignore[attr-defined]
    fabric.strategy.teardown()
    torch.distributed.destroy_process_group()
