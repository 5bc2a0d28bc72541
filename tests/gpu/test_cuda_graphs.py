"""What graphs compute between our operators, replayed as CUDA graphs: see [Note: CUDA graphs]."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.engine import Engine
from lightning_zerocompile.runtime.runtime import Stats
from tests.support import engines, models
from tests.support.harness import Ranks
from tests.support.memory import Stack
from tests.support.parity import STAGES

pytestmark = pytest.mark.gpu
STEPS = 6
GRAPHS: dict[str, Any] = {
    "compile_options": {"backend": "inductor", "mode": "reduce-overhead", "dynamic": False},
    "unit_bytes": 2**26,
}


def _step(engine: Engine, optimizer: torch.optim.Optimizer, batches: list[Tensor], how: str) -> None:
    """One optimizer step over two batches: backwards that each reduce, a window, or an accumulation of two steps."""
    if how == "accumulation":
        for number, batch in enumerate(batches):
            waits = engine.accumulation() if number == 0 else contextlib.nullcontext()
            with engine.training_step(), waits:
                engines.backward(engine, engines.token_loss(engine.model, batch) / 2)
    else:
        window = engine.windows.open("auto", None, None) if how == "window" else contextlib.nullcontext()
        with engine.training_step(), window:
            for batch in batches:
                engines.backward(engine, engines.token_loss(engine.model, batch) / 2)
    optimizer.step()
    optimizer.zero_grad()


def _trained(stage: int, compile: Any, how: str) -> tuple[float, int, Counter[str], Stats]:
    """How far from DDP the model ends, how often Inductor gave CUDA graphs up, the runtime calls of a step, and what
    the runtime did."""
    model, twin = models.Whole(models.ByteModel()), models.Whole(models.ByteModel())
    twin.load_state_dict(model.state_dict())
    data = models.Batches(models.rank())
    counters.clear()
    calls: Counter[str] = Counter()
    with engines.engine(model, stage, compile=compile, **GRAPHS) as engine:
        optimizer = engines.sgd(engine, model)
        for step in range(STEPS):
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            with profiler if step == STEPS - 1 else contextlib.nullcontext():
                _step(engine, optimizer, [data[2 * step], data[2 * step + 1]], how)
                torch.cuda.synchronize()
        calls.update(event.name() for event in profiler.profiler.kineto_results.events())
        stats = engine.runtime.stats()
    engines.window_reference(twin, [[2 * step, 2 * step + 1] for step in range(STEPS)])
    return models.deviation(model, twin), counters["inductor"]["cudagraph_skips"], calls, stats


@pytest.mark.parametrize("how", ["plain", "window", "accumulation"])
@pytest.mark.parametrize("compile", ["blocks", "model"])
@STAGES
def test_graphs_are_replayed(ranks: Ranks, stage: int, compile: Any, how: str) -> None:
    """Two backwards a step, each of which would write to the other's gradients: DDP's parameters."""
    for deviation, skips, calls, stats in ranks.run(_trained, stage, compile, how, timeout=300):
        assert deviation <= 1e-5 and skips == 0
        assert (stats.place_copies > 0) == (stage == 3 and compile == "blocks" and how == "window")
        waits = how == "window" or (how == "accumulation" and stage == 1)
        assert (stats.graph_copies > 0) == waits and stats.graph_reductions > 0
        assert calls["cudaGraphLaunch"] >= (12 if compile == "blocks" else 4)  # forward and backward, twice


def _far_ahead(stage: int, mode: str | None, dtype: torch.dtype) -> tuple[list[Tensor], Stats]:
    """The whole parameters on the CPU after steps in which no host waits; a block's gradients take longer to be reduced
    than to be made."""
    torch.manual_seed(0)
    model = models.Whole(Stack(2048, 12))
    options = {"compile_options": {"mode": mode, "dynamic": False}, "param_dtype": dtype, "unit_bytes": 1}
    with engines.engine(model, stage, compile="blocks", **options) as engine:
        optimizer = engines.sgd(engine, model, lr=0.1)
        generator = torch.Generator("cuda").manual_seed(models.rank())
        for step in range(12):
            if step >= STEPS:  # what was recorded is replayed
                torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call] # and the host is far ahead of it
            x = torch.randn(8, 2048, device="cuda", generator=generator, dtype=dtype)
            with engine.training_step():
                engines.backward(engine, model(x).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        stats = engine.runtime.stats()
    return [p.detach().cpu() for p in model.parameters()], stats


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@STAGES
def test_gradients_last_until_they_are_reduced(ranks: Ranks, stage: int, dtype: torch.dtype) -> None:
    """A graph that wrote to them earlier would change the parameters: [Note: gradients of CUDA graphs]."""
    plain = ranks.run(_far_ahead, stage, None, dtype, timeout=300)
    replayed = ranks.run(_far_ahead, stage, "reduce-overhead", dtype, timeout=300)
    for (expected, _), (found, stats) in zip(plain, replayed, strict=True):
        assert stats.graph_copies == 0 and stats.graph_reductions > 0
        assert max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True)) <= 1e-4


def _kept(stage: int, compile: Any) -> float:
    """The largest difference of results that are kept within a step (as GradCache does) from the plain model's."""
    model, twin = models.Whole(models.ByteModel()), models.Whole(models.ByteModel())
    twin.load_state_dict(model.state_dict())
    batches = [models.Batches(models.rank())[number] for number in range(3)]
    twin.to(models.device())
    worst = 0.0

    def apart(results: list[Tensor]) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(results, expected, strict=True))

    with engines.engine(model, stage, compile=compile, **GRAPHS) as engine:
        engine.attach_optimizers([torch.optim.SGD(model.parameters(), lr=0.5)])
        for _ in range(4):
            with torch.no_grad():
                expected = [twin(batch) for batch in batches]
            with engine.evaluation_step(), torch.inference_mode():
                evaluated = [model(batch) for batch in batches]
                worst = max(worst, apart(evaluated))
            with engine.training_step():
                with torch.no_grad():
                    first = [model(batch) for batch in batches]
                again = [model(batch) for batch in batches]
                worst = max(worst, apart(first), apart(again))
                for result in again:
                    engines.backward(engine, result.square().mean())
            model.zero_grad()
    return worst


