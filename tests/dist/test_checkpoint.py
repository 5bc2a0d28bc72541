"""Checkpoints: one file with full tensors, DDP's keys, resume to the bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile import ZeroCompileStrategy
from tests import models
from tests.harness import Ranks

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
AOT: dict[str, Any] = {"compile": "blocks", "backend": "aot_eager"}


class Saved(models.Module):
    """AdamW with a schedule, hyperparameters, a buffer, tied weights and something of the user's in the checkpoint."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__(optimizer="adamw", lr=lr)
        self.save_hyperparameters()
        self.model.head.weight = self.model.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.restored: list[str] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8), "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = "user"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.restored.append(checkpoint["mine"])


def _data() -> models.Batches:
    return models.Batches(models.rank(), 4)


def _fit(module: L.LightningModule, stage: int, epochs: int, path: str | None = None, **arguments: Any) -> L.Trainer:
    strategy = arguments.pop("strategy", None) or ZeroCompileStrategy(stage=stage, **AOT)
    trainer = models.make_trainer(strategy, max_epochs=epochs, limit_val_batches=0, **arguments)
    trainer.fit(module, _data(), ckpt_path=path, weights_only=False)
    return trainer


def _load(path: str) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    return checkpoint


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []


def _skeleton(value: Any) -> Any:
    """Keys, types, shapes and dtypes."""
    if isinstance(value, Tensor):
        return (type(value), tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {key: _skeleton(v) for key, v in value.items()}
    return [_skeleton(v) for v in value] if isinstance(value, (list, tuple)) else type(value)


# ---- one file, as DDP writes it ----


def _same_as_ddp(stage: int, folder: str) -> None:
    torch.manual_seed(0)
    module = Saved()
    twin = copy.deepcopy(module)
    _fit(module, stage, 1).save_checkpoint(f"{folder}/ours.ckpt")
    _fit(twin, stage, 1, strategy="ddp").save_checkpoint(f"{folder}/ddp.ckpt")
    ours, theirs = _load(f"{folder}/ours.ckpt"), _load(f"{folder}/ddp.ckpt")
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "hyper_parameters", "global_step", "mine"):
        assert _skeleton(ours[part]) == _skeleton(theirs[part]), part
    assert ours.keys() == theirs.keys()
    assert not any(isinstance(t, DTensor) for t in _tensors(ours))
    for mine, other in zip(_tensors(ours["state_dict"]), _tensors(theirs["state_dict"]), strict=True):
        assert torch.allclose(mine.cpu(), other.cpu(), atol=1e-5)


@STAGES
def test_checkpoint_is_that_of_ddp(ranks: Ranks, stage: int, tmp_path: Path) -> None:
    """One file: the same keys, shapes and dtypes everywhere in it as DDP's, and the same values."""
    ranks.run(_same_as_ddp, stage, str(tmp_path))


def _read_by_others(stage: int, folder: str) -> None:
    module = Saved()
    _fit(module, stage, 1).save_checkpoint(f"{folder}/a.ckpt")
    loaded = Saved.load_from_checkpoint(f"{folder}/a.ckpt", map_location="cpu", weights_only=False)
    assert loaded.restored == ["user"] and loaded.lr == 1e-2
    plain = models.ByteModel()
    plain.head.weight = plain.embedding.weight
    state = {n.removeprefix("model."): v for n, v in _load(f"{folder}/a.ckpt")["state_dict"].items() if n != "seen"}
    plain.load_state_dict(state)
    assert models.deviation(loaded, module) == 0 and models.deviation(plain, module.model) == 0
    assert type(plain) is models.ByteModel and isinstance(plain.head, nn.Linear)


@STAGES
def test_checkpoint_is_read_without_the_strategy(ranks: Ranks, stage: int, tmp_path: Path) -> None:
    """``load_from_checkpoint``, and ``torch.load`` into a plain ``nn.Module``."""
    ranks.run(_read_by_others, stage, str(tmp_path))


