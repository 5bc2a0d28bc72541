"""Several backwards, one reduction: the window's gradients, its collectives, its gathers and its errors."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileStrategy
from lightning_zerocompile.engine import Engine
from lightning_zerocompile.sharding.full_values import full_value
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import ENDS, STAGES, mean_backward, reference

MODES: dict[str, dict[str, Any]] = {
    "eager": {"compile": False},
    "aot_eager": {"compile": "blocks"},
    "model": {"compile": "model", "unit_bytes": 2**26},
}
UNITS = 5  # of ByteModel


def _backwards(engine: Engine, data: models.Batches, numbers: list[int]) -> None:
    for number in numbers:
        loss = engines.token_loss(engine.model, data[number]) / len(numbers)
        engines.backward(engine, loss)


def _traffic(profile: Any) -> dict[str, int]:
    found = profile.profiler.kineto_results.events()  # `profile.events()` makes a tree of them first, in seconds
    events = Counter(event.name() for event in found)
    reduced = [event.shapes() for event in found if event.name() == "gloo:all_reduce"]
    return {
        "gathers": events["c10d::_allgather_base_"] + events["c10d::allgather_into_tensor_coalesced_"],
        "scatters": events["c10d::reduce_scatter_tensor_coalesced_"],
        "allreduces": events["c10d::allreduce_"],  # gloo's: one for each gradient, see [Note: gloo reduce-scatters]
        "reduced": sum(4 * torch.Size(shape).numel() for shapes in reduced for shape in shapes),
    }


# ---- one reduction, whatever the number of backwards ----


def _windows(stage: int, mode: str, gather: str) -> dict[str, Any]:
    model, twin = models.pair(lambda: models.Whole(models.ByteModel()))
    data = models.Batches(models.rank())
    counts = [1, 2, 4, 8, 1]  # the first and the last window show that nothing is left behind
    micros = [list(range(10 * k, 10 * k + count)) for k, count in enumerate(counts)]
    seen, held = [], []
    with engines.engine(model, stage, copy_engine=False, **MODES[mode]) as engine:
        optimizer = engines.sgd(engine, model)
        for numbers in micros:
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)
            before = engine.runtime.stats().reductions
            with engine.training_step(), profiler:
                with engine.windows.open(gather, None, None):
                    _backwards(engine, data, numbers)
                    held.append(engine.runtime.core.deferred_bytes())
                engine.apply_writes()  # while gloo's threads still record, the profiler may lose all other events
            seen.append(_traffic(profiler) | {"reductions": engine.runtime.stats().reductions - before})
            held.append(engine.runtime.core.deferred_bytes())
            resident = engine.runtime.core.resident_units()
            optimizer.step()
        compiled = engine.regions.stats
    engines.window_reference(twin, micros)
    return {
        "deviation": models.deviation(model, twin), "seen": seen, "held": held, "resident": resident,
        "compiled": (compiled.forward, compiled.backward),
    }  # fmt: skip


@STAGES
@pytest.mark.parametrize("mode", list(MODES))
@on_ranks()
def test_window_reduces_once(stage: int, mode: str) -> None:
    """N = 1, 2, 4, 8 backwards: DDP's parameters, and reductions and gathers that do not depend on N."""
    result = _windows(stage, mode, "window")
    assert result["deviation"] <= 1e-6
    first = result["seen"][0]
    # all units are small, so one reduction takes them; the 0-dim parameter has one of its own
    assert [(seen["reductions"], seen["reduced"]) for seen in result["seen"]] == [(2, first["reduced"])] * 5
    gradients = len(list(models.Whole(models.ByteModel()).parameters()))
    collectives = (
        {"scatters": 1, "allreduces": 1} if models.device() == "cuda" else {"scatters": 0, "allreduces": gradients}
    )
    assert [seen | collectives for seen in result["seen"]] == result["seen"]
    assert first["reduced"] > 0 or models.device() == "cuda"  # the profiler shows the sizes of gloo's transfers only
    # stages 1 and 2 gather after the optimizer, outside the window, but for the very first values
    assert [seen["gathers"] for seen in result["seen"]] == [1 if stage == 3 else 0] * 5
    assert all(size > 0 for size in result["held"][::2]) and not any(result["held"][1::2])
    assert result["resident"] == []
    assert result["compiled"] == ((0, 0) if mode == "eager" else (1, 1))


def _filled(engine: Engine, limit: int, units: list[int]) -> int:
    """How many runs of up to ``limit`` bytes the units make."""
    masters, runs, filled = dict(engine.runtime.units_in_order()), 0, limit + 1
    for unit in units:
        size = sum(4 * master.numel() for master in masters[unit])
        runs, filled = (runs, filled + size) if filled + size <= limit else (runs + 1, size)
    return runs


