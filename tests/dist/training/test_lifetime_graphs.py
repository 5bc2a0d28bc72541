"""Full gradients are gone when a backward ends, whatever its graphs are; in an accumulation they are all there is.

Source of the cases: DeepSpeed PR 8036, whose first version freed its buckets in the first graph only.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_zerocompile.config import Config
from lightning_zerocompile.engine import Engine
from tests.support import engines, models
from tests.support.alive import Partitions
from tests.support.harness import on_ranks
from tests.support.memory import Formula, Stack
from tests.support.parity import reference

CELLS: list[tuple[int, Any]] = [(1, "blocks"), (3, False), (3, "blocks")]
LONG: list[tuple[int, Any]] = [(1, False), (2, False), (2, "blocks"), (3, "model")]
SIZE = 6


class Watched(torch.autograd.Function):
    """`x @ weight.T`; remembers the weight's raw gradients weakly."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seen: list[weakref.ref[Any]]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.seen = seen
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        raw = grads[0].t() @ x
        ctx.seen.append(weakref.ref(raw.untyped_storage()))
        return grads[0] @ weight, raw, None


class Block(nn.Module):
    """A linear map between two graph breaks: the first graph and the last have no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:  # [batch, SIZE]
        x = torch.sin(x)
        torch._dynamo.graph_break()
        x = x + self.linear(x)
        torch._dynamo.graph_break()
        return torch.cos(x)


class Net(nn.Module):
    """Blocks, of which some are frozen, and a weight whose raw gradients are watched (eagerly)."""

    def __init__(self, frozen: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(SIZE, SIZE))
        self.layers = nn.ModuleList(Block() for _ in range(3))
        for index in frozen:
            self.layers[index].requires_grad_(False)
        self.seen: list[weakref.ref[Any]] = []

    def forward(self, x: Tensor) -> Tensor:  # [batch, SIZE]
        x = self.watched(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    @torch.compiler.disable
    def watched(self, x: Tensor) -> Tensor:
        return Watched.apply(x, self.first, self.seen)


def _data(rank: int, number: int) -> Tensor:
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(10 * rank + number))


def _plain(twin: nn.Module, steps: int) -> None:
    reference(twin, steps, lambda module, x: module(x), lambda rank: [_data(rank, n) for n in range(steps)])


@on_ranks(timeout=240)
def test_buckets_are_gone(long: bool) -> None:
    """Graphs without parameters, without reductions, of frozen blocks, between breaks: no raw gradient stays."""
    cells = CELLS + LONG * long
    problems = []
    for frozen in ((), (0,), (0, 1, 2)):  # the first block (its graphs reduce nothing), or all
        twin = Net(frozen)
        state = {name: value.clone() for name, value in twin.state_dict().items()}
        _plain(twin, 3)
        for stage, scope in cells:
            torch._dynamo.reset()
            counters.clear()
            net = Net(frozen)
            net.load_state_dict(state)
            model, cell = models.Whole(net), f"frozen {frozen} stage {stage} {scope}"
            with engines.engine(model, stage, compile=scope) as engine:
                optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
                engine.attach_optimizers([optimizer])
                for number in range(3):
                    with engine.training_step():
                        engines.backward(engine, model(_data(models.rank(), number).to(models.device())))
                    gc.collect()
                    alive = [reference() is not None for reference in net.seen]
                    if len(alive) != number + 1 or any(alive) or engine.runtime.core.deferred_bytes():
                        problems.append(f"{cell}: raw gradients alive after backward {number}: {alive}")
                    if engine.runtime.core.resident_units():
                        problems.append(f"{cell}: gathered after it: {engine.runtime.core.resident_units()}")
                    optimizer.step()
                reductions, expected = engine.runtime.stats().graph_reductions, 3 * 2 * (3 - len(frozen))
                if reductions != (expected if scope else 0):
                    problems.append(f"{cell}: graphs delivered {reductions} gradients")
                if scope and not counters["graph_break"]:
                    problems.append(f"{cell}: no graph breaks")
            if models.deviation(net, twin) > 1e-6:
                problems.append(f"{cell}: {models.deviation(net, twin)}")
    assert problems == [], "\n".join(problems)


@on_ranks(timeout=240)
def test_bytes_of_an_accumulation(long: bool) -> None:
    """Backwards that are not an accumulation's last: full gradients and no partition at stage 1, else the opposite."""
    cells = [*CELLS, (2, False)] + LONG * long
    problems = []
    for stage, scope in cells:
        torch._dynamo.reset()
        model, data = models.Whole(models.ByteModel()), models.Batches(models.rank())
        full = sum(4 * p.numel() for p in model.parameters())
        with engines.engine(model, stage, compile=scope) as engine:
            parameters = list(model.parameters())
            rows = [(-(-p.shape[0] // models.world()), p.shape[1:].numel()) if p.dim() else (1, 1) for p in parameters]
            exact = sum(4 * count * numel for count, numel in rows)
            optimizer = torch.optim.SGD(parameters, lr=0.5)
            engine.attach_optimizers([optimizer])
            for last in (False, False, True, False, True):
                partitions = Partitions(parameters)
                with nullcontext() if last else engine.accumulation(), engine.training_step():
                    engines.backward(engine, engines.token_loss(model, data[0]))
                seen = partitions.note(), engine.runtime.core.deferred_bytes()
                if seen != ((0, full) if stage == 1 and not last else (exact, 0)):
                    problems.append(f"stage {stage} {scope}: {seen}, of {full} and {exact} bytes")
                if last:
                    optimizer.step()
                    if partitions.alive() or engine.runtime.core.deferred_bytes():
                        problems.append(f"stage {stage} {scope}: alive after the step")
    assert problems == [], "\n".join(problems)


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_memory_formula(stage: int) -> None:
    """The parts of the formula that the GPU test predicts memory with, against the bytes of what one step makes of a
    stack of blocks in bfloat16."""
    width = 4 * models.world()
    formula = Formula(stage, models.world(), width, 4)
    held = Stack(width, 4, held=(0, 1))
    config = Config(stage=stage, compile=False)
    made = Engine(held, engines.place(), config, torch.bfloat16, torch.distributed.get_backend())
    with engines.closing(made) as engine:
        parameters = list(held.parameters())
        optimizer = torch.optim.AdamW(parameters)
        engine.attach_optimizers([optimizer])
        with engine.training_step():
            loss = held(torch.randn(4, width, dtype=torch.bfloat16, device=models.device())).float().sum()
            engines.backward(engine, loss)
        partition = Partitions(parameters).note()
        engine.step(optimizer, lambda: None)
        states = [s for p in parameters for n, s in optimizer.state[p].items() if n != "step"]
        assert formula.masters == sum(p.to_local().nbytes for p in parameters)
        assert formula.states == sum(s.to_local().nbytes for s in states)
        assert formula.partition == formula.after_backward - formula.between_steps == partition
        assert formula.resident == engine.runtime.stats().resident_bytes
        assert formula.unit == sum(grad.nbytes for grad in held.hold) // 2
