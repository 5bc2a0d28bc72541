"""Rule 11 of lightning_zerocompile/README.md in compiled regions: a write to a parameter raises, however it is "
"written and reached."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import SCOPES, STAGES


@torch.library.custom_op("zerocompile_tests::halve", mutates_args=("weight",))
def halve(factor: float, weight: Tensor) -> None:
    weight.mul_(factor)


class Writer(nn.Module):
    """A block that writes to its own weight in its forward."""

    def __init__(self, how: str, width: int = 10) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(width, width))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear[0].weight
        if self.how == "checkpoint":
            return checkpoint(self.write, x, use_reentrant=False)  # type: ignore[no-any-return]
        with torch.no_grad():
            WRITES[self.how](weight)
        return x + self.linear(x)

    def write(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear[0].weight.mul_(0.9)
        return x + self.linear(x)


def _index(weight: Tensor) -> None:
    weight[0] = 0.05


def _iadd(weight: Tensor) -> None:
    weight += 0.01


WRITES: dict[str, Any] = {
    "mul_": lambda w: w.mul_(0.9),
    "data": lambda w: w.data.mul_(0.9),
    "clamp_": lambda w: w.t().clamp_(-0.1, 0.1),
    "index": _index,
    "foreach": lambda w: torch._foreach_mul_([w], 0.9),
    "out": lambda w: torch.mul(w, 0.9, out=w),
    "copy_": lambda w: w.data.copy_(w * 0.9),
    "iadd": _iadd,
    "init": lambda w: nn.init.constant_(w, 0.03),
    "renorm": lambda w: F.embedding(torch.tensor([0, 1], device=w.device), w, max_norm=0.01),
    "diagonal": lambda w: w.diagonal().zero_(),
    "contiguous": lambda w: w.contiguous().mul_(0.9),
    "float": lambda w: w.float().mul_(0.9),
    "to": lambda w: w.to(torch.float32).mul_(0.9),
    "as_strided": lambda w: w.as_strided((5,), (1,)).mul_(0.9),
    "unflatten": lambda w: w.unflatten(0, (2, 5)).mul_(0.9),
    "T": lambda w: w.T.mul_(0.9),
    "mT": lambda w: w.mT.mul_(0.9),
    "chunk": lambda w: w.chunk(2)[1].mul_(0.9),
    "in place by argument": lambda w: F.relu(w, inplace=True),
    "in place by position": lambda w: F.relu(w, True),
    "custom op": lambda w: halve(0.9, w),
    "checkpoint": None,
}
NAMES = {"clamp_": "clamp_", "foreach": "_foreach_mul_", "copy_": "copy_", "renorm": "embedding", "custom op": "halve"}


@pytest.mark.parametrize(
    ("scope", "stage"),
    [("blocks", 3), ("model", 1), *(pytest.param(*c, marks=pytest.mark.long) for c in (("blocks", 1), ("model", 3)))],
)
@on_ranks(1)
def test_compiled_write_raises(stage: int, scope: Any) -> None:
    """An in-place write to a parameter inside a compiled region is an error that names the operation."""
    messages = {}
    for how in WRITES:
        torch._dynamo.reset()
        model = models.Whole(models.Stacked(partial(Writer, how)))
        engine = engines.make_engine(model, stage, compile=scope)
        try:
            with engine.training_step():
                model(models.Batches(0)[0])
            messages[how] = "no error"
        except Exception as error:
            messages[how] = f"{type(error).__name__}: {error}"
        finally:
            engine.abandon()
    wrong = {how: m for how, m in messages.items() if "writes in place to a parameter" not in m}
    assert wrong == {}
    assert all(name in messages[how] for how, name in NAMES.items()), messages


@torch.compiler.disable
def _eagerly(write: Callable[[Tensor], object], weight: Tensor) -> None:
    with torch.no_grad():
        write(weight)


def _set_data(weight: Tensor) -> None:
    weight.data = weight * 0.9


class Breaking(nn.Module):
    """A block that writes to its own weight after Dynamo has ended a graph."""

    def __init__(self, how: str, width: int = 10) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(width, width), how

    def forward(self, x: Tensor) -> Tensor:
        AFTER_A_BREAK[self.how](self.linear)
        return x + self.linear(x)


def _after_a_break(linear: nn.Linear) -> None:
    weight = linear.weight
    torch._dynamo.graph_break()
    with torch.no_grad():
        weight.mul_(0.9)


def _of_data(linear: nn.Linear) -> None:
    weight = linear.weight.data
    torch._dynamo.graph_break()
    weight.mul_(0.9)


AFTER_A_BREAK: dict[str, Callable[[nn.Linear], None]] = {
    "data is set": lambda linear: _set_data(linear.weight),
    "in a disabled function": lambda linear: _eagerly(lambda w: w.mul_(0.9), linear.weight),
    "data is set in a disabled function": lambda linear: _eagerly(_set_data, linear.weight),
    "to a view": lambda linear: _eagerly(lambda w: w.mul_(0.9), linear.weight.t()),
    "after a break": _after_a_break,
    "to data, after a break": _of_data,
}


@pytest.mark.parametrize(("scope", "stage"), [("blocks", 1), ("blocks", 3), ("model", 2)])
@on_ranks(1)
def test_a_write_after_a_graph_break_raises(stage: int, scope: Any) -> None:
    """A graph hands the weight on as a temporary: what is written to that would be lost."""
    messages = {}
    for how in AFTER_A_BREAK:
        torch._dynamo.reset()
        engine = engines.make_engine(models.Whole(models.Stacked(partial(Breaking, how))), stage, compile=scope)
        try:
            with engine.training_step():
                engine.model(models.Batches(0)[0])
            messages[how] = "no error"
        except Exception as error:
            messages[how] = f"{type(error).__name__}: {error}"
        finally:
            engine.abandon()
    assert {how: m for how, m in messages.items() if "writes in place to a parameter" not in m} == {}


class Mapped(nn.Module):
    """Uses ``torch.vmap`` beside its weights and on one of them, as attention masks of transformers do."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(width, width), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, width]
        places = torch.arange(x.shape[1], device=x.device)
        mask = torch.vmap(lambda row: torch.vmap(lambda column: row >= column)(places))(places)
        mixed = mask.to(x.dtype) @ torch.vmap(lambda row: row * self.gain)(x.flatten(0, 1)).view_as(x)
        return x + torch.tanh(self.linear(mixed))


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_vmap_in_a_compiled_region(stage: int) -> None:
    """What a transform wraps has no storage to compare; it trains as DDP trains it."""
    ours, twin = (models.Module(partial(models.Stacked, Mapped), lr=0.3) for _ in range(2))
    twin.load_state_dict(ours.state_dict())
    strategy = ZeroCompileStrategy(stage=stage, compile_options={"backend": "aot_eager"})
    record = models.train(ours, strategy, steps=3)
    models.reference(twin, 3)
    graphs = record.stats.graph_uses + record.stats.graph_reductions
    assert models.deviation(ours, twin) <= 1e-6 and graphs > 0


