"""Fabric's plain loop trains as with Fabric's DDP: every call of it, on the engine that the Trainer's strategy has."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler

from lightning_zerocompile import ZeroCompileFabricStrategy
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER

MODES = {"eager": EAGER, "aot_eager": AOT}


def _loop(fabric: L.Fabric, model: Any, optimizer: Any, steps: int = 4, **clip: Any) -> list[float]:
    """Every second step has two forwards and two backwards, of which the first does not reduce. Returns the norms."""
    batches, norms = models.Batches(models.rank()), []
    for number in range(steps):
        micro = [batches[2 * number], batches[2 * number + 1]][: 1 + number % 2]
        for place, batch in enumerate(micro):
            with fabric.no_backward_sync(model, enabled=place + 1 < len(micro)):
                fabric.backward(engines.token_loss(model, batch) / len(micro))
        if clip:
            norms.append(fabric.clip_gradients(model, optimizer, **clip))
        optimizer.step()
        optimizer.zero_grad()
    return [float(norm) for norm in norms if norm is not None]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def _momenta() -> dict[str, Any]:
    """The whole state of an optimizer that has made a step."""
    model = models.ByteModel()
    optimizer = _sgd(model)
    engines.token_loss(model, torch.arange(models.LENGTH)[None] % models.VOCABULARY).backward()
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
@on_ranks()
def test_it_trains_as_fabric_s_ddp(stage: int, mode: str) -> None:
    """The optimizer is made before the set-up at odd stages, and after it at even ones. It loads a whole state."""
    ours, theirs = models.pair(models.ByteModel)
    ddp, momenta = models.make_fabric("ddp"), _momenta()
    clip = {"max_norm": 0.05} if mode == "eager" else {"clip_val": 0.01}
    model, optimizer = ddp.setup(theirs, _sgd(theirs))
    optimizer.load_state_dict(copy.deepcopy(momenta))  # torch does not copy what it loads
    expected = _loop(ddp, model, optimizer, **clip)
    fabric = models.make_fabric(ZeroCompileFabricStrategy(stage, **MODES[mode]))
    if stage % 2:
        model, optimizer = fabric.setup(ours, _sgd(ours))
    else:
        model = fabric.setup_module(ours)
        optimizer = fabric.setup_optimizers(_sgd(model))
    optimizer.load_state_dict(momenta)
    norms = _loop(fabric, model, optimizer, **clip)
    stats, compiled = fabric.strategy.stats, fabric.strategy.compile_stats  # type: ignore[attr-defined]
    fabric.strategy.unshard()  # type: ignore[attr-defined]
    assert models.deviation(ours, theirs) <= 1e-6
    assert norms == pytest.approx(expected, abs=1e-6) and (mode != "eager" or len(norms) == 4)
    assert stats.reductions > 0 and (compiled.forward > 0 or mode == "eager" or stage > 1)


def _normed(strategy: Any, module: nn.Module) -> Tensor:
    """What this rank computes without gradients after a training step, whose statistics differ between the ranks."""
    fabric = models.make_fabric(strategy)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    fabric.backward(model(torch.randn(6, 4, device=fabric.device) + models.rank()).square().mean())
    optimizer.step()
    model.eval()
    with torch.no_grad():
        result: Tensor = model(torch.ones(2, 4, device=fabric.device)).cpu()
    return result


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_a_forward_without_gradients_has_the_buffers_of_ddp(stage: int) -> None:
    results = []
    for strategy in (ZeroCompileFabricStrategy(stage, **EAGER), "ddp"):
        torch.manual_seed(0)
        results.append(_normed(strategy, nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))))
    assert torch.allclose(*results, atol=1e-6)


@pytest.mark.parametrize("kind", ["full", "sharded"])
@on_ranks()
def test_save_and_load(kind: str, tmp_path: Path) -> None:
    """A run that is loaded in the middle goes on as one that was not interrupted."""
    options: dict[str, Any] = {"stage": 3, "state_dict_type": kind, **EAGER}
    start = models.ByteModel()
    whole, again = copy.deepcopy(start), copy.deepcopy(start)
    fabric = models.make_fabric(ZeroCompileFabricStrategy(**options))
    model, optimizer = fabric.setup(whole, _sgd(whole))
    _loop(fabric, model, optimizer, steps=2)
    path = fabric.broadcast(str(tmp_path / "saved"))
    more = {"numbers": np.arange(3)} if kind == "sharded" else {}  # an array has no truth value
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 2, **more})
    _loop(fabric, model, optimizer, steps=2)
    fabric.strategy.unshard()  # type: ignore[attr-defined]

    fabric = models.make_fabric(ZeroCompileFabricStrategy(**options))
    model, optimizer = fabric.setup(again, _sgd(again))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    rest = fabric.load(path, state, strict=not more, weights_only=False if more else None)
    assert state["step"] == 2 and list(rest) == list(more)
    _loop(fabric, model, optimizer, steps=2)
    fabric.strategy.unshard()  # type: ignore[attr-defined]
    assert models.deviation(again, whole) == 0


@pytest.mark.parametrize(
    ("stage", "mode"),
    [(1, "eager"), (3, "aot_eager"), *(pytest.param(s, "eager", marks=pytest.mark.long) for s in (2, 3))],
)
@on_ranks()
def test_scaled_losses(stage: int, mode: str) -> None:
    """As under DDP, with clipping; what was clipped and is not stepped is not scaled twice, or left scaled."""
    ours, theirs = models.pair(models.ByteModel)

    def scaling() -> MixedPrecision:
        return MixedPrecision("16-mixed", models.device(), GradScaler(models.device(), init_scale=64.0))

    ddp, fabric = (
        models.make_fabric(s, plugins=[scaling()]) for s in ("ddp", ZeroCompileFabricStrategy(stage, **MODES[mode]))
    )
    expected = _loop(ddp, *ddp.setup(theirs, _sgd(theirs)), max_norm=0.05)
    model, optimizer = fabric.setup(ours, _sgd(ours))
    assert _loop(fabric, model, optimizer, max_norm=0.05) == pytest.approx(expected, rel=2e-3)
    batch = models.Batches(models.rank())[0]
    fabric.backward(engines.token_loss(model, batch))
    first = fabric.clip_gradients(model, optimizer, max_norm=0.05)
    assert fabric.clip_gradients(model, optimizer, max_norm=0.05) <= 0.0501 < first  # it is unscaled once
    optimizer.zero_grad()
    fabric.backward(engines.token_loss(model, batch))
    with pytest.raises(RuntimeError, match=r"of this SGD were clipped, and a further backward.*after each clipping"):
        fabric.clip_gradients(model, optimizer, max_norm=0.05)
    with pytest.raises(RuntimeError, match="a further backward came before the optimizer's step"):
        optimizer.step()
    fabric.strategy.unshard()  # type: ignore[attr-defined]
    assert models.deviation(ours, theirs) <= 2e-4  # products are in half precision


@on_ranks()
def test_what_does_not_work_says_what_to_do() -> None:
    fabric = models.make_fabric("zerocompile_stage_1")
    with pytest.raises(RuntimeError, match=r"works after `fabric\.setup`"):
        fabric.setup_optimizers(_sgd(models.ByteModel()))
    with pytest.raises(RuntimeError, match="Identity has no parameters"):
        fabric.setup_module(torch.nn.Identity())
    fabric.setup_module(models.ByteModel())
    with pytest.raises(RuntimeError, match=r"shards one module.*ModuleDict"):
        fabric.setup_module(models.ByteModel())
    with pytest.raises(RuntimeError, match="not the model's"):
        fabric.setup_optimizers(_sgd(models.ByteModel()))
    fabric.strategy.unshard()  # type: ignore[attr-defined]


@on_ranks()
def test_a_part_that_the_user_compiled_is_taken_as_the_plain_one() -> None:
    ours, theirs = models.pair(models.ByteModel)
    ddp = models.make_fabric("ddp")
    _loop(ddp, *ddp.setup(theirs, _sgd(theirs)))
    head: Any = torch.compile(ours.head, backend="aot_eager")
    ours.head = head
    fabric = models.make_fabric(ZeroCompileFabricStrategy(3, **AOT))
    _loop(fabric, *fabric.setup(ours, _sgd(ours)))
    assert fabric.strategy.compile_stats.forward == 1  # type: ignore[attr-defined] # the blocks', not the head's
    fabric.strategy.unshard()  # type: ignore[attr-defined]
    assert ours.head is head and hasattr(vars(head)["forward"], "_torchdynamo_orig_callable")
    ours.head = head._orig_mod
    assert models.deviation(ours, theirs) <= 1e-6


@pytest.mark.parametrize("mode", ["aot_eager", pytest.param("eager", marks=pytest.mark.long)])
@on_ranks()
def test_unequal_work(mode: str) -> None:
    """Ranks run different numbers of forwards, of different layers, in training and in evaluation."""
    model, twin = models.pair(models.Routed)
    data = [models.Batches(rank) for rank in range(models.world())]
    mine, strategy = models.rank(), ZeroCompileFabricStrategy(3, **MODES[mode])
    fabric = models.make_fabric(strategy)
    sharded, optimizer = fabric.setup(model, _sgd(model))
    reference = _sgd(twin)
    for number in range(3):
        with strategy.unequal():
            total = torch.zeros((), device=fabric.device)
            for place in range(1 + 2 * mine):
                model.route = [(number + place) % 4, mine]
                total = total + engines.token_loss(sharded, data[mine][place])
            fabric.backward(total)
        optimizer.step()
        optimizer.zero_grad()
        with strategy.unequal(), torch.no_grad():
            for _ in range(mine):
                sharded(data[mine][0])
        for rank, batches in enumerate(data):
            for place in range(1 + 2 * rank):
                twin.route = [(number + place) % 4, rank]
                (engines.token_loss(twin, batches[place]) / models.world()).backward()
        reference.step()
        reference.zero_grad()
    assert strategy.stats.served > 0
    strategy.unshard()
    assert models.deviation(model, twin) <= 1e-6
    with pytest.raises(ValueError, match=r"fabric\.strategy\.unequal"):
        ZeroCompileFabricStrategy(3, unequal_work="evaluation")


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_back_to_a_state_in_memory(stage: int, kind: Any) -> None:
    """Of the optimizer and of the module, on all ranks, as under DDP."""
    ours, theirs = models.pair(models.ByteModel)
    fabric = models.make_fabric(ZeroCompileFabricStrategy(stage, state_dict_type=kind, **EAGER))
    model, optimizer = fabric.setup(ours, _sgd(ours))
    ddp = models.make_fabric("ddp")
    other, others = ddp.setup(theirs, _sgd(theirs))
    _loop(fabric, model, optimizer, 1)
    _loop(ddp, other, others, 1)
    kept = copy.deepcopy((model.module.state_dict(), optimizer.state_dict()))
    expected = copy.deepcopy((other.state_dict(), others.state_dict()))
    assert kept[1]["param_groups"][0]["lr"] == 0.5
    _loop(fabric, model, optimizer, 2)
    _loop(ddp, other, others, 2)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    other.load_state_dict(expected[0])
    others.load_state_dict(expected[1])
    _loop(fabric, model, optimizer, 3)
    _loop(ddp, other, others, 3)
    fabric.strategy.unshard()
    assert models.deviation(ours, theirs) <= 1e-6


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(models.Block(6) for _ in range(2))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:  # [batch, 6] -> [batch, 1]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def _penalty(fabric: L.Fabric, model: Any, x: Tensor) -> None:
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    fabric.backward(model(x.detach()).square().mean() + (slope.norm(dim=1) - 1).square().mean())


def _attack(fabric: L.Fabric, model: Any, x: Tensor) -> None:
    (slope,) = torch.autograd.grad(model(x).square().mean(), x)
    fabric.backward(model(x.detach() + 0.1 * slope.sign()).square().mean())


def _plain_backward(fabric: L.Fabric, model: Any, x: Tensor) -> None:
    model(x).square().mean().backward()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("step", "options"),
    [
        (_penalty, EAGER),
        (_attack, EAGER),
        (_attack, AOT),
        (_plain_backward, EAGER),
        (_plain_backward, AOT),
        (_plain_backward, EAGER | {"optimizer_in_backward": True}),
    ],
)
@on_ranks()
def test_a_gradient_is_taken_past_fabric(stage: int, step: Any, options: dict[str, Any]) -> None:
    """`torch.autograd.grad` of a model's output, and `loss.backward()`, with an accumulation of two in each step."""
    ours, theirs = models.pair(Critic)
    for module, strategy in ((theirs, "ddp"), (ours, ZeroCompileFabricStrategy(stage, **options))):
        fabric = models.make_fabric(strategy)
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
        for number in range(3):
            for micro in range(2):
                generator = torch.Generator().manual_seed(10 * number + 2 * models.rank() + micro)
                x = torch.randn(4, 6, generator=generator).to(fabric.device).requires_grad_()
                with fabric.no_backward_sync(model, enabled=micro == 0):
                    step(fabric, model, x)
            optimizer.step()
            optimizer.zero_grad()
    fabric.strategy.unshard()  # type: ignore[attr-defined]
    assert models.deviation(ours, theirs) <= 1e-6
