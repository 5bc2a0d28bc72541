"""The predicted seconds of a run on several hosts, in closed form: equal blocks, and rates that are given."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile.config import Config
from lightning_zerocompile.plan.__main__ import main
from lightning_zerocompile.plan.machine import Machine
from lightning_zerocompile.plan.plan import StagePlan, make_plan
from lightning_zerocompile.plan.trace import PlanError

WIDTH, BLOCKS, ROWS = 32, 4, 16
UNIT = 4 * WIDTH * WIDTH  # bytes, float32
TOTAL = BLOCKS * UNIT
FLOPS = 2 * ROWS * WIDTH * WIDTH  # of a block's forward; twice that in the backward, but for the first block's input


class Stack(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(BLOCKS))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # [ROWS, WIDTH]
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def train_dataloader(self) -> list[Tensor]:
        return [torch.zeros(ROWS, WIDTH, device="cpu")]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# Compute takes next to no time, so a step is its communication; inside a host it is ten times as fast.
MACHINE = Machine(bandwidth=1e6, node_bandwidth=1e7, flops=1e18, ranks_per_node=4, latency=1e-3, node_latency=1e-4)


def _stage(stage: int, world: int, machine: Machine = MACHINE, accumulate: int = 1, **options: Any) -> StagePlan:
    config = Config(compile=False, unit_bytes=1, **options)
    plan = make_plan(
        Stack(), torch.zeros(ROWS, WIDTH), world_size=world, config=config, machine=machine, stages=[stage],
        accumulate=accumulate,
    )  # fmt: skip
    assert len(plan.units) == BLOCKS
    return plan.stages[0]


def _ring(size: int, ranks: int, hosts: int, bandwidth: float, count: int) -> float:
    """``bandwidth``: of all network cards of a host together, or inside one."""
    steps = (ranks - hosts) * 1e-4 + (hosts - 1) * 1e-3
    return size * (ranks - 1) / ranks / bandwidth + count * steps


def _tree(size: int, ranks: int) -> float:
    """Of one sum over hosts."""
    return 2 * size * (ranks - 1) / ranks / 1e6 + 2 * math.log2(ranks) * 1e-3


def _whole(stage: int, ranks: int, hosts: int, bandwidth: float, backwards: int = 1, reductions: int = 1) -> float:
    """Gathers and reductions of all units, and what nothing hides at the ends.

    A backward at stage 3 finds the last unit gathered.
    """
    one = _ring(UNIT, ranks, hosts, bandwidth, 1)
    return one * ((2 * BLOCKS - 1) * backwards if stage == 3 else BLOCKS) + one * (BLOCKS * reductions + 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_host_has_its_own_rate(stage: int) -> None:
    found = _stage(stage, 4)
    assert found.seconds == pytest.approx(_whole(stage, 4, 1, 1e7), rel=1e-4)
    assert found.exposed == pytest.approx(found.seconds, rel=1e-4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_over_hosts_take_their_links_and_steps(stage: int) -> None:
    assert _stage(stage, 16).seconds == pytest.approx(_whole(stage, 16, 4, 4e6), rel=1e-4)


def test_links_inside_hosts_may_be_the_slower_ones() -> None:
    machine = dataclasses.replace(MACHINE, node_bandwidth=3e6)
    assert _stage(3, 16, machine).seconds == pytest.approx(_whole(3, 16, 4, 3e6), rel=1e-4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_sum_their_rows_beside_the_reductions_inside(stage: int) -> None:
    found = _stage(stage, 16, device_mesh="nodes")
    one = _ring(UNIT, 4, 1, 1e7, 1)
    back = max((2 * BLOCKS - 1 if stage == 3 else BLOCKS) * one, BLOCKS * _tree(UNIT // 4, 4))
    ends = 2 * one + _tree(UNIT // 4, 4)
    assert found.seconds == pytest.approx(BLOCKS * one + back + ends, rel=1e-4)
    assert found == _stage(stage, 16, device_mesh=4) == _stage(stage, 16, device_mesh=(4, 4))
    assert found.memory == _stage(stage, 4).memory


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_crosses_hosts_is_packed(stage: int) -> None:
    """On its way a unit, or its gradient, is there a second time, with this rank's rows; inside a host it is not."""
    packed, plain = (_stage(stage, 16, dataclasses.replace(MACHINE, ranks_per_node=n)).memory for n in (4, None))
    assert packed.peak - plain.peak == UNIT + UNIT // 16
    assert _stage(stage, 16, device_mesh="nodes").memory == _stage(stage, 4).memory