def _safe_load(folder: str) -> None:
    module = models.Module(optimizer="adamw", lr=1e-2)
    _fit(module, 3, 1).save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    checkpoint = torch.load(f"{folder}/weights.ckpt", weights_only=True)
    assert "optimizer_states" not in checkpoint
    assert all(type(value) is Tensor for value in checkpoint["state_dict"].values())


def test_weights_only_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """It loads with ``weights_only=True``: nothing but plain tensors, nothing of ours to unpickle."""
    ranks.run(_safe_load, str(tmp_path))


# ---- resume ----


class Moments(L.Callback):
    """The optimizer's state and the loops when training ends, before the module is made whole."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.state = trainer.strategy.optimizer_state(trainer.optimizers[0])
        self.rates = trainer.optimizers[0].param_groups[0]["lr"]
        self.steps, self.epoch = trainer.global_step, trainer.current_epoch


def _resume(stage: int, options: dict[str, Any], precision: str, folder: str) -> None:
    module, twin = Saved(), Saved()
    twin.load_state_dict(module.state_dict())
    whole, resumed = Moments(), Moments()
    ours = ZeroCompileStrategy(stage=stage, **options)
    _fit(module, stage, 4, strategy=ours, callbacks=[whole], precision=precision)
    _fit(twin, stage, 2, strategy=ZeroCompileStrategy(stage=stage, **options), precision=precision).save_checkpoint(
        f"{folder}/half.ckpt"
    )
    other = Saved()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)  # all of it must come from the checkpoint
    strategy = ZeroCompileStrategy(stage=stage, **options)
    path = f"{folder}/half.ckpt"
    _fit(other, stage, 4, path, strategy=strategy, callbacks=[resumed], precision=precision)
    assert other.restored == ["user"]
    assert models.deviation(other, module) == 0
    assert other.seen == module.seen == 16
    assert (whole.steps, whole.epoch, whole.rates) == (resumed.steps, resumed.epoch, resumed.rates)
    assert other.losses == module.losses[8:]
    assert _skeleton(whole.state) == _skeleton(resumed.state)
    pairs = zip(_tensors(whole.state), _tensors(resumed.state), strict=True)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)
    assert len(_tensors(whole.state)) > 0 or models.rank() > 0


@pytest.mark.parametrize(
    ("stage", "options", "precision"),
    [
        (1, AOT, "32-true"), (3, AOT, "32-true"), (3, {"compile": False}, "32-true"),
        (1, AOT, "bf16-true"), (3, AOT, "bf16-true"), pytest.param(2, AOT, "32-true", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_resume_equals_an_uninterrupted_run(
    ranks: Ranks, stage: int, options: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    """Weights, moments, loops, schedule, buffers and losses are equal to the bit."""
    ranks.run(_resume, stage, options, precision, str(tmp_path))


def _resume_from_ddp(stage: int, folder: str) -> None:
    torch.manual_seed(0)
    module = Saved()
    twin = copy.deepcopy(module)
    _fit(module, stage, 1, strategy="ddp").save_checkpoint(f"{folder}/ddp.ckpt")
    _fit(module, stage, 2, f"{folder}/ddp.ckpt", strategy="ddp")
    _fit(twin, stage, 2, f"{folder}/ddp.ckpt")
    assert models.deviation(module, twin) < 1e-6
    assert twin.seen == 8 and len(twin.losses) == 4


@STAGES
def test_resume_from_ddp(ranks: Ranks, stage: int, tmp_path: Path) -> None:
    """A DDP checkpoint, with its optimizer state, goes on with this strategy."""
    ranks.run(_resume_from_ddp, stage, str(tmp_path))


# ---- when checkpoints are written ----


def _callback(stage: int, folder: str) -> None:
    module = Saved()
    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1, save_last=True, monitor=None)
    saved: dict[int, dict[str, Tensor]] = {}

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
            with trainer.strategy.full_parameters(writeback=False) as values:  # type: ignore[attr-defined]
                saved[trainer.global_step] = {name: value.clone() for name, value in values.items()}

    _fit(module, stage, 1, callbacks=[callback, Watch()], enable_checkpointing=True)
    for step in range(1, 5):
        state = _load(f"{folder}/step={step}.ckpt")["state_dict"]
        assert all(torch.equal(state[name], value.cpu()) for name, value in saved[step].items())
    assert models.deviation(Saved.load_from_checkpoint(callback.last_model_path, weights_only=False), module) == 0


@STAGES
def test_model_checkpoint_in_every_step(ranks: Ranks, stage: int, tmp_path: Path) -> None:
    """ModelCheckpoint between two steps writes exactly the weights of that step."""
    ranks.run(_callback, stage, str(tmp_path))


def _best(folder: str) -> None:
    module = Saved()
    callback = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1)
    trainer = models.make_trainer(
        ZeroCompileStrategy(**AOT), max_epochs=2, callbacks=[callback], enable_checkpointing=True
    )
    trainer.fit(module, _data(), _data())
    [before] = trainer.validate(module, _data(), verbose=False)
    [after] = trainer.validate(Saved(), _data(), ckpt_path="best", weights_only=False, verbose=False)
    assert after["val_loss"] == pytest.approx(callback.best_model_score.item(), abs=1e-6)
    assert before["val_loss"] == pytest.approx(trainer.callback_metrics["val_loss"].item(), abs=1e-1)
    trainer.save_checkpoint(f"{folder}/after_validate.ckpt")
    assert len(_load(f"{folder}/after_validate.ckpt")["optimizer_states"]) == 1


def test_best_checkpoint_and_save_after_validate(ranks: Ranks, tmp_path: Path) -> None:
    """``ckpt_path="best"`` restores into another module; a checkpoint after validate still has the optimizer."""
    ranks.run(_best, str(tmp_path))


class Loader(models.Module):
    """Loads full weights in the middle of training."""

    source: dict[str, Tensor]

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1:
            self.load_state_dict(self.source)


def _load_inside(stage: int) -> None:
    module = Loader()
    module.source = {name: value.clone() for name, value in module.state_dict().items()}
    _fit(module, stage, 1)
    twin = models.Module().to(models.device())
    twin.load_state_dict(module.source)
    data = [models.Batches(r, 4) for r in range(models.world())]
    optimizer = twin.configure_optimizers()
    for step in range(1, 4):
        optimizer.zero_grad()
        for batches in data:
            (twin.loss(batches[step]) / models.world()).backward()
        optimizer.step()
    assert models.deviation(module, twin) < 1e-6


@STAGES
def test_load_state_dict_during_training(ranks: Ranks, stage: int) -> None:
    """Full tensors load into the shards at any time; the next forward computes with them."""
    ranks.run(_load_inside, stage)


def _mismatch(folder: str) -> list[str]:
    module = Saved()
    trainer = _fit(module, 3, 1)
    trainer.save_checkpoint(f"{folder}/a.ckpt")
    checkpoint = _load(f"{folder}/a.ckpt")
    errors = []
    wrong = {"missing": dict(checkpoint["state_dict"]), "shape": dict(checkpoint["state_dict"])}
    del wrong["missing"]["model.scale"]
    wrong["shape"]["model.layers.0.up.weight"] = torch.zeros(3, 10)
    for what, state in wrong.items():
        path = f"{folder}/{what}.ckpt"
        trainer.strategy.barrier()
        if models.rank() == 0:
            torch.save({**checkpoint, "state_dict": state}, path)
        trainer.strategy.barrier()
        try:
            _fit(Saved(), 3, 2, path)
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_checkpoint_of_another_model(ranks: Ranks, tmp_path: Path) -> None:
    """A missing key and a wrong shape raise on every rank, by name; torch's own message."""
    for missing, shape in ranks.run(_mismatch, str(tmp_path)):
        assert "Missing key" in missing and "model.scale" in missing
        assert "size mismatch for model.layers.0.up.weight" in shape
