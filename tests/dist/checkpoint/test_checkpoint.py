"""Checkpoints: one file with full tensors, DDP's keys, resume to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zerocompile import ZeroCompileStrategy
from tests.support import checkpoints, models
from tests.support.checkpoints import Saved
from tests.support.harness import on_ranks
from tests.support.parity import AOT, STAGES


def _fit(module: L.LightningModule, stage: int, epochs: int, path: str | None = None, **arguments: Any) -> L.Trainer:
    strategy = arguments.pop("strategy", None) or ZeroCompileStrategy(stage=stage, **AOT)
    trainer = models.make_trainer(strategy, max_epochs=epochs, limit_val_batches=0, **arguments)
    trainer.fit(module, checkpoints.data(), ckpt_path=path, weights_only=False)
    return trainer


def _skeleton(value: Any) -> Any:
    """Keys, types, shapes and dtypes."""
    if isinstance(value, Tensor):
        return (type(value), tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {key: _skeleton(v) for key, v in value.items()}
    return [_skeleton(v) for v in value] if isinstance(value, (list, tuple)) else type(value)


# ---- one file, as DDP writes it ----


@STAGES
@on_ranks()
def test_checkpoint_is_that_of_ddp(stage: int, tmp_path: Path) -> None:
    """One file: the same keys, shapes and dtypes everywhere in it as DDP's, and the same values."""
    folder = str(tmp_path)
    torch.manual_seed(0)
    module, twin = models.pair(Saved)
    _fit(module, stage, 1).save_checkpoint(f"{folder}/ours.ckpt")
    _fit(twin, stage, 1, strategy="ddp").save_checkpoint(f"{folder}/ddp.ckpt")
    ours, theirs = checkpoints.load(f"{folder}/ours.ckpt"), checkpoints.load(f"{folder}/ddp.ckpt")
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "hyper_parameters", "global_step", "mine"):
        assert _skeleton(ours[part]) == _skeleton(theirs[part]), part
    assert ours.keys() == theirs.keys()
    assert not any(isinstance(t, DTensor) for t in checkpoints.tensors(ours))
    for mine, other in zip(
        checkpoints.tensors(ours["state_dict"]), checkpoints.tensors(theirs["state_dict"]), strict=True
    ):
        assert torch.allclose(mine.cpu(), other.cpu(), atol=1e-5)


@STAGES
@on_ranks()
def test_checkpoint_is_read_without_the_strategy(stage: int, tmp_path: Path) -> None:
    """``load_from_checkpoint``, and ``torch.load`` into a plain ``nn.Module``."""
    folder = str(tmp_path)
    module = Saved()
    _fit(module, stage, 1).save_checkpoint(f"{folder}/a.ckpt")
    loaded = Saved.load_from_checkpoint(f"{folder}/a.ckpt", map_location="cpu", weights_only=False)
    assert loaded.restored == ["user"] and loaded.lr == 1e-2
    plain = models.ByteModel()
    plain.head.weight = plain.embedding.weight
    state = {
        n.removeprefix("model."): v
        for n, v in checkpoints.load(f"{folder}/a.ckpt")["state_dict"].items()
        if n != "seen"
    }
    plain.load_state_dict(state)
    assert models.deviation(loaded, module) == 0 and models.deviation(plain, module.model) == 0
    assert type(plain) is models.ByteModel and isinstance(plain.head, nn.Linear)


@on_ranks()
def test_weights_only_checkpoint(tmp_path: Path) -> None:
    """It loads with ``weights_only=True``: nothing but plain tensors, nothing of ours to unpickle."""
    folder = str(tmp_path)
    module = models.Module(optimizer="adamw", lr=1e-2)
    _fit(module, 3, 1).save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    checkpoint = torch.load(f"{folder}/weights.ckpt", weights_only=True)
    assert "optimizer_states" not in checkpoint
    assert all(type(value) is Tensor for value in checkpoint["state_dict"].values())


# ---- resume ----


