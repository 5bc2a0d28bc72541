"""Rule 13 of lightning_zerocompile/README.md: what was modified between forward and backward raises as in torch; what "
"is legal does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import engines, models
from tests.support.harness import on_ranks

Loss = Callable[[Tensor], Tensor]


class Session:
    """Lets a case step in the middle of a training step."""

    def __init__(self, model: nn.Module, loss: Loss, backward: Callable[[Tensor], None], step: Callable[[], None]):
        self.model, self.loss, self.backward, self.step = model, loss, backward, step
        self.data = models.Batches(models.rank())


def _activation(at: Session) -> None:
    x = at.model.embedding(at.data[1])
    for layer in at.model.layers:
        x = layer(x)
    loss = F.relu(at.model.head(x)).exp()
    loss.detach().mul_(2.0)
    at.backward(loss.sum())


def _step(at: Session) -> None:
    late = at.loss(at.data[1])
    at.backward(at.loss(at.data[2]))
    at.step()
    at.backward(late)


def _step_and_forward(at: Session) -> None:
    late = at.loss(at.data[1])
    at.backward(at.loss(at.data[2]))
    at.step()
    kept = at.loss(at.data[3])
    at.backward(late)
    del kept


def _step_and_backward(at: Session) -> None:
    late = at.loss(at.data[1])
    for number in (2, 3):
        at.backward(at.loss(at.data[number]))
        at.step()
    at.backward(late)


def _write(at: Session) -> None:
    loss = at.loss(at.data[1])
    with torch.no_grad():
        at.model.layers[1].up.weight.mul_(0.5)
    at.backward(loss)


def _write_and_forward(at: Session) -> None:
    late = at.loss(at.data[1])
    with torch.no_grad():
        at.model.layers[1].up.weight.mul_(0.5)
    at.backward(at.loss(at.data[2]))
    at.backward(late)


def _write_to_master(at: Session) -> None:
    loss = at.loss(at.data[1])
    with torch.no_grad():
        dict(at.model.named_parameters())["layers.1.up.weight"].mul_(0.5)
    at.backward(loss)


RAISES: dict[str, tuple[Callable[[Session], None], str]] = {
    "activation": (_activation, "modified by an inplace operation"),
    "step": (_step, "modified b"),
    "step and forward": (_step_and_forward, "modified b"),
    "step and backward": (_step_and_backward, "modified b"),
    "write": (_write, "modified b"),
    "write and forward": (_write_and_forward, "modified b"),
    "write to master": (_write_to_master, "modified b"),
}


def _message(name: str, stage: int, scope: Any) -> str:
    torch._dynamo.reset()
    model = models.ByteModel()
    engine = engines.make_engine(model, stage, compile=scope)
    optimizer = engines.sgd(engine, model)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    data = models.Batches(models.rank())
    engines.step(engine, optimizer, lambda: engines.token_loss(model, data[0]))
    loss: Loss = lambda batch: engines.token_loss(model, batch)  # noqa: E731
    try:
        with engine.training_step():
            RAISES[name][0](Session(model, loss, lambda value: engines.backward(engine, value), step))
        return "no error"
    except RuntimeError as error:
        return str(error)
    finally:
        engine.abandon()


@pytest.mark.parametrize("name", list(RAISES))
@on_ranks(1)
def test_modified_before_backward_raises(name: str) -> None:
    """An activation, or weights (by an optimizer or by an in-place write), also when a later forward saw them anew."""
    # at stages 1 and 2 the forward's values outlive a write to the masters, and the backward uses those
    stages = (3,) if name == "write to master" else (1, 2, 3)
    messages = {f"{stage} {scope}": _message(name, stage, scope) for stage in stages for scope in (False, "blocks")}
    for cell, message in messages.items():
        assert RAISES[name][1] in message, f"{cell}: {message}"


# ---- what torch allows ----


def _abandoned(at: Session) -> None:
    """A forward that gets no backward, a step, then a new forward with its backward; twice."""
    kept = [at.loss(at.data[1])]
    for number in (2, 3):
        kept.append(at.loss(at.data[number + 4]))
        at.backward(at.loss(at.data[number]))
        at.step()
    at.backward(at.loss(at.data[4]))
    at.step()


def _interleaved(at: Session) -> None:
    """Backwards in another order than their forwards."""
    losses = [at.loss(at.data[number]) for number in (1, 2, 3)]
    for number in (1, 0, 2):
        at.backward(losses[number])
    at.step()


def _data(at: Session) -> None:
    """A write through `data`, of which torch takes no notice, to a weight that this backward does not read."""
    loss = at.loss(at.data[1])
    at.model.layers[1].up.bias.data.mul_(0.5)
    at.backward(loss)
    at.step()


def _bias(at: Session) -> None:
    """A bias is not saved for backward: torch lets it change."""
    loss = at.loss(at.data[1])
    with torch.no_grad():
        at.model.layers[1].up.bias.add_(0.5)
    at.backward(loss)
    at.step()


def _other(at: Session) -> None:
    """A parameter that this backward does not read is written by its own optimizer, and read again in a forward.

    It is in one unit with others that the backward does read.
    """
    loss = at.loss(at.data[1])
    with torch.no_grad():
        dict(at.model.named_parameters())["shift"].add_(0.5)
    at.backward(at.loss(at.data[2]))
    at.backward(loss)
    at.step()


LEGAL = {"abandoned": _abandoned, "interleaved": _interleaved, "data": _data, "bias": _bias, "other": _other}


def _reference(name: str, twin: nn.Module) -> None:
    """The case with the losses of all ranks as one; writes are alike on all ranks."""
    optimizer = torch.optim.SGD(twin.to(models.device()).parameters(), lr=0.5)
    everyone = [models.Batches(rank) for rank in range(models.world())]

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def loss(number: Any) -> Tensor:
        return sum(engines.token_loss(twin, batches[number]) for batches in everyone) / models.world()  # type: ignore

    at = Session(twin, loss, lambda value: value.backward(), step)
    at.data = range(100)  # type: ignore[assignment]  # numbers of batches
    LEGAL[name](at)


@pytest.mark.parametrize("name", list(LEGAL))
@on_ranks()
def test_what_torch_allows_works(name: str) -> None:
    source, found = models.ByteModel(), {}
    twin = models.ByteModel()
    twin.load_state_dict(source.state_dict())
    _reference(name, twin)
    for stage in (1, 2, 3):
        for scope in (False, "blocks"):
            torch._dynamo.reset()
            model = models.ByteModel()
            model.load_state_dict(source.state_dict())
            with engines.engine(model, stage, compile=scope) as engine:
                optimizer = engines.sgd(engine, model)

                def step(optimizer: Any = optimizer) -> None:
                    optimizer.step()
                    optimizer.zero_grad()

                loss: Loss = lambda batch, model=model: engines.token_loss(model, batch)  # noqa: E731
                backward = lambda value, engine=engine: engines.backward(engine, value)  # noqa: E731
                with engine.training_step():
                    LEGAL[name](Session(model, loss, backward, step))
            found[f"{stage} {scope}"] = models.deviation(model, twin)
    assert max(found.values()) <= 1e-6, found
