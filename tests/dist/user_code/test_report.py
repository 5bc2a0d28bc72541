"""What a run reports, what the monitor logs, and advice and warnings: each is provoked."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn

from lightning_zerocompile import ZeroCompileMonitor, ZeroCompileStrategy
from lightning_zerocompile.report.report import HostTimes, Report
from lightning_zerocompile.runtime import window
from tests.support import engines, models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER

LONG = pytest.mark.long


class Kept(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
        if any(name.startswith("zerocompile/") for name in metrics):
            self.lines.append({name.removeprefix("zerocompile/"): value for name, value in metrics.items()})


def _reported(module: L.LightningModule, steps: int = 4, **options: Any) -> tuple[Report, list[str]]:
    """Of a run that has ended, and the warnings of it."""
    torch._dynamo.reset()
    strategy = ZeroCompileStrategy(**options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        models.fit(module, strategy, steps)
    return strategy.report(), [str(warning.message) for warning in caught]


def _about(report: Report) -> dict[str, str]:
    return {advice.about: advice.text for advice in report.advice}


# ---- the monitor ----


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (1, EAGER),
        (3, AOT),
        pytest.param(2, AOT, marks=pytest.mark.long),
        pytest.param(3, EAGER, marks=pytest.mark.long),
    ],
    ids=["1-eager", "3-aot_eager", "2-aot_eager", "3-eager"],
)
@on_ranks()
def test_the_monitor_logs_what_the_run_does(stage: int, options: dict[str, Any]) -> None:
    """Every second step, on rank 0; the run communicates what it communicates without it."""
    torch._dynamo.reset()
    logger, strategy = Kept(), ZeroCompileStrategy(stage=stage, unit_bytes=1, **options)
    module, twin = models.pair(optimizer="adamw", lr=0.01)
    record = models.train(module, strategy, 6, callbacks=[ZeroCompileMonitor(2)], logger=[logger])
    plain = models.train(twin, ZeroCompileStrategy(stage=stage, unit_bytes=1, **options), 6)
    assert (record.stats.gathers, record.stats.reductions) == (plain.stats.gathers, plain.stats.reductions)
    assert models.deviation(module, twin) == 0
    assert len(logger.lines) == (3 if models.rank() == 0 else 0)
    if models.rank() > 0:
        return
    last = logger.lines[-1]
    assert 2 * sum(line["gathers"] for line in logger.lines) == pytest.approx(record.stats.gathers, abs=2)
    assert 2 * sum(line["reduce_bytes"] for line in logger.lines) == record.stats.reduce_bytes
    assert last["stage"] == stage and last["host_seconds"] > 0
    assert last["host_seconds"] < 1  # without the compilation
    assert last["graphs"] == record.compiled.dynamo_graphs and (last["graphs"] > 0) is bool(options["compile"])
    assert last["memory/masters"] == 4 * record.local_numel
    assert last["memory/optimizer_states"] >= 2 * last["memory/masters"]
    full = 4 * sum(p.numel() for p in module.parameters())
    assert (last["memory/gathered_peak"] >= full) is (stage < 3)
    report = strategy.report()
    assert report.host is not None and report.host.steps == 6
    assert (report.host.drained is None) is (models.device() == "cpu")  # only a device can wait for its host


@on_ranks()
def test_a_monitor_without_use_raises() -> None:
    for number in (0, True, 1.5):
        with pytest.raises(ValueError, match="`every_n_steps="):
            ZeroCompileMonitor(number)  # type: ignore[arg-type]
    monitor = ZeroCompileMonitor()
    with pytest.raises(MisconfigurationException, match="nothing to log to"):
        models.train(models.Module(), ZeroCompileStrategy(**EAGER), 1, callbacks=[monitor])
    with pytest.raises(MisconfigurationException, match="the Trainer's strategy is DDPStrategy"):
        models.train(models.Module(), "ddp", 1, callbacks=[monitor], logger=[Kept()])  # type: ignore[arg-type]


# ---- the report ----


@on_ranks()
def test_the_report() -> None:
    """While a run goes on and after it: text, and the same figures as JSON."""
    strategy = ZeroCompileStrategy(stage=3, unit_bytes=1, **AOT)
    with pytest.raises(AttributeError, match="no report yet"):
        strategy.report()

    class Middle(L.Callback):
        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.seen = trainer.strategy.report()  # type: ignore[attr-defined]

    models.train(models.Module(), strategy, 3, callbacks=[middle := Middle()])
    report = strategy.report()
    assert middle.seen.stats.backwards == report.stats.backwards == 3
    made = json.loads(report.as_json())
    assert made["stats"]["gathers"] == strategy.stats.gathers and made["stage"] == 3
    assert made["advice"] == [{"about": one.about, "text": one.text} for one in report.advice]
    assert set(report.gathers.values()) <= {0.0, 1.0, 2.0} and len(report.gathers) == report.units
    text = str(report)
    assert f"zerocompile, stage 3 on {models.world()} ranks" in text and "3 modules compiled by aot_eager" in text
    assert all(f"-> {advice.text}" in text for advice in report.advice)


# ---- advice, and warnings that name the module ----


class Disabled(models.Block):
    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def narrow(self, x: Tensor) -> Tensor:
        return self.down(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        wide = F.gelu(self.up(self.norm(x)))
        return x + self.narrow(wide)


@on_ranks()
def test_a_block_that_ran_eagerly() -> None:
    """The warning, on rank 0 and once, and the advice say which, why and where."""
    module = models.Module(lambda: models.Stacked(lambda: Disabled(10)))
    report, warned = _reported(module, stage=3, **AOT)
    text = _about(report)["eager"]
    line = Disabled.forward.__code__.co_firstlineno + 2
    assert "`model.layers.0` ran eagerly" in text and "disable" in text and f"test_report.py:{line}" in text, text
    assert "return x + self.narrow(wide)" in text
    said = [message for message in warned if "`model.layers.0`" in message]
    assert len(said) == (models.rank() == 0) and all(f"test_report.py:{line}" in message for message in said)
    plain, _ = _reported(models.Module(), stage=3, **AOT)
    assert "eager" not in _about(plain)


class Lengths(models.Batches):
    """Each batch has another length."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(2, 3 + index, dtype=torch.long, device=models.device())

    def __iter__(self) -> Any:
        return (self[index] for index in range(7))


