"""What a run says when it starts, where, and that Lightning's own callbacks say full sizes."""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import DeviceStatsMonitor, ModelSummary
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.model_summary import ModelSummary as Summary
from torch import nn
from torch._dynamo.callback import callback_handler

from lightning_zerocompile import ZeroCompileStrategy, engine_owner
from lightning_zerocompile.compile.progress import Progress
from lightning_zerocompile.plan.plan import in_units
from lightning_zerocompile.report.start import start_line
from tests.support import models
from tests.support.harness import on_ranks
from tests.support.memory import gathered_bytes
from tests.support.parity import AOT, EAGER


def _lines(options: dict[str, Any], optimizer: str) -> tuple[list[str], str, tuple[int, int]]:
    """What a fit of three steps logs on this rank, what it writes to stdout, and what a step of it moves."""
    trainer = models.make_trainer(ZeroCompileStrategy(**options), max_steps=3, callbacks=[step := Moved()])
    with contextlib.redirect_stdout(io.StringIO()) as out, models.heard() as heard:
        trainer.fit(models.Module(optimizer=optimizer), models.Batches(models.rank()))
    return [line for line in heard if "zerocompile" in line], out.getvalue(), step.last


class Moved(L.Callback):
    """Bytes that the last step gathered and reduced."""

    last = before = (0, 0)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        stats = trainer.strategy.stats  # type: ignore[attr-defined]
        now = (stats.gather_bytes, stats.reduce_bytes)
        self.last, self.before = (now[0] - self.before[0], now[1] - self.before[1]), now


@pytest.mark.parametrize(
    ("options", "optimizer", "expected"),
    [
        ({"stage": 1, **EAGER}, "sgd", ["stage 1 on {} ranks", "nothing compiled", "states of SGD 0 B"]),
        ({"stage": 3, "unit_bytes": 1, **AOT}, "adamw", ["stage 3 on {} ranks", "3 modules compiled by aot_eager"]),
    ],
    ids=["1-eager", "3-aot_eager"],
)
@on_ranks()
def test_one_line(options: dict[str, Any], optimizer: str, expected: list[str]) -> None:
    """On rank 0 alone and not on stdout; the bytes of a step in it are those of the run."""
    lines, out, moved = _lines(options, optimizer)
    assert out == "" and len(lines) == (models.rank() == 0)
    if models.rank() > 0:
        return
    for text in expected:
        assert text.format(models.world()) in lines[0], lines[0]
    assert f" and reduces {in_units(moved[1])} on each rank" in lines[0], lines[0]
    gathers = float(lines[0].split("a step gathers ")[1].split(" KiB")[0]) * 1024
    assert gathers == pytest.approx(moved[0], rel=1e-2)  # it takes the backward to read all, `shift` and `scale`, too
    masters = sum(gathered_bytes(p) for p in models.ByteModel().parameters()) // models.world()
    if optimizer == "adamw":
        size = float(lines[0].split("states of AdamW ")[1].split(" KiB")[0]) * 1024
        assert size == pytest.approx(2 * masters, rel=0.05)  # rank 0 has the most rows
    assert lines[0].endswith("and activations")


@on_ranks()
def test_what_cannot_be_said_ends_no_run() -> None:
    """Neither the line at the start nor the report at the end: the module is trained, and whole."""

    def fails(*_: Any, **__: Any) -> Any:
        raise ArithmeticError("on purpose")

    module, twin = models.pair(models.Module)
    strategy = ZeroCompileStrategy(3, **EAGER)
    trainer = models.make_trainer(strategy, max_steps=2)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned, models.heard() as heard:
        warnings.simplefilter("always")
        for name in ("start_line", "report_of"):
            patch.setattr(engine_owner, name, fails)
        trainer.fit(module, models.Batches(models.rank()))
    models.reference(twin, 2)
    assert models.deviation(module, twin) <= 1e-6 and all(type(p) is nn.Parameter for p in module.parameters())
    with pytest.raises(AttributeError, match="no report"):
        strategy.report()
    said = [line for line in heard if "cannot be said: ArithmeticError: on purpose." in line]
    told = [str(one.message) for one in warned if "there is no report of this run" in str(one.message)]
    assert (len(said), len(told)) == ((1, 1) if models.rank() == 0 else (0, 0))


