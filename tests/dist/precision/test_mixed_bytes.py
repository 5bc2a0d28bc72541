"""Mixed precision at stage 3: gathers move autocast's casts, once the ranks have agreed on which."""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision as LightningMixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.engine import Engine
from lightning_zerocompile.sharding.autocast import STEPS
from tests.support import engines, mixed, models
from tests.support.harness import Ranks, on_ranks
from tests.support.mixed import MIXED
from tests.support.precisions import BF16, FP16, FP32

WIDTH = 10


def _low(engine: Engine) -> set[str]:
    return {engine.runtime.sharded_parameters[index].name for index in engine.runtime.casts.low}


# ---- bytes ----

LOW = {f"layers.{n}.{name}" for n in range(3) for name in ("up.weight", "up.bias", "down.weight")} | {"head.weight"}


@pytest.mark.parametrize("compile", [False, "blocks", MIXED])
@on_ranks()
def test_bytes_of_a_step(compile: Any, tmp_path: Path) -> None:
    """From the agreement on linear weights and biases move in two bytes an element, everything else in four."""
    before, after = mixed.bytes_of_a_step(low=False), mixed.bytes_of_a_step(low=True)
    assert models.world() != 2 or (before, after) == (13024, 7320)
    path = str(tmp_path)
    with mixed.engine(models.ByteModel(), compile=compile) as engine:
        moved = []
        for number in range(STEPS + 2):
            moved.append(mixed.gathered(engine, lambda first=number: mixed.train(engine, 1, first=first), path))
        low = _low(engine)
    assert moved[1:] == [before] * (STEPS - 1) + [after] * 2
    assert low == LOW


# ---- numbers ----


class Checkpointed(models.ByteModel):
    """Blocks that are computed again in the backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class Inside(nn.Module):
    """A block that reads weights itself: one to compute with, of one only the dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.same = nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.down.weight.dtype != FP32:
            raise AssertionError("the model sees the parameter's dtype")
        x = self.same(self.same(x))  # one weight, two casts
        x = x + self.down(torch.relu(self.up(x)))
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return x * self.up.weight.square().mean()


class Reader(nn.Module):
    """Parameters that must stay whole, and some that need not: tied ones, an L2 term, code without autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Inside() for _ in range(2))
        self.exact, self.penalized = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, models.VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        with torch.autocast(x.device.type, enabled=False):
            x = self.exact(x.float())
        x = self.penalized(x)
        return self.head(x) + self.penalized.weight.square().mean()


MODELS = {"plain": models.ByteModel, "checkpointed": Checkpointed, "reader": Reader}
LOW_OF_READER = {
    *(f"layers.{n}.{name}" for n in (0, 1) for name in ("up.bias", "down.bias")),
    *(f"layers.{n}.{layer}.{name}" for n in (0, 1) for layer in ("same", "conv") for name in ("weight", "bias")),
    "penalized.bias",
    "head.bias",
}


def _run(start: nn.Module, stage: int, cell: Any, micro: int, dtype: torch.dtype) -> tuple[dict[str, Any], set[str]]:
    torch._dynamo.reset()
    model = models.Whole(copy.deepcopy(start)) if cell == "model" else copy.deepcopy(start)
    with mixed.engine(model, stage, dtype, compile=cell, defer_grad_sync=True) as engine:
        return mixed.train(engine, STEPS + 2, micro, dtype) | {"values": mixed.masters(engine)}, _low(engine)


@pytest.mark.parametrize(
    ("kind", "micro", "dtype", "cells"),
    [
        ("plain", 1, BF16, [False, "blocks", "model"]),
        ("plain", 2, FP16, [False, "blocks"]),
        ("checkpointed", 1, BF16, ["blocks", MIXED]),
        pytest.param("reader", 1, BF16, ["blocks", MIXED], marks=pytest.mark.long),
        pytest.param("reader", 1, BF16, [False, "model"], marks=pytest.mark.long),
    ],
)
@on_ranks()
def test_same_numbers(kind: str, micro: int, dtype: torch.dtype, cells: list[Any]) -> None:
    """Losses, gradients, their dtypes and parameters are to the bit those of float32 gathers, compiled or not."""
    # What differs from stage 1, where every value is float32.
    start, problems = MODELS[kind](), []
    expected, low = _run(start, 1, False, micro, dtype)
    if low:
        problems.append("stage 1 gathers low")
    for cell in cells:
        if cell == "model":  # one graph sums a parameter's gradients in its own order
            expected, _ = _run(start, 1, cell, micro, dtype)
        seen, low = _run(start, 3, cell, micro, dtype)
        low = {name.removeprefix("model.") for name in low}
        if low != (LOW_OF_READER if kind == "reader" else LOW):
            problems.append(f"{cell}: low are {sorted(low)}")
        if seen["losses"] != expected["losses"]:
            problems.append(f"{cell}: losses {seen['losses']} instead of {expected['losses']}")
        for step, (ours, theirs) in enumerate(zip(seen["grads"], expected["grads"], strict=True)):
            problems += [f"{cell}: step {step}: gradient of {name}" for name in mixed.differ(ours, theirs)]
            problems += [f"{cell}: {name} in {grad.dtype}" for name, grad in ours.items() if grad.dtype != FP32]
        problems += [f"{cell}: {name}" for name in mixed.differ(seen["values"], expected["values"])]
    assert problems == []


@pytest.mark.long
@on_ranks(timeout=300)
def test_same_numbers_with_inductor() -> None:
    """Inductor rounds as it fuses, so it is compared with itself, gathering float32."""
    problems, results = [], []
    start = models.ByteModel()
    for agrees in (True, False):
        with mixed.engine(copy.deepcopy(start), compile="blocks", compile_options={"backend": "inductor"}) as engine:
            if not agrees:
                engine.runtime.casts._steps = STEPS + 1
            results.append(mixed.train(engine, STEPS + 2))
            results[-1]["values"] = mixed.masters(engine)
            if bool(_low(engine)) != agrees:
                problems.append(f"low: {_low(engine)}")
    low, full = results
    if low["losses"] != full["losses"]:
        problems.append(f"losses {low['losses']} instead of {full['losses']}")
    problems = problems + mixed.differ(low["values"], full["values"])
    assert problems == []


class Told(models.Record):
    """What the ranks agreed on in a run of the Trainer."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        super().on_train_end(trainer, module)
        self.low = _low(trainer.strategy.engine)


