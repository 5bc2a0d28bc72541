"""The rates that a plan measures: of one block, and of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zerocompile.config import Config
from lightning_zerocompile.plan.plan import Machine, make_plan
from lightning_zerocompile.plan.timing import block_rate
from lightning_zerocompile.plan.trace import PlanError

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.seen: list[Any] = []

    def forward(self, x: Tensor, mask: Tensor, *, scale: float) -> Tensor:  # [rows, width], [rows]
        self.seen.append((tuple(x.shape), x.dtype, mask.dtype, scale, self.layer.weight.dtype, x.is_meta))
        return F.relu(self.layer(x)) * mask[:, None] * scale


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:  # [rows, 8]
        x = self.first(x)
        for block in self.blocks:
            x = block(x, torch.ones(len(x), dtype=torch.bool), scale=0.5)
        return x


def _loss(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _rate(model: nn.Module, name: str = "blocks.1", rows: int = 32, **changes: Any) -> float:
    options: dict[str, Any] = {"dtype": None, "autocast": None, "compiled": None, "step": _loss, **changes}
    return block_rate(model, torch.randn(rows, 8), name, CPU, **options)


@pytest.mark.parametrize("meta", [False, True])
def test_the_block_runs_with_its_shapes(meta: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the blocks, alone, with data, in the dtype of the run; the user's module stays as it is."""
    with torch.device("meta" if meta else "cpu"):
        model = Model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    seen: list[Any] = []
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, *a, **k: (seen.append(self), forward(self, *a, **k))[1])
    assert _rate(model, dtype=torch.bfloat16) > 0
    timed = seen[-1]
    assert timed.seen[-1] == ((32, 64), torch.bfloat16, torch.bool, 0.5, torch.bfloat16, False)
    assert float(timed.layer.weight.detach().float().std()) > 0.01 and timed.layer.weight.device == CPU
    assert all(seen[k] is timed for k in range(-10, 0))  # it is repeated
    assert all(not block.seen for block in model.blocks)  # type: ignore[union-attr]
    assert all(p.grad is None and (meta or torch.equal(p, before[name])) for name, p in model.named_parameters())


def test_the_rate_is_flops_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward and both products of a backward, 2 n k m each, in the median of the runs."""
    from lightning_zerocompile.plan import timing

    clock = iter([0.0, 9.0] * timing.WARM_UP + [0.0, 0.5] * 4 + [0.0, 3.0] * 3)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    assert _rate(Model()) == 3 * 2 * 32 * 64 * 64 / 0.5


def test_a_plan_takes_what_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is not given; a block that is compiled is compiled for it."""
    compiled: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda block, **options: (compiled.append(options), block)[1])
    config = Config(backend="aot_eager")
    plan = make_plan(
        Model(), torch.randn(32, 8), world_size=1, config=config, step=_loss, measure=CPU, optimizer=torch.optim.SGD
    )
    machine = plan.machine
    assert compiled == [{"backend": "aot_eager", "dynamic": False}]
    assert machine.flops and machine.memory_bandwidth and plan.flops
    stage = plan.stages[0]
    update = (2 * stage.memory.masters + 2 * stage.memory.states + stage.memory.reduced) / machine.memory_bandwidth
    assert stage.seconds == pytest.approx(plan.flops / machine.flops + update)
    given = Machine(flops=1e9, memory_bandwidth=1e6)
    compiled.clear()
    plan = make_plan(
        Model(), torch.randn(32, 8), world_size=1, machine=given, config=config, step=_loss, measure=CPU,
        optimizer=torch.optim.SGD,
    )  # fmt: skip
    assert plan.machine == given and not compiled


class Uncalled(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)


class Wrong(Block):
    def forward(self, x: Tensor, mask: Tensor, *, scale: float) -> Tensor:
        if not isinstance(x, torch._subclasses.FakeTensor):
            raise ValueError("on purpose")
        return super().forward(x, mask, scale=scale)


def test_what_cannot_be_timed_says_why() -> None:
    with pytest.raises(PlanError, match=r"does not call the block `blocks\.1`"):
        _rate(Uncalled())
    model = Model()
    model.blocks[1] = Wrong(64)
    with pytest.raises(PlanError, match=r"`blocks\.1` cannot be timed on cpu: ValueError: on purpose\. Give `flops=`"):
        _rate(model)
    for block in model.blocks:
        block.layer = nn.Identity()  # type: ignore[union-attr, assignment]
        block.layer.weight = torch.zeros(())  # type: ignore[union-attr, assignment]
    with pytest.raises(PlanError, match="has no matrix product"):
        _rate(model, "blocks.0")
    with pytest.raises(PlanError, match="needs a model with repeated blocks"):
        make_plan(nn.Linear(8, 8), torch.randn(4, 8), world_size=1, step=_loss, measure=CPU)
    with pytest.raises(PlanError, match="needs a batch"):
        make_plan(Model(), world_size=1, step=_loss, measure=CPU)
