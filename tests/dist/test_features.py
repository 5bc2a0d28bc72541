"""Lightning's callbacks and Trainer features: as with DDP in the same process group, or as the docstring says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch import callbacks
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile import ZeroCompileStrategy
from tests import models
from tests.harness import Ranks

EAGER: dict[str, Any] = {"compile": False}
AOT: dict[str, Any] = {"compile": "blocks", "backend": "aot_eager"}


def _fit(
    module: L.LightningModule, strategy: Any, epochs: int, path: str | None = None, **arguments: Any
) -> L.Trainer:
    """Three batches an epoch, one of validation after each."""
    trainer = models.make_trainer(strategy, max_epochs=epochs, num_sanity_val_steps=0, **arguments)
    data = models.Batches(models.rank(), 3), models.Batches(models.rank(), 1)
    trainer.fit(module, *data, ckpt_path=path, weights_only=False)
    return trainer


# ---- averages of the weights ----


class Normalized(models.Module):
    """Has batch statistics, which averaging callbacks treat apart; keeps what validation saw."""

    def __init__(self) -> None:
        super().__init__(lr=0.1)
        self.norm = nn.BatchNorm1d(models.LENGTH - 1)
        self.seen: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + self.norm(batch[:, 1:].float()).pow(3).mean() / 100

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(self.loss(batch).item())


AVERAGES: dict[str, Callable[[], L.Callback]] = {
    "ema": lambda: callbacks.EMAWeightAveraging(decay=0.5),
    "equal": lambda: callbacks.WeightAveraging(device="cpu", use_buffers=False),
    "swa": lambda: callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1),
}


class Averages(L.Callback):
    """Every rank keeps its rows of the average only."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            average = getattr(callback, "_average_model", None)
            if average is not None:
                assert all(isinstance(p, DTensor) for p in average.parameters())


def _averages(kind: str, folder: str) -> None:
    torch.manual_seed(0)
    start = Normalized()
    ddp, further, plain = (copy.deepcopy(start) for _ in range(3))
    _fit(ddp, "ddp", 3, callbacks=[AVERAGES[kind]()]).save_checkpoint(f"{folder}/ddp.ckpt")
    _fit(further, "ddp", 5, f"{folder}/ddp.ckpt", callbacks=[AVERAGES[kind]()])
    _fit(plain, "ddp", 3)
    assert models.deviation(ddp, plain) > 1e-2
    theirs = torch.load(f"{folder}/ddp.ckpt", weights_only=False)
    for stage in (1, 3):
        module, resumed, path = copy.deepcopy(start), copy.deepcopy(start), f"{folder}/{stage}.ckpt"
        trainer = _fit(module, ZeroCompileStrategy(stage, **EAGER), 3, callbacks=[AVERAGES[kind](), Averages()])
        trainer.save_checkpoint(path)
        assert models.deviation(module, ddp) < 1e-6
        assert module.seen == pytest.approx(ddp.seen, abs=1e-5)  # the average's, for the newer callbacks
        ours = torch.load(path, weights_only=False)
        assert ours.keys() == theirs.keys()
        for name, value in theirs["state_dict"].items():
            assert type(ours["state_dict"][name]) is Tensor
            assert torch.allclose(ours["state_dict"][name], value, atol=1e-6), name
        _fit(resumed, ZeroCompileStrategy(stage, **EAGER), 5, path, callbacks=[AVERAGES[kind]()])
        assert models.deviation(resumed, further) < 1e-6
        trainer.validate(module, models.Batches(models.rank(), 1), verbose=False)
        probe = module.eval().loss(models.Batches(models.rank(), 1)[0].to(module.norm.weight.device))
        assert module.seen[-1] == pytest.approx(probe.item(), abs=1e-5)  # a validation alone sees the average, too
        module.train()


