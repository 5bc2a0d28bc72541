"""Mixed precision at stage 3: gathers move autocast's casts, once the ranks have agreed on which."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
from lightning_zerocompile.config import Config
from lightning_zerocompile.engine import Engine
from lightning_zerocompile.sharding.autocast import STEPS, forward_of
from lightning_zerocompile.sharding.full_values import full_value
from lightning_zerocompile.sharding.module_swap import REGION
from tests import engines, models
from tests.harness import Ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDTH = 10
MIXED = "rank 0 compiled, rank 1 eager"


@contextmanager
def _engine(model: nn.Module, stage: int = 3, dtype: torch.dtype = BF16, **options: Any) -> Iterator[Engine]:
    mixed = options.get("compile") == MIXED
    if mixed:
        options["compile"] = "blocks"
    config = Config(stage=stage, **({"backend": "aot_eager", "copy_engine": False} | options))
    backend = torch.distributed.get_backend()
    with engines.closing(Engine(model, engines.place(), config, None, backend, dtype)) as made:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        made.attach_optimizers([optimizer])
        made.optimizer = optimizer  # type: ignore[attr-defined]
        if mixed and models.rank() == 1:
            _stop_compiling(made)
        yield made


def _stop_compiling(engine: Engine) -> None:
    """As a rank that is over the recompile limit."""
    for module in engine.model.modules():
        if REGION in module.__dict__:
            module.__dict__[REGION].run = forward_of(module)


def _autocast(dtype: torch.dtype = BF16) -> Any:
    return torch.autocast(engines.place().type, dtype=dtype)


def _train(engine: Engine, steps: int, micro: int = 1, dtype: torch.dtype = BF16, first: int = 0) -> dict[str, Any]:
    """Steps under autocast, as Lightning's plugin runs them; losses and reduced gradients, these by step and name."""
    data, losses, grads = models.Batches(models.rank()), [], []
    for number in range(first, first + steps):
        for part in range(micro):
            last = part == micro - 1
            with engine.training_step(), nullcontext() if last else engine.accumulation():
                with _autocast(dtype):
                    loss = engines.token_loss(engine.model, data[number * micro + part])
                engines.backward(engine, loss)
            losses.append(loss.item())
        grads.append({n: p.grad.to_local().clone() for n, p in engine.model.named_parameters() if p.grad is not None})
        engine.optimizer.step()  # type: ignore[attr-defined]
        engine.optimizer.zero_grad()  # type: ignore[attr-defined]
    return {"losses": losses, "grads": grads}


def _masters(engine: Engine) -> dict[str, Tensor]:
    return {n: full_value(p).clone() for n, p in engine.model.state_dict().items()}


def _differ(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    return [name for name in right if left[name].dtype != right[name].dtype or not torch.equal(left[name], right[name])]


def _low(engine: Engine) -> set[str]:
    return {engine.runtime.sharded_parameters[index].name for index in engine.runtime.casts.low}


def _gathered(engine: Engine, run: Callable[[], Any], path: str) -> int:
    """Bytes of the full values that the process group gathers meanwhile, as torch's profiler sees them."""
    if models.device() == "cuda":  # the profiler does not tell the sizes of NCCL's grouped calls
        before = engine.runtime.stats().gather_bytes
        run()
        return engine.runtime.stats().gather_bytes - before
    engine.apply_writes()
    torch.distributed.barrier()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        run()
        engine.apply_writes()
    file = Path(path) / f"{models.rank()}.json"
    profile.export_chrome_trace(str(file))
    sizes = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2}
    total = 0
    for event in json.loads(file.read_text())["traceEvents"]:
        if event.get("name") in ("c10d::_allgather_base_", "c10d::allgather_into_tensor_"):
            arguments = event["args"]
            total += torch.Size(arguments["Input Dims"][0]).numel() * sizes[arguments["Input type"][0]]
    return total


# ---- bytes ----

# ByteModel on 2 ranks; rows are padded to a multiple of 2, see test_invariants.py. What is low has half the bytes.
#   first: scale (whole on every rank), shift 8 B, embedding 560 B                                        568 B
#   block: norm 40 + 40 B; up 880, its bias 88, down 840 B, low: 904 B              1888 B, low:  984 B, three of them
#   head:  560 B                                                                     560 B, low:  280 B
# A step: `first` twice (see there), the head once (its cast is kept for the backward), the blocks twice.
BEFORE = 2 * 568 + 560 + 6 * 1888
AFTER = 2 * 568 + 280 + 6 * 984
LOW = {f"layers.{n}.{name}" for n in range(3) for name in ("up.weight", "up.bias", "down.weight")} | {"head.weight"}


def _bytes(compile: Any, path: str) -> tuple[list[int], set[str]]:
    with _engine(models.ByteModel(), compile=compile) as engine:
        moved = []
        for number in range(STEPS + 2):
            moved.append(_gathered(engine, lambda first=number: _train(engine, 1, first=first), path))
        return moved, _low(engine)


@pytest.mark.parametrize("compile", [False, "blocks", MIXED])
def test_bytes_of_a_step(ranks: Ranks, compile: Any, tmp_path: Path) -> None:
    """From the agreement on linear weights and biases move in two bytes an element, everything else in four."""
    assert (BEFORE, AFTER) == (13024, 7320)
    for moved, low in ranks.run(_bytes, compile, str(tmp_path)):
        assert moved[1:] == [BEFORE] * (STEPS - 1) + [AFTER] * 2
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
    with _engine(model, stage, dtype, compile=cell, defer_grad_sync=True) as engine:
        return _train(engine, STEPS + 2, micro, dtype) | {"values": _masters(engine)}, _low(engine)


