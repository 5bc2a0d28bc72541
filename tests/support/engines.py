"""The engine without Lightning's loop, for tests that look into the middle of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_zerocompile.config import Config
from lightning_zerocompile.engine import Engine
from tests.support import models


def make_engine(model: nn.Module, stage: int, **options: Any) -> Engine:
    """Shards ``model``; unless ``options`` say otherwise with aot_eager, and with small units not joined."""
    apart = {"unit_bytes": 1} if options.get("compile") == "model" else {}
    config = Config(stage=stage, **({"compile_options": {"backend": "aot_eager"}} | apart | options))
    return Engine(model, place(), config, config.param_dtype, torch.distributed.get_backend())


def compiled_here(yes: bool) -> contextlib.AbstractContextManager[Any]:
    """Whether this rank runs compiled code; ranks with different options are refused."""
    return contextlib.nullcontext() if yes else torch.compiler.set_stance("force_eager")


def place() -> torch.device:
    """This rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if models.device() == "cuda" else torch.device("cpu")


@contextmanager
def engine(model: nn.Module, stage: int, **options: Any) -> Iterator[Engine]:
    """:func:`make_engine`; the model is whole again after it, unless the body raised."""
    with closing(make_engine(model, stage, **options)) as made:
        yield made


@contextmanager
def closing(made: Engine) -> Iterator[Engine]:
    """Makes the model of ``made`` whole after the body, unless it raised."""
    try:
        yield made
    except BaseException:
        made.abandon()
        raise
    made.unshard()


def token_loss(model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:  # batch: [batch, length]
    """Next-token loss, a mean."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def anchored_loss(model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:  # batch: [batch, length]
    """A next-token loss that depends on ``ByteModel.shift``, too.

    Of :func:`token_loss` that parameter's gradient is the rounding of a zero: its sign depends on the order in which
    the ranks' parts are summed, and AdamW makes steps of it as long as any.
    """
    logits = model(batch[:, :-1]).flatten(0, 1).float()
    return F.cross_entropy(logits, batch[:, 1:].flatten()) + 0.1 * logits.square().mean()


def routed_loss(model: Any, part: tuple[list[int], Tensor]) -> Tensor:
    """:func:`token_loss` of a ``models.Routed``. ``part``: its route, and the batch."""
    model.route, batch = part
    return token_loss(model, batch)


def mean_backward(twin: nn.Module, number: int) -> None:
    """The gradients of DDP, computed here: the mean over all ranks of :func:`token_loss` on their batches."""
    for rank in range(models.world()):
        (token_loss(twin, models.Batches(rank)[number]) / models.world()).backward()


def window_reference(twin: nn.Module, micros: list[list[int]], lr: float = 0.5) -> None:
    """One SGD step per entry: the mean over ranks of the summed gradients of each rank's micro-batches."""
    optimizer = torch.optim.SGD(twin.to(models.device()).parameters(), lr=lr)
    data = [models.Batches(r) for r in range(models.world())]
    for numbers in micros:
        optimizer.zero_grad()
        for batches in data:
            for number in numbers:
                (token_loss(twin, batches[number]) / models.world() / len(numbers)).backward()
        optimizer.step()


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ValueError("on purpose")


def backward(engine: Engine, loss: Tensor) -> None:
    """A backward as the strategy runs it."""
    with engine.backward(loss):
        loss.backward()


def step(engine: Engine, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> float:
    """One step as the strategy runs it."""
    with engine.training_step():
        value = loss()
        backward(engine, value)
    optimizer.step()
    optimizer.zero_grad()
    return value.item()


def profiled_step(engine: Engine, model: nn.Module, batch: Tensor) -> profile:
    """What torch's profiler has seen of the second of two SGD steps."""
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach_optimizers([optimizer])

    def one() -> None:
        with engine.training_step():
            backward(engine, token_loss(model, batch))
        engine.step(optimizer, lambda: None)
        engine.apply_writes()  # while gloo's threads still record, the profiler may lose all other events

    one()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        one()
    return trace


def accumulate(engine: Any, model: nn.Module, batch: Tensor) -> None:
    with engine.training_step():
        backward(engine, token_loss(model, batch))


def sgd(engine: Any, model: nn.Module, lr: float = 0.5) -> Any:
    """An optimizer that the engine steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    engine.attach_optimizers([optimizer])
    return optimizer