@pytest.mark.parametrize("kind", list(AVERAGES))
def test_weight_averaging(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    """SWA, EMA and the equal average: sharded, DDP's values in training, validation, checkpoint and resume."""
    ranks.run(_averages, kind, str(tmp_path))


# ---- freezing and unfreezing ----


class Gradual(callbacks.BaseFinetuning):
    """Trains one block from the second epoch on, the others from the third."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.layers)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        layers = pl_module.model.layers
        if epoch == 1:
            self.unfreeze_and_add_param_group(layers[1], optimizer, lr=0.2)
        if epoch == 2:
            self.unfreeze_and_add_param_group([layers[0], layers[2]], optimizer)


class Unfrozen(models.Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.3, momentum=0.5)


def _finetuning(folder: str) -> None:
    torch.manual_seed(0)
    start = Unfrozen()
    twin, callback = copy.deepcopy(start).to(models.device()), Gradual()
    callback.freeze_before_training(twin)
    optimizer = twin.configure_optimizers()
    for epoch in range(4):
        callback.finetune_function(twin, epoch, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            for r in range(models.world()):
                (twin.loss(models.Batches(r)[step]) / models.world()).backward()
            optimizer.step()
    assert models.deviation(twin.model.layers, start.model.layers) > 1e-2
    for stage, options in ((1, EAGER), (3, EAGER), (3, AOT)):
        module, resumed = copy.deepcopy(start), copy.deepcopy(start)
        path = f"{folder}/{stage}.ckpt"
        _fit(module, ZeroCompileStrategy(stage, **options), 4, callbacks=[Gradual()]).save_checkpoint(path)
        assert models.deviation(module, twin) < 1e-6
        assert all(p.requires_grad for p in module.parameters())
        if options is EAGER:
            trainer = _fit(resumed, ZeroCompileStrategy(stage, **options), 5, path, callbacks=[Gradual()])
            assert [len(group["params"]) for group in trainer.optimizers[0].param_groups] == [4, 5, 10]
            assert models.deviation(resumed, module) > 1e-3


def test_finetuning_callback(ranks: Ranks, tmp_path: Path) -> None:
    """Unfreezing during training is training from then on, with gradients of all ranks, and can be resumed.

    DDP deviates: it never reduces gradients of parameters that were frozen when it was made.
    """
    ranks.run(_finetuning, str(tmp_path))


class LowRank(nn.Module):
    """A frozen layer and its trained low-rank update."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Adapted(models.Module):
    """Low-rank adapters in every block; all else is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.model.requires_grad_(False)
        for layer in self.model.layers:  # type: ignore[union-attr]
            layer.up, layer.down = LowRank(layer.up), LowRank(layer.down)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


def _adapters() -> None:
    start = Adapted()
    twin = copy.deepcopy(start)
    losses = models.reference(twin, 5)
    assert models.deviation(twin, start) > 1e-2
    for stage, options in ((1, EAGER), (3, EAGER), (3, AOT)):
        module = copy.deepcopy(start)
        models.train(module, ZeroCompileStrategy(stage, **options), 5)
        assert models.deviation(module, twin) < 1e-6 and module.losses == pytest.approx(losses, abs=1e-5)
        for name, parameter in module.named_parameters():
            frozen = not name.endswith((".down", ".up"))
            assert parameter.requires_grad is not frozen
            assert not frozen or torch.equal(parameter, dict(start.named_parameters())[name])


def test_adapters_on_frozen_weights(ranks: Ranks) -> None:
    """LoRA: only the adapters move; the frozen weights stay to the bit."""
    ranks.run(_adapters)


# ---- the learning rate finder ----


def _find(folder: str) -> None:
    torch.manual_seed(0)
    start = models.Module(optimizer="adamw", lr=1e-3)
    found: list[Any] = []
    for strategy in ("ddp", ZeroCompileStrategy(1, **EAGER), ZeroCompileStrategy(3, **AOT)):
        module = copy.deepcopy(start)
        trainer = models.make_trainer(strategy, max_epochs=1, limit_val_batches=0, default_root_dir=folder)
        finder = Tuner(trainer).lr_find(module, models.Batches(models.rank(), 30), num_training=20, min_lr=1e-4)
        assert finder is not None and models.deviation(module, start) == 0
        losses = finder.results["loss"]
        module.losses.clear()
        trainer.fit(module, models.Batches(models.rank(), 3))
        found.append((module.lr, losses, module.losses))
    assert found[0][0] != 1e-3
    for rate, losses, later in found[1:]:
        assert rate == found[0][0]
        assert losses == pytest.approx(found[0][1], abs=1e-5) and later == pytest.approx(found[0][2], abs=1e-4)
    assert not list(Path(folder).glob(".lr_find*"))


def test_learning_rate_finder(ranks: Ranks, tmp_path: Path) -> None:
    """DDP's curve and suggestion; weights and optimizer states are those of before."""
    ranks.run(_find, str(tmp_path))


# ---- writes to the parameters themselves ----


class Clamped(models.Module):
    """A Wasserstein critic's way to write: through ``data``, between two steps."""

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.1, 0.1)