@LONG
@on_ranks()
def test_many_recompilations() -> None:
    """A graph for each length; with `dynamic` one for all."""
    torch._dynamo.reset()
    found = []
    for dynamic in (False, True):
        strategy = ZeroCompileStrategy(stage=1, compile_options={"backend": "aot_eager", "dynamic": dynamic})
        models.make_trainer(strategy, max_steps=6).fit(models.Module(), Lengths(models.rank()))
        found.append(strategy.report())
    assert found[0].compile_stats.recompilations == 5 and "{'dynamic': True}" in _about(found[0])["recompilations"]
    assert "recompilations" not in _about(found[1])


@on_ranks()
def test_recompilations_are_counted() -> None:
    """Those of code that had a graph already, not the first; a few are no reason for advice."""
    torch._dynamo.reset()
    strategy = ZeroCompileStrategy(stage=1, compile_options={"backend": "aot_eager", "dynamic": False})
    models.make_trainer(strategy, max_steps=2).fit(models.Module(), Lengths(models.rank()))
    report = strategy.report()
    assert report.compile_stats.recompilations == 1 and "recompilations" not in _about(report)
    many = replace(report, compile_stats=replace(report.compile_stats, recompilations=4))
    assert "4 of 2 graphs are recompilations" in _about(many)["recompilations"]
    assert "{'dynamic': True}" in _about(many)["recompilations"]


