"""Random programs that freeze and train parameters anywhere in accumulations and windows, against one process.

See [Note: frozen in an accumulation] in csrc/gradients.cpp.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile.engine import Engine
from tests.support import models, twins
from tests.support.harness import on_ranks
from tests.support.parity import EAGER

WORLD, STEPS, PROGRAMS = 2, 4, 25


class Routed(nn.Module):
    """A rank may leave out some of its layers (``skip``)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.skip: frozenset[str] = frozenset()

    def forward(self, x: Tensor) -> Tensor:  # [rows, 4]
        x = torch.tanh(self.a(x))
        for name in ("b", "c"):
            x = x if name in self.skip else torch.tanh(self.get_submodule(name)(x))
        return self.d(x if "scale" in self.skip else x * self.scale)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Freeze:
    """``prefix``: of the parameters' names; ``trains``: whether they are trained from now on."""

    prefix: str
    trains: bool


@dataclass(frozen=True)
class Backward:
    """``skips``: what each rank leaves out; ``raw``: whether it runs past the strategy."""

    number: int
    skips: tuple[frozenset[str], ...]
    raw: bool


@dataclass(frozen=True)
class Zero:
    """Drops all gradients."""


Op = Freeze | Backward | Zero


@dataclass(frozen=True)
class Step:
    """One step of the optimizer. ``kind``: what its backwards are inside of; an accumulation may end without one."""

    kind: str
    ops: tuple[Op, ...]
    max_bytes: int | None


def _program(seed: int, alike: bool) -> list[Step]:
    """``alike``: whether the ranks leave out the same layers, as stage 3 asks for."""
    rng, steps = random.Random(seed), []
    for _ in range(STEPS):
        kind, ops = rng.choice(["accumulation", "accumulation", "open", "window"]), list[Op]()
        for _ in range(rng.randint(1, 4)):
            for _ in range(rng.randint(0, 2)):
                prefix = rng.choice(["a.", "a.weight", "b.", "b.bias", "c.", "c.weight", "d.weight", "scale"])
                ops.append(Freeze(prefix, rng.random() < 0.4))
            if kind != "window" and rng.random() < 0.15:
                ops.append(Zero())
            skips = [frozenset(n for n in ("b", "c", "scale") if rng.random() < 0.35) for _ in range(WORLD)]
            both = (skips[0],) * WORLD if alike else tuple(skips)
            ops.append(Backward(rng.randint(0, 5), both, rng.random() < 0.15))
        steps.append(Step(kind, tuple(ops), rng.choice([None, 0, 200])))
    return steps


def _freeze(model: nn.Module, op: Freeze) -> None:
    for name, parameter in model.named_parameters():
        if name.startswith(op.prefix):
            parameter.requires_grad_(op.trains)


def _sharded(engine: Engine, optimizer: torch.optim.Optimizer, program: list[Step]) -> Iterator[None]:
    """Yields after each step."""
    model: Any = engine.model

    def run(op: Op) -> None:
        if isinstance(op, Freeze):
            _freeze(model, op)
        elif isinstance(op, Zero):
            optimizer.zero_grad()
        elif any(parameter.requires_grad for parameter in model.parameters()):
            model.skip = op.skips[models.rank()]
            with engine.training_step():
                loss = twins.loss(model, twins.mine(op.number))
                if loss.requires_grad and op.raw:
                    loss.backward()  # type: ignore[no-untyped-call]
                elif loss.requires_grad:
                    with engine.backward(loss):
                        loss.backward()  # type: ignore[no-untyped-call]

    for step in program:
        last = max(number for number, op in enumerate(step.ops) if isinstance(op, Backward))
        inside = {"accumulation": last, "open": len(step.ops), "window": len(step.ops)}[step.kind]
        with ExitStack() as stack:
            if step.kind == "window":
                stack.enter_context(engine.windows.open("auto", step.max_bytes, None))
            else:
                stack.enter_context(engine.accumulation())
            for op in step.ops[:inside]:
                run(op)
        for op in step.ops[inside:]:
            run(op)
        optimizer.step()
        yield
        optimizer.zero_grad()


def _alone(model: Any, optimizer: torch.optim.Optimizer, program: list[Step]) -> Iterator[None]:
    """The same in one process, with the mean over ranks."""
    for step in program:
        for op in step.ops:
            if isinstance(op, Freeze):
                _freeze(model, op)
            elif isinstance(op, Zero):
                optimizer.zero_grad()
            else:
                for rank, skip in enumerate(op.skips):
                    model.skip = skip
                    loss = twins.loss(model, twins.batch(rank, op.number)) / WORLD
                    if loss.requires_grad:
                        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield
        optimizer.zero_grad()


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(WORLD, timeout=300.0)
def test_freezing_anywhere(stage: int) -> None:
    for seed in range(PROGRAMS):
        program = _program(seed, alike=stage == 3)
        options = {"defer_grad_sync": seed % 2 == 0, "unit_bytes": 1 if seed % 5 else 10**6, **EAGER}
        make = torch.optim.AdamW if seed % 4 == 0 else torch.optim.SGD
        with twins.pair(stage, Routed, keep_gradients=False, **options) as (engine, twin, _):
            optimizer, other = (make(model.parameters(), lr=0.1) for model in (engine.model, twin))
            engine.attach_optimizers([optimizer])
            for number, _ in enumerate(
                zip(_sharded(engine, optimizer, program), _alone(twin, other, program), strict=True)
            ):
                assert twins.deviation(engine, twin) <= 1e-5, (seed, number, program)