def _clamped() -> None:
    start = Clamped()
    ddp = copy.deepcopy(start)
    models.make_trainer("ddp", max_steps=4).fit(ddp, models.Batches(models.rank()))
    for stage, options in ((1, EAGER), (1, AOT), (3, EAGER), (3, AOT)):
        module = copy.deepcopy(start)
        models.train(module, ZeroCompileStrategy(stage, **options), 4)
        assert module.losses == pytest.approx(ddp.losses, abs=1e-5)
        assert models.deviation(module, ddp) < 1e-6


def test_parameters_are_clamped_through_data(ranks: Ranks) -> None:
    """The next forward computes with what was written, also where the value had been gathered after the step."""
    ranks.run(_clamped)


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
    trainer = _fit(
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


def _watched(folder: str) -> None:
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


def test_callbacks_that_watch(ranks: Ranks, tmp_path: Path) -> None:
    """Checkpoints, early stopping, monitors, accumulation schedule, logs and (true) summaries are DDP's."""
    ranks.run(_watched, str(tmp_path))


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


def _options() -> None:
    torch.manual_seed(0)
    start = Probed()
    everyone = torch.utils.data.DataLoader(models.Batches(0, 8)._batches, batch_size=None)
    modules, values = [], []
    strategies = ["ddp", ZeroCompileStrategy(1, **EAGER), ZeroCompileStrategy(3, **AOT), ZeroCompileStrategy(3, **EAGER)]
    for strategy, inference_mode in zip(strategies, (True, True, False, True), strict=True):
        module = copy.deepcopy(start)
        trainer = models.make_trainer(
            strategy, max_epochs=1, use_distributed_sampler=True, inference_mode=inference_mode, num_sanity_val_steps=1
        )
        trainer.fit(module, everyone, models.Batches(models.rank(), 1))
        assert len(module.batches) == 8 // models.world()
        assert module.inference is (inference_mode and models.device() == "cuda")  # Lightning: not with gloo
        modules.append(module)
        values.append(trainer.callback_metrics["metric"].item())
    assert values == pytest.approx([values[0]] * 4) and values[0] > 1
    for module in modules[1:]:
        assert all(torch.equal(a, b) for a, b in zip(module.batches, modules[0].batches, strict=True))
        assert models.deviation(module, modules[0]) < 1e-6
    module = copy.deepcopy(start)
    trainer = models.make_trainer(ZeroCompileStrategy(3, **EAGER), max_epochs=-1, max_time={"seconds": 1})
    trainer.fit(module, models.Batches(models.rank()))
    assert 0 < trainer.global_step < 100_000 and trainer.should_stop


def test_options_of_the_trainer(ranks: Ranks) -> None:
    """Samplers, inference mode, time limit, and the strategy's reductions, gathers and decisions."""
    ranks.run(_options)


class Idle(models.Module):
    def train_dataloader(self) -> Any:
        return models.Batches(models.rank())


def _command_line() -> None:
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
             '"init_args": {"stage": 1, "compile": "blocks", "backend": "aot_eager", "reduce_dtype": "float32"}}'],
            (1, None),
        ),
    ]  # fmt: skip
    common = [
        f"--trainer.accelerator={models.device()}", f"--trainer.devices={models.world()}", "--trainer.logger=false",
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


def test_command_line(ranks: Ranks) -> None:
    """LightningCLI takes the name, and the class with arguments, as options or as one value."""
    pytest.importorskip("jsonargparse")
    ranks.run(_command_line)
