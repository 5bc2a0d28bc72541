"""On GPUs: what is in host memory streams beside the backward, and nobody reads what has not come or not gone yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule

from lightning_zerocompile.optim.slabs import local_of
from tests.support import engines, models
from tests.support.device_time import beside, spans, total
from tests.support.harness import Worlds
from tests.support.memory import Stack

pytestmark = pytest.mark.gpu
WIDTH, BLOCKS, STEPS = 1024, 12, 6
ROWS = 256  # so few that a unit's copies take longer than its backward
OFFLOAD: dict[str, Any] = {"offload": "optimizer"}
BESIDE: dict[str, Any] = {**OFFLOAD, "optimizer_in_backward": True}


class _Routed(Stack):
    """Uses its layers in another order in every second step, and fails before layer `fails_at` in the backward."""

    route: tuple[int, ...] = tuple(range(BLOCKS))
    fails_at: int | None = None

    def forward(self, x: Tensor) -> Tensor:  # [rows, width]
        for number in self.route:
            x = engines.FailsInBackward.apply(x) if number == self.fails_at else x
            x = self.layers[number](x)
        return x


def _optimizer(engine: Any, model: nn.Module, fused: bool) -> Any:
    kind: Any = torch.optim.AdamW if fused else torch.optim.SGD
    arguments = {"lr": 1e-3, "eps": 1e-3, "fused": True} if fused else {"lr": 0.5, "momentum": 0.9}
    optimizer = kind(model.parameters(), **arguments)
    engine.attach_optimizers([optimizer])
    return optimizer


def _input(generator: torch.Generator, rows: int = ROWS, width: int = WIDTH) -> Tensor:
    return torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, generator=generator)


def _one(engine: Any, model: nn.Module, optimizer: Any, x: Tensor) -> None:
    with engine.training_step():
        engines.backward(engine, model(x).float().square().mean())
    engine.step(optimizer, lambda: None)


def _rows(engine: Any, optimizer: Any) -> list[Tensor]:
    """This rank's rows of each master and of its states, on the CPU."""
    found = []
    for sharded in engine.runtime.sharded_parameters:
        states = [kept for kept in optimizer.state[sharded.master].values() if kept.dim()]
        found += [local_of(kept).detach().cpu().clone() for kept in (sharded.master, *states)]
    return found


