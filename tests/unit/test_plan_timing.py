"""The rates that a plan measures: of one block, and of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zerocompile.config import Config
from lightning_zerocompile.plan.machine import Machine
from lightning_zerocompile.plan.plan import make_plan
from lightning_zerocompile.plan.timing import STRATEGY, Seconds, Timer, step_seconds
from lightning_zerocompile.plan.trace import PlanError

CPU = torch.device("cpu")


BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


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


def _seconds(model: nn.Module, rows: int = 32, blocks: tuple[str, ...] = BLOCKS, **changes: Any) -> Seconds:
    options: dict[str, Any] = {"dtype": None, "autocast": None, "compiled": None, "step": _loss, **changes}
    return step_seconds(model, torch.randn(rows, 8), blocks, CPU, **options)


@pytest.mark.parametrize("meta", [False, True])
def test_the_block_runs_with_its_shapes(meta: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the blocks, alone, with data, in the dtype of the run; the user's module stays as it is."""
    with torch.device("meta" if meta else "cpu"):
        model = Model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    seen: list[Any] = []
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, *a, **k: (seen.append(self), forward(self, *a, **k))[1])
    assert _seconds(model, dtype=torch.bfloat16).device > 0
    timed = seen[-1]
    assert timed.seen[-1] == ((32, 64), torch.bfloat16, torch.bool, 0.5, torch.bfloat16, False)
    assert float(timed.layer.weight.detach().float().std()) > 0.01 and timed.layer.weight.device == CPU
    assert all(seen[k] is timed for k in range(-10, 0))  # it is repeated, and beside the fake step no other runs
    assert len([one for one in seen if one is not timed]) == 3
    assert all(not block.seen for block in model.blocks)  # type: ignore[union-attr]
    assert all(p.grad is None and (meta or torch.equal(p, before[name])) for name, p in model.named_parameters())


class Simulated(Timer):
    """A host and a device that works behind it. Work says what it needs of each."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda"))
        self.time, self.done = 0.0, 0.0

    def issue(self, host: float, device: float) -> None:
        self.time += host
        self.done = max(self.done, self.time) + device

    def now(self) -> float:
        return self.time

    def wait(self) -> None:
        self.time = max(self.time, self.done)

    def keep_busy(self, seconds: float) -> float:
        self.done = max(self.done, self.time) + seconds
        return self.done

    def passed(self, began: float) -> float:
        self.wait()
        return self.done - began


@pytest.mark.parametrize(("host", "device"), [(3.0, 1.0), (1.0, 3.0)])
def test_host_and_device_are_timed_apart(host: float, device: float) -> None:
    """Waited for after each run, a run would take 4 seconds, whichever of the two is the limit."""
    timer = Simulated()
    found = timer.seconds(lambda: timer.issue(host, device))
    assert (found.host, found.device) == (pytest.approx(host), pytest.approx(device))


def test_a_step_is_its_blocks_and_what_is_around_them() -> None:
    """Two kinds of blocks, each timed once; the rest with the blocks replaced; its gradients reach the first layer."""
    timer = Simulated()
    timed: list[tuple[str, int]] = []

    class Wide(Model):
        def __init__(self) -> None:
            super().__init__()
            self.blocks.append(nn.Sequential(nn.Linear(64, 64), nn.ReLU()))
            self.reached = 0

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks[:3]:
                x = block(x, torch.ones(len(x), dtype=torch.bool), scale=0.5)
            return self.blocks[3](self.blocks[3](x))

    def loss(model: Any, batch: Tensor) -> Tensor:
        value = _loss(model, batch)
        if isinstance(value, torch._subclasses.FakeTensor):
            return value
        held = {name: p.is_meta for name, p in model.named_parameters()}
        assert {name for name, meta in held.items() if not meta} == {"first.weight", "first.bias"}
        value.register_hook(lambda _: timer.issue(0.5, 0.25))
        model.first.weight.register_hook(lambda _: timed.append(("outside", 1)))
        return value

    def compiled(block: nn.Module) -> Any:
        timed.append((type(block).__name__, 0))
        seconds = (2.0, 1.0) if isinstance(block, Block) else (1.0, 8.0)

        def run(*args: Any, **kwargs: Any) -> Any:
            timer.issue(*seconds)
            return block(*args, **kwargs)

        return run

    names = (*BLOCKS, "blocks.3")
    found = _seconds(Wide(), blocks=names, step=loss, compiled=compiled, timer=timer)
    assert [one for one in timed if one[1] == 0] == [("Block", 0), ("Sequential", 0)] and ("outside", 1) in timed
    assert found == Seconds(pytest.approx(3 * 2 + 2 * 1 + 0.5), pytest.approx(3 * 1 + 2 * 8 + 0.25))


def test_seconds_are_of_the_slower_of_host_and_device() -> None:
    """And the optimizer's update follows, as long as memory, the host or the link to host memory needs for it."""
    options: dict[str, Any] = {
        "world_size": 1, "step": _loss, "optimizer": torch.optim.SGD, "stages": [3], "config": Config(compile=False)
    }  # fmt: skip

    def seconds(**machine: Any) -> float:
        made = make_plan(Model(), torch.randn(32, 8), machine=Machine(**machine), **options)
        found = made.stages[0].seconds
        assert found is not None
        return found

    device = seconds(flops=1e6)
    assert seconds(flops=1e6, host=device / 2, call=1e-12) == pytest.approx(device)
    units, parameters = 4, 8
    own = (STRATEGY[3].unit * units + STRATEGY[3].parameter * parameters) * 1e-3
    step = (STRATEGY[3].step + STRATEGY[3].stepped * parameters) * 1e-3
    assert seconds(flops=1e6, host=10 * device, call=1e-3) == pytest.approx(10 * device + own + step)
    update = seconds(flops=1e6, memory_bandwidth=1e6) - device
    options["config"] = Config(compile=False, optimizer_in_backward=True)
    assert 0 < update < device / 2  # the backward is twice the forward
    assert seconds(flops=1e6, memory_bandwidth=1e6) == pytest.approx(device)
    assert 0 < seconds(flops=1e6, memory_bandwidth=1e2) - 1e4 * update < device  # the forward
    options["config"] = Config(compile=False, offload="optimizer", param_dtype=torch.bfloat16)
    options["compute_dtype"] = torch.bfloat16
    options["optimizer"] = torch.optim.AdamW
    plan = make_plan(Model(), torch.randn(32, 8), **options)
    host = plan.stages[0].memory.host
    assert host == 12 * plan.parameters
    assert seconds(flops=1e6, link=1e3) - seconds(flops=1e6) == pytest.approx(2 * host / 1e3)
    both = {"offload": "optimizer", "optimizer_in_backward": True}
    options["config"] = Config(compile=False, param_dtype=torch.bfloat16, **both)
    assert 0 < seconds(flops=1e6, link=1e3) - 2 * host / 1e3 < device / 2  # the forward; the backward is beside them
    assert seconds(flops=1e6, link=1e9) == pytest.approx(device)
    memory = make_plan(Model(), torch.randn(32, 8), **options).stages[0].memory
    block = 12 * max(sum(p.numel() for p in block.parameters()) for block in Model().blocks)
    options["config"] = Config(compile=False, param_dtype=torch.bfloat16, optimizer_in_backward=True)
    without = make_plan(Model(), torch.randn(32, 8), **options).stages[0].memory
    assert (memory.host, memory.masters, memory.states) == (host, 2 * plan.parameters, 0)
    assert memory.backward_peak - without.backward_peak == 3 * block - (12 - 2) * plan.parameters


