"""Lightning's callbacks and Trainer features: as with DDP in the same process group, or as the docstring says."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch import callbacks
from torch import Tensor

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER

# ---- callbacks and loggers that watch ----


class Watched(models.Module):
    """Logs in every way; its validation loss rises after two epochs."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("rank", float(models.rank()), sync_dist=True, reduce_fx="max")
        self.log("mean_loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.accumulated = [*getattr(self, "accumulated", []), self.trainer.accumulate_grad_batches]
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("worse", abs(self.current_epoch - 1.0) + models.rank(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Counted(L.Callback):
    """Lightning's summary while the model is sharded."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        summary = L.pytorch.utilities.model_summary.summarize(module, max_depth=-1)
        self.counts = (summary.total_parameters, summary.trainable_parameters, summary.model_size)
        self.layers = dict(zip(summary.layer_names, summary.param_nums, strict=True))


def _watch(strategy: Any, start: Watched, folder: str) -> tuple[Any, ...]:
    module, counted = copy.deepcopy(start), Counted()
    checkpoint = callbacks.ModelCheckpoint(folder, monitor="worse", save_top_k=1, filename="{epoch}", save_last=True)
    logger = L.pytorch.loggers.CSVLogger(folder, version=0)
    trainer = models.fit_epochs(
        module, strategy, 9, logger=logger, log_every_n_steps=1, enable_checkpointing=True, enable_model_summary=True,
        callbacks=[
            checkpoint, counted, callbacks.EarlyStopping("worse", patience=1), callbacks.LearningRateMonitor(),
            callbacks.DeviceStatsMonitor(cpu_stats=False), callbacks.GradientAccumulationScheduler({0: 1, 1: 3}),
            callbacks.ModelSummary(max_depth=2),
        ],
    )  # fmt: skip
    trainer.strategy.barrier()
    rows = (Path(folder) / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    files = sorted(path.name for path in Path(folder).glob("*.ckpt"))
    best = models.Module.load_from_checkpoint(checkpoint.best_model_path, map_location="cpu", weights_only=False)
    return metrics, module.accumulated, rows.splitlines()[0], files, counted.counts, counted.layers, best, module


@on_ranks()
def test_callbacks_that_watch(tmp_path: Path) -> None:
    """Checkpoints, early stopping, monitors, accumulation schedule, logs and (true) summaries are DDP's."""
    folder = str(tmp_path)
    torch.manual_seed(0)
    start = Watched()
    start.model.embedding.requires_grad_(False)  # type: ignore[union-attr]
    numel = sum(p.numel() for p in start.parameters())
    *ddp, their_best, theirs = _watch("ddp", start, f"{folder}/ddp")
    assert ddp[0]["rank"] == models.world() - 1 and ddp[1][-1] == 3 and "lr-SGD" in ddp[2]
    assert ddp[3] == ["epoch=1.ckpt", "last.ckpt"] and ddp[4][0] == numel
    for stage in (1, 3):
        metrics, *ours, best, module = _watch(ZeroCompileStrategy(stage, **EAGER), start, f"{folder}/{stage}")
        assert metrics == pytest.approx(ddp[0], abs=1e-5)
        assert ours == ddp[1:]
        assert models.deviation(best, their_best) < 1e-6 and models.deviation(module, theirs) < 1e-6
        assert models.deviation(best, module) > 1e-3


# ---- the Trainer's options ----


class Probed(models.Module):
    """Looks at the data and at the strategy's communication from inside; has a metric that keeps its own tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.device == batch.device
        self.metric(batch.float())
        self.log("metric", self.metric, on_epoch=True)
        self.batches = [*getattr(self, "batches", []), batch.cpu()]
        gathered = self.all_gather(torch.tensor(float(models.rank()), device=batch.device))
        assert gathered.tolist() == [float(r) for r in range(models.world())]
        strategy = self.trainer.strategy
        one = torch.ones((), device=batch.device)
        assert strategy.reduce(one * models.rank(), reduce_op="sum").item() == sum(range(models.world()))
        assert strategy.reduce(one * models.rank()).item() == sum(range(models.world())) / models.world()
        assert strategy.reduce_boolean_decision(True, all=True)
        assert not strategy.reduce_boolean_decision(models.rank() == 0, all=True)
        assert strategy.reduce_boolean_decision(models.rank() == 0, all=False)
        assert strategy.broadcast({"rank": models.rank()}, src=1) == {"rank": 1}
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.inference = torch.is_inference_mode_enabled()
        super().validation_step(batch, batch_idx)


@on_ranks()
def test_options_of_the_trainer() -> None:
    """Samplers, inference mode, time limit, and the strategy's reductions, gathers and decisions."""
    torch.manual_seed(0)
    start = Probed()
    everyone = torch.utils.data.DataLoader(models.Batches(0, 8)._batches, batch_size=None)
    modules, values = [], []
    ours = [(1, EAGER), (3, AOT), (3, EAGER)]
    strategies: list[Any] = ["ddp", *(ZeroCompileStrategy(stage, **options) for stage, options in ours)]
    for strategy, inference_mode in zip(strategies, (True, True, False, True), strict=True):
        module = copy.deepcopy(start)
        trainer = models.make_trainer(
            strategy, max_epochs=1, use_distributed_sampler=True, inference_mode=inference_mode, num_sanity_val_steps=1
        )
        trainer.fit(module, everyone, models.Batches(models.rank(), 1))
        assert len(module.batches) == -(-8 // models.world())  # the sampler repeats some
        assert not module.inference  # Lightning: validations of a fit are under no_grad
        modules.append(module)
        values.append(trainer.callback_metrics["metric"].item())
        trainer.validate(module, models.Batches(models.rank(), 1), verbose=False)
        assert module.inference is (inference_mode and models.device() == "cuda")  # Lightning: not with gloo
    assert values == pytest.approx([values[0]] * 4) and values[0] > 1
    for module in modules[1:]:
        assert all(torch.equal(a, b) for a, b in zip(module.batches, modules[0].batches, strict=True))
        assert models.deviation(module, modules[0]) < 1e-6
    module = copy.deepcopy(start)
    trainer = models.make_trainer(ZeroCompileStrategy(3, **EAGER), max_epochs=-1, max_time={"seconds": 1})
    trainer.fit(module, models.Batches(models.rank()))
    assert 0 < trainer.global_step < 100_000 and trainer.should_stop


class Idle(models.Module):
    def train_dataloader(self) -> Any:
        return models.Batches(models.rank())


@on_ranks()
def test_command_line() -> None:
    """LightningCLI takes the name, and the class with arguments, as options or as one value."""
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    cases = [
        (["--trainer.strategy", "zerocompile"], (3, None)),
        (["--trainer.strategy", "zerocompile_stage_1"], (1, None)),
        (
            ["--trainer.strategy=lightning_zerocompile.ZeroCompileStrategy", "--trainer.strategy.stage=2",
             "--trainer.strategy.compile=false", "--trainer.strategy.param_dtype=bfloat16",
             "--trainer.strategy.prefetch=0"],
            (2, torch.bfloat16),
        ),
        (
            ['--trainer.strategy={"class_path": "lightning_zerocompile.ZeroCompileStrategy", '
             '"init_args": {"stage": 1, "compile": "blocks", "compile_options": {"backend": "aot_eager"}, '
             '"reduce_dtype": "float32"}}'],
            (1, None),
        ),
    ]  # fmt: skip
    common = [
        f"--trainer.accelerator={models.device()}", f"--trainer.devices={models.ranks_here()}",
        f"--trainer.num_nodes={models.world() // models.ranks_here()}", "--trainer.logger=false",
        "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false", "--trainer.max_steps=2",
        "--trainer.enable_model_summary=false",
    ]  # fmt: skip
    for arguments, (stage, dtype) in cases:
        cli = LightningCLI(
            Idle, save_config_callback=None, args=[*common, *arguments], run=False, seed_everything_default=False
        )
        strategy = cli.trainer.strategy
        assert isinstance(strategy, ZeroCompileStrategy)
        assert strategy.config.stage == stage and strategy.config.param_dtype is dtype
        if strategy.config.compile is False or strategy.config.backend == "aot_eager":
            before = copy.deepcopy(cli.model)
            cli.trainer.fit(cli.model)
            assert cli.trainer.global_step == 2 and models.deviation(cli.model, before) > 1e-3