@STAGES
@on_ranks()
def test_small_units_share_collectives(stage: int) -> None:
    """A step in which up to `limit` bytes are reduced, and gathered, together, where all units are at once."""
    counts, data = [], models.Batches(models.rank())
    for limit in (0, 4000, 2**26):
        model, twin = models.pair(models.ByteModel)
        with engines.engine(model, stage, compile=False, copy_engine=False) as engine:
            engine.runtime.core.set_merge_bytes(limit)
            optimizer = engines.sgd(engine, model)
            before = engine.runtime.stats()
            with engine.training_step(), engine.windows.open("window", None, None):
                held = engine.runtime.stats()
                _backwards(engine, data, [0, 1])
            window = engine.runtime.stats()
            optimizer.step()
            after = engine.runtime.stats()
            used = [unit for unit, _ in engine.runtime.units_in_order()]
            gathers = held.gathers - before.gathers if stage == 3 else after.gathers - window.gathers
            expected = _filled(engine, limit, used[::-1]), _filled(engine, limit, sorted(used) if stage == 3 else used)
            counts.append((window.reductions - 1, gathers))  # the 0-dim parameter has a reduction of its own
        assert counts[-1] == expected, limit
        engines.window_reference(twin, [[0, 1]])
        assert models.deviation(model, twin) <= 1e-6
    for each, some, one in zip(*counts, strict=True):
        assert UNITS == each > some > one == 1


@on_ranks()
def test_gather_at_each_use() -> None:
    """`gather="use"` trains the same and gathers in each backward; "auto" decides for "step" where memory allows."""
    use, auto = (_windows(3, "eager", gather) for gather in ("use", "auto"))
    assert max(use["deviation"], auto["deviation"]) <= 1e-6
    assert use["seen"][3]["gathers"] > 4 * use["seen"][0]["gathers"] > 0
    assert [seen["gathers"] for seen in auto["seen"]] == [1] * 5


@STAGES
@on_ranks()
def test_exact_sums_are_equal_to_the_bit(stage: int) -> None:
    """Gradients whose sums are exact in fp32: several backwards outside, and inside a window.

    With three ranks the sums are, and the mean is not: NCCL multiplies by a third before it adds.
    """
    found = []
    for window in (False, True):
        model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 5 - 2)
        engine = engines.make_engine(model, stage, compile=False, keep_gradients=True)
        try:
            with (
                engine.training_step(),
                engine.windows.open("window", None, None) if window else contextlib.nullcontext(),
            ):
                for k in range(4):
                    x = torch.arange(12.0, device=models.device()).view(2, 6) % (3 + k) + models.rank()
                    engines.backward(engine, model(x).sum())
            found.append([full_value(p.grad).cpu() for p in model.parameters()])
        finally:
            engine.abandon()
    assert all(g.abs().max() > 0 for g in found[0])
    allowed = 0 if models.world() & (models.world() - 1) == 0 else 1e-6
    for outside, inside in zip(*found, strict=True):
        assert (outside - inside).abs().max() <= allowed * outside.abs().max()


# ---- ranks that differ ----


@STAGES
@on_ranks()
def test_ranks_may_run_different_numbers_of_backwards(stage: int) -> None:
    """Rank 0 runs three backwards in the window, the others one; two windows."""
    model, twin = models.pair(models.ByteModel)
    mine = models.Batches(models.rank())
    counts = [3 if r == 0 else 1 for r in range(models.world())]
    with engines.compiled_here(models.rank() == 0), engines.engine(model, stage) as engine:
        optimizer = engines.sgd(engine, model)
        for start in (0, 10):
            with engine.training_step(), engine.windows.open("window", None, None):
                for number in range(start, start + counts[models.rank()]):
                    engines.token_loss(model, mine[number]).backward()
            optimizer.step()

    def windows(rank: int) -> list[list[Tensor]]:
        return [[models.Batches(rank)[start + number] for number in range(counts[rank])] for start in (0, 10)]

    reference(twin, 2, lambda module, batches: sum(engines.token_loss(module, batch) for batch in batches), windows)
    assert models.deviation(model, twin) <= 1e-6