def test_a_plan_takes_what_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is not given; a block that is compiled is compiled for it."""
    compiled: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda block, **options: (compiled.append(options), block)[1])
    config = Config(compile_options={"backend": "aot_eager"})
    plan = make_plan(
        Model(), torch.randn(32, 8), world_size=1, config=config, step=_loss, measure=CPU, optimizer=torch.optim.SGD
    )
    machine = plan.machine
    assert compiled == [{"backend": "aot_eager", "dynamic": False}]
    assert machine.flops and machine.memory_bandwidth and plan.flops
    stage = plan.stages[0]
    memory = stage.memory  # masters are read once more, and full values written, to gather these
    update = (3 * memory.masters + 2 * memory.states + memory.reduced + memory.resident) / machine.memory_bandwidth
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
    with pytest.raises(PlanError, match=r"calls none of the blocks \(`blocks\.0`"):
        _seconds(Uncalled())
    model = Model()
    model.blocks[1] = Wrong(64)
    with pytest.raises(PlanError, match=r"`blocks\.1` cannot be timed on cpu: ValueError: on purpose\. Give `flops=`"):
        _seconds(model)

    def fails(model: Any, batch: Tensor) -> Tensor:
        if not isinstance(batch, torch._subclasses.FakeTensor):
            raise ValueError("outside")
        return _loss(model, batch)

    with pytest.raises(
        PlanError, match=r"around its blocks cannot be timed on cpu: ValueError: outside\. Give `flops=`"
    ):
        _seconds(Model(), step=fails)
    with pytest.raises(PlanError, match="needs a model with repeated blocks"):
        make_plan(nn.Linear(8, 8), torch.randn(4, 8), world_size=1, step=_loss, measure=CPU)
    with pytest.raises(PlanError, match="needs a batch"):
        make_plan(Model(), world_size=1, step=_loss, measure=CPU)