class Rounds(nn.Module):
    """Blocks that are used three times, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 10)
        self.layers = nn.ModuleList(models.Block(10) for _ in range(4))
        self.head = nn.Linear(10, models.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length] -> [batch, length, vocabulary]
        x = self.embedding(tokens)
        for _ in range(3):
            for layer in self.layers:
                x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [EAGER, pytest.param(AOT, marks=pytest.mark.long)], ids=["eager", "aot_eager"])
@on_ranks()
def test_a_unit_that_is_gathered_many_times(options: dict[str, Any]) -> None:
    """Named once on rank 0; not where it is used once, kept, or lives for a step, and not for validation's gathers."""
    report, warned = _reported(models.Module(Rounds), stage=3, **options)
    names = [f"model.layers.{number}" for number in range(4)]
    often = [name for name, times in report.gathers.items() if times > 4]
    assert len(often) >= 3 and set(often) <= set(names)
    said = [message for message in warned if "times for each backward" in message]
    assert said == [report.often] * (models.rank() == 0)
    text = _about(report)["gathers"]
    assert all(f"`{name}`" in text for name in often) and f"gathered up to {max(report.gathers.values()):.0f} t" in text
    kept, quiet = _reported(models.Module(Rounds), stage=3, keep_gathered=names, **options)
    assert not kept.often and not [message for message in quiet if "times for each backward" in message]
    step, _ = _reported(models.Module(Rounds), stage=2, **options)
    assert not step.often and not step.gathers
    module, strategy = models.Module(), ZeroCompileStrategy(stage=3, **options)
    trainer = models.make_trainer(strategy, max_steps=4, val_check_interval=1, num_sanity_val_steps=0)
    trainer.fit(module, models.Batches(models.rank()), models.Batches(models.rank(), 8))
    assert not strategy.report().often and strategy.report().gathers


@on_ranks()
def test_memory_that_is_free() -> None:
    """At stage 3 the advice is to use it; not where a budget was given, where it is too small, or at other stages."""
    small, _ = _reported(models.Module(), 2, stage=3, **EAGER)
    assert "memory" not in _about(small)  # nothing to gain
    report = replace(small, stats=replace(small.stats, gather_bytes=2**27 * small.stats.backwards))
    assert report.free is not None and "keep_gathered='auto'" in _about(report)["memory"]
    assert "memory" not in _about(replace(report, free=report.largest))
    assert "memory" not in _about(replace(report, free=None))
    assert "memory" not in _about(replace(report, world_size=1))
    for options in ({"stage": 3, "keep_gathered": 0}, {"stage": 2}):
        other, _ = _reported(models.Module(), 2, **options, **EAGER)
        assert "memory" not in _about(replace(other, stats=report.stats))


@on_ranks()
def test_the_host_is_the_limit() -> None:
    """What a device that runs dry says; the figures are made up, since ranks on the CPU have none."""
    report, _ = _reported(models.Module(), 2, stage=2, **EAGER)
    assert "host" not in _about(report)
    dry = replace(report, host=HostTimes(steps=20, seconds=2.0, drained=19))
    assert "{'mode': 'reduce-overhead'}" in _about(dry)["host"] and "19 of 20" in _about(dry)["host"]
    assert "0.1000 s a step" in str(dry)
    for host in (HostTimes(20, 2.0, 3), HostTimes(2, 0.2, 2), HostTimes(20, 2.0, None)):
        assert "host" not in _about(replace(report, host=host))
    assert "host" not in _about(replace(dry, modes={**dry.modes, "mode": "reduce-overhead"}))


class Fused(models.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, **self.options)


@on_ranks()
def test_an_optimizer_that_could_be_fused() -> None:
    """On CUDA devices, where nobody has chosen."""
    report, _ = _reported(Fused(), 2, stage=2, **EAGER)
    assert report.unfused == ("AdamW",) and report.as_dict()["unfused"] == ("AdamW",)
    assert "AdamW makes several passes" in _about(replace(report, device="cuda:1"))["optimizer"]
    assert "optimizer" not in _about(replace(report, device="cpu"))
    for options in ({"fused": True}, {"fused": False}, {"foreach": True}):
        assert _reported(Fused(**options), 2, stage=2, **EAGER)[0].unfused == ()


@on_ranks()
def test_a_window_that_does_not_fit() -> None:
    """Said once, on rank 0, with the sizes; nothing is said where it fits or where `gather` was chosen."""
    for free, gather, count in ((10, "auto", 1), (2**40, "auto", 0), (10, "use", 0)):
        model = models.ByteModel()
        with (
            mock.patch.object(window, "free_memory", lambda device, free=free: ("", free)),
            engines.engine(model, 3, **EAGER) as engine,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            for number in range(2):
                with engine.windows.open(gather, None, None):  # type: ignore[arg-type]
                    engines.accumulate(engine, model, models.Batches(models.rank())[number])
        said = [str(w.message) for w in caught if "more than half" in str(w.message)]
        assert len(said) == count * (models.rank() == 0), (free, gather, said)