class Sometimes(nn.Module):
    """`one` is used by rank 0 alone, `nobody` by none, `late` in the second backward only, `frozen` has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.one, self.late = (nn.Linear(4, 4) for _ in range(3))
        self.nobody = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor, rank: int, late: bool) -> Tensor:
        x = self.frozen(torch.tanh(self.always(x)))
        x = x + self.one(x) if rank == 0 else x
        return self.late(x) if late else x


@STAGES
@on_ranks()
def test_unused_frozen_and_one_sided_parameters(stage: int) -> None:
    model, twin = models.pair(Sometimes)
    x = torch.randn(3, 4).to(models.device())
    engine = engines.make_engine(model, stage, compile=False, keep_gradients=True)
    try:
        with engine.training_step(), engine.windows.open("window", None, None):
            for late in (False, True):
                model(x, models.rank(), late).square().mean().backward()
        grads = {n: None if p.grad is None else full_value(p.grad) for n, p in model.named_parameters()}
    finally:
        engine.abandon()
    for late in (False, True):
        mean_backward(lambda rank, late=late: twin(x, rank, late).square().mean())  # type: ignore[misc]
    expected = {n: p.grad for n, p in twin.named_parameters()}
    worst = max((grads[n] - g).abs().max().item() for n, g in expected.items() if g is not None)
    assert worst <= 1e-6 and all((grads[n] is None) == (g is None) for n, g in expected.items())


# ---- with Lightning: optimizers, clipping, accumulation ----


class Adversarial(models.Module):
    """Two optimizers that alternate, over parts that share the embedding; the second steps in every second step."""

    def __init__(self, window: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(models.VOCABULARY, 1)
        self.window = window

    def _losses(self, batch: Tensor) -> Iterator[tuple[int, Tensor]]:
        for chunk in batch.chunk(2):
            yield 0, self.loss(chunk) - self.critic(self.model(chunk[:, :-1])).mean() * 0.1
        for chunk in batch.chunk(2):
            yield 1, self.critic(self.model(chunk[:, :-1]).detach()).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        generator, critic = self.optimizers()  # type: ignore[attr-defined]
        for which, optimizer in ((0, generator), (1, critic)):
            self.toggle_optimizer(optimizer)
            with strategy.coalesce_grad_reduction() if self.window else contextlib.nullcontext():
                for index, loss in self._losses(batch):
                    if index == which:
                        self.manual_backward(loss)
            if which == 0 or batch_idx % 2:
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.SGD([*self.model.parameters()], lr=0.3),
            torch.optim.SGD(self.critic.parameters(), lr=0.3, momentum=0.9),
        )


@ENDS
@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
@on_ranks()
def test_several_optimizers_and_clipping(stage: int, mode: str) -> None:
    """Alternating optimizers, one of which steps every second time on gradients that add up, clipped by norm."""
    modules = [Adversarial(True), Adversarial(False)]
    modules[1].load_state_dict(modules[0].state_dict())
    for module in modules:
        models.train(
            module,
            ZeroCompileStrategy(stage=stage, **({"compile_options": {"backend": "aot_eager"}} | MODES[mode])),
            steps=6,
        )
    assert models.deviation(*modules) <= 1e-6


class Accumulates(models.Module):
    """Manual accumulation over two steps, by `block_backward_sync` or by `toggle_model(sync_grad=...)`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.automatic_optimization, self.how = False, how
        self.reductions: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        optimizer: Any = self.optimizers()
        last = batch_idx % 2 == 1
        before = strategy.stats.reductions
        if self.how == "toggle":
            with optimizer.toggle_model(sync_grad=last):
                self.manual_backward(self.loss(batch) / 2)
        else:
            with contextlib.nullcontext() if last else strategy.block_backward_sync():
                self.manual_backward(self.loss(batch) / 2)
        self.reductions.append(strategy.stats.reductions - before)
        if last:
            optimizer.step()
            optimizer.zero_grad()


@STAGES
@pytest.mark.parametrize("how", ["block", "toggle"])
@pytest.mark.parametrize("defer_grad_sync", [False, True])
@on_ranks()
def test_accumulation_reduces_as_rarely_as_the_stage_allows(stage: int, how: str, defer_grad_sync: bool) -> None:
    module, twin = Accumulates(how), models.ByteModel()
    twin.load_state_dict(module.model.state_dict())
    models.train(module, ZeroCompileStrategy(stage, compile=False, defer_grad_sync=defer_grad_sync), steps=2)
    engines.window_reference(twin, [[0, 1], [2, 3]])
    assert models.deviation(module.model, twin) <= 1e-6
    once = UNITS + 1  # the 0-dim parameter has a collective of its own
    assert module.reductions == [0 if stage == 1 or defer_grad_sync else once, once] * 2


@ENDS
@on_ranks()
def test_several_forwards_and_one_backward(stage: int) -> None:
    """Two forwards, one backward of their product, inside and outside a window; before it a backward that stays."""
    model, twin = models.pair(models.ByteModel)
    data = models.Batches(models.rank())
    with engines.engine(model, stage) as engine:
        optimizer = engines.sgd(engine, model)
        with engine.training_step():
            engines.backward(engine, engines.token_loss(model, data[0]) * engines.token_loss(model, data[1]))
            for number in (2, 4):  # two windows in one step add up
                with engine.windows.open("auto", None, None):
                    (engines.token_loss(model, data[number]) * engines.token_loss(model, data[number + 1])).backward()
        optimizer.step()

    def loss(module: nn.Module, of: models.Batches) -> Any:
        return sum(engines.token_loss(module, of[n]) * engines.token_loss(module, of[n + 1]) for n in (0, 2, 4))

    reference(twin, 1, loss, lambda rank: [models.Batches(rank)])
    assert models.deviation(model, twin) <= 1e-6
