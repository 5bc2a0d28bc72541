"""The training of `benchmark.py` by Lightning's Trainer, as a user would write it."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from benchmark_measures import Meter
from benchmark_systems import adamw, loss_of, micro_batches
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_zerocompile import ZeroCompileMonitor, ZeroCompileStrategy


class Training(L.LightningModule):
    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        super().__init__()
        self.model, self.args = model, args
        self.loss = torch.zeros(())  # of the last micro-batch

    def training_step(self, tokens: Tensor, index: int) -> Tensor:  # [batch, seq]
        loss = loss_of(self.model, tokens)
        self.loss = loss.detach()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters(), self.args)


class Batches(IterableDataset[Tensor]):
    """The micro-batches of all rows, one row after the other, on the CPU."""

    def __init__(self, meters: Sequence[Meter], args: argparse.Namespace) -> None:
        self.meters, self.args = meters, args

    def __iter__(self) -> Iterator[Tensor]:
        for meter in self.meters:
            batches = micro_batches(self.args, meter.seq, torch.device("cpu"))
            yield from itertools.islice(batches, meter.steps * self.args.accumulate)


class Metering(L.Callback):
    """Tells the meters of the optimizer's steps."""

    def __init__(self, meters: Sequence[Meter], accumulate: int) -> None:
        self.accumulate = accumulate
        self._meters = itertools.chain.from_iterable(itertools.repeat(meter, meter.steps) for meter in meters)
        self._meter: Meter | None = None

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        if index % self.accumulate == 0:
            self._meter = next(self._meters)
            self._meter.begin()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if (index + 1) % self.accumulate == 0:
            assert self._meter is not None and isinstance(module, Training)
            self._meter.end(module.loss)


class TimedMonitor(ZeroCompileMonitor):
    """Logs every step, and knows the host's seconds of each in which it did so."""

    def __init__(self) -> None:
        super().__init__(every_n_steps=1)
        self.seconds: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.seconds.append(0.0)
        self._timed(super().on_train_batch_start, *args)

    def on_before_backward(self, *args: Any) -> None:
        self._timed(super().on_before_backward, *args)

    def on_train_batch_end(self, *args: Any) -> None:
        self._timed(super().on_train_batch_end, *args)

    def _timed(self, hook: Any, *args: Any) -> None:
        began = time.perf_counter()
        hook(*args)
        self.seconds[-1] += time.perf_counter() - began


def fit(
    model: nn.Module, meters: Sequence[Meter], options: dict[str, Any], args: argparse.Namespace, device: torch.device
) -> Iterator[Meter]:
    """Runs all steps in one fit."""
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    strategy = ZeroCompileStrategy(param_dtype=torch.bfloat16, unshard_after_fit=False, **options)
    monitor = TimedMonitor()
    trainer = L.Trainer(
        accelerator=device.type,
        devices=dist.get_world_size(),
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=args.clip or None,
        callbacks=[Metering(meters, args.accumulate), *([monitor] if args.with_monitor else [])],
        logger=CSVLogger(tempfile.mkdtemp()) if args.with_monitor else False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Training(model, args), DataLoader(Batches(meters, args), batch_size=None))
    if args.with_monitor and dist.get_rank() == 0:
        taken = {"median": statistics.median(monitor.seconds), "fastest": min(monitor.seconds)}
        print(json.dumps({"monitor": {name: round(value, 7) for name, value in taken.items()}}), flush=True)
    yield from meters