class Own(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        return super().step(closure)


class WithOwn(models.Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.own = Own(self.parameters(), lr=0.1)
        return self.own


@on_ranks()
def test_the_users_optimizer_is_not_tried_out() -> None:
    """Its states are not counted, and the line says so."""
    module, lines = WithOwn(), []

    class Line(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            lines.append(start_line(trainer.strategy.engine, trainer.optimizers))  # type: ignore[attr-defined]

    models.train(module, ZeroCompileStrategy(stage=2, **EAGER), 2, callbacks=[Line()])
    assert lines[0].endswith("and activations and states of Own") and module.own.steps == 2


# ---- while torch.compile works ----


def test_a_long_compilation_is_said() -> None:
    """Which module, for how long, and when it is over; a short one and one of somebody else's code are not."""

    def compiles(what: str, seconds: float, patience: float = 0.2) -> list[str]:
        def backend(graph: Any, inputs: Any) -> Any:
            time.sleep(seconds)
            return graph.forward

        torch._dynamo.reset()
        progress = Progress(patience)
        end = progress.watch()
        progress.what = what
        with models.heard() as heard:
            torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
            end()
            time.sleep(0.3)  # the thread's last line
        assert progress.seconds >= seconds
        return heard

    assert compiles("`layers.0`", 0.0, patience=60.0) == []
    assert compiles("", 0.6) == []
    first, last = compiles("`layers.0`", 0.6)
    assert first.startswith("torch.compile is at work on `layers.0`, for 0 s so far")
    assert last.startswith("torch.compile has finished `layers.0` after ")


@on_ranks()
def test_blocks_are_named() -> None:
    """What compiles is the block that runs; nothing watches after the run."""
    seen: list[str] = []

    class Watch(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            progress = trainer.strategy.engine.regions.progress  # type: ignore[attr-defined]
            self.seen = callback_handler.register_start_callback(lambda _: seen.append(progress.what))

        def on_train_end(self, *_: Any) -> None:
            callback_handler.remove_start_callback(self.seen)

    before = len(callback_handler.start_callbacks)
    models.train(models.Module(), ZeroCompileStrategy(stage=3, **AOT), 2, callbacks=[Watch()])
    assert seen[0] == "`model.layers.0`" and set(seen[1:]) <= {""}  # what else compiles is a backward
    assert len(callback_handler.start_callbacks) == before


# ---- Lightning's own ----


class Logged(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, Any] = {}

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:  # type: ignore[override]
        self.metrics |= metrics


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
@on_ranks()
def test_lightnings_own_figures_are_of_the_whole_model(stage: int) -> None:
    """ModelSummary: names, classes, counts and sizes as of the plain module; DeviceStatsMonitor logs as ever."""
    seen: list[Any] = []

    class Look(ModelSummary):
        @staticmethod
        def summarize(summary_data: Any, *figures: Any, **_: Any) -> None:
            seen.append((summary_data, *figures[:3]))

        def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            super().on_fit_start(trainer, module)
            self.on_rank = Summary(module, max_depth=-1)

    module = models.Module()
    module.model.embedding.weight.requires_grad_(False)
    plain = Summary(module, max_depth=-1)
    look, monitor = Look(max_depth=-1), DeviceStatsMonitor()
    logger = Logged()
    strategy = ZeroCompileStrategy(stage=stage, **AOT)
    models.train(
        module, strategy, 2, callbacks=[look, monitor], enable_model_summary=True, logger=[logger], log_every_n_steps=1
    )
    assert str(look.on_rank) == str(plain)
    if models.rank() == 0:
        [(data, total, trainable, size)] = seen
        rows = dict(data)
        assert (total, trainable) == (plain.total_parameters, plain.trainable_parameters)
        assert size == plain.model_size and rows["Type"] == plain.layer_types
    if models.device() == "cpu":
        assert any("DeviceStatsMonitor" in name for name in logger.metrics) or models.rank() > 0


@pytest.mark.usefixtures("one_process")
def test_a_warning_of_lightnings_is_not_repeated() -> None:
    """After each compilation Python shows again what it has shown; under DDP, which compiles nothing, it comes once."""
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        strategy, module = ZeroCompileStrategy(3, **AOT), models.Evaluated()
        trainer = models.make_trainer(strategy, max_steps=2)
        trainer.fit(module, models.Batches(0), models.Batches(0))
        assert strategy.compile_stats.dynamo_graphs > 0
        trainer.validate(module, models.Batches(0), verbose=False)
        trainer.test(module, models.Batches(0), verbose=False)
    assert len([one for one in caught if "treespec, LeafSpec" in str(one.message)]) <= 1
