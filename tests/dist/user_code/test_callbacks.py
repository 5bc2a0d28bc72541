"""What works around training: averages, freezing, adapters, the learning rate finder, the timer, clamping."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import callbacks
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import models
from tests.support.harness import on_ranks
from tests.support.parity import AOT, EAGER

CHECKPOINTS = ["full", pytest.param("sharded", marks=pytest.mark.long)]


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


def _consolidated(path: str) -> dict[str, Any]:
    return _format_checkpoint(_load_distributed_checkpoint(Path(path)))


def _saving(path: str) -> L.Callback:
    return callbacks.ModelCheckpoint(str(Path(path).parent), Path(path).name, every_n_epochs=3)


@pytest.mark.parametrize("kind", ["ema", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("swa", "equal"))])
@on_ranks()
def test_weight_averaging(kind: str, tmp_path: Path, long: bool) -> None:
    """SWA, EMA and the equal average: sharded, DDP's values in training, validation, either checkpoint and resume."""
    folder = str(tmp_path)
    cells = [(1, "full"), (3, "sharded"), *[(3, "full")] * long]
    torch.manual_seed(0)
    start = Normalized()
    ddp, further, plain = (copy.deepcopy(start) for _ in range(3))
    saving = _saving(f"{folder}/ddp")
    models.fit_epochs(ddp, "ddp", 3, callbacks=[AVERAGES[kind](), saving], enable_checkpointing=True)
    models.fit_epochs(further, "ddp", 5, f"{folder}/ddp.ckpt", callbacks=[AVERAGES[kind]()])
    models.fit_epochs(plain, "ddp", 3)
    assert models.deviation(ddp, plain) > 1e-2
    theirs = torch.load(f"{folder}/ddp.ckpt", weights_only=False)
    for stage, saves in cells:
        module, resumed, path = copy.deepcopy(start), copy.deepcopy(start), f"{folder}/{stage}-{saves}.ckpt"
        strategy = ZeroCompileStrategy(stage, state_dict_type=saves, **EAGER)  # type: ignore[arg-type]
        watched = [AVERAGES[kind](), Averages(), _saving(path.removesuffix(".ckpt"))]
        trainer = models.fit_epochs(module, strategy, 3, callbacks=watched, enable_checkpointing=True)
        assert models.deviation(module, ddp) < 1e-6
        assert module.seen == pytest.approx(ddp.seen, abs=1e-5)  # the average's, for the newer callbacks
        ours = torch.load(path, weights_only=False) if saves == "full" else _consolidated(path)
        assert ours.keys() == theirs.keys()
        for name, value in theirs["state_dict"].items():
            assert type(ours["state_dict"][name]) is Tensor
            assert torch.allclose(ours["state_dict"][name].cpu(), value.cpu(), atol=1e-6), name
        models.fit_epochs(resumed, ZeroCompileStrategy(stage, **EAGER), 5, path, callbacks=[AVERAGES[kind]()])
        assert models.deviation(resumed, further) < 1e-6
        trainer.validate(module, models.Batches(models.rank(), 1), verbose=False)
        probe = module.eval().loss(models.Batches(models.rank(), 1)[0].to(module.norm.weight.device))
        assert module.seen[-1] == pytest.approx(probe.item(), abs=1e-5)  # a validation alone sees the average, too
        module.train()