# ---- writes that a rule is about ----


@STAGES
@pytest.mark.parametrize("how", ["data", "mul_", "clamp_", "renorm"])
@on_ranks()
def test_rule_11_eager_write_in_forward(how: str, stage: int) -> None:
    """`weight.data.mul_` and its like in an eager forward train as in one process."""
    # Eager writes in the forward; each rank writes the same.
    model, twin = models.pair(lambda: models.Stacked(lambda: Writer(how)))
    data = models.Batches(0)
    with engines.engine(model, stage, compile=False) as engine:
        optimizer = engines.sgd(engine, model)
        for number in range(3):
            engines.step(engine, optimizer, lambda number=number: engines.token_loss(model, data[number]))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for number in range(3):
        optimizer.zero_grad()
        engines.token_loss(twin, data[number]).backward()
        optimizer.step()
    assert models.deviation(model, twin) <= 1e-6


class MaxNorm(nn.Module):
    """torch's own layer that writes to its weight in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 10, max_norm=0.5)
        self.layers = nn.ModuleList(models.Block(10) for _ in range(2))
        self.head = nn.Linear(10, models.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@STAGES
@SCOPES
@pytest.mark.parametrize("moment", ["after", "before"])
@on_ranks()
def test_rule_11_eager_write_between_steps(stage: int, scope: Any, moment: str) -> None:
    """Writes outside the forward, and those of `nn.Embedding(max_norm=...)`, reach the masters on every rank."""
    # Writes to a block's and to the head's weight, after a step or between backward and step.
    model, twin = models.pair(MaxNorm)
    data = models.Batches(0)

    def write(module: nn.Module) -> None:
        with torch.no_grad():
            module.layers[1].up.weight.data.mul_(0.5)
            module.head.weight.clamp_(-0.1, 0.1)

    strategy = ZeroCompileStrategy(stage=stage, compile=scope, compile_options={"backend": "aot_eager"})

    class Hook(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            if moment == "after":
                write(model)

        def on_before_optimizer_step(self, *_: Any) -> None:
            if moment == "before":
                write(model)

    module = models.Module(lambda: model)
    models.make_trainer(strategy, max_steps=3, callbacks=[Hook()]).fit(module, data)
    optimizer = torch.optim.SGD(twin.to(models.device()).parameters(), lr=0.5)
    for number in range(3):
        optimizer.zero_grad()
        engines.token_loss(twin, data[number]).backward()
        if moment == "before":
            write(twin)
        optimizer.step()
        if moment == "after":
            write(twin)
    assert models.deviation(model, twin) <= 1e-6
    assert moment == "before" or float(model.head.weight.detach().abs().max()) <= 0.1 + 1e-6
