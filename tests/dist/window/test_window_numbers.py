"""Windows in numbers: to the bit, in every mode; gathers, bytes and compilations; decisions alike on all ranks."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.engine import Engine
from tests.support import engines, models, twins
from tests.support.architectures import SquareModel
from tests.support.harness import on_ranks
from tests.support.parity import mean_backward

COUNTS = (1, 2, 4, 8)


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class Exact(nn.Module):
    """Weights and inputs are small integers: every sum is exact, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Row() for _ in range(2))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.arange(16.0).view(4, 4) % 3 - 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _whole() -> nn.Module:
    return models.Whole(Exact())


def _half() -> nn.Module:
    return _whole().to(torch.bfloat16)


def _sum(model: nn.Module, rank: int, number: int) -> Tensor:
    """Times what makes a power of two of the mean's divisor: it rounds nothing."""
    x = (torch.arange(8.0, device=models.device()).view(2, 4) + number) % 3 + rank
    factor = models.world() / 2 ** (models.world().bit_length() - 1)  # 1 for two ranks
    return model(x.to(next(model.parameters()).dtype)).sum() * factor  # type: ignore[no-any-return]


def _backwards(engine: Engine, count: int) -> None:
    for number in range(count):
        engines.backward(engine, _sum(engine.model, models.rank(), number))


def _expected(twin: nn.Module, count: int) -> None:
    twin.zero_grad()
    for number in range(count):
        mean_backward(lambda rank, number=number: _sum(twin, rank, number))  # type: ignore[misc]


@pytest.mark.parametrize("compile", [False, "blocks", "model"])
@on_ranks()
def test_windows_are_equal_to_the_bit_and_compile_nothing(compile: Any, long: bool) -> None:
    """Against plain torch's sums, for any number of backwards, bounded or not; windows share the graphs outside."""
    for stage in (1, 2, 3) if long or not compile else (3,) if compile == "blocks" else (2,):
        with twins.pair(stage, _whole, compile=compile) as (engine, twin, optimizer):

            def one(engine: Engine = engine, optimizer: Any = optimizer) -> int:
                """A backward without a window; the graphs after it."""
                with engine.training_step():
                    _backwards(engine, 1)
                optimizer.zero_grad()
                return engine.regions.stats.forward + engine.regions.stats.backward

            graphs = one()
            assert (graphs > 0) is bool(compile)
            for max_bytes, count in itertools.product((None, 0), COUNTS):
                with engine.training_step(), engine.windows.open("auto", max_bytes, None):
                    _backwards(engine, count)
                _expected(twin, count)
                assert twins.grad_deviation(engine, twin) == 0, (stage, count, max_bytes)
                optimizer.zero_grad()
                assert one() == graphs, (stage, count, max_bytes)
        with twins.pair(stage, _half, compile=compile, master_dtype=None) as (engine, twin, optimizer):
            for dtype, held in ((torch.float32, 4 * 32), (None, 2 * 32)):
                with engine.training_step(), engine.windows.open("auto", None, dtype):
                    _backwards(engine, 2)
                    assert engine.runtime.core.deferred_bytes() == held
                _expected(twin, 2)
                assert twins.grad_deviation(engine, twin) == 0, (stage, dtype)
                optimizer.zero_grad()


@pytest.mark.parametrize("compile", [False, "blocks"])
@on_ranks()
def test_gathers_at_each_use(compile: Any) -> None:
    """2 N for each of the five units."""
    model = models.ByteModel()
    data = models.Batches(models.rank())
    counts = []
    with engines.engine(model, 3, compile=compile, copy_engine=False) as engine:
        for count in (1, *COUNTS):
            before = engine.runtime.stats().gathers
            with engine.training_step(), engine.windows.open("use", None, None):
                for number in range(count):
                    engines.backward(engine, engines.token_loss(model, data[number]))
            counts.append(engine.runtime.stats().gathers - before)
    assert counts[1:] == [10 * count for count in COUNTS]


def _decisions(free: tuple[float, float], host: str = "") -> tuple[int, int]:
    """Gathers inside a window, with that many times as much free memory as is needed (by rank; further ranks take them
    in turn); and what is needed."""
    with twins.pair(3) as (engine, _, _):
        needed = engine.runtime.held_window_bytes(None)
        mine = host, 2 * needed * free[models.rank() % 2]
        with (
            mock.patch("lightning_zerocompile.runtime.window.free_memory", return_value=mine),
            engine.training_step(),
            engine.windows.open("auto", None, None),
        ):
            before = engine.runtime.stats().gathers
            for number in (0, 1):
                engines.backward(engine, twins.loss(engine.model, twins.mine(number)))
            return engine.runtime.stats().gathers - before, needed