class Moments(L.Callback):
    """The optimizer's state and the loops when training ends, before the module is made whole."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.state = trainer.strategy.optimizer_state(trainer.optimizers[0])
        self.rates = trainer.optimizers[0].param_groups[0]["lr"]
        self.steps, self.epoch = trainer.global_step, trainer.current_epoch


@pytest.mark.parametrize(
    ("stage", "options", "precision"),
    [
        (1, AOT, "32-true"), (3, AOT, "32-true"), (3, {"compile": False}, "32-true"),
        (1, AOT, "bf16-true"), (3, AOT, "bf16-true"), pytest.param(2, AOT, "32-true", marks=pytest.mark.long),
    ],
)  # fmt: skip
@on_ranks()
def test_resume_equals_an_uninterrupted_run(
    stage: int, options: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    """Weights, moments, loops, schedule, buffers and losses are equal to the bit."""
    folder = str(tmp_path)
    module, twin = models.pair(Saved)
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
    pairs = zip(checkpoints.tensors(whole.state), checkpoints.tensors(resumed.state), strict=True)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)
    assert len(checkpoints.tensors(whole.state)) > 0 or models.rank() > 0


@STAGES
@on_ranks()
def test_resume_from_ddp(stage: int, tmp_path: Path) -> None:
    """A DDP checkpoint, with its optimizer state, goes on with this strategy."""
    folder = str(tmp_path)
    torch.manual_seed(0)
    module, twin = models.pair(Saved)
    _fit(module, stage, 1, strategy="ddp").save_checkpoint(f"{folder}/ddp.ckpt")
    _fit(module, stage, 2, f"{folder}/ddp.ckpt", strategy="ddp")
    _fit(twin, stage, 2, f"{folder}/ddp.ckpt")
    assert models.deviation(module, twin) < 1e-6
    assert twin.seen == 8 and len(twin.losses) == 4


# ---- when checkpoints are written ----


@STAGES
@on_ranks()
def test_model_checkpoint_in_every_step(stage: int, tmp_path: Path) -> None:
    """ModelCheckpoint between two steps writes exactly the weights of that step."""
    folder = str(tmp_path)
    module = Saved()
    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1, save_last=True, monitor=None)
    saved: dict[int, dict[str, Tensor]] = {}

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
            with trainer.strategy.full_parameters(writeback=False) as values:  # type: ignore[attr-defined]
                saved[trainer.global_step] = {name: value.clone() for name, value in values.items()}

    _fit(module, stage, 1, callbacks=[callback, Watch()], enable_checkpointing=True)
    for step in range(1, 5):
        state = checkpoints.load(f"{folder}/step={step}.ckpt")["state_dict"]
        assert all(torch.equal(state[name], value.cpu()) for name, value in saved[step].items())
    assert models.deviation(Saved.load_from_checkpoint(callback.last_model_path, weights_only=False), module) == 0


@on_ranks()
def test_best_checkpoint_and_save_after_validate(tmp_path: Path) -> None:
    """``ckpt_path="best"`` restores into another module; a checkpoint after validate still has the optimizer."""
    folder = str(tmp_path)
    module = Saved()
    callback = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1)
    trainer = models.make_trainer(
        ZeroCompileStrategy(**AOT), max_epochs=2, callbacks=[callback], enable_checkpointing=True
    )
    trainer.fit(module, checkpoints.data(), checkpoints.data())
    [before] = trainer.validate(module, checkpoints.data(), verbose=False)
    [after] = trainer.validate(Saved(), checkpoints.data(), ckpt_path="best", weights_only=False, verbose=False)
    assert after["val_loss"] == pytest.approx(callback.best_model_score.item(), abs=1e-6)
    assert before["val_loss"] == pytest.approx(trainer.callback_metrics["val_loss"].item(), abs=1e-1)
    trainer.save_checkpoint(f"{folder}/after_validate.ckpt")
    assert len(checkpoints.load(f"{folder}/after_validate.ckpt")["optimizer_states"]) == 1


class Loader(models.Module):
    """Loads full weights in the middle of training."""

    source: dict[str, Tensor]

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1:
            self.load_state_dict(self.source)


@STAGES
@on_ranks()
def test_load_state_dict_during_training(stage: int) -> None:
    """Full tensors load into the shards at any time; the next forward computes with them."""
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


@on_ranks()
def test_checkpoint_of_another_model(tmp_path: Path) -> None:
    """A missing key and a wrong shape raise on every rank, by name; torch's own message."""
    folder = str(tmp_path)
    module = Saved()
    trainer = _fit(module, 3, 1)
    trainer.save_checkpoint(f"{folder}/a.ckpt")
    checkpoint = checkpoints.load(f"{folder}/a.ckpt")
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
    missing, shape = errors
    assert "Missing key" in missing and "model.scale" in missing
    assert "size mismatch for model.layers.0.up.weight" in shape


class Reversed(Saved):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(reversed(list(self.parameters())), lr=self.lr)


@on_ranks()
def test_checkpoint_of_an_optimizer_in_another_order(tmp_path: Path) -> None:
    """Its file names parameters by positions, as torch does; where shapes differ the error has the remedy."""
    path = f"{tmp_path}/a.ckpt"
    _fit(Saved(), 2, 1).save_checkpoint(path)
    with pytest.raises(ValueError, match=r"`exp_avg` has shape .* in the same order as when it was saved"):
        _fit(Reversed(), 2, 2, path)