def test_replicas_of_several_hosts_share_their_links() -> None:
    """Two replicas of two hosts each: the sums over replicas come on top of the reductions inside."""
    found = _stage(3, 16, device_mesh=2)
    sums = (BLOCKS + 1) * _tree(UNIT // 8, 2)
    assert found.seconds == pytest.approx(_whole(3, 8, 2, 4e6) + sums, rel=1e-4)


def test_the_backward_gathers_inside_a_host() -> None:
    found = _stage(3, 16, reshard_after_forward="nodes")
    again = (BLOCKS - 1) * _ring(UNIT, 4, 1, 1e7, 1)
    assert found.seconds == pytest.approx(_whole(1, 16, 4, 4e6) + again, rel=1e-4)
    assert found.memory.secondary == TOTAL // 4
    assert _stage(3, 4, reshard_after_forward="nodes").memory.secondary == 0  # one host: nothing to gain


def test_compute_hides_communication() -> None:
    """What is longer counts in each phase; only what is longer than compute, and the ends, are exposed."""
    slow = _stage(3, 16, Machine(**{**vars(MACHINE), "flops": 1e3}))
    ends = 2 * _ring(UNIT, 16, 4, 4e6, 1)
    forward, back = BLOCKS * FLOPS / 1e3, (2 * BLOCKS - 1) * FLOPS / 1e3
    assert slow.exposed == pytest.approx(ends) and slow.seconds == pytest.approx(forward + back + ends)


@pytest.mark.parametrize(("stage", "defer", "reductions"), [(1, False, 1), (2, False, 3), (2, True, 1), (3, False, 3)])
def test_several_backwards(stage: int, defer: bool, reductions: int) -> None:
    found = _stage(stage, 16, accumulate=3, defer_grad_sync=defer)
    assert found.seconds == pytest.approx(_whole(stage, 16, 4, 4e6, 3, reductions), rel=1e-4)


def test_without_hosts_and_latency_bytes_alone_count() -> None:
    found = _stage(1, 16, Machine(bandwidth=1e6, flops=1e18))
    assert found.seconds == pytest.approx(2 * (TOTAL + UNIT) * 15 / 16 / 1e6, rel=1e-4)
    assert _stage(1, 1, Machine(flops=1e18)).exposed == 0
    assert _stage(1, 16, Machine(flops=1e18)).seconds is None and _stage(1, 16, Machine(flops=1e18)).exposed is None


def test_the_command_knows_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    rates = "--bandwidth 1MB --node-bandwidth 10MB --flops 1e18 --ranks-per-node 4 --latency 1e-3 --node-latency 1e-4"
    command = [f"{__name__}:Stack", "--world-size", "16", *rates.split(), "--stage", "3"]
    assert main([*command, "--options", '{"device_mesh": "nodes"}', "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["replicas"] == 4 and made["machine"]["latency"] == 1e-3
    assert made["stages"][0]["seconds"] > made["stages"][0]["exposed"] > 0
    assert main([*command, "--options", '{"reshard_after_forward": 4}']) == 0
    assert "of them communication alone" in capsys.readouterr().out
    assert main([*command, "--options", '{"device_mesh": "node"}']) == 1
    assert "`device_mesh='node'`" in capsys.readouterr().err


def test_what_cannot_be() -> None:
    with pytest.raises(PlanError, match=r"`device_mesh='nodes'`.*`ranks_per_node`"):
        _stage(3, 16, Machine(), device_mesh="nodes")
    with pytest.raises(PlanError, match=r"18 ranks are not on hosts of 4 each"):
        _stage(3, 18)
    for name in ("ranks_per_node", "latency", "node_latency"):
        with pytest.raises(PlanError, match=f"`{name}=0`"):
            Machine(**{name: 0})  # type: ignore[arg-type]