@pytest.mark.parametrize("compile", ["blocks", "model"])
@STAGES
def test_results_last_for_a_step(ranks: Ranks, stage: int, compile: Any) -> None:
    """Also those without autograd, of block by block and of several forwards."""
    assert max(ranks.run(_kept, stage, compile, timeout=300)) <= 1e-5


def _recorded(stage: int) -> tuple[int, Counter[str], int]:
    """Inputs that recorded graphs copy, the runtime calls of a later step, and its gathers."""
    model, own = models.Whole(models.ByteModel(blocks=6)), models.Batches(models.rank())
    counters.clear()
    with engines.engine(model, stage, compile="blocks", **GRAPHS) as engine:
        optimizer = engines.sgd(engine, model)

        def train(number: int) -> None:
            engines.step(engine, optimizer, lambda: engines.token_loss(model, own[number]))

        for step in range(STEPS):
            train(step)
        copied, gathers = counters["inductor"]["cudagraph_recorded_non_static_inputs"], engine.runtime.stats().gathers
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            train(STEPS)
            torch.cuda.synchronize()
        calls = Counter(event.name() for event in profiler.profiler.kineto_results.events())
        return copied, calls, engine.runtime.stats().gathers - gathers


def test_places_are_where_graphs_read(ranks: Ranks) -> None:
    """Stage 3 gathers each block twice in a step, and copies no more to recorded graphs than stage 2 does."""
    before = ranks.run(_recorded, 2, timeout=300)
    for (copied, calls, gathers), (least, *_) in zip(ranks.run(_recorded, 3, timeout=300), before, strict=True):
        assert copied == least and gathers >= 2 * 6 - 1
        recording = [name for name in calls if "BeginCapture" in name or "Instantiate" in name]
        assert calls["cudaGraphLaunch"] >= 12 and not recording, recording


def _ordered(stage: int) -> tuple[int, int, list[str]]:
    """The highest bytes of gathered values, those of all parameters, and the code."""
    from torch._inductor.utils import run_and_get_code

    width = 512  # a MiB for each weight: smaller ones go together
    model = models.Whole(nn.Sequential(*(nn.Linear(width, width) for _ in range(8))))
    x = torch.randn(4, width, device=models.device())
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        engines.engine(model, stage, compile="model", prefetch=1, **GRAPHS | {"unit_bytes": 1}) as engine,
    ):
        optimizer = engines.sgd(engine, model, lr=0.01)

        def train() -> None:
            for _ in range(STEPS):
                engines.step(engine, optimizer, lambda: model(x).square().mean())

        _, codes = run_and_get_code(train)
        full = sum(p.numel() * p.element_size() for p in model.parameters())
        return engine.runtime.stats().peak_resident_bytes, full, codes


@STAGES
def test_communication_stays_in_its_place(ranks: Ranks, stage: int) -> None:
    """To have fewer cuts, Inductor would gather everything first and reduce everything last."""
    for peak, full, codes in ranks.run(_ordered, stage, timeout=300):
        backward = next(code for code in codes if "reduce_unit_" in code)
        assert backward.index("zerocompile.reduce_unit_") < backward.rindex("self.partitions[")
        assert stage < 3 or peak < full / 2


class WithLoss(nn.Module):
    """Its result, which Lightning logs and keeps, is a graph's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.ByteModel()

    def forward(self, batch: Tensor) -> Tensor:  # [batch, length]
        return engines.token_loss(self.inner, batch)


class Fitted(models.Module):
    def __init__(self) -> None:
        super().__init__(WithLoss)

    def loss(self, batch: Tensor) -> Tensor:  # [batch, length]
        return self.model(batch)  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.losses.append(loss.item())
        return loss


def _fitted(stage: int) -> tuple[float, float, list[float], list[float]]:
    """The deviation, the logged mean of the losses, these, and those of DDP."""
    module, twin = models.pair(Fitted)
    strategy = ZeroCompileStrategy(
        stage=stage, compile="model", compile_options={"mode": "reduce-overhead", "dynamic": False}
    )
    trainer = models.make_trainer(strategy, max_epochs=1, limit_train_batches=5)
    trainer.fit(module, models.Batches(models.rank()), models.Batches(models.rank(), 2))
    expected = models.reference(twin)
    return models.deviation(module, twin), float(trainer.callback_metrics["loss"]), module.losses, expected


@STAGES
def test_lightning_logs_what_a_graph_returns(ranks: Ranks, stage: int) -> None:
    for deviation, logged, losses, expected in ranks.run(_fitted, stage, timeout=300):
        assert deviation <= 1e-5 and losses == pytest.approx(expected, abs=1e-5)
        assert logged == pytest.approx(sum(losses) / len(losses), abs=1e-5)