class ClampedAfter(models.Module):
    """Its weights are clamped through the attributes, after the step and before the average is updated."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.model.layers[0].up.weight.data.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_an_average_has_what_was_written_after_the_step(stage: Any) -> None:
    ddp, ours, plain = ClampedAfter(), ClampedAfter(), models.Module()
    for other in (ours, plain):
        other.load_state_dict(ddp.state_dict())
    for module, strategy in ((ddp, "ddp"), (ours, ZeroCompileStrategy(stage, **EAGER)), (plain, "ddp")):
        models.fit_epochs(module, strategy, 2, callbacks=[AVERAGES["ema"]()])
    assert models.deviation(ours, ddp) < 1e-6
    assert models.deviation(plain, ddp) > 1e-2


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


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@on_ranks()
def test_finetuning_callback(tmp_path: Path, checkpoint: str) -> None:
    """Unfreezing during training is training from then on, with gradients of all ranks, and can be resumed.

    DDP deviates: it never reduces gradients of parameters that were frozen when it was made.
    """
    folder = str(tmp_path)
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
        strategy = ZeroCompileStrategy(stage, state_dict_type=checkpoint, **options)
        models.fit_epochs(module, strategy, 4, callbacks=[Gradual()]).save_checkpoint(path)
        assert models.deviation(module, twin) < 1e-6
        assert all(p.requires_grad for p in module.parameters())
        if options is EAGER:
            strategy = ZeroCompileStrategy(stage, state_dict_type=checkpoint, **options)
            trainer = models.fit_epochs(resumed, strategy, 5, path, callbacks=[Gradual()])
            assert [len(group["params"]) for group in trainer.optimizers[0].param_groups] == [4, 5, 10]
            assert models.deviation(resumed, module) > 1e-3


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


@on_ranks()
def test_adapters_on_frozen_weights() -> None:
    """LoRA: only the adapters move; the frozen weights stay to the bit."""
    start, twin = models.pair(Adapted)
    losses = models.reference(twin, 5)
    assert models.deviation(twin, start) > 1e-2
    for stage, options in ((1, EAGER), (3, EAGER), (3, AOT)):
        module = copy.deepcopy(start)
        models.train(module, ZeroCompileStrategy(stage, **options), 5)
        assert models.deviation(module, twin) < 1e-6 and module.losses == pytest.approx(losses, abs=1e-5)
        for name, parameter in module.named_parameters():
            frozen = not name.endswith((".down", ".up"))
            assert parameter.requires_grad is not frozen
            assert not frozen or torch.equal(parameter.cpu(), dict(start.named_parameters())[name])


# ---- the learning rate finder ----


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@on_ranks()
def test_learning_rate_finder(tmp_path: Path, checkpoint: str) -> None:
    """DDP's curve and suggestion; weights and optimizer states are those of before."""
    folder = str(tmp_path)
    torch.manual_seed(0)
    start = models.Module(optimizer="adamw", lr=1e-3)
    found: list[Any] = []
    ours = [ZeroCompileStrategy(s, state_dict_type=checkpoint, **options) for s, options in ((1, EAGER), (3, AOT))]
    for strategy in ("ddp", *ours):
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


# ---- the timer ----


@pytest.mark.parametrize("interval", ["step", pytest.param("epoch", marks=pytest.mark.long)])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@on_ranks()
def test_a_timer_that_has_run_out_stops_a_resumed_run(tmp_path: Path, checkpoint: str, interval: str) -> None:
    """Nothing is trained, as under DDP, although the timer's seconds, which are in the checkpoint, come later here."""
    path = str(tmp_path / "timer.ckpt")
    for stage, options in ((1, EAGER), (3, AOT)):
        module, resumed = models.Module(), models.Module()
        strategy = ZeroCompileStrategy(stage, state_dict_type=checkpoint, **options)
        models.fit_epochs(module, strategy, 1, callbacks=[callbacks.Timer()]).save_checkpoint(path)
        strategy = ZeroCompileStrategy(stage, state_dict_type=checkpoint, **options)
        timer = callbacks.Timer(timedelta(microseconds=1), interval=interval)
        trainer = models.fit_epochs(resumed, strategy, 3, path, callbacks=[timer])
        assert trainer.global_step == 3
        assert models.deviation(resumed, module) == 0


# ---- writes to the parameters themselves ----


class Clamped(models.Module):
    """A Wasserstein critic's way to write: through ``data``, between two steps."""

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.1, 0.1)


@on_ranks()
def test_parameters_are_clamped_through_data() -> None:
    """The next forward computes with what was written, also where the value had been gathered after the step."""
    start, ddp = models.pair(Clamped)
    models.make_trainer("ddp", max_steps=4).fit(ddp, models.Batches(models.rank()))
    for stage, options in ((1, EAGER), (1, AOT), (3, EAGER), (3, AOT)):
        module = copy.deepcopy(start)
        models.train(module, ZeroCompileStrategy(stage, **options), 4)
        assert module.losses == pytest.approx(ddp.losses, abs=1e-5)
        assert models.deviation(module, ddp) < 1e-6
