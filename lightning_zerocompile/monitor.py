"""A callback that logs what the strategy does to any of Lightning's loggers."""

from __future__ import annotations

import time
import weakref
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from typing_extensions import override

from lightning_zerocompile.report.report import HostTimes, Kept, kept_bytes, memory_by_kind
from lightning_zerocompile.runtime.runtime import Stats
from lightning_zerocompile.strategy import ZeroCompileStrategy

_COUNTS = ("gathers", "gather_bytes", "prefetched", "reductions", "reduce_bytes", "eager_reads", "eager_gathers")


class ZeroCompileMonitor(pl.Callback):
    """Logs what rank 0 does, on rank 0, every ``every_n_steps`` steps of the optimizers.

    Names are ``zerocompile/...``: ``memory/KIND`` in bytes; of each step since the last time ``gathers``,
    ``gather_bytes``, ``prefetched``, ``reductions``, ``reduce_bytes``, ``eager_reads``, ``eager_gathers`` and
    ``host_seconds`` (from the beginning to the end of its batches, as the host sees them, without those that
    torch.compile took); since set-up ``graphs``, ``recompilations`` and ``compile_seconds``. It adds no communication
    and waits for no device. Exposed communication is not logged: to measure it, a device must be asked for times. While
    the callback is there, ``strategy.report()`` has the host's times, too.

    Args:
        every_n_steps: ``None``: the Trainer's ``log_every_n_steps``.

    Raises:
        ValueError: ``every_n_steps`` is not positive.
        MisconfigurationException: in set-up: the Trainer has another strategy, or no logger.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and (
            isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1
        ):
            raise ValueError(f"`every_n_steps={every_n_steps!r}` must be a number of steps, 1 or more, or None.")
        self.every_n_steps = every_n_steps
        self._batches = self._drained = 0
        self._seconds = 0.0
        self._since = self._compiled = 0.0
        self._last: dict[str, float] = {}
        self._last_step = 0
        self._kept: tuple[tuple[object, ...], Kept] | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, ZeroCompileStrategy):
            raise MisconfigurationException(
                f"ZeroCompileMonitor logs what `strategy='zerocompile'` does, and the Trainer's strategy is "
                f"{type(trainer.strategy).__name__}. Leave the callback out, or pass that strategy."
            )
        if not trainer.loggers:
            raise MisconfigurationException(
                "ZeroCompileMonitor has nothing to log to: the Trainer has no logger. Pass one (`logger=True`), or "
                "leave the callback out and print `trainer.strategy.report()`."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._batches = self._drained = 0
        self._seconds, self._last, self._last_step, self._kept = 0.0, {}, trainer.global_step, None

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._since, self._compiled = time.perf_counter(), _compile_seconds(trainer)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if loss.is_cuda:  # the query does not wait for the device
            self._drained += torch.cuda.current_stream(loss.device).query()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        self._seconds += time.perf_counter() - self._since - (_compile_seconds(trainer) - self._compiled)
        self._batches += 1
        strategy = trainer.strategy
        if not isinstance(strategy, ZeroCompileStrategy):
            return
        cuda = strategy.root_device.type == "cuda"
        strategy.host_times = HostTimes(self._batches, self._seconds, self._drained if cuda else None)
        every = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        steps = trainer.global_step - self._last_step
        if steps >= every > 0 and trainer.is_global_zero:
            self._log(trainer, strategy, steps)

    def _kept_bytes(self, strategy: ZeroCompileStrategy, stats: Stats) -> Kept:
        """To count them takes longer than all the rest, so they are counted when there are others than before."""
        engine = strategy.engine
        runtime = weakref.ref(engine.runtime)
        there = runtime, engine.steps.number_of_states(), len(engine.runtime.sharded_parameters), stats.offload_bytes
        if self._kept is None or self._kept[0] != there:
            self._kept = there, kept_bytes(engine)
        return self._kept[1]

    def _log(self, trainer: pl.Trainer, strategy: ZeroCompileStrategy, steps: int) -> None:
        stats, compiled = strategy.stats, strategy.compile_stats
        counts = asdict(stats)
        now: dict[str, float] = {name: counts[name] for name in _COUNTS} | {"host_seconds": self._seconds}
        metrics = {name: (value - self._last.get(name, 0)) / steps for name, value in now.items()}
        sizes = memory_by_kind(strategy.engine, stats, self._kept_bytes(strategy, stats))
        metrics |= {f"memory/{kind}": size for kind, size in sizes.items()}
        metrics |= {"graphs": compiled.dynamo_graphs, "recompilations": compiled.recompilations}
        metrics["compile_seconds"] = _compile_seconds(trainer)
        metrics["stage"] = strategy.engine.config.chosen_stage
        self._last, self._last_step = now, trainer.global_step
        for logger in trainer.loggers:
            logger.log_metrics(
                {f"zerocompile/{name}": value for name, value in metrics.items()},
                step=trainer.fit_loop.epoch_loop._batches_that_stepped,
            )


def _compile_seconds(trainer: pl.Trainer) -> float:
    """That torch.compile took since set-up."""
    strategy = trainer.strategy
    return strategy.engine.regions.progress.seconds if isinstance(strategy, ZeroCompileStrategy) else 0.0