def _trained(stage: int, scope: Any, fused: bool, reroutes: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Rows and states after some steps, bytes copied, and how many units a backward has updated."""
    torch.manual_seed(0)
    model = _Routed(WIDTH, BLOCKS).to(torch.bfloat16)
    with engines.engine(model, stage, compile=scope, compile_options={"backend": "inductor"}, **options) as engine:
        optimizer, generator = _optimizer(engine, model, fused), torch.Generator("cuda").manual_seed(models.rank())
        for step in range(STEPS):
            if reroutes:
                order = tuple(range(BLOCKS)) if step % 2 else tuple(reversed(range(BLOCKS)))
                model.route = order[: BLOCKS - step % 3]
            _one(engine, model, optimizer, _input(generator))
            assert engine.steps._offload._beside is None
            for sharded in engine.runtime.sharded_parameters:
                if options.get("optimizer_in_backward") and sharded.on_host:
                    units = engine.steps._offload._slabs[optimizer].values()
                    (slot,) = (slab.slots[sharded.master] for slab in units if sharded.master in slab.slots)
                    assert torch.equal(slot.shown.cpu(), sharded.local.to(torch.bfloat16))
        stats = engine.runtime.stats()
        return {
            "rows": _rows(engine, optimizer),
            "copied": (stats.offload_in_bytes, stats.offload_out_bytes),
            "held": stats.offload_bytes,
            "updated": stats.updated_in_backward,
        }


@pytest.mark.parametrize(
    ("stage", "scope", "fused", "reroutes"),
    [(1, "blocks", True, False), (2, False, False, False), (3, "blocks", True, False), (3, False, False, True)],
)
def test_numbers_are_those_without(worlds: Worlds, stage: int, scope: Any, fused: bool, reroutes: bool) -> None:
    """To the bit. The copies are slower than the backward: a read before a copy is done would see old bytes."""
    plain = worlds(2).run(_trained, stage, scope, fused, reroutes, {}, timeout=300)
    beside = worlds(2).run(_trained, stage, scope, fused, reroutes, BESIDE, timeout=300)
    for expected, seen in zip(plain, beside, strict=True):
        assert expected["held"] == 0 < seen["held"]
        assert all(torch.equal(one, two) for one, two in zip(expected["rows"], seen["rows"], strict=True))
        assert seen["copied"][1] == STEPS * seen["held"]
        if not reroutes:
            assert seen["copied"][0] == seen["copied"][1]
            assert seen["updated"] >= (STEPS - 1) * (BLOCKS - 2)


def _failed(stage: int, options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Rows and states after a backward that has raised half-way, and after two more steps from what was before it."""
    torch.manual_seed(0)
    model = _Routed(WIDTH, BLOCKS).to(torch.bfloat16)
    with engines.engine(model, stage, compile=False, optimizer_in_backward=True, **options) as engine:
        optimizer, generator = _optimizer(engine, model, False), torch.Generator("cuda").manual_seed(models.rank())
        for _ in range(2):
            _one(engine, model, optimizer, _input(generator))
        before, model.fails_at = _rows(engine, optimizer), BLOCKS // 2
        with engine.training_step():
            loss = model(_input(generator)).float().square().mean()
            with pytest.raises(ValueError, match="on purpose"):
                engines.backward(engine, loss)
        torch.cuda.synchronize()
        model.fails_at, after = None, _rows(engine, optimizer)
        assert engine.steps._offload._beside is None
        kept = iter(before)
        with torch.no_grad():
            for sharded in engine.runtime.sharded_parameters:
                states = [state for state in optimizer.state[sharded.master].values() if state.dim()]
                for one in (sharded.master, *states):
                    local_of(one).copy_(next(kept))
        engine.steps.restored()
        for _ in range(2):
            _one(engine, model, optimizer, _input(generator))
        return after, _rows(engine, optimizer)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_backward_that_raises(worlds: Worlds, stage: int) -> None:
    """Host memory has what the device would have without an offload: some units updated, the others as they were."""
    plain, offloaded = (worlds(2).run(_failed, stage, options, timeout=300) for options in ({}, OFFLOAD))
    for expected, seen in zip(plain, offloaded, strict=True):
        for one, two in zip(expected, seen, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def _memory(stage: int, options: dict[str, Any]) -> dict[str, int]:
    """Bytes that are allocated after each part of the last step, and its peak."""
    model = Stack(2048, BLOCKS).to(torch.bfloat16)
    with engines.engine(model, stage, compile=False, copy_engine=False, **options) as engine:
        optimizer, generator = _optimizer(engine, model, True), torch.Generator("cuda").manual_seed(0)
        seen: dict[str, int] = {}
        for step in range(5):
            torch.cuda.synchronize()
            seen[f"between {step}"] = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with engine.training_step():
                loss = model(_input(generator, width=2048)).float().square().mean()
                engines.backward(engine, loss)
            del loss
            torch.cuda.synchronize()
            seen["after backward"] = torch.cuda.memory_allocated()
            engine.step(optimizer, lambda: None)
            seen["peak"] = torch.cuda.max_memory_allocated()
        seen["slab"] = engine.runtime.host_traffic.held // BLOCKS
        return seen


@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_are_gone_after_the_backward(worlds: Worlds, stage: int) -> None:
    """Three units are on the device beside the backward at most, and none after it; nothing stays from step to step."""
    slack = 4 * 2**20
    plain = worlds(2).run(_memory, stage, {"optimizer_in_backward": True}, timeout=300)
    for before, seen in zip(plain, worlds(2).run(_memory, stage, BESIDE, timeout=300), strict=True):
        assert seen["slab"] > 2 * slack
        assert abs(seen["between 4"] - seen["between 3"]) <= slack, seen
        assert abs(seen["after backward"] - seen["between 4"]) <= slack, seen
        rest = before["peak"] - before["between 4"]  # all that is not kept from step to step
        assert seen["peak"] - seen["between 4"] <= rest + 3 * seen["slab"] + slack, (before, seen)


_WIDE, _MANY = 4096, 8192


def _beside_compute(stage: int, options: dict[str, Any]) -> dict[str, float]:
    """The share of the matrix products' time in which a copy runs, by the copy's direction."""
    torch.manual_seed(0)
    model = Stack(_WIDE, 8).to(torch.bfloat16)
    with engines.engine(
        model, stage, compile="blocks", compile_options={"backend": "inductor"}, copy_engine=False, **options
    ) as engine:
        optimizer, x = _optimizer(engine, model, True), _input(torch.Generator("cuda"), _MANY, _WIDE)
        for _ in range(4):
            _one(engine, model, optimizer, x)
        torch.cuda.synchronize()
        # the profiler's own start holds up one rank more than another
        warm_up = schedule(wait=0, warmup=2, active=3)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], schedule=warm_up) as profiler:
            for _ in range(4):
                _one(engine, model, optimizer, x)
                torch.cuda.synchronize()
                profiler.step()
        events = profiler.events()
    compute = spans(events, "nvjet", "gemm")
    return {word: beside(compute, spans(events, f"Memcpy {word}")) / total(compute) for word in ("HtoD", "DtoH")}


@pytest.mark.parametrize("stage", [1, 3])
def test_copies_run_beside_the_backward(worlds: Worlds, stage: int, a_gpu_a_rank: None) -> None:
    """The backward is two thirds of the products. Without the option nothing goes out before its end."""
    after = worlds(2).run(_beside_compute, stage, OFFLOAD, timeout=300)
    for former, shares in zip(after, worlds(2).run(_beside_compute, stage, BESIDE, timeout=300), strict=True):
        assert former["DtoH"] < 0.05, former
        assert shares["DtoH"] > 0.25 and shares["HtoD"] > 0.25, shares