@pytest.mark.parametrize(
    ("precision", "stage", "count"),
    [("bf16-mixed", 3, 10), ("16-mixed", 3, 10), ("32-true", 3, 0), ("bf16-mixed", 2, 0)],
)
@on_ranks()
def test_it_is_on_by_itself(precision: str, stage: int, count: int) -> None:
    """Under the Trainer's mixed precisions at stage 3, without an option."""
    told = Told()
    arguments: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # on the CPU Lightning makes bf16-mixed of the word
        arguments = {"plugins": [LightningMixedPrecision(precision, models.device(), GradScaler(models.device()))]}
    strategy = ZeroCompileStrategy(stage=stage, compile=False)
    models.train(models.Module(), strategy, steps=STEPS + 2, callbacks=[told], **arguments)
    assert len(told.low) == count


# ---- ranks that differ ----


def _falls_back(kind: str) -> dict[str, Any]:
    """Rank 1 stops compiling after the agreement, as when it is over the recompile limit."""
    start, results = MODELS[kind](), []
    for stage in (1, 3):
        torch._dynamo.reset()
        with mixed.engine(copy.deepcopy(start), stage, compile="blocks") as engine:
            mixed.train(engine, STEPS + 1)
            if models.rank() == 1:
                mixed.stop_compiling(engine)
            mixed.train(engine, 2, first=STEPS + 1)
            with engine.evaluation_step(), torch.no_grad(), mixed.autocast():
                loss = engines.token_loss(engine.model, models.Batches(models.rank())[0]).item()
            results.append(mixed.masters(engine) | {"loss": torch.tensor(loss)})
            gathers = engine.runtime.stats().gathers, engine.runtime.stats().gather_bytes
    return {"problems": mixed.differ(results[1], results[0]), "gathers": gathers}


@pytest.mark.parametrize("kind", ["plain", pytest.param("reader", marks=pytest.mark.long)])
def test_a_rank_that_stops_compiling(ranks: Ranks, kind: str) -> None:
    """It reads weights, and dtypes of weights, where the other rank's graphs do not; they gather the same."""
    found = ranks.run(_falls_back, kind)
    assert [one["problems"] for one in found] == [[]] * ranks.world
    assert len({one["gathers"] for one in found}) == 1


def _parts(cell: Any) -> None:
    with mixed.engine(models.ByteModel(), compile=cell, timeout=timedelta(seconds=4)) as engine:
        mixed.train(engine, STEPS + 1)
        with engine.evaluation_step(), torch.no_grad(), mixed.autocast():
            layers: Any = engine.model.get_submodule("layers")
            layers[0](torch.ones(2, WIDTH, device=engines.place()))
            if models.rank() == 1:
                layers[0].up.weight.sum()
            layers[1](torch.ones(2, WIDTH, device=engines.place()))


@pytest.mark.parametrize("cell", [False, pytest.param("blocks", marks=pytest.mark.long)])
def test_a_full_value_on_one_rank_raises(ranks: Ranks, cell: Any) -> None:
    """A float32 gather never meets a bf16 one: the rank that needs it hears that the other does not come."""
    text = ranks.expect_error(_parts, cell, timeout=60)
    assert "layers.0 (in full precision)" in text and "gather number" in text


BUDGET = 528 + 2 * 1844  # `first` and two blocks, without padding: what costs most for its size


@pytest.mark.parametrize("micro", [1, pytest.param(2, marks=pytest.mark.long)])
@on_ranks()
def test_units_that_stay_gathered(micro: int) -> None:
    """They are whole, also if they were low before; the others are low."""
    # `keep_gathered` keeps some units, in float32, when the ranks agree on what the others move, or later.
    start, results = models.ByteModel(), []
    options: dict[str, Any]
    for options in ({"stage": 1}, {"stage": 3, "keep_gathered": BUDGET}):
        torch._dynamo.reset()
        with mixed.engine(copy.deepcopy(start), compile="blocks", defer_grad_sync=True, **options) as engine:
            trained = mixed.train(engine, STEPS + 3, micro)
            exact = mixed.masters(engine)["layers.1.up.weight"]
            with engine.training_step():
                same = torch.equal(engine.model.get_submodule("layers.1").up.weight, exact)
            results.append((trained["losses"], mixed.masters(engine), same))
            low = _low(engine)
    (losses, values, _), (theirs, kept, same) = results
    the_losses = losses == theirs
    assert the_losses and mixed.differ(kept, values) == [] and same
    assert low == {name for name in LOW if name.startswith(("layers.2", "head"))}
