"""Training equals DDP's: the options that tests train with, the reference, and the test in one call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from tests.support import engines, models

# A model's blocks are compiled in AOT, all of it in MODEL; without code generation: the graphs and passes are the same.
EAGER: dict[str, Any] = {"compile": False}
AOT: dict[str, Any] = {"compile": "blocks", "compile_options": {"backend": "aot_eager"}}
MODEL: dict[str, Any] = {"compile": "model", "compile_options": {"backend": "aot_eager"}}

# What tests go over: every stage; those whose code differs, the rest with --long; what a region is; and cells that have
# each stage, eager and compiled code. The last are (stage, scope).
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
ENDS = pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
SCOPES = pytest.mark.parametrize("scope", [False, "blocks"])
CELLS: list[tuple[int, Any]] = [(1, "blocks"), (2, False), (3, False), (3, "blocks")]

Loss = Callable[[nn.Module, Any], Tensor]  # of a model and a batch, a mean


def mean_backward(loss: Callable[[int], Tensor]) -> None:
    """Adds DDP's gradients, in one process: those of the mean over ranks of ``loss(rank)``."""
    for rank in range(models.world()):
        (loss(rank) / models.world()).backward()


def reference(
    twin: nn.Module,
    steps: int | Iterable[int],
    loss: Loss = engines.token_loss,
    data: Callable[[int], Sequence[Any]] = models.Batches,
    optimizer: torch.optim.Optimizer | None = None,
    lr: float = 0.5,
) -> None:
    """Trains a plain model as DDP would, with SGD if no optimizer is given.

    Args:
        steps: how many, or the numbers of their batches.
        data: a rank's batches.
    """
    twin.to(models.device())
    optimizer = optimizer or torch.optim.SGD(twin.parameters(), lr=lr)
    batches = [data(rank) for rank in range(models.world())]
    for number in range(steps) if isinstance(steps, int) else steps:
        optimizer.zero_grad()
        of_ranks = [move_data_to_device(batch[number], models.device()) for batch in batches]
        for batch in of_ranks:
            loss(twin, batch).backward()
        for parameter in twin.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(models.world())  # not the loss: float8 rounds a third of a gradient otherwise
        optimizer.step()


@dataclass
class Trained:
    """What the engine had counted when training ended."""

    stats: Any
    compiled: Any
    eager_reads: dict[str, int]
    resident: list[str]


def assert_trains_like_ddp(
    model: nn.Module,
    stage: int,
    *,
    steps: int = 3,
    loss: Loss = engines.token_loss,
    data: Callable[[int], Sequence[Any]] = models.Batches,
    lr: float = 0.5,
    tolerance: float = 1e-6,
    **options: Any,
) -> Trained:
    """Trains ``model``, on every rank of a test, and asserts that SGD leaves the parameters that DDP leaves.

    Args:
        options: of the strategy; :data:`EAGER`, :data:`AOT` or :data:`MODEL` and more.

    Returns:
        What shows that the path which the test names is the one that ran.
    """
    twin, start = copy.deepcopy(model), copy.deepcopy(model)
    own = data(models.rank())
    with engines.engine(model, stage, **options) as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        engine.attach_optimizers([optimizer])
        for number in range(steps):
            engines.step(engine, optimizer, lambda number=number: loss(model, own[number]))  # type: ignore[misc]
        runtime = engine.runtime
        reads, resident = dict(runtime.eager_reads()), runtime.core.resident_units()
        trained = Trained(runtime.stats(), engine.regions.stats, reads, resident)
    reference(twin, steps, loss, data, lr=lr)
    assert models.deviation(twin, start) > 1e3 * tolerance, "the reference hardly moved: the test would see nothing"
    assert models.deviation(model, twin) <= tolerance
    return trained