@pytest.mark.parametrize(("free", "holds"), (((1, 1), True), ((0.99, 1), False), ((1, 0.99), False)))
@on_ranks()
def test_one_rank_without_memory_decides_for_all(free: tuple[float, float], holds: Any) -> None:
    gathers, needed = _decisions(free)
    assert (gathers == 0) is holds
    shard = sum(size // models.world() for size in (24, 6, 18, 3))
    assert needed == 2 * 4 * 51 + 2 * 4 * shard  # parameters, gradients, two moments of the shard


@pytest.mark.parametrize(("free", "holds"), ((0.995, False), (1, True)))
@on_ranks()
def test_ranks_of_one_host_share_its_memory(free: Any, holds: Any) -> None:
    gathers, _ = _decisions((free * models.world(),) * 2, "a host")
    assert (gathers == 0) is holds


class Cached(torch.autograd.Function):
    """Runs whole backwards in its forward, as cached contrastive losses do."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, model: nn.Module, numbers: list[int], rank: int) -> Tensor:
        total = torch.zeros((), device=anchor.device)
        for number in numbers:
            with torch.enable_grad():
                loss = twins.loss(model, twins.batch(rank, number))
            torch.autograd.backward(loss)
            total += loss.detach()
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.zeros(1, device=grad.device), None, None, None


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("window", (True, False))
@on_ranks()
def test_a_function_that_calls_backward_in_its_forward(stage: int, window: bool) -> None:
    with twins.pair(stage) as (engine, twin, _):
        anchor = torch.zeros(1, device=models.device(), requires_grad=True)
        with engine.training_step(), engine.windows.open("auto", None, None) if window else contextlib.nullcontext():
            loss = Cached.apply(anchor, engine.model, [0, 1], models.rank())  # type: ignore[no-untyped-call]
            engines.backward(engine, loss + twins.loss(engine.model, twins.mine(2)))
        twins.gradients(twin, twins.on_all(0, 1, 2))
        assert twins.grad_deviation(engine, twin) <= 1e-6


# ---- Inductor ----


def _inductor(cpp_wrapper: bool = False) -> tuple[float, list[int], list[str]]:
    """Weights, their gradients and the activations have one size, so that Inductor wants to reuse memory; two windows.

    Before each a forward, which has released a part of its values where the window opens. Returns the deviation, the
    gathers of each window and the code.
    """
    from torch._inductor.utils import run_and_get_code

    model, twin = models.pair(SquareModel)
    data = torch.randn(2, 3, models.world(), 20, 20).to(models.device())  # [windows, backwards, ranks, rows, width]
    options = {"cpp_wrapper": True} if cpp_wrapper else {}
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        engines.engine(
            model, 3, compile_options={"backend": "inductor", "options": options}, compile="model"
        ) as engine,
    ):
        optimizer = engines.sgd(engine, model, lr=0.1)
        gathers = []

        def train() -> None:
            for batches in data:
                with engine.training_step():
                    outside = model(batches[0][models.rank()]).square().mean()
                    with engine.windows.open("window", None, None):
                        before = engine.runtime.stats().gathers
                        for batch in batches[1:]:
                            engines.backward(engine, model(batch[models.rank()]).square().mean())
                        gathers.append(engine.runtime.stats().gathers - before)
                    engines.backward(engine, outside)
                optimizer.step()

        _, codes = run_and_get_code(train)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for batches in data:
        optimizer.zero_grad()
        for x in batches.flatten(0, 1):
            (twin(x).square().mean() / models.world()).backward()
        optimizer.step()
    return models.deviation(model, twin), gathers, codes


@pytest.mark.long
@on_ranks(timeout=240)
def test_inductor_reuses_no_held_value() -> None:
    deviation, gathers, _ = _inductor()
    assert deviation <= 1e-5 and gathers == [0, 0]


@pytest.mark.long
@on_ranks(timeout=400)
def test_graphs_run_without_python() -> None:
    """Inductor's C++ wrapper calls our operators; from torch 2.12 on also those that return values."""
    deviation, gathers, codes = _inductor(cpp_wrapper=True)
    assert deviation <= 1e-5 and gathers == [0, 0]
    assert len(codes) == 2 and all("inductor_entry_impl" in code for code in codes)
    # torch's C interface would lose the texts of our errors
    assert not any("aoti_torch_call_dispatcher" in code for code in codes)
    if torch.__version__ >= "2.12":
        assert not any("PyObject_CallObject" in code for code in codes)


# ---- with Lightning ----


class Scaled(models.Module):
    """Two losses of one batch: two backwards in a window, or one of their sum."""

    def __init__(self, window: bool) -> None:
        super().__init__(lr=0.1)
        self.automatic_optimization, self.window = False, window

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        if self.window:
            with self.trainer.strategy.coalesce_grad_reduction():  # type: ignore[attr-defined]
                self.manual_backward(self.loss(batch))
                self.manual_backward(self.loss(batch.flip(1)))
        else:
            self.manual_backward(self.loss(batch) + self.loss(batch.flip(1)))
        optimizer.step()
        optimizer.zero_grad()


@on_ranks()
def test_loss_scaling_after_a_window(long: bool) -> None:
    stages = (1, 2, 3) if long else (2,)
    start = Scaled(False)

    def fit(strategy: Any, window: bool) -> L.LightningModule:
        module = Scaled(window)
        module.load_state_dict(start.state_dict())
        scaler = GradScaler(models.device(), init_scale=2.0**17, growth_interval=2)  # the first steps overflow
        plugin = MixedPrecision("16-mixed", models.device(), scaler)
        trainer = models.make_trainer(strategy, max_steps=6, plugins=[plugin])
        trainer.fit(module, models.Batches(models.rank()))
        module.scale = scaler.get_scale() if strategy == "ddp" else trainer.precision_plugin.scaler.get_scale()  # type: ignore[attr-defined]
        return module

    ddp = fit("ddp", False)
    assert models.deviation(ddp, start) > 1e-2
    found = []
    for stage in stages:
        ours = fit(ZeroCompileStrategy(stage=stage, compile=False), True)
        assert ours.scale == ddp.scale  # type: ignore[attr-defined]
        found.append(models.deviation(ours, ddp))
    assert max(found) <= 1e-4, found  # fp16 rounds the two losses' gradients one by one


def test_no_window_outside_a_fit() -> None:
    with pytest.raises(RuntimeError, match="not sharded"), ZeroCompileStrategy().coalesce_grad_reduction():
        pass