def _same(kind: str, micro: int, dtype: torch.dtype, cells: list[Any]) -> list[str]:
    """What differs from stage 1, where every value is float32."""
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
            problems += [f"{cell}: step {step}: gradient of {name}" for name in _differ(ours, theirs)]
            problems += [f"{cell}: {name} in {grad.dtype}" for name, grad in ours.items() if grad.dtype != FP32]
        problems += [f"{cell}: {name}" for name in _differ(seen["values"], expected["values"])]
    return problems


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
def test_same_numbers(ranks: Ranks, kind: str, micro: int, dtype: torch.dtype, cells: list[Any]) -> None:
    """Losses, gradients, their dtypes and parameters are to the bit those of float32 gathers, compiled or not."""
    for problems in ranks.run(_same, kind, micro, dtype, cells):
        assert problems == []


@pytest.mark.long
def test_same_numbers_with_inductor(ranks: Ranks) -> None:
    """Inductor rounds as it fuses, so it is compared with itself, gathering float32."""
    for problems in ranks.run(_same_inductor, timeout=300):
        assert problems == []


def _same_inductor() -> list[str]:
    problems, results = [], []
    start = models.ByteModel()
    for agrees in (True, False):
        with _engine(copy.deepcopy(start), compile="blocks", backend="inductor") as engine:
            if not agrees:
                engine.runtime.casts._steps = STEPS + 1
            results.append(_train(engine, STEPS + 2))
            results[-1]["values"] = _masters(engine)
            if bool(_low(engine)) != agrees:
                problems.append(f"low: {_low(engine)}")
    low, full = results
    if low["losses"] != full["losses"]:
        problems.append(f"losses {low['losses']} instead of {full['losses']}")
    return problems + _differ(low["values"], full["values"])


class Told(models.Record):
    """What the ranks agreed on in a run of the Trainer."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        super().on_train_end(trainer, module)
        self.low = _low(trainer.strategy.engine)


def _through_the_trainer(precision: str, stage: int) -> int:
    told = Told()
    arguments: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # on the CPU Lightning makes bf16-mixed of the word
        arguments = {"plugins": [LightningMixedPrecision(precision, models.device(), GradScaler(models.device()))]}
    strategy = ZeroCompileStrategy(stage=stage, compile=False)
    models.train(models.Module(), strategy, steps=STEPS + 2, callbacks=[told], **arguments)
    return len(told.low)


@pytest.mark.parametrize(
    ("precision", "stage", "count"),
    [("bf16-mixed", 3, 10), ("16-mixed", 3, 10), ("32-true", 3, 0), ("bf16-mixed", 2, 0)],
)
def test_it_is_on_by_itself(ranks: Ranks, precision: str, stage: int, count: int) -> None:
    """Under the Trainer's mixed precisions at stage 3, without an option."""
    assert ranks.run(_through_the_trainer, precision, stage) == [count, count]


# ---- ranks that differ ----


def _falls_back(kind: str) -> dict[str, Any]:
    """Rank 1 stops compiling after the agreement, as when it is over the recompile limit."""
    start, results = MODELS[kind](), []
    for stage in (1, 3):
        torch._dynamo.reset()
        with _engine(copy.deepcopy(start), stage, compile="blocks") as engine:
            _train(engine, STEPS + 1)
            if models.rank() == 1:
                _stop_compiling(engine)
            _train(engine, 2, first=STEPS + 1)
            with engine.evaluation_step(), torch.no_grad(), _autocast():
                loss = engines.token_loss(engine.model, models.Batches(models.rank())[0]).item()
            results.append(_masters(engine) | {"loss": torch.tensor(loss)})
            gathers = engine.runtime.stats().gathers, engine.runtime.stats().gather_bytes
    return {"problems": _differ(results[1], results[0]), "gathers": gathers}


@pytest.mark.parametrize("kind", ["plain", pytest.param("reader", marks=pytest.mark.long)])
def test_a_rank_that_stops_compiling(ranks: Ranks, kind: str) -> None:
    """It reads weights, and dtypes of weights, where the other rank's graphs do not; they gather the same."""
    one, two = ranks.run(_falls_back, kind)
    assert one["problems"] == two["problems"] == []
    assert one["gathers"] == two["gathers"]


def _parts(cell: Any) -> None:
    with _engine(models.ByteModel(), compile=cell, timeout=timedelta(seconds=4)) as engine:
        _train(engine, STEPS + 1)
        with engine.evaluation_step(), torch.no_grad(), _autocast():
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


def _kept(micro: int) -> dict[str, Any]:
    """`memory_budget` keeps some units, in float32, when the ranks agree on what the others move, or later."""
    start, results = models.ByteModel(), []
    options: dict[str, Any]
    for options in ({"stage": 1}, {"stage": 3, "memory_budget": BUDGET}):
        torch._dynamo.reset()
        with _engine(copy.deepcopy(start), compile="blocks", defer_grad_sync=True, **options) as engine:
            trained = _train(engine, STEPS + 3, micro)
            exact = _masters(engine)["layers.1.up.weight"]
            with engine.training_step():
                same = torch.equal(engine.model.get_submodule("layers.1").up.weight, exact)
            results.append((trained["losses"], _masters(engine), same))
            low = _low(engine)
    (losses, values, _), (theirs, kept, same) = results
    return {"losses": losses == theirs, "values": _differ(kept, values), "exact": same, "low": low}


@pytest.mark.parametrize("micro", [1, pytest.param(2, marks=pytest.mark.long)])
def test_units_that_stay_gathered(ranks: Ranks, micro: int) -> None:
    """They are whole, also if they were low before; the others are low."""
    for seen in ranks.run(_kept, micro):
        assert seen["losses"] and seen["values"] == [] and seen["exact"]
        assert seen["low"] == {name for name in LOW if name.startswith(("layers.2", "head"))}
